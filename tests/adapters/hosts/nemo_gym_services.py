"""NeMo Gym's terminals and endpoints, which its versions from 0.7 have, over the provider."""

from __future__ import annotations

import asyncio
import signal
import urllib.request

import pytest
import pytest_asyncio
from accident import kill_container
from nemo_gym.sandbox import AsyncSandbox, SandboxSpec
from nemo_gym.sandbox.providers.base import (
    SandboxPtyError,
    SandboxPtySession,
    SupportsSandboxEndpoint,
    SupportsSandboxPty,
)

from atropos.adapters.nemo_gym import AtroposProvider
from atropos.adapters.sharing import SandboxGoneError

LIMITS = {"memory_mib": 192, "pids": 64, "disk_mib": 64}
POOL = {"backend": "local", "slots_per_container": 1, "max_containers": 1, "limits": LIMITS}
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox():
    spec = SandboxSpec(workdir="/work/here", env={"WORD": "hello"}, ports=[8000, 8001])
    async with AsyncSandbox({"atropos": {"pool": POOL}}, spec) as started:
        yield await started.start()


async def test_the_provider_has_both():
    assert isinstance(AtroposProvider(), SupportsSandboxPty)
    assert isinstance(AtroposProvider(), SupportsSandboxEndpoint)


async def test_a_terminal_is_one(sandbox):
    async with await sandbox.pty.create(
        "tty && stty size && echo $WORD && read line && echo got $line", rows=30, cols=90
    ) as session:
        assert isinstance(session, SandboxPtySession)
        seen = b""
        while b"hello\r\n" not in seen:  # the kernel may give the end of the line apart
            seen += await session.read(timeout_s=20)
        assert b"/dev/pts/" in seen
        assert b"30 90" in seen
        with pytest.raises(TimeoutError):
            await session.read(timeout_s=0.2)
        await session.write(b"this\n")
        assert b"got this" in b"".join([data async for data in session])
        assert await session.wait_exit() == 0
        assert session.mode == "pty"
    assert session.closed


async def test_pipes_and_signals_of_a_program(sandbox):
    result = await sandbox.pty.exec("pwd; echo no >&2; exit 3", pty=False)
    assert (result.stdout, result.stderr, result.return_code) == ("/work/here\n", "no\n", 3)
    async with await sandbox.pty.create("sleep 60", user="nobody", pty=False) as session:
        with pytest.raises(ValueError, match="SIGNONE"):
            await session.send_signal("SIGNONE")
        await session.send_signal("SIGTERM")
        assert await session.wait_exit(timeout_s=30) == 128 + signal.SIGTERM
    with pytest.raises(SandboxPtyError, match="nobody-here"):
        await sandbox.pty.create("true", user="nobody-here")


async def test_output_is_whole_or_an_error(sandbox):
    async with await sandbox.pty.create("seq 1 300000") as session:
        assert await session.wait_exit() == 0
        assert b"".join([data async for data in session]).split() == [b"%d" % number for number in range(1, 300_001)]
    async with await sandbox.pty.create("head -c 9000000 /dev/zero") as session:
        assert await session.wait_exit() == 0
        with pytest.raises(SandboxPtyError, match="5,000,000 bytes of output are lost"):
            await session.read()


async def test_a_shell_runs_one_line_after_another(sandbox):
    async with await sandbox.pty.create(pty=False) as session:
        assert (await sandbox.pty.exec("cd /tmp; X=5", session=session)).return_code == 0
        result = await sandbox.pty.exec("pwd; echo $X; false", session=session)
        assert (result.stdout, result.return_code) == ("/tmp\n5\n", 1)
        assert await session.run_detached("echo $X; (exit 4)") == (b"5\n", 4)
        output, code = await session.run_detached("seq 1 500000")
        assert (output.split(), code) == ([b"%d" % number for number in range(1, 500_001)], 0)
        async with asyncio.timeout(60):
            with pytest.raises(SandboxPtyError, match="more than 10,485,760 bytes"):
                await session.run_detached("yes")


async def test_a_service_has_an_endpoint(sandbox):
    await sandbox.exec("echo found >page; nohup python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &")
    endpoint = await sandbox.endpoint(8000)
    assert await fetched(f"{endpoint.endpoint}/page") == b"found\n"
    assert await sandbox.endpoint(8000) == endpoint


async def test_a_killed_container_ends_both(sandbox):
    session = await sandbox.pty.create("sleep 60")
    kill_container()
    with pytest.raises(SandboxPtyError):
        await session.wait_exit()
    await session.close()
    with pytest.raises(SandboxGoneError):
        await sandbox.endpoint(8001)


async def fetched(url):
    def fetch():
        with urllib.request.urlopen(url) as response:
            return response.read()

    for _ in range(100):
        try:
            return await asyncio.to_thread(fetch)
        except OSError:
            await asyncio.sleep(0.1)
    return await asyncio.to_thread(fetch)
