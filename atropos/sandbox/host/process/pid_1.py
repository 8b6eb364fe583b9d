"""The server's side of a slot's PID 1: forked by the spawner, killed, and confirmed to be gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from atropos.aio import done_within
from atropos.errors import SandboxError
from atropos.sandbox.host.process.spawner_client import SpawnerClient, pidfd_of

if TYPE_CHECKING:
    from atropos.sandbox.programs.spawner import StartRequest

STOP_DEADLINE_S = 10.0


class FirstProcess:
    """PID 1 of a slot.

    Attributes:
        pid: its number here; None before its start.
        pidfd: a descriptor of it; -1 before its start, and once its end was waited for.
    """

    def __init__(self) -> None:
        self.pid: int | None = None
        self.pidfd = -1
        self._started: asyncio.Future[int] | None = None
        self._ended: asyncio.Future[float] | None = None

    async def start(self, spawner: SpawnerClient, request: StartRequest, fds: list[int]) -> None:
        """Have the spawner fork it, once; arguments and errors as `SpawnerClient.start`."""
        self._started, self._ended = await spawner.start(request, fds)
        # Shielded: a start that is cancelled here may still have made a process, which `end` waits for.
        self.pid = pid = await asyncio.shield(self._started)
        # From here on it is named by descriptor: its number may be used again once the spawner has reaped it.
        self.pidfd = pidfd_of(pid)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have this called once it has ended."""
        assert self._ended is not None
        self._ended.add_done_callback(lambda _: call())

    @property
    def cpu_s(self) -> float | None:
        """CPU time of everything in its namespace, in seconds, once that has ended; None: unknown."""
        seconds = self._ended.result() if self._ended is not None and self._ended.done() else -1
        return seconds if seconds >= 0 else None

    def kill(self) -> None:
        """Kill it, and with it everything in its namespace."""
        if self.pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                # By pidfd: a number may have been given to another process since.
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self, kill_rest: Callable[[], None]) -> str:
        """Kill it and wait until it is reaped. '' when confirmed; else `kill_rest` was called, which is not waited for.

        A start that was cancelled may be under way: its process is awaited, too.
        """
        if self._started is not None and self.pidfd < 0 and not (self._ended is not None and self._ended.done()):
            # the start was cancelled, but its process may still appear; or an earlier stop did not see its end
            came = await done_within(self._started, STOP_DEADLINE_S)
            with contextlib.suppress(SandboxError, OSError):  # it failed to start, or no descriptor is left
                self.pidfd = pidfd_of(self._started.result()) if came else -1
        self.kill()
        problem = ""
        # the kernel reaps PID 1 after every process of its namespace: nothing else confirms their end
        if self._ended is not None and not await done_within(self._ended, STOP_DEADLINE_S):
            # A process in an uninterruptible sleep (D) dies when its wait ends; the kill is there by then.
            kill_rest()
            problem = f"its processes did not end within {STOP_DEADLINE_S} s"
        if self.pidfd >= 0:
            os.close(self.pidfd)
        self.pidfd = -1
        return problem
