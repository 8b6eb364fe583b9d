"""The server as a process: the ready line, exit codes, signals, and an end that leaves nothing. Real sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import aiohttp
import pytest

from atropos.slots.client import SandboxClient
from atropos.wire import (
    CommandResult,
    Exec,
    LeaseLimits,
    LeaseRequest,
    OpError,
    ProcRead,
    ProcStart,
    ProcState,
    ReadFile,
    ReadStream,
    WriteFile,
)
from tests.processes import alive, descendants
from tests.processes import running as count
from tests.settings import shows
from tests.unit.server.fakes import TOKEN
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.slow("starts servers")

ROOT = Path(__file__).parents[3]


class Process:
    """One `python -m atropos.sandbox`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0
        self.boot_id = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def ended(self) -> tuple[int, str]:
        """Exit code and what stands on stderr."""
        assert self.process.stderr is not None
        assert self.process.stdout is not None
        async with asyncio.timeout(60 * SLOWNESS):
            text = await self.process.stderr.read()
            await self.process.stdout.read()  # its pipe is closed at its end only
            return await self.process.wait(), text.decode()

    def client(self, **settings) -> SandboxClient:
        return SandboxClient(self.url, TOKEN, **{"client_id": "tester", **settings})


async def spawn(config: str, *arguments: str, before: Sequence[str] = ()) -> Process:
    process = await asyncio.create_subprocess_exec(
        *before,
        sys.executable,
        "-m",
        "atropos.sandbox",
        *(arguments or ("--config", "-")),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(config.encode())
        await process.stdin.drain()
    process.stdin.close()
    return Process(process)


@contextlib.asynccontextmanager
async def running(before: Sequence[str] = (), **settings) -> AsyncIterator[Process]:
    """A server with these settings; `before`: a command that ends by executing its arguments."""
    config = {"token": TOKEN, "slots": 2, "drain_s": 0, "die_with_parent": True, **settings}
    found = await spawn(json.dumps(config), before=before)
    assert found.process.stdout is not None
    line = await asyncio.wait_for(found.process.stdout.readline(), 120 * SLOWNESS)
    if not line:
        pytest.fail(f"the server did not start: {await found.ended()}")
    ready = json.loads(line)
    assert ready["ready"] is True
    found.port, found.boot_id = ready["port"], ready["boot_id"]
    try:
        yield found
    finally:
        if found.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                found.process.send_signal(signal.SIGCONT)
                found.process.terminate()
            await found.ended()


def request(name: str = "lease-0001", **fields) -> LeaseRequest:
    return LeaseRequest(lease_id=name, client_id="tester", **fields)


async def gone(pids: set[int]) -> None:
    await until(lambda: not alive(pids), "the end of all its processes")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", "Invalid JSON"),
        ("{}", "token: Field required"),
        ('{"token": "t", "slots": 0}', "slots: Input should be greater than or equal to 1"),
        ('{"token": "t", "slot": 1}', "slot: Extra inputs are not permitted"),
        ('{"token": "t", "limits": {"pids": 1}}', "limits.pids: Input should be greater"),
    ],
)
async def test_a_config_error_is_exit_2(config, says):
    code, text = await (await spawn(config)).ended()
    assert code == 2, text
    assert says in text
    assert len(text.splitlines()) == 1
    assert "Traceback" not in text


async def test_missing_file_is_named(tmp_path):
    code, text = await (await spawn("", "--config", str(tmp_path / "none.json"))).ended()
    assert (code, len(text.splitlines())) == (2, 1)
    assert "none.json" in text


async def test_port_in_use_is_one_line():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = await (await spawn(json.dumps({"token": TOKEN, "slots": 1, "port": port}))).ended()
    assert (code, len(text.splitlines())) == (2, 1), text
    assert f"can't listen on 127.0.0.1:{port}: it is in use" in text


async def test_a_missing_base_is_refused():
    code, text = await (await spawn(json.dumps({"token": TOKEN, "slots": 1, "base": "/no/such/base"}))).ended()
    assert code in {2, 3}
    assert (len(text.splitlines()), "/no/such/base" in text) == (1, True), text


async def test_base_over_folder_refused(tmp_path):
    base = tmp_path / "base"
    base.mkdir()
    (tmp_path / "link").symlink_to(base)
    settings = {"token": TOKEN, "die_with_parent": True, "base": str(base), "state_dir": str(tmp_path / "link/own")}
    process = await spawn(json.dumps(settings))
    code, text = await process.ended()
    assert (code, "holds the server's own folder" in text) == (2, True), text


async def test_whole_way_through_slots():
    async with running() as server, server.client() as client:
        assert client.boot_id == server.boot_id
        lease = await client.acquire(request())
        result = await client.call(lease, Exec(command="echo hi; echo err >&2; exit 3"))
        assert isinstance(result, CommandResult)
        assert (result.exit_code, result.output) == (3, b"hi\nerr\n")
        await client.call(lease, WriteFile(path="a.bin", data=bytes(range(256))))
        found = await client.call(lease, ReadFile(path="a.bin"))
        assert found.kind == "file_result"
        assert found.data == bytes(range(256))
        assert (await client.release(lease)).clean
        again = await client.acquire(request("lease-0002"))
        missing = await client.call(again, ReadFile(path="a.bin"))
        assert missing.kind == "op_error"


@pytest.mark.parametrize("wall_s", [math.inf, 1e8])
async def test_commands_run_for_years(wall_s):
    async with running(limits={"wall_s": wall_s}) as server, server.client() as client:
        lease = await client.acquire(request(limits=LeaseLimits(wall_s=wall_s)))
        ended = await client.call(lease, Exec(command="sleep 0.1; echo hi"))
        assert isinstance(ended, CommandResult)
        assert ended.output == b"hi\n"
        started = await client.call(lease, ProcStart(command="sleep 0.1"))
        assert isinstance(started, ProcState)
        waited = await client.call(lease, ProcRead(id=started.id, wait_s=math.inf))
        assert isinstance(waited, ProcState)
        assert not waited.running


async def test_low_priority_empties():
    # lower than the threads that free volumes; the lowest would not start in time on a busy machine
    async with running(before=("nice", "-n", "11")) as server, server.client() as client:
        for number in range(3):
            assert (await client.release(await client.acquire(request(f"lease-000{number}")))).clean
        assert (await client.status()).retired == 0


async def test_fork_leaves_original():
    async with running() as server, server.client() as client:
        lease = await client.acquire(request())
        await client.call(lease, Exec(command="echo base > f; mkdir d; rmdir d"))
        started = await client.call(lease, ProcStart(command="sleep 1000"))
        assert isinstance(started, ProcState)
        info = await client.snapshot(lease)
        await client.call(lease, Exec(command="echo more >> f"))
        fork = await client.acquire(request("lease-fork", snapshot=info.snapshot_id))
        look = Exec(command="cat f; pgrep sleep")
        mine, theirs = await client.call(lease, look), await client.call(fork, look)
        assert (mine.output, theirs.output) == (b"base\nmore\n", b"base\n")
        await client.drop_snapshot(info.snapshot_id)
        assert (await client.release(lease)).clean
        assert (await client.call(fork, Exec(command="cat f"))).output == b"base\n"
        assert (await client.release(fork)).clean


async def test_snapshot_travels_whole():
    setup = (
        "mkdir -p deep/er && echo base > f && ln -s f link && ln f hard && chmod 4711 f && mkfifo p && rm -rf /media"
        " && useradd -m someone; chown 1000:33 deep; head -c 5000000 /dev/urandom > deep/er/big; touch $'bad-\\xff'"
    )
    look = "stat -c '%n %a %u %g %h %F %s' * deep/er/*; cat f; ls -d /media; sha256sum deep/er/big; tail -1 /etc/passwd"
    async with running() as here, running() as there, here.client() as client, there.client() as other:
        lease = await client.acquire(request())
        await client.call(lease, Exec(command=setup))
        await client.snapshot(lease)
        await client.call(lease, Exec(command="echo more >> f; rm p"))
        info = await client.snapshot(lease)
        assert info.layers == 2
        copied = await client.copy_snapshot(info.snapshot_id, other)
        assert (copied.snapshot_id, copied.layers) == (info.snapshot_id, 2)
        assert await client.copy_snapshot(info.snapshot_id, other) == copied, "once is enough"
        fork = await other.acquire(request("lease-fork", snapshot=info.snapshot_id))
        before = await client.call(lease, Exec(command=look))
        after = await other.call(fork, Exec(command=look))
        assert b"more" in before.output
        assert after.output == before.output
        await other.call(fork, Exec(command="echo mine >> f; rm -rf deep"))
        await other.release(fork)
        await other.drop_snapshot(info.snapshot_id)
        assert (await other.status()).snapshots == ()


async def test_sigterm_is_exit_0():
    async with running(drain_s=30) as server:
        client = server.client()
        await client.connect()
        lease = await client.acquire(request())
        call = asyncio.create_task(client.call(lease, Exec(command="sleep 0.5; echo done")))
        await client.status()
        pids = set(descendants(server.process.pid))
        assert pids
        server.process.terminate()
        server.process.send_signal(signal.SIGINT)
        server.process.terminate()
        # What runs may finish; new leases are refused; the last release ends the server.
        assert (await call).output == b"done\n"
        assert (await client.release(lease)).clean
        code, text = await server.ended()
        assert code == 0, text
        await gone(pids)
        await client.close()


async def test_signals_change_nothing():
    for _ in range(3):
        async with running() as server:
            ended = asyncio.create_task(server.ended())
            while not ended.done():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server.process.pid, signal.SIGTERM)  # asyncio's own may lose the exit code
                await asyncio.sleep(0.001)
            assert await ended == (0, "")


async def test_sigterm_shortens_a_drain():
    async with running(drain_s=0.5) as server, server.client() as client, aiohttp.ClientSession() as session:
        await client.acquire(request())
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with session.post(f"{server.url}/v1/drain", json={"deadline_s": 3600}, headers=headers) as answer:
            assert answer.status == 200
        server.process.terminate()
        code, text = await server.ended()
        assert code == 0, text


async def test_end_in_import_is_quiet():
    async def never_whole():
        yield bytes(512)
        await asyncio.Event().wait()

    async with running() as server, aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
        url = f"{server.url}/v1/snapshots/snap-00000001/archive?layers=1"
        sending = asyncio.create_task(session.put(url, data=never_whole()))
        await until(lambda: count("snapshot_tar", server.process.pid), "the program that unpacks it")
        server.process.terminate()
        assert await server.ended() == (0, "")
        with pytest.raises(aiohttp.ClientError):
            await sending


@shows("unattended_s")
async def test_an_unattended_server_ends():
    async with running(unattended_s=3) as server:
        client = server.client()
        await client.connect()
        await asyncio.sleep(4)
        lease = await client.acquire(request())
        assert (await client.call(lease, Exec(command="echo on"))).output == b"on\n"
        assert (await client.release(lease)).clean
        await client.close()
        code, text = await server.ended()
        assert (code, "unattended_s (3 s)" in text) == (0, True), text


async def test_sigterm_in_the_start():
    for pause in (0.05, 0.3, 0.6):
        server = await spawn(json.dumps({"token": TOKEN, "slots": 4, "die_with_parent": True}))
        await asyncio.sleep(pause)
        pids = set(descendants(server.process.pid))
        with contextlib.suppress(ProcessLookupError):
            server.process.terminate()
        await server.ended()
        await gone(pids)


async def test_kill_9_ends_every_sandbox():
    async with running(slots=4) as server:
        client = server.client(reconnect_s=1)
        await client.connect()
        leases = [await client.acquire(request(f"lease-000{n}")) for n in range(3)]
        calls = [asyncio.create_task(client.call(lease, Exec(command="sleep 1000 & sleep 1000"))) for lease in leases]
        await until(lambda: count("sleep 1000", server.process.pid) >= 6, "two programs in each slot")
        pids = set(descendants(server.process.pid))
        server.process.kill()
        await asyncio.wait_for(client.lost.wait(), 60 * SLOWNESS)
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            assert getattr(outcome, "code", "") in {"outcome_unknown", "slot_lost"}, outcome
        await gone(pids)
        await client.close()


async def test_stopped_server_comes_back():
    async with running(heartbeat_s=0.3) as server, server.client(reconnect_s=30) as client:
        lease = await client.acquire(request(ttl_s=2.5))
        call = asyncio.create_task(client.call(lease, Exec(command="echo a >> f; sleep 0.2; cat f")))
        await asyncio.sleep(0.05)
        os.kill(server.process.pid, signal.SIGSTOP)
        await asyncio.sleep(4)
        os.kill(server.process.pid, signal.SIGCONT)
        assert (await call).output == b"a\n"
        assert (await client.call(lease, Exec(command="cat f"))).output == b"a\n"


async def test_killed_client_gives_back():
    async with running() as server:
        code = (
            "import asyncio, sys\n"
            "from atropos.slots.client import SandboxClient\n"
            "from atropos.wire import Exec, LeaseRequest\n"
            "async def main():\n"
            f"    client = SandboxClient({server.url!r}, {TOKEN!r}, client_id='victim')\n"
            "    await client.connect()\n"
            "    for n in range(2):\n"
            "        lease = await client.acquire(LeaseRequest(lease_id=f'victim-{n}', client_id='victim', ttl_s=3))\n"
            "    print('holding', flush=True)\n"
            "    await client.call(lease, Exec(command='sleep 1000'))\n"
            "asyncio.run(main())\n"
        )
        victim = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        assert victim.stdout is not None
        assert await asyncio.wait_for(victim.stdout.readline(), 60 * SLOWNESS) == b"holding\n"
        async with server.client() as client:
            assert (await client.status()).leased == 2
            victim.kill()
            await victim.wait()
            async with asyncio.timeout(30 * SLOWNESS):
                while (await client.status()).free < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert (await client.call(await client.acquire(request()), Exec(command="echo ok"))).output == b"ok\n"


@shows("require_stateful_sandbox")
async def test_require_sandbox_is_strict():
    async with running() as server, server.client() as client:
        found = await client.capabilities()
    config = {"token": TOKEN, "slots": 1, "require_sandbox": True, "require_stateful_sandbox": True}
    if found.isolated:
        async with running(**config):
            pass
        return
    code, text = await (await spawn(json.dumps(config))).ended()
    assert (code, len(text.splitlines())) == (3, 1), text
    missing = next(feature for feature in found.features if not feature.ok)
    assert missing.name in text
    assert missing.fix in text


async def test_bad_requests_are_log_line():
    def send(port, rest):
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            head = f"POST /v1/leases HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\n"
            connection.sendall(f"{head}{rest}".encode())
            return connection.recv(100)

    async with running(slots=1) as server:
        async with server.client() as client:
            lease = await client.acquire(request())
            await client.call(lease, Exec(command="head -c 30000000 /dev/zero > /workspace/large"))
            reading = ReadStream(path="/workspace/large", stream="stream-00001", max_bytes=1 << 30)
            call = asyncio.create_task(client.call(lease, reading))
            async with contextlib.aclosing(client.get_stream(lease, reading.stream)) as chunks:
                assert await anext(chunks)
            assert isinstance(await call, OpError)
        for rest in ("Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "Content-Length: 5\r\nContent-Length: 5\r\n\r\n"):
            assert b" 400 " in await asyncio.to_thread(send, server.port, rest)
        server.process.terminate()
        _, log = await server.ended()
    assert log == "ERROR aiohttp.server: Error handling request from 127.0.0.1: 400 BadHttpMessage\n" * 2
