"""Supervision of local servers, with small programs in the server's place; real ones are in tests/conformance."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import sys
import tempfile
import textwrap
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends import supervised
from atropos.slots.backends.local import backend
from atropos.slots.backends.local.backend import LocalBackend
from tests.waiting import until

READY = """
import json, signal, sys, time, os
config = json.load(sys.stdin)
print(json.dumps({"ready": True, "port": 1000 + os.getpid() % 1000, "boot_id": "b"}), flush=True)
"""
GOOD = f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n{READY}signal.pause()"
DEAF = f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}while True: signal.pause()"


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(supervised, "BACKOFF_S", (0.01, 0.05))
    monkeypatch.setattr(supervised, "STOP_S", 0.3)


@asynccontextmanager
async def running(program: str, count: int = 1, **settings):
    command = [sys.executable, "-S", "-c", textwrap.dedent(program)]
    backend = LocalBackend(SlotPoolConfig(**settings), command=command)
    await backend.start()
    try:
        await backend.scale(count)
        yield backend
    finally:
        await backend.aclose(purge=True)
        assert backend.containers() == []
        assert not backend.scratch.exists()


def ready(backend: LocalBackend, count: int):
    return lambda: sum(c.state == "running" for c in backend.containers()) == count


def pid_of(container) -> int:
    return int(container.id.partition("-")[0])


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_servers_start_and_end():
    async with running(GOOD, 3) as backend:
        await until(ready(backend, 3))
        found = backend.containers()
        assert [c.index for c in found] == [0, 1, 2]
        assert all(c.url.startswith("http://127.0.0.1:") for c in found)
        assert len({c.token for c in found}) == 3
        pids = [pid_of(c) for c in found]
        await backend.scale(1)
        await until(lambda: len(backend.containers()) == 1)
        assert backend.containers()[0].id == found[0].id
    assert not any(alive(pid) for pid in pids)


async def test_killed_server_is_replaced():
    async with running(GOOD) as backend:
        await until(ready(backend, 1))
        (old,) = backend.containers()
        os.kill(pid_of(old), 9)
        await until(lambda: ready(backend, 1)() and backend.containers()[0].id != old.id)
        assert backend.trouble() == ""


async def test_deaf_server_is_killed():
    async with running(DEAF) as backend:
        await until(ready(backend, 1))
        (container,) = backend.containers()
    assert not alive(pid_of(container))


async def test_kill_outlives_stuck_loop():
    async with running(f"memory = bytearray(100 << 20)\n{DEAF}") as backend:  # which takes the kernel a while to free
        await until(ready(backend, 1))
        (container,) = backend.containers()
        asyncio.get_running_loop().call_later(0.1, time.sleep, 1.5)
    assert not alive(pid_of(container))


async def test_retired_is_replaced():
    async with running(GOOD) as backend:
        await until(ready(backend, 1))
        (old,) = backend.containers()
        await backend.retire(old)
        await backend.retire(old)
        await until(lambda: [c.id for c in backend.containers() if c.state == "running"] not in ([], [old.id]))
        await until(lambda: len(backend.containers()) == 1, "the end of the old one")
        assert not alive(pid_of(old))


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (3, IsolationUnavailable)])
async def test_a_refusal_is_final(code, kind):
    program = f"""
        import sys
        print("noise\\nbase: no such folder", file=sys.stderr)
        sys.exit({code})
    """
    async with running(program) as backend:
        await until(lambda: backend.failure() is not None)
        assert isinstance(backend.failure(), kind)
        assert str(backend.failure()) == "base: no such folder"
        assert backend.containers() == []
        assert "no such folder" in backend.trouble()


async def test_a_crash_loop_is_given_up():
    async with running("import sys; sys.exit('port 80 is in use')") as backend:
        await until(lambda: backend.failure() is not None)
        assert isinstance(backend.failure(), BackendUnavailable)
        assert "port 80 is in use" in str(backend.failure())


async def test_failed_start_ends_itself(tmp_path):
    first, go = tmp_path / "first", tmp_path / "go"
    crashing_but_the_first = f"""
import os, sys, time
try:
    os.mkdir({str(first)!r})
except FileExistsError:
    sys.exit("no GPU")
while not os.path.exists({str(go)!r}):
    time.sleep(0.01)
"""
    async with running(crashing_but_the_first + GOOD, 2) as backend:
        await until(lambda: "failed 9 times" in backend.trouble(), "many failures of one")
        assert backend.failure() is None
        go.touch()
        await until(ready(backend, 1), "the other one")
        assert "no GPU" in backend.trouble()


async def test_refused_pool_is_tidy():
    command = [sys.executable, "-S", "-c", "import sys; print('user namespaces are off', file=sys.stderr); sys.exit(3)"]
    config = SlotPoolConfig()
    pool = SlotPool(config, backend=LocalBackend(config, command=command))
    with pytest.raises(IsolationUnavailable, match=r"^user namespaces are off$"):
        await pool.start()
    assert not pool.backend.scratch.exists()


async def test_bad_ready_line_is_failure():
    async with running("print('hello')\nimport time; time.sleep(60)") as backend:
        await until(lambda: "hello" in backend.trouble())
    async with running("import time; time.sleep(60)", start_timeout_s=0.1) as backend:
        await until(lambda: "not ready within" in backend.trouble())


async def test_a_log_flood_is_bounded():
    flood = READY + "\nfor _ in range(200): sys.stderr.write('x' * 100000)\nprint('done', file=sys.stderr)\nsys.exit(1)"
    async with running(flood) as backend:
        await until(lambda: "done" in backend.trouble())


async def test_servers_get_no_secret(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    program = "import os, sys; sys.exit(' '.join(sorted(os.environ)))"
    async with running(program) as backend:
        await until(lambda: "PATH" in backend.trouble())
        assert "OPENAI" not in backend.trouble()


async def test_scratch_of_dead_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(backend.tempfile, "gettempdir", lambda: str(tmp_path))
    dead, mine = tmp_path / "atropos-1-99999999999-abc", tmp_path / "atropos-x"
    (dead / "0-ab" / "mnt").mkdir(parents=True)
    mine.mkdir()
    kept = tmp_path / f"atropos-{os.getpid()}-{backend.start_time(os.getpid())}-zz"
    kept.mkdir()
    elsewhere = tmp_path / "atropos-1-99999999999-def"  # its owner lives where we don't see its pid, and holds its lock
    elsewhere.mkdir()
    held = os.open(elsewhere, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    backend.remove_stale_scratch()
    assert not dead.exists()
    assert elsewhere.exists()
    os.close(held)
    backend.remove_stale_scratch()
    assert not elsewhere.exists()
    assert mine.exists()
    assert kept.exists()


async def test_lockless_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "atropos-1-99999999999-abc").mkdir()

    def flock(fd, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(BackendUnavailable, match="Function not implemented; set TMPDIR"):
        await SlotPool(SlotPoolConfig()).start()
    assert [each.name for each in tmp_path.iterdir()] == ["atropos-1-99999999999-abc"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [({"allow_network": True}, True), ({}, False), ({"allow_network": True, "base": "/"}, False)],
)
async def test_host_as_base_is_said(caplog, settings, said):
    async with running(GOOD, 0, **settings) as backend:
        backend.note_base()
        assert ("apt-get" in caplog.text and "debootstrap" in caplog.text) == said


async def test_end_in_a_start_is_tidy():
    for delay in (0, 0.01, 0.03):
        async with running(GOOD, 2):
            await asyncio.sleep(delay)


async def test_missing_folder_delays():
    async with running(GOOD) as backend:
        await until(ready(backend, 1), "a server")
        away = backend.scratch.with_name(f"away-{backend.scratch.name}")
        backend.scratch.rename(away)  # as on a full disk, no folder can be made there
        (container,) = backend.containers()
        os.kill(pid_of(container), signal.SIGKILL)
        await until(lambda: "could not be started: [Errno 2]" in backend.trouble(), "the reason")
        away.rename(backend.scratch)
        await until(ready(backend, 1), "another server")
        assert backend.trouble() == ""
