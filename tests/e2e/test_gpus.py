"""A lease gets the GPUs that it asks for, alone; on harmless devices that a CDI specification calls GPUs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager
from pathlib import Path

import docker
import pytest

from atropos.errors import AcquireTimeout, BackendUnavailable, ConfigError, NotSupported
from atropos.metrics import exposition
from atropos.slots import LeaseLimits, Slot, SlotPool, SlotPoolConfig
from atropos.slots.backends.docker.facts import EngineFacts
from atropos.slots.backends.spec import ContainerSpec
from atropos.testing.waiting import until
from tests import privileges
from tests.engines import BACKENDS, containers, nothing_left, params, pool_config, printed_in
from tests.gpus import KIND, GpuMachine, gpu_machine
from tests.security.tenants import ALICE, key, serving
from tests.settings import shows

pytestmark = privileges.device_nodes
ONE, BOTH = LeaseLimits(gpus=1), LeaseLimits(gpus=2)
SEEN = "echo /dev/test-*"
LOADS = 'python3 -c "import ctypes; print(ctypes.CDLL(\\"libgpu-test.so.1\\").gpus())"'


@pytest.fixture
def machine() -> Generator[GpuMachine]:
    with gpu_machine() as made:
        yield made


@pytest.fixture(params=params("local", "docker"))
def backend(request) -> str:
    return request.param


@asynccontextmanager
async def running(machine: GpuMachine, backend: str = "local", **more: object) -> AsyncGenerator[SlotPool]:
    async with SlotPool(pool_config(backend, slots_per_container=4, **machine.settings(**more))) as pool:
        yield pool


async def output(slot: Slot, command: str) -> str:
    return (await slot.exec(command)).output.strip()


def nodes(*gpus: int) -> str:
    return " ".join(f"/dev/test-gpu{name}" for name in (*gpus, "ctl"))


@shows("gpu_devices", "cdi_folders")
async def test_each_lease_has_its_gpu(machine, backend):
    async with running(machine, backend) as pool, pool.lease("plain") as plain:
        async with pool.lease("a", limits=ONE) as one, pool.lease("b", limits=ONE) as two:
            assert [await output(slot, SEEN) for slot in (one, two)] == [nodes(0), nodes(1)]
            assert await output(one, f"{LOADS}; echo $GPU $GPU_LIBRARY; ls -d /run/gpu*") == (
                "42\n0 yes\nls: cannot access '/run/gpu*': No such file or directory"
            )
            assert await output(two, "cd /dev/by-path && echo * && readlink -f *") == "gpu1\n/dev/test-gpu1"
            read = "head -c 3 /dev/test-gpu$GPU | od -An -tx1; echo x > /dev/test-gpu$GPU"
            assert await output(one, read) == "00 00 00"
            assert "No space left on device" in await output(two, read)  # as /dev/full says
            assert await output(plain, f"{SEEN}; echo $GPU") == "/dev/test-*"
            assert 'atropos_pool_gpus_leased{type="T1000"} 2' in exposition(pool.metrics())
        async with pool.lease("both", limits=LeaseLimits(gpus=2, gpu_types=("H100", "t1000"))) as slot:
            assert await output(slot, SEEN) == nodes(0, 1)


async def test_leases_without_a_gpu_pass(machine):
    async with running(machine) as pool:
        first = await pool.acquire("first", limits=BOTH)
        waiting = asyncio.create_task(pool.acquire("second", limits=ONE))
        await until(lambda: pool.stats().waiting == 1, "it waits")
        async with pool.lease("plain", timeout_s=20) as slot:
            assert await output(slot, "echo ok") == "ok"
        assert not waiting.done()
        with pytest.raises(AcquireTimeout):
            await pool.acquire("late", limits=ONE, timeout_s=0.2)
        await first.release()
        second = await waiting
        assert await output(second, SEEN) in {nodes(0), nodes(1)}
        await second.release()


@shows("gpus", "gpu_type")
async def test_unknown_gpus_are_refused(machine):
    async with running(machine) as pool:
        with pytest.raises(ConfigError, match=r"limits\.gpus: 3 wanted, a container has 2; set gpus"):
            await pool.acquire("many", limits=LeaseLimits(gpus=3))
        with pytest.raises(ConfigError, match=r"limits\.gpu_types: H100 or A100 wanted, they are T1000"):
            await pool.acquire("other", limits=LeaseLimits(gpus=1, gpu_types=("H100", "A100")))
    with pytest.raises(
        ConfigError, match=r"gpus: 3 wanted; of gpu_devices \(atropos.test/gpu\) this machine has .*=0, .*=1"
    ):
        async with running(machine, gpus=3):
            pass
    with pytest.raises(ConfigError, match=r"max_containers: of backend .local., 1 can have GPUs"):
        SlotPoolConfig(**machine.settings(max_containers=2))
    assert SlotPoolConfig(gpus=1).max_containers == 1


@shows("slots_per_gpu")
async def test_slots_per_gpu_are_shared(machine, backend):
    async with running(machine, backend, slots_per_gpu=2) as pool:
        with pytest.raises(ConfigError, match="a lease one, since slots_per_gpu"):
            await pool.acquire("both", limits=BOTH)
        slots = [await pool.acquire(f"t{number}", limits=ONE) for number in range(4)]
        seen = sorted([await output(slot, SEEN) for slot in slots])
        assert seen == [nodes(0), nodes(0), nodes(1), nodes(1)]
        for slot in slots:
            await slot.release()


async def test_snapshots_keep_no_gpus(machine, backend):
    async with running(machine, backend) as pool, pool.lease("a", limits=ONE) as slot:
        await slot.exec("echo kept > /workspace/file")
        snapshot = await slot.snapshot()
        assert await output(slot, f"{SEEN}; {LOADS}") == f"{nodes(0)}\n42"
        async with pool.lease("fork", snapshot=snapshot) as fork:  # asks for what its snapshot's lease had
            assert await output(fork, f"{SEEN}; cat /workspace/file; {LOADS}") == f"{nodes(1)}\nkept\n42"
        async with pool.lease("without", snapshot=snapshot, limits=LeaseLimits()) as plain:
            assert await output(plain, f"{SEEN}; find /opt -type f") == "/dev/test-*"
        await slot.view(["/workspace"])
        assert await output(slot, f"{SEEN}; cat /workspace/file; {LOADS}") == f"{nodes(0)}\nkept\n42"


async def test_gpu_in_use_goes_to_next(machine):
    async with running(machine, gpus=1) as pool:
        for number in range(3):
            slot = await pool.acquire(f"t{number}", limits=ONE)
            assert await output(slot, SEEN) == nodes(0)
            await slot.start("exec cat /dev/test-gpu0 > /dev/null")
            await until(lambda: holders(machine), "a program reads the device")
            await slot.release()
            assert not holders(machine)


def holders(machine: GpuMachine) -> list[str]:
    """Descriptors of this machine's processes on its first GPU."""
    gpu = (machine.folder / "dev" / "gpu0").stat()
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ends meanwhile
            for path in process.glob("fd/*"):
                with contextlib.suppress(OSError):
                    each = path.stat()
                    if (each.st_dev, each.st_ino) == (gpu.st_dev, gpu.st_ino):
                        found.append(str(path))
    return found


IN_FLIGHT = """
import array, os, socket
gpu = os.open("/dev/test-gpu0", os.O_RDWR | os.O_NOCTTY)
os.write(gpu, b"open\\n")
one, other = socket.socketpair()
for sock in (one, other):  # each waits in the other, with the device
    sock.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [gpu, one.fileno(), other.fileno()]))])
"""


async def test_none_is_left_on_its_way(machine):
    """The other end of a terminal tells whether anybody has it open."""
    main, end = os.openpty()
    spec = machine.spec()
    os.chmod(os.ttyname(end), 0o666)
    spec["devices"][0]["containerEdits"]["deviceNodes"] = [{"path": "/dev/test-gpu0", "hostPath": os.ttyname(end)}]
    machine.write(spec)
    os.close(end)
    watched = select.poll()
    watched.register(main, select.POLLIN)
    with open(main, "rb", buffering=0) as shown:
        async with running(machine, gpu_devices=(f"{KIND}=0",), gpus=1) as pool:
            slot = await pool.acquire("a", limits=ONE)
            sent = await slot.exec(["python3", "-c", IN_FLIGHT])
            assert (sent.exit_code, shown.read(4)) == (0, b"open"), sent.output
            await slot.release()
            while (state := watched.poll(0)) == [(main, select.POLLIN)]:
                shown.read(100)
            assert state[0][1] & select.POLLHUP


@pytest.fixture
def mounted(machine: GpuMachine) -> Generator[Path]:
    """A folder of the machine's in which something else is mounted, that everybody may write."""
    folder = machine.folder / "data"
    (folder / "below").mkdir(parents=True)
    tool = folder / "tool"
    tool.write_text("#!/bin/sh\necho ran\n")
    tool.chmod(0o777)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=777", "below", folder / "below"], check=True)
    yield folder
    subprocess.run(["umount", folder / "below"], check=True)


async def test_folders_are_read_only_to_the_end(machine, mounted):
    spec = machine.spec()
    wanted = {"hostPath": str(mounted), "containerPath": "/opt/gpu-data", "options": ["ro", "noexec", "rbind"]}
    spec["containerEdits"]["mounts"].append(wanted)
    machine.write(spec)
    async with running(machine) as pool, pool.lease("a", limits=ONE) as slot:
        said = await output(slot, "cd /opt/gpu-data; touch below/file tool; ./tool")
        assert said.count("Read-only file system") == 2, said
        assert (said.count("Permission denied"), "ran" in said) == (1, False), said


async def test_a_key_s_slots_have_its_gpus(machine, tmp_path):
    pool = pool_config("local", slots_per_container=4, **machine.settings())
    with pytest.raises(ConfigError, match=r"keys_file: .*: alice\.limits\.gpus: 3 wanted, a container has 2"):
        async with serving(tmp_path, {"alice": key(ALICE, limits={"gpus": 3})}, pool=pool):
            pass
    keys = {"alice": key(ALICE, limits={"gpus": 1, "gpu_types": ["T1000"]})}
    async with serving(tmp_path, keys, pool=pool, acquire_s=20) as world:
        sandbox = await world.alice("POST", "/e2b/sandboxes", {"templateID": "base"})
        await world.alice("POST", "/trajectories", {"trajectory_id": "one"})
        call = {"name": "terminal", "arguments": {"command": SEEN}}
        answer = await world.alice("POST", "/trajectories/one/calls", call)
        (tenant,) = world.app.state.tenants.all()
        slot = tenant.slot_of(sandbox["sandboxID"])
        assert [await output(slot, SEEN), answer["result"]["output"].strip()] == [nodes(0), nodes(1)]


async def test_read_only_root_is_refused(machine):
    machine.write(machine.spec("/usr/lib/no-such-folder"))
    async with running(machine) as pool:
        with pytest.raises(NotSupported, match=r"gpus: this root can't hold .*lease an image"):
            await pool.acquire("host-usr", limits=ONE)


@pytest.mark.docker
@pytest.mark.skipif("docker" not in BACKENDS, reason="ATROPOS_BACKENDS has no docker: no engine in this run")
@pytest.mark.parametrize("devices", [(f"{KIND}=1",), (f"{KIND}=1", f"{KIND}=0")])
async def test_a_container_has_no_gpu_but_its_own(machine, devices):
    async with (
        running(machine, "docker", gpu_devices=devices, gpus=len(devices)) as pool,
        pool.lease("a", limits=LeaseLimits(gpus=len(devices))) as slot,
    ):
        (container,) = containers(pool.config.job_id)
        numbers = sorted(int(name[-1]) for name in devices)
        assert printed_in(container, SEEN).strip() == await output(slot, SEEN) == nodes(*numbers)


@pytest.mark.docker
@pytest.mark.skipif("docker" not in BACKENDS, reason="ATROPOS_BACKENDS has no docker: no engine in this run")
async def test_engines_with_cdi_go_by_names(machine):
    with contextlib.closing(docker.from_env()) as client:
        reads = str(machine.specs) in EngineFacts.read(client.version(), client.info()).cdi_folders
        async with running(machine, "docker") as pool:
            (container,) = containers(pool.config.job_id)
            asked = client.api.inspect_container(container)["HostConfig"].get("DeviceRequests") or []
    names = [name for each in asked if each["Driver"] == "cdi" for name in each["DeviceIDs"]]
    assert names == ([f"{KIND}=0", f"{KIND}=1"] if reads else [])
    assert machine.ran.exists() == reads


@pytest.mark.docker
@pytest.mark.skipif("docker" not in BACKENDS, reason="ATROPOS_BACKENDS has no docker: no engine in this run")
async def test_refused_gpus_end_the_start(machine):
    config = pool_config("docker", start_timeout_s=600, **machine.settings(gpus=3))
    with pytest.raises(BackendUnavailable, match=r"gpus: 3 wanted; of gpu_devices \(atropos.test/gpu\) .*=0, .*=1"):
        await SlotPool(config).start()
    await nothing_left("docker", config.job_id)


@pytest.mark.parametrize(
    ("devices", "names"),
    [
        (("nvidia.com/gpu",), ["nvidia.com/gpu=0", "nvidia.com/gpu=1"]),
        (("nvidia.com/gpu=3", "nvidia.com/gpu=1"), ["nvidia.com/gpu=3", "nvidia.com/gpu=1"]),
    ],
)
def test_devices_are_asked_by_name(devices, names):
    pool = SlotPoolConfig(backend="docker", gpus=2, gpu_devices=devices)
    assert ContainerSpec.from_pool(pool).gpu_names == names
    assert ContainerSpec.from_pool(SlotPoolConfig(backend="docker")).gpu_names == []
