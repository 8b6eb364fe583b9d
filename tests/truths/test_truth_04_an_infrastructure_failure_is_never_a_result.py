"""Truth 4: an infrastructure failure never becomes a reward, a message to the model, or a training token.

Here: the two channels never mix below the environment. That an environment scores nothing then is tested with it.
"""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from atropos import errors
from atropos.aio import cancel_and_wait
from atropos.errors import ConfigError, SandboxError
from atropos.slots import ExecResult
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_failures_are_one_family():
    for kind in errors.BY_CODE.values():
        assert issubclass(kind, SandboxError)
        assert not issubclass(kind, OSError | ValueError | TimeoutError | asyncio.CancelledError)
    assert not issubclass(ConfigError, SandboxError)


@pytest.mark.parametrize(
    "command",
    [
        "exit 255",
        "kill -9 $$",
        "(kill -STOP $BASHPID) & sleep 0.1; kill -9 %1; exit 7",
        "nonsense",
        "cat /no/such",
        "exec 1>&- 2>&-; exit 1",
        "\x01",
        "if then fi",
        "ulimit -v 1000; python3 -c 'x = b\"1\" * 10**9'",
        "python3 -c 'import os; os.abort()'",
    ],
)
async def test_any_end_is_a_result(shared_pool, command):
    async with shared_pool.lease("t") as slot:
        result = await slot.exec(command, timeout_s=30)
        assert isinstance(result, ExecResult)
        assert result.exit_code is not None
        assert not result.timed_out
        assert (await slot.exec("echo fine")).output == "fine\n"


async def test_missing_workdir_is_result(shared_pool):
    async with shared_pool.lease("t") as slot:
        result = await slot.exec("true", workdir="/no/such")
    assert result.exit_code != 0
    assert "no" in (result.error or result.output).lower()


async def test_no_kill_makes_up_a_result(local_pool, engine):
    async with local_pool(slots_per_container=4, max_containers=1) as pool:
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        commands = ["sleep 60; echo done", "yes", "cat", "while :; do :; done"]
        calls = [asyncio.create_task(s.exec(c, stdin=b"x" * 10)) for s, c in zip(slots, commands, strict=True)]
        await until(calls[2].done, "the end of cat")
        ended = [call for call in calls if call.done()]
        await engine.signal(slots[0].container, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 30)
        assert len(ended) == 1
        for call, result in zip(calls, results, strict=True):
            assert isinstance(result, ExecResult if call in ended else SandboxError), result


async def test_busy_client_s_slot_lives(shared_pool, monkeypatch):
    """A hook that computes without an `await` keeps the event loop, and with it the check of another trajectory."""
    monkeypatch.setattr("atropos.slots.slot.slot.ALIVE_S", 3.0)
    async with shared_pool.lease("t") as slot:
        given_up = asyncio.create_task(slot.exec("sleep 1000"))
        check = asyncio.create_task(slot.check_alive())
        for _ in range(3):  # until the check's own call is sent
            await asyncio.sleep(0)
        time.sleep(3.2)  # noqa: ASYNC251 (as the hook does)
        await check
        await cancel_and_wait([given_up])
