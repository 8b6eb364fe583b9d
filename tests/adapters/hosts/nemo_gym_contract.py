"""NeMo Gym's public sandbox API over the provider; tests/adapters/test_nemo_gym.py runs it with that package."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
import pytest_asyncio
import side_by_side
from accident import kill_container
from nemo_gym.sandbox import (
    AsyncSandbox,
    Sandbox,
    SandboxCreateError,
    SandboxResources,
    SandboxSpec,
    SandboxStatus,
    create_provider,
    list_providers,
)

from atropos.adapters.nemo_gym import AtroposProvider
from atropos.adapters.sharing import SandboxGoneError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.wire import ImageSettings

LIMITS = {"memory_mib": 192, "pids": 64, "disk_mib": 64}
POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1, "limits": LIMITS}
ATROPOS = {"atropos": {"pool": POOL}}
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    spec = SandboxSpec(
        workdir="/work/here", env={"WORD": "hello", "N": 4}, files={"/etc/made/x": "é"}, entrypoint=["sleep", "99"]
    )
    async with AsyncSandbox(ATROPOS, spec) as started:
        yield await started.start()


def test_it_is_found_by_its_name():
    assert "atropos" in list_providers()
    assert isinstance(create_provider(ATROPOS), AtroposProvider)


def test_a_wrong_setting_is_named_at_once():
    with pytest.raises(ValueError, match="slots_per_contaner: no such setting"):
        create_provider({"atropos": {"pool": {"slots_per_contaner": 4}}})


@in_one_loop
async def test_commands_have_folder_and_user(sandbox):
    result = await sandbox.exec("pwd; echo $WORD $MORE $N; cat /etc/made/x; echo no >&2; exit 3", env={"MORE": "world"})
    assert result.stdout == "/work/here\nhello world 4\né"
    assert (result.stderr, result.return_code, result.error_type) == ("no\n", 3, None)
    assert (await sandbox.exec("id -un; pwd", user="nobody", cwd="/")).stdout == "nobody\n/\n"
    assert (await sandbox.exec("id -u", user=0)).stdout == "0\n"
    assert (await sandbox.exec("kill -9 $$")).return_code == 137
    assert (await sandbox.exec("pgrep -x sleep || ps -e | grep sleep")).return_code == 0


@in_one_loop
async def test_what_did_not_run_has_an_error_type(sandbox):
    slow = await sandbox.exec("echo begun; sleep 60", timeout_s=0.3)
    if not slow.stdout:  # the shell of a busy machine took longer to start
        slow = await sandbox.exec("echo begun; sleep 60", timeout_s=20)
    assert (slow.stdout, slow.return_code, slow.error_type) == ("begun\n", 125, "timeout")
    nobody = await sandbox.exec("true", user="nobody-here")
    assert (nobody.return_code, nobody.error_type) == (125, "sandbox")
    assert "nobody-here" in nobody.stderr


@in_one_loop
async def test_files_go_there_and_back(sandbox, tmp_path):
    (tmp_path / "a").write_bytes(bytes(range(256)) * 4000)
    (tmp_path / "a").chmod(0o750)
    await sandbox.upload(tmp_path / "a", "/deep/er/a")
    assert (await sandbox.exec("stat -c %a /deep/er/a")).stdout == "750\n"
    await sandbox.download("/deep/er/a", tmp_path / "new" / "b")
    assert (tmp_path / "new" / "b").read_bytes() == (tmp_path / "a").read_bytes()
    with pytest.raises(FileNotFoundError):
        await sandbox.download("/nothing", tmp_path / "c")
    for folder in ("/deep/er", "/new/"):  # as docker cp
        await sandbox.upload(tmp_path / "a", folder)
        assert (await sandbox.exec(f"cmp {folder}/a /deep/er/a")).return_code == 0


@in_one_loop
async def test_files_are_moved_as_root(tmp_path):
    key = hashlib.sha256(b"nemo-gym: an image with a user").hexdigest()
    async with SlotPool(SlotPoolConfig(**POOL)) as pool, pool.lease("image") as slot:
        image = await slot.keep(key, ImageSettings(user="nobody", workdir="/"))
    spec = SandboxSpec(image=image.source, workdir="/work/here", files={"/tests/x": "é"})
    async with AsyncSandbox(ATROPOS, spec) as sandbox:
        await sandbox.start()
        assert (await sandbox.exec("pwd; id -un; cat /tests/x; rm /tests/x")).stdout == "/work/here\nnobody\né"
        await sandbox.exec("umask 77; echo secret >/root/x", user="root")
        await sandbox.download("/root/x", tmp_path / "x")
    assert (tmp_path / "x").read_text() == "secret\n"
    async with AsyncSandbox({"atropos": {"pool": POOL, "user": 65534}}, spec) as sandbox:
        await sandbox.start()
        assert (await sandbox.exec("stat -c %U . /tests/x")).stdout == "nobody\nnobody\n"


@in_one_loop
async def test_twenty_share_four_slots():
    async def square(number: int) -> int:
        async with AsyncSandbox(ATROPOS) as sandbox:
            await sandbox.start(SandboxSpec(env={"N": str(number)}))
            return int((await sandbox.exec("ls; echo $((N * N)) | tee answer")).stdout)

    assert await asyncio.gather(*(square(n) for n in range(20))) == [n * n for n in range(20)]


@in_one_loop
async def test_a_killed_container_is_no_outcome():
    async with AsyncSandbox({"atropos": {"pool": {**POOL, "slots_per_container": 1}}}) as sandbox:
        await sandbox.start(SandboxSpec())
        assert await sandbox.status() is SandboxStatus.RUNNING
        running = asyncio.create_task(sandbox.exec("sleep 60"))
        await asyncio.sleep(0.5)
        kill_container()
        with pytest.raises(SandboxGoneError):
            await running
        with pytest.raises(SandboxGoneError):
            await sandbox.exec("true")
        assert await sandbox.status() is SandboxStatus.ERROR
    assert await sandbox.status() is SandboxStatus.STOPPED


@in_one_loop
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (SandboxSpec(image="127.0.0.1:1/none:1"), "none"),
        (SandboxSpec(resources=SandboxResources(gpu=1)), "gpu"),
        (SandboxSpec(resources=SandboxResources(memory_mib=512)), "a slot has 192"),
        (SandboxSpec(resources=SandboxResources(disk_gib=1)), "a slot has 64 MiB"),
        (SandboxSpec(entrypoint=["/nothing"]), "entrypoint"),
    ],
)
async def test_what_can_t_be_had_is_no_sandbox(spec, says):
    with pytest.raises(SandboxCreateError, match=says):
        await AsyncSandbox(ATROPOS).start(spec)


@in_one_loop
async def test_no_slot_in_time_is_no_sandbox():
    one = {"atropos": {"pool": {**POOL, "slots_per_container": 1}}}
    async with AsyncSandbox(one) as first:
        await first.start(SandboxSpec())
        with pytest.raises(SandboxCreateError, match="ready_timeout_s"):
            await AsyncSandbox(one).start(SandboxSpec(ready_timeout_s=0.2))


def test_the_blocking_interface():
    with Sandbox(ATROPOS, SandboxSpec()) as sandbox:
        assert sandbox.start().exec("echo ok").stdout == "ok\n"


@in_one_loop
async def test_commands_run_beside_a_waiting_one(sandbox):
    async def run(line):
        return (await sandbox.exec(line)).stdout

    assert await side_by_side.answer(run) == "42\n"
