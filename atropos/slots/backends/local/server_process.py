"""One sandbox server as a subprocess: its start, its ready line, its log and its confirmed end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Self

import atropos
from atropos import cgroup_paths
from atropos.aio import Tasks, outlive
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable
from atropos.slots.backends.spec import refused
from atropos.slots.config import server_json

log = logging.getLogger("atropos.slots.server")

LOG_LINES, LOG_LINE_CHARS = 200, 2000
"""How much of the end of a server's log is kept."""
SHOWN_CHARS = 600
"""How much of its last line an error has."""
KILL_WAIT_S = 5.0
"""How long a killed process may take to be reaped before that is logged."""
CGROUPS_WAIT_S, CGROUPS_POLL_S = 1.0, 0.02
"""How long the slots of a killed server may take to end, before its cgroups are left to the next server."""

COMMAND = (sys.executable, "-m", "atropos.sandbox", "--config", "-")
PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "TMPDIR",
    "LD_LIBRARY_PATH",
    "XDG_RUNTIME_DIR",
    "LANG",
    "LC_ALL",
    "TZ",
    "SSL_CERT_FILE",
)
"""The variables of this process that a server gets; others may hold secrets of the trainer."""


def server_environment() -> dict[str, str]:
    """The environment of a sandbox server, in which this package can be imported."""
    env = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    here = str(Path(atropos.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    # Its ready line and its log go to pipes, which Python would buffer in blocks.
    env["PYTHONUNBUFFERED"] = "1"
    return env


def last_line(lines: Iterable[str]) -> str:
    """What a server printed last, as an error says it."""
    printed = [line.strip() for line in lines if line.strip()]
    return printed[-1][-SHOWN_CHARS:] if printed else "it printed nothing"


class ServerProcess:
    """One run of `python -m atropos.sandbox`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        # Read now: this process may be moved to another cgroup before the server ends.
        self._groups = cgroup_paths.own_places()
        self.pid = process.pid
        self._name = cgroup_paths.server_name(process.pid)
        self.id = self._name.rpartition("-")[0]
        self.place = f"pid {self.pid}"
        self.port = 0
        self._lines: deque[str] = deque(maxlen=LOG_LINES)
        self._tasks = Tasks(f"server {self.pid}")
        self._log = self._tasks.spawn(self._follow(), "log")

    @classmethod
    async def start(cls, config: ServerConfig, command: Sequence[str] = COMMAND) -> Self:
        """Start it with its configuration, token included, on stdin.

        Raises:
            BackendUnavailable: the process could not be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=server_environment(),
                # The trainer's folder may be unmounted or removed while the server runs.
                cwd="/",
                start_new_session=True,  # Ctrl-C in a terminal is for the trainer, which ends its servers in order
            )
        except OSError as error:
            raise BackendUnavailable(f"a sandbox server could not be started: {error}") from error
        self = cls(process)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: its exit code says why
            # On stdin, with the token: /proc shows a process's arguments to every user, and its environment to its own.
            process.stdin.write(server_json(config))
            await process.stdin.drain()
        process.stdin.close()
        return self

    async def ready(self, timeout_s: float) -> None:
        """Wait for its ready line.

        Raises:
            ConfigError, IsolationUnavailable: it refused, with its reason.
            BackendUnavailable: it ended, printed something else, or nothing in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._first_line()
                why = None if line else await self.ended()
        except TimeoutError:
            raise BackendUnavailable(f"a sandbox server was not ready within {timeout_s:g} s: {self.last}") from None
        if why is not None:
            raise why
        try:
            self.port = int(json.loads(line)["port"])
        except (ValueError, KeyError, TypeError):
            raise BackendUnavailable(f"a sandbox server printed {line[:200]!r} in place of its ready line") from None
        # Nothing else is expected there, but a pipe that nobody reads would stop its writer after 64 KiB.
        self._tasks.spawn(self._drain(), "stdout")

    async def _first_line(self) -> bytes:
        """The first line on stdout; empty when the server has ended."""
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.readline()
        # asyncio's way to say that a line exceeds the reader's limit.
        except ValueError:
            return b"a line without end"

    @property
    def last(self) -> str:
        """The last line of its log."""
        return last_line(self._lines).removeprefix("error: ")

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._process.returncode

    async def ended(self) -> Exception:
        """Wait until it has ended and its log is read. Returns why it ended: one of the errors of `ready`."""
        # The log after the end: its last line says why.
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):  # a child of it may still hold the pipe
            async with asyncio.timeout(1):
                await asyncio.wait([self._log])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return refused(code, self.last) or BackendUnavailable(f"a sandbox server {how}: {self.last}")

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, and kill it after `grace_s`; returns when it is gone."""
        try:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
        finally:
            if self._process.returncode is None:
                # harmless: its leases are over, and a kill leaves nothing
                log.info("sandbox server %d did not end within %g s: killed", self.pid, grace_s)
                self._signal(signal.SIGKILL)
            await outlive(self._gone())  # a shutdown's last deadline ends the wait above, and not this one

    async def _gone(self) -> None:
        try:
            async with asyncio.timeout(KILL_WAIT_S):
                await self._process.wait()
        except TimeoutError:
            log.critical("sandbox server %d was killed and has not ended", self.pid)
        self._tasks.stop()
        # a child may hold the pipes open: close our ends, or they outlive the event loop
        self._process._transport.close()  # type: ignore[attr-defined]  # noqa: SLF001

    async def tidy(self) -> None:
        """After its end, remove those of its cgroups that it left, as far as this process may."""
        deadline = asyncio.get_running_loop().time() + CGROUPS_WAIT_S
        while not await asyncio.to_thread(cgroup_paths.remove_server, self._groups, self._name):
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(CGROUPS_POLL_S)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def _follow(self) -> None:
        """Keep the end of its stderr: however much it writes, it neither blocks nor fills this process's memory."""
        assert self._process.stderr is not None
        rest = ""
        while chunk := await self._process.stderr.read(65_536):
            *lines, rest = (rest + chunk.decode(errors="replace")).split("\n")
            # A line that never ends must not grow in memory.
            rest = rest[-LOG_LINE_CHARS:]
            for line in lines:
                self._lines.append(line[-LOG_LINE_CHARS:])
                log.debug("server %d: %s", self.pid, line[-LOG_LINE_CHARS:])
        if rest:
            self._lines.append(rest)

    async def _drain(self) -> None:
        assert self._process.stdout is not None
        while await self._process.stdout.read(65_536):
            pass
