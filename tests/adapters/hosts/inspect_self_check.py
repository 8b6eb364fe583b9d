"""inspect_ai's own self-check and tool support on slots; run by tests/adapters/test_inspect_ai.py in the peers'
environment."""

from __future__ import annotations

import shutil

import anyio
import entrypoint_images
import pytest
import pytest_asyncio
import side_by_side
from inspect_ai.util import (
    OutputLimitExceededError,
    SandboxUnavailableError,
    override_sandbox_output_limit,
    sandbox_service,
)
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

from atropos.adapters.inspect_ai import AtroposSandbox, AtroposSandboxConfig, read_settings
from atropos.errors import ConfigError
from tests import privileges
from tests.gpus import gpu_machine
from tests.images.making import entry

pytestmark = pytest.mark.asyncio(loop_scope="module")
test_exec_as_user = pytest.mark.skipif(shutil.which("adduser") is None, reason="slots on this host have no adduser")(
    test_exec_as_user  # noqa: F405
)
CONFIG = AtroposSandboxConfig(user="nobody", pool={"backend": "local", "slots_per_container": 2, "max_containers": 1})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox_env():
    await AtroposSandbox.task_init("check", CONFIG)
    environments = await AtroposSandbox.sample_init("check", CONFIG, {})
    yield environments["default"]
    await AtroposSandbox.sample_cleanup("check", CONFIG, environments, interrupted=False)
    await AtroposSandbox.task_cleanup("check", CONFIG, cleanup=True)


async def test_a_slots_limit_is_named():
    config = CONFIG.model_copy(update={"pool": {**CONFIG.pool, "limits": {"wall_s": 3}}})
    environments = await AtroposSandbox.sample_init("check", config, {})
    with pytest.raises(TimeoutError, match=r"limits\.wall_s"):
        await environments["default"].exec(["sleep", "60"])
    await AtroposSandbox.sample_cleanup("check", config, environments, interrupted=False)


async def test_a_missing_user_is_no_sandbox():
    with pytest.raises(ConfigError, match="no user 'nobody-here'"):
        await AtroposSandbox.sample_init("check", CONFIG.model_copy(update={"user": "nobody-here"}), {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("imag: x", "atropos.yaml: imag: Extra"),
        ("pool: {slots_per_contaner: 4}", "atropos.yaml: pool: slots_per_contaner: no such setting"),
        ("pool: [", "atropos.yaml: while parsing"),
    ],
)
async def test_mistake_in_a_file_is_named(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "atropos.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        await AtroposSandbox.task_init("check", "atropos.yaml")


@privileges.device_nodes
async def test_a_sample_has_its_gpus():
    with gpu_machine() as machine:
        config = CONFIG.model_copy(update={"gpus": 1, "pool": {**CONFIG.pool, **machine.settings()}})
        environments = await AtroposSandbox.sample_init("check", config, {})
        found = await environments["default"].exec(["sh", "-c", "echo /dev/test-*"])
        assert found.stdout == "/dev/test-gpu0 /dev/test-gpuctl\n"
        await AtroposSandbox.sample_cleanup("check", config, environments, interrupted=False)
    with pytest.raises(ConfigError, match="gpus: 1 wanted, a container has 0"):
        await AtroposSandbox.sample_init("check", CONFIG.model_copy(update={"gpus": 1}), {})


async def test_edited_settings_hold_from_then_on(tmp_path):
    file = tmp_path / "atropos.yaml"
    one = "pool: {backend: local, slots_per_container: 1, max_containers: 1}\n"
    nobodys = f"user: nobody\n{one.replace('1', '2')}"
    for text, edited in ((one, nobodys), (nobodys, "user: [")):
        file.write_text(text)
        begun = read_settings(str(file))
        await AtroposSandbox.task_init("startup", str(file))
        pool = await begun.shared().enter()
        await begun.shared().leave()
        file.write_text(edited)
        environments = await AtroposSandbox.sample_init("check", str(file), {})
        assert (await environments["default"].exec(["whoami"])).stdout == f"{begun.user or 'root'}\n"
        await AtroposSandbox.sample_cleanup("check", str(file), environments, interrupted=False)
        await AtroposSandbox.task_cleanup("shutdown", str(file), cleanup=True)
        assert "stopped" in repr(pool)


async def test_root_can_switch_users(sandbox_env):
    from inspect_ai.tool._sandbox_tools_utils.sandbox import resolve_root_access

    access = await resolve_root_access(sandbox_env)
    assert access.state == "usable", access


async def test_injected_tools_stream(sandbox_env):
    from inspect_ai.util._sandbox.events import SandboxEnvironmentProxy

    process = await SandboxEnvironmentProxy(sandbox_env).exec_remote(
        ["sh", "-c", "echo one; sleep 0.5; echo two >&2; whoami; exit 3"]
    )
    events = [event async for event in process]
    text = {kind: "".join(e.data for e in events if e.type == kind) for kind in ("stdout", "stderr")}
    assert text == {"stdout": "one\nnobody\n", "stderr": "two\n"}
    assert events[-1].exit_code == 3


async def test_its_bound_of_output_is_kept(sandbox_env):
    """As it does for the requests of an agent to its bridge."""
    command = ["sh", "-c", "head -c 12m /dev/zero | tr '\\0' x; whoami >&2; exit 3"]
    with override_sandbox_output_limit(150 * 1024**2, "exec"):
        result = await sandbox_env.exec(command)
        assert (len(result.stdout), result.stderr, result.returncode) == (12 * 1024**2, "nobody\n", 3)
    with override_sandbox_output_limit(11 * 1024**2, "exec"), pytest.raises(OutputLimitExceededError, match="11 MiB"):
        await sandbox_env.exec(command)
    assert (await sandbox_env.exec(["sh", "-c", "ls /tmp/.stdout*"])).stdout == ""


async def test_an_entrypoint_runs_beside_a_sample(tmp_path):
    started = AtroposSandboxConfig(image=entrypoint_images.image(tmp_path / "image"), pool=CONFIG.pool)
    environments = await AtroposSandbox.sample_init("check", started, {})
    assert (await environments["default"].exec(["cat", "/said"], timeout=20)).stdout == "tail -f /dev/null /srv\n"
    await AtroposSandbox.sample_cleanup("check", started, environments, interrupted=False)
    missing = entrypoint_images.image(tmp_path / "missing", starts="/nothing")
    with pytest.raises(SandboxUnavailableError, match=r"ENTRYPOINT: .*nothing"):
        await AtroposSandbox.sample_init("check", started.model_copy(update={"image": missing}), {})


async def test_a_cancelled_start_leaves_no_pool(tmp_path):
    """anyio cancels each wait of a task again, those of its cleanup as well."""
    image = entrypoint_images.image(tmp_path, entry("bin/chown", "#!/bin/sh\nexec sleep 600\n", mode=0o755))
    config = AtroposSandboxConfig(image=image, user="1000", pool={**CONFIG.pool, "slots_per_container": 1})
    await AtroposSandbox.task_init("check", config)
    pool = await config.shared().enter()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(AtroposSandbox.sample_init, "check", config, {})
        while not pool.stats().leases:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    await config.shared().leave()
    await AtroposSandbox.task_cleanup("check", config, cleanup=True)
    assert "stopped" in repr(pool)


CALLER = """
import sys
sys.path.append("/var/tmp/sandbox-services/maths")
import maths
print(maths.call_maths("double", x=21))
"""


async def test_a_program_that_runs_calls_a_service(sandbox_env):
    over = False

    async def double(x: int) -> int:
        return 2 * x

    async with anyio.create_task_group() as tasks:
        started = anyio.Event()

        async def serve() -> None:
            await sandbox_service("maths", [double], lambda: over, sandbox_env, user="root", started=started)

        tasks.start_soon(serve)
        await started.wait()
        result = await sandbox_env.exec(["python3", "-c", CALLER], user="root", timeout=60)
        over = True
    assert (result.returncode, result.stdout) == (0, "42\n"), result.stderr


async def test_commands_run_beside_a_waiting_one(sandbox_env):
    async def run(line):
        return (await sandbox_env.exec(["sh", "-c", line])).stdout

    assert await side_by_side.answer(run) == "42\n"
