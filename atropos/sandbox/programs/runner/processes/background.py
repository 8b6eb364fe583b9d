"""Background processes: each with a rolling buffer of its output, and calls that wait for it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

from atropos.sandbox.programs.runner.children import children, signal_session
from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import CHUNK, loop, now
from atropos.sandbox.programs.runner.processes.filters import CUT, Filters, place_of
from atropos.sandbox.programs.runner.processes.launch import Launch
from atropos.sandbox.programs.runner.processes.terminals import open_terminal, resize
from atropos.sandbox.programs.runner.signals import signals
from atropos.sandbox.programs.runner.state import state

if TYPE_CHECKING:
    from atropos.sandbox.programs.runner.processes.launch import CommandLine

MAX_PROCS = 64
MAX_STDIN_QUEUE = 1 << 20
TERM_GRACE_S = 5.0


class Proc:
    """A background process and the rolling buffer of its output."""

    def __init__(self, ident: str, command: CommandLine, size: int, *, pty: bool) -> None:
        self.id, self.command, self.size, self.pty = ident, command, size, pty
        self.pid = self.fd = self.stdin = -1
        self.buffer = bytearray()
        self.total = 0
        self.code: int | None = None
        self.running = True
        self.started = self.last = now()
        self.finished = 0.0
        self.waiters: list[Waiter] = []
        self.queue = bytearray()
        self.eof = False
        self.errors: Proc | None = None
        self.outputs: list[tuple[int, int]] = []
        """Where it prints, by device and inode."""
        self.hold = False
        self.seen = 0
        self.unread = False
        """Whether it is kept until a caller has its end, and all that it printed."""

    def readable(self) -> None:
        """Read a piece of its output, unless too much is held for the caller."""
        unread = self.total - self.seen
        if self.hold and unread >= self.size // 2:
            loop.unwatch(self.fd)
        else:
            self.read(min(CHUNK, self.size - unread) if self.hold else CHUNK)

    def read(self, most: int) -> bool:
        """Read a piece of its output; whether there was one."""
        try:
            data = os.read(self.fd, most)
        except BlockingIOError:
            return False
        except OSError:  # the last program on a terminal has gone
            data = b""
        if not data:
            self.close_output()
            return False
        self.keep(data)
        self.wake()
        return True

    def keep(self, data: bytes) -> None:
        """Add a piece to the rolling buffer."""
        self.buffer += data
        self.total += len(data)
        # In larger steps than a read: each cut moves what remains.
        if len(self.buffer) > self.size + CHUNK:
            del self.buffer[: -self.size]
        self.last = now()

    def was_read(self, offset: int) -> None:
        """Note that the caller has everything before `offset`; read on if that makes room."""
        self.seen = max(self.seen, min(offset, self.total))
        # Half: otherwise each read would stop and start it again.
        if self.fd >= 0 and self.total - self.seen < self.size // 2:
            loop.watch(self.fd, self.readable)

    def close_output(self) -> None:
        """Close the output: its last writer is gone, or its process is dropped."""
        if self.fd >= 0:
            loop.unwatch(self.fd)
            loop.unwatch_room(self.fd)
            os.close(self.fd)
            # A terminal has one descriptor for both directions.
            if self.stdin == self.fd:
                self.stdin = -1
            self.fd = -1

    def close_stdin(self) -> None:
        """Close a pipe to it; a terminal is closed with its output."""
        if self.stdin >= 0 and self.stdin != self.fd:
            loop.unwatch_room(self.stdin)
            os.close(self.stdin)
            self.stdin = -1

    def ended(self, code: int) -> None:
        """Its first process was reaped: read the rest, and what its filters still print."""
        parts = self.parts()
        for part in parts:
            part.drain()
        if self.progress() is None:
            self.finish(code)
            return

        def behind() -> bool:
            return any(part.fd >= 0 and part.fd not in loop.readers for part in parts)

        def ended(cut: bool) -> None:
            for part in parts:
                part.drain()
            if cut:
                self.keep(CUT)
            self.finish(code)

        place = place_of(self.stdin) if self.stdin >= 0 and not self.pty else None
        Filters(self.pid, self.outputs, place, self.progress, ended, self.open, behind=behind)

    def progress(self) -> int | None:
        """How much it has printed, errors included; None once no process can print."""
        parts = self.parts()
        return sum(part.total for part in parts) if self.open() else None

    def open(self) -> list[int]:
        """Its outputs to which processes may still print."""
        return [part.fd for part in self.parts() if part.fd >= 0]

    def parts(self) -> list[Proc]:
        """Its outputs."""
        return [self, self.errors] if self.errors else [self]

    def drain(self) -> None:
        """Read what is in the pipe."""
        # What it left running may print without end.
        budget = 64
        while budget and self.fd >= 0:
            if self.hold:  # all that is in the pipe is kept
                self.size = max(self.size, self.total - self.seen + CHUNK)
            if not self.read(CHUNK):
                break
            budget -= 1

    def finish(self, code: int) -> None:
        """Wake waiting calls: it has ended."""
        self.hold = False
        if self.errors:
            self.errors.finish(code)
        self.code, self.running, self.finished = code, False, now()
        if self.fd >= 0:  # by what it left running
            loop.watch(self.fd, self.readable)
        self.close_stdin()
        self.wake()

    def state(self, offset: int, limit: int) -> tuple[dict[str, object], bytes]:
        """Fields of a `proc_state` and its output from `offset` on."""
        first = self.total - min(len(self.buffer), self.size)
        start = min(max(offset, first), self.total)
        at = start - self.total + len(self.buffer)
        data = bytes(self.buffer[at : at + limit])
        # The caller has its end and everything before it: the place may be given to another.
        if limit and not self.running and start + len(data) == self.total:
            self.unread = False
        fields: dict[str, object] = {
            "id": self.id,
            "command": (self.command if isinstance(self.command, str) else " ".join(self.command))[:10_000],
            "pid": self.pid,
            "running": self.running,
            "exit_code": self.code,
            "offset": start,
            "total_bytes": self.total,
            "dropped_bytes": max(0, start - offset),
            "uptime_s": round((now() if self.running else self.finished) - self.started, 3),
            "pty": self.pty,
            "errors": self.errors.id if self.errors else None,
        }
        return fields, data

    def wake(self) -> None:
        """Let waiting calls check the new state."""
        for waiter in list(self.waiters):
            waiter.check()

    def write(self, data: bytes, *, eof: bool) -> None:
        """Queue input."""
        if self.stdin < 0:
            raise OpFailed("io", "its input is closed" if self.running else "the process has ended")
        if len(self.queue) + len(data) > MAX_STDIN_QUEUE:
            raise OpFailed("limit", f"more than {MAX_STDIN_QUEUE} bytes wait to be read by the process", "output")
        self.queue += data
        self.eof = self.eof or eof
        self.feed()

    def feed(self) -> None:
        """Write queued input as far as the pipe has room."""
        try:
            while self.queue:
                sent = os.write(self.stdin, self.queue[:CHUNK])
                del self.queue[:sent]
        except BlockingIOError:
            loop.watch_room(self.stdin, self.feed)
            return
        # EPIPE: it has closed its input, which is its own affair.
        except OSError:
            self.queue.clear()
            self.close_stdin()
            return
        loop.unwatch_room(self.stdin)
        if self.eof:
            self.close_stdin()

    def kill(self) -> None:
        """Kill it if it still runs."""
        if self.running:
            signal_session(self.pid, signals.SIGKILL)


class Waiter:
    """A `proc_read` that waits."""

    def __init__(
        self,
        call: int,
        proc: Proc,
        offset: int,
        max_bytes: int,
        until: Literal["exit", "output", "quiet"],
        deadline: float,
        quiet_s: float,
    ) -> None:
        self.call, self.proc, self.offset, self.max_bytes = call, proc, offset, max_bytes
        self.until, self.deadline, self.quiet_s = until, deadline, quiet_s
        self.started = now()
        self.timer = 0
        proc.waiters.append(self)
        link.calls[call] = self
        self.check()

    def check(self) -> None:
        """Answer if its condition holds."""
        moment, proc = now(), self.proc
        # Each check sets its own: an earlier one would answer too soon.
        loop.timers.pop(self.timer, None)
        wake = self.deadline
        if not proc.running or moment >= self.deadline or (self.until == "output" and proc.total > self.offset):
            self.answer()
            return
        if self.until == "quiet":
            quiet = max(proc.last, self.started) + self.quiet_s
            if moment >= quiet:
                self.answer()
                return
            wake = min(wake, quiet)
        self.timer = loop.later(wake, self.check)

    def answer(self) -> None:
        """Answer with the present state and output."""
        loop.timers.pop(self.timer, None)
        self.proc.waiters.remove(self)
        answer_state(self.call, self.proc, self.offset, self.max_bytes)

    cancel = answer


procs: dict[str, Proc] = {}
errors: dict[str, Proc] = {}
"""Separate error outputs of processes: each kept like the output of a further process."""


def answer_state(call: int, proc: Proc, offset: int = 0, limit: int = 0) -> None:
    """Answer with a process's state."""
    fields, data = proc.state(offset, limit)
    link.answer(call, "proc_state", fields, {"output": data})


def op_proc_start(
    call: int,
    command: CommandLine,
    workdir: str | None,
    env: dict[str, str],
    user: str | None,
    pty: bool,
    split: bool,
    hold: bool,
    rows: int,
    cols: int,
    buffer_bytes: int,
) -> None:
    """Start a background process."""
    if len(procs) >= MAX_PROCS:
        drop_one()
    loop.serial += 1
    proc = Proc(f"proc-{loop.serial}", command, buffer_bytes, pty=pty)
    if split and not pty:
        proc.errors = Proc(f"{proc.id}-errors", command, buffer_bytes, pty=False)
        proc.errors.hold = proc.errors.unread = hold
    proc.hold, proc.unread = hold and not pty, hold
    if pty:
        # TERM may be chosen by the caller; LINES and COLUMNS must agree with the terminal.
        env = {"TERM": "xterm-256color", **env, "LINES": str(rows), "COLUMNS": str(cols)}
    launch = Launch(command, workdir, env, user)
    try:
        if pty:
            start_on_terminal(proc, launch, rows, cols)
        else:
            start_on_pipes(proc, launch)
    except OSError as error:
        raise launch.failure(error) from None
    procs[proc.id] = proc
    children.running[proc.pid] = proc
    # Only once it has started and is listed: a failed start leaves nothing that could be called back.
    loop.watch(proc.fd, proc.readable)
    if proc.errors:
        proc.errors.pid = proc.pid
        errors[proc.errors.id] = proc.errors
        loop.watch(proc.errors.fd, proc.errors.readable)
    answer_state(call, proc)


def drop_one() -> None:
    """Drop the oldest process that has ended, but for those that are kept until they are read."""
    for proc in procs.values():
        if not (proc.running or proc.unread or (proc.errors and proc.errors.unread)):
            break
    else:
        raise OpFailed("limit", f"{MAX_PROCS} background processes run already, or are to be read to their end", "pids")
    del procs[proc.id]
    proc.close_output()
    if proc.errors:
        errors.pop(proc.errors.id).close_output()


def start_on_terminal(proc: Proc, launch: Launch, rows: int, cols: int) -> None:
    """Start a process on a terminal of its own."""
    master, path = open_terminal(rows, cols)
    try:
        if launch.identity:
            # As login does (grantpt(3)): programs of that user open their terminal by its path.
            os.chown(path, launch.identity.uid, launch.identity.gid)
        proc.outputs = [place_of(path)]
        proc.pid = launch.start((state.null, state.null, state.null), path)
    except BaseException:
        os.close(master)
        raise
    proc.fd = proc.stdin = master


def start_on_pipes(proc: Proc, launch: Launch) -> None:
    """Start a process with a pipe for its input, and one for what it prints, or two."""
    source, proc.stdin = os.pipe2(os.O_CLOEXEC)
    try:
        os.set_blocking(proc.stdin, False)
        proc.pid, outputs = launch.start_on_pipes(source, split=proc.errors is not None)
    except BaseException:
        os.close(proc.stdin)
        raise
    finally:
        os.close(source)
    proc.outputs = [place_of(fd) for fd in outputs]
    proc.fd = outputs[0]
    if proc.errors:
        proc.errors.fd = outputs[1]


def proc_of(ident: str) -> Proc:
    """The process of an id."""
    proc = procs.get(ident) or errors.get(ident)
    if proc is None:
        raise OpFailed("unknown_process", f"no background process has the id {ident!r}")
    return proc


def op_proc_read(
    call: int,
    id: str,  # noqa: A002
    offset: int,
    max_bytes: int,
    wait_s: float,
    until: Literal["exit", "output", "quiet"],
    quiet_s: float,
) -> None:
    """Answer with state and output, now or when what is waited for has happened."""
    proc = proc_of(id)
    proc.was_read(offset)
    if wait_s > 0 and proc.running:
        Waiter(call, proc, offset, max_bytes, until, now() + min(wait_s, state.wall_s), quiet_s)
    else:
        answer_state(call, proc, offset, max_bytes)


def op_proc_write(call: int, id: str, data: bytes, eof: bool, rows: int | None, cols: int | None) -> None:  # noqa: A002
    """Write to a process, or give its terminal another size."""
    proc = proc_of(id)
    if (rows is not None or cols is not None) and proc.pty and proc.fd >= 0:
        resize(proc.fd, rows, cols)
    if data or eof:
        # A terminal has no end of its own: ^D is what its line discipline takes for one (VEOF).
        proc.write(data + b"\x04" if proc.pty and eof else data, eof=eof and not proc.pty)
    link.answer(call, "done", {"count": len(data)})


def op_proc_kill(call: int, id: str, signal: str) -> None:  # noqa: A002
    """Signal a process's session. It is no longer kept for its output: its starter gives it up."""
    proc = proc_of(id)
    proc.unread = False
    if proc.errors:
        proc.errors.unread = False
    if proc.running:
        signal_session(proc.pid, getattr(signals, f"SIG{signal}"))
        if signal == "TERM":
            # `kill` looks whether it still runs: pids may be given to others by then.
            loop.later(now() + TERM_GRACE_S, proc.kill)
    answer_state(call, proc, proc.total)


def op_proc_list(call: int) -> None:
    """Answer with the state of all."""
    states = [proc.state(proc.total, 0)[0] for proc in procs.values()]
    link.answer(call, "proc_listing", {"processes": states})
