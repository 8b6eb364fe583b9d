"""Operations that a forked child does, because they could block or take long."""

from __future__ import annotations

import marshal
import os
from typing import TYPE_CHECKING

from atropos.sandbox.linux.syscalls import name_process
from atropos.sandbox.programs.runner.children import children, with_room
from atropos.sandbox.programs.runner.failures import OpFailed, failure
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import loop, now
from atropos.sandbox.programs.runner.opening import write_all
from atropos.sandbox.programs.runner.signals import signals
from atropos.sandbox.programs.runner.state import state

if TYPE_CHECKING:
    from collections.abc import Callable

    Outcome = tuple[str, dict[str, object], dict[str, bytes]]
    """The kind of a result, its fields, and its pieces of bytes."""

WORK_DEADLINE_S = 30.0
NAME = b"atropos-files"
"""What these children are called: one with PID 1's name is taken for one that it waits for
(`linux.stopped_children`)."""
STREAM = 1
"""The descriptor of the child's stream from or to the server."""


class Work:
    """An operation that a forked child does; it is killed at its deadline."""

    __slots__ = ("call", "data", "fd", "pid", "timer", "why")

    def __init__(self, call: int, job: Callable[[], Outcome], stream: int | None = None) -> None:
        self.call = call
        self.data = bytearray()
        self.why: OpFailed | None = None
        self.pid = -1
        self.fd, write = os.pipe2(os.O_CLOEXEC)
        state.expose_children()
        try:
            self.pid = with_room(os.fork)
        except OSError:
            os.close(self.fd)
            os.close(write)
            raise
        finally:
            # Not in the child, which has to keep the score that it inherited.
            if self.pid:
                state.protect_self()
        if self.pid == 0:
            in_child(job, write, stream)
        os.close(write)
        os.set_blocking(self.fd, False)
        children.running[self.pid] = self
        link.calls[call] = self
        loop.watch(self.fd, self.readable)
        self.timer = loop.later(now() + WORK_DEADLINE_S, self.timeout) if stream is None else -1

    def readable(self) -> None:
        """Read a piece of its outcome."""
        try:
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return
        if data:
            self.data += data
            return
        self.finish()

    def timeout(self) -> None:
        """Kill it at its deadline."""
        self.why = OpFailed("timeout", f"the operation took longer than {WORK_DEADLINE_S:.0f} s", "time")
        self.stop()

    def cancel(self) -> None:
        """Kill it for a cancelled call."""
        self.why = OpFailed("timeout", "the operation was cancelled")
        self.stop()

    def stop(self) -> None:
        """Kill it and answer."""
        try:
            os.kill(self.pid, signals.SIGKILL)
        except OSError:
            pass
        self.finish()

    def ended(self, code: int) -> None:
        """Do nothing when it is reaped: the end of its pipe triggers the answer."""

    def finish(self) -> None:
        """Answer with its outcome."""
        loop.timers.pop(self.timer, None)
        loop.unwatch(self.fd)
        os.close(self.fd)
        if self.why is None:
            try:
                outcome = marshal.loads(self.data)  # noqa: S302
            # marshal ends where the child was killed in the middle of writing.
            except (EOFError, ValueError, TypeError):
                self.why = OpFailed("limit", "the operation was killed before it ended", "memory")
            else:
                self.data.clear()  # it may be a large part of the slot's memory
                if outcome[0] == "ok":
                    link.answer(self.call, *outcome[1:])
                    return
                self.why = OpFailed(*outcome[1:])
        link.fail(self.call, self.why)


def in_child(job: Callable[[], Outcome], write: int, stream: int | None) -> None:
    """Do the job, write its outcome and end."""
    try:
        signals.set_wakeup_fd(-1)
        name_process(NAME)
        # an open descriptor could be reached by a path through /proc/self/fd
        last = STREAM if stream is not None else 0
        if stream is not None:
            os.dup2(stream, STREAM)  # first: `write` is above it, as 0, 1 and 2 are always open
        os.dup2(write, 0)
        os.closerange(last + 1, 1 << 16)
        try:
            result = marshal.dumps(("ok", *job()))
        except BaseException as error:
            failed = failure(error)
            result = marshal.dumps(("failed", failed.error, failed.message, failed.limit))
        write_all(0, result)
    finally:
        os._exit(0)
