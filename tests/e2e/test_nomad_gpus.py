"""Containers get GPUs from a client's device plug-in, and slots theirs from the client's specifications."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots import LeaseLimits, SlotPool, SlotPoolConfig
from tests import privileges
from tests.engines import BACKENDS, ROOT, pool_config
from tests.gpus import GpuMachine, gpu_machine
from tests.security.test_gpus import CHANGE, MAKE, MOUNT, SEARCH, number_of, run
from tests.waiting import until

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
    pytest.mark.asyncio(loop_scope="module"),
    privileges.device_nodes,
]
PORT = 7846
CONFIG = """
ports {{
  http = {port}
  rpc = {rpc}
  serf = {serf}
}}
plugin_dir = "{folder}/plugins"
plugin "gpus" {{}}
client {{
  min_dynamic_port = 20000
  max_dynamic_port = 20999
  host_volume "cdi" {{
    path = "{specs}"
    read_only = true
  }}
}}
"""
ADDRESS = f"http://127.0.0.1:{PORT}"
SEEN = "echo /dev/test-*"
ONE = LeaseLimits(gpus=1)


def start_agent(folder: Path, machine: GpuMachine, brings: str) -> subprocess.Popen[bytes]:
    """A development agent whose client has the machine's GPUs; `brings`: what its plug-in gives to a container."""
    found = subprocess.run(["bash", str(ROOT / "scripts/nomad.sh")], capture_output=True, text=True, check=True)
    config = CONFIG.format(port=PORT, rpc=PORT + 1, serf=PORT + 2, folder=folder, specs=machine.specs)
    (folder / "agent.hcl").write_text(config)
    for name in ("data", "plugins"):
        (folder / name).mkdir()
    plugin = folder / "plugins" / "gpus"
    plugin.write_text(f"#!/bin/sh\nexec {sys.executable} {ROOT / 'tests/gpu_plugin.py'} {machine.folder} {brings}\n")
    plugin.chmod(0o755)
    settings = ["-config", str(ROOT / "nomad/dev-agent.hcl"), "-config", str(folder / "agent.hcl")]
    return subprocess.Popen(
        [found.stdout.split()[-1], "agent", "-dev", *settings, "-data-dir", str(folder / "data")],
        stdin=subprocess.DEVNULL,
        stdout=(folder / "log").open("wb"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def devices() -> int:
    """GPUs of the agent's node, once it can run containers."""
    try:
        with urllib.request.urlopen(f"{ADDRESS}/v1/nodes?resources=true", timeout=15) as answer:
            (node,) = json.loads(answer.read())
    except (OSError, ValueError):
        return 0
    if node["Status"] != "ready" or not node["Drivers"]["docker"]["Healthy"]:
        return 0
    return sum(len(each["Instances"]) for each in node["NodeResources"].get("Devices") or ())


@pytest.fixture(scope="module", params=["devices", "files"])
def brings(request) -> str:
    return request.param


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(brings) -> AsyncGenerator[GpuMachine]:
    with gpu_machine(library=brings == "files") as made:
        folder = Path(tempfile.mkdtemp(prefix="atropos-gpu-agent."))
        agent = await asyncio.to_thread(start_agent, folder, made, brings)
        try:
            await until(lambda: agent.poll() is not None or devices() == 2, "the node's GPUs", 60)
            assert agent.poll() is None, (folder / "log").read_text()[-3000:]
            yield made
        finally:
            agent.send_signal(signal.SIGINT)
            await asyncio.to_thread(agent.wait)
            for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
                if (where := line.split()[1]).startswith(f"{folder}/"):
                    await asyncio.to_thread(subprocess.run, ["umount", "-l", where], check=False)
            shutil.rmtree(folder, ignore_errors=True)


def config(machine: GpuMachine, **more: object) -> SlotPoolConfig:
    settings = machine.settings(nomad_address=ADDRESS, nomad_variables={"gpu_device": "atropos/gpu"}, **more)
    settings["cdi_folders"] = ("/etc/cdi",)  # where a container has its client's
    return pool_config("nomad", **settings)


async def test_two_containers_have_each_its_own(machine, brings):
    async with SlotPool(config(machine, gpus=1, max_containers=2, min_containers=2)) as pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{number}", limits=ONE) for number in range(2)))
        seen = sorted([(await slot.exec(SEEN)).output.strip() for slot in slots])
        assert seen == ["/dev/test-gpu0 /dev/test-gpuctl", "/dev/test-gpu1 /dev/test-gpuctl"]
        assert len({slot.container for slot in slots}) == 2
        if brings == "devices":
            return
        loads = 'python3 -c "import ctypes; print(ctypes.CDLL(\\"libgpu-test.so.1\\").gpus())"; echo $GPU_LIBRARY'
        assert (await slots[0].exec(loads)).output == "42\nyes\n"


async def test_gpu_is_its_lease_s_alone(machine):
    async with (
        SlotPool(config(machine, slots_per_container=3)) as pool,
        pool.lease("one", limits=ONE) as one,
        pool.lease("two", limits=ONE) as two,
        pool.lease("none") as none,
    ):
        await one.start("exec 3< /dev/test-gpu0; exec sleep 1000")
        assert "/dev/test-gpu0" in await run(one, SEARCH, *number_of(0))
        for slot, gpu in ((two, 0), (none, 0)):
            assert await run(slot, SEARCH, *number_of(gpu)) == "[]"
            assert await run(slot, MAKE, *number_of(gpu)) == "[]"
            assert await run(slot, MOUNT, machine.folder / "dev") == "[]"
        assert await run(two, CHANGE) == "12"


async def test_too_many_are_refused(machine):
    asked = config(machine, gpus=3, placement_s=0.3, start_timeout_s=600)
    with pytest.raises(BackendUnavailable, match="devices"):
        await SlotPool(asked).start()


async def test_gpus_are_set_once(machine):
    with pytest.raises(ConfigError, match="nomad_variables: gpus is set by gpus"):
        await SlotPool(pool_config("nomad", nomad_address=ADDRESS, nomad_variables={"gpus": 1})).start()
