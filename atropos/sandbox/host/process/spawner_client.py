"""The server's side of the process that slots are forked from (`spawner`)."""

from __future__ import annotations

import asyncio
import errno
import itertools
import marshal
import os
import socket
import subprocess
from typing import TYPE_CHECKING

from atropos.errors import SandboxError
from atropos.sandbox.contract import HostBroken

if TYPE_CHECKING:
    from atropos.sandbox.programs.spawner import NumberedRequest, Report, StartRequest


class SpawnerClient:
    """Starts slots, and reports their ends, by the spawner that `prestart` started and our end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._readable)
        self._numbers = itertools.count(1)
        self._slots: dict[int, tuple[asyncio.Future[int], asyncio.Future[float]]] = {}
        """What `start` returned, of the slots that have not ended."""
        self.broken: str | None = None

    async def start(self, request: StartRequest, fds: list[int]) -> tuple[asyncio.Future[int], asyncio.Future[float]]:
        """Ask for a slot; futures of its PID 1's number here, and of its CPU time (-1: unknown) at its end.

        Call from the event loop's thread.

        Raises:
            HostBroken: the spawner is gone.
            SandboxError: descriptors can't be passed to it now.
        """
        if self.broken is not None:
            raise HostBroken(self.broken)
        number = next(self._numbers)
        numbered: NumberedRequest = {"id": number, **request}
        # marshal: both ends are the same Python, and the spawner does without json, whose module every PID 1 would
        # have.
        data = marshal.dumps({**numbered})
        while True:
            try:
                socket.send_fds(self._sock, [data], fds)
                break
            except BlockingIOError:
                # The socket's buffer is full for the moment; SEQPACKET would not send a part.
                await asyncio.sleep(0.001)
            except OSError as error:
                if error.errno != errno.ETOOMANYREFS:
                    self._broke(str(error))
                    raise HostBroken(self.broken) from None
                raise SandboxError("the kernel's bound on descriptors in flight of this user is reached") from None
        futures = self._slots[number] = self._loop.create_future(), self._loop.create_future()
        return futures

    def _readable(self) -> None:
        while True:
            try:
                # One report a message: the socket keeps their borders.
                data = self._sock.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError as error:
                self._broke(str(error))
                return
            if not data:
                self._broke("it ended")
                return
            self._report(marshal.loads(data))  # noqa: S302 (the spawner is as trusted as this process)

    def _report(self, report: Report) -> None:
        started, ended = self._slots[report["id"]]
        if "pid" in report:
            started.set_result(report["pid"])
            return
        del self._slots[report["id"]]
        if "error" in report:
            ended.set_result(-1)
            started.set_exception(SandboxError(f"a sandbox could not be started: {report['error']}"))
        elif "cpu_s" in report:
            ended.set_result(report["cpu_s"])

    def _broke(self, why: str) -> None:
        if self.broken is not None:
            return
        self.broken = f"the process that starts sandboxes is gone ({why})"
        self._loop.remove_reader(self._sock)
        for started, ended in self._slots.values():
            if not started.done():
                started.set_exception(HostBroken(self.broken))
            ended.set_result(-1)
        self._slots.clear()

    async def aclose(self) -> None:
        """End the spawner, and with it every slot that remains."""
        if self.broken is None:
            self._loop.remove_reader(self._sock)
            self.broken = "closed"
        # The spawner ends at the end of its input, and its slots with it (PR_SET_PDEATHSIG).
        self._sock.close()
        try:
            await asyncio.to_thread(self._process.wait, 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


def pidfd_of(pid: int) -> int:
    """A descriptor of a process, which never refers to another process; -1 when the process has gone."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return -1
