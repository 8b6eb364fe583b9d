"""Commands that a call waits for."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.children import KILL_PATIENCE_S, children, session_members, signal_session
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import CHUNK, loop, now
from atropos.sandbox.programs.runner.processes.filters import CUT, Filters, place_of
from atropos.sandbox.programs.runner.processes.head_tail import HeadTail
from atropos.sandbox.programs.runner.processes.launch import Launch, memory_file
from atropos.sandbox.programs.runner.processes.orphan_pipes import adopt
from atropos.sandbox.programs.runner.signals import signals
from atropos.sandbox.programs.runner.state import state

if TYPE_CHECKING:
    from atropos.sandbox.programs.runner.processes.launch import CommandLine

READ_AFTER_S = (0.004, 0.048)
"""How long a command's output waits in its pipe (64 KiB) before it is read: most commands are over by then. Twice what
the last command took, within these bounds: on a busy machine a short command takes long, and each look costs a call.
The shorter bound after a command that printed more than half a pipe: it may have waited for us."""


class Pipe:
    """Where a command's output is read (-1: its last writer is gone), and what it is added to."""

    __slots__ = ("fd", "sinks")

    def __init__(self, fd: int, sinks: list[HeadTail]) -> None:
        self.fd, self.sinks = fd, sinks

    def read(self) -> int:
        """Read a piece; returns how long it was."""
        try:
            data = os.read(self.fd, CHUNK)
        except BlockingIOError:
            return 0
        if data:
            for each in self.sinks:
                each.add(data)
        else:
            loop.unwatch(self.fd)
            os.close(self.fd)
            self.fd = -1
        return len(data)

    def drain(self) -> None:
        """Read what the ended program left in it, but not what a background child is still writing."""
        # A pipe has 64 KiB by itself; the rest is for one that a program made larger (F_SETPIPE_SZ).
        budget = 1 << 20
        while budget > 0 and self.fd >= 0 and (got := self.read()):
            budget -= got


class Command:
    """One exec call, from its start to its answer."""

    __slots__ = (
        *("all", "call", "cancelled", "cut", "ends", "err", "filters", "out", "pid", "pipes", "started", "timed_out"),
        "timer",
    )
    patience = READ_AFTER_S[0]

    def __init__(self, call: int, limit: int, *, split: bool) -> None:
        self.call = call
        self.all = HeadTail(limit)
        self.out = HeadTail(limit) if split else None
        self.err = HeadTail(limit) if split else None
        self.pipes: list[Pipe] = []
        self.pid = -1
        self.timed_out = self.cancelled = self.cut = False
        self.filters: Filters | None = None
        self.started = now()
        self.timer = 0
        self.ends = 0.0

    def wait(self) -> None:
        """Leave what it prints in the pipe for now: a short command is over by then, and is read once, at its end."""
        until = self.started + Command.patience
        if self.ends <= until:
            self.listen()
        else:
            self.timer = loop.later(until, self.listen)

    def listen(self) -> None:
        """Read what it prints from now on."""
        self.timer = loop.later(self.ends, self.timeout)
        for pipe in self.pipes:
            loop.watch(pipe.fd, pipe.read)

    def ended(self, code: int) -> None:
        """Its first process was reaped."""
        loop.timers.pop(self.timer, None)
        least, most = READ_AFTER_S
        took = now() - self.started
        # On the class: the next command is most likely of the same kind.
        Command.patience = least if self.all.total > CHUNK // 2 else min(max(2 * took, least), most)
        if self.timed_out or self.cancelled:
            self.settle(code, now() + KILL_PATIENCE_S)
        else:
            self.drain()
            if self.progress() is None:
                self.finish(code)
            else:
                self.await_filters(code)

    def await_filters(self, code: int) -> None:
        """Read on what its filters still print."""
        for pipe in self.pipes:
            if pipe.fd >= 0:
                loop.watch(pipe.fd, pipe.read)

        def ended(cut: bool) -> None:
            self.cut = cut
            self.finish(code)

        outputs = [place_of(fd) for fd in self.open()]
        self.filters = Filters(self.pid, outputs, None, self.progress, ended, self.open, self.ends)

    def progress(self) -> int | None:
        """How much it has printed; None once no process can write to its pipes."""
        return self.all.total if self.open() else None

    def open(self) -> list[int]:
        """Its pipes to which processes may still print."""
        return [pipe.fd for pipe in self.pipes if pipe.fd >= 0]

    def drain(self) -> None:
        """Read what is in its pipes."""
        for pipe in self.pipes:
            pipe.drain()

    def settle(self, code: int, until: float) -> None:
        """Answer a killed command once its whole session is gone, not only its first process."""
        # A caller of a killed command counts on its processes being gone, with their locks and ports.
        if not session_members(self.pid) or now() > until:
            self.finish(code)
            return
        signal_session(self.pid, signals.SIGKILL)
        loop.later(now() + 0.002, lambda: self.settle(code, until))

    def finish(self, code: int) -> None:
        """Read what is left, and answer."""
        self.drain()
        for pipe in self.pipes:
            if pipe.fd >= 0:  # a background child may hold it: it is read on, so that the child isn't killed by SIGPIPE
                adopt(pipe.fd)
        if self.cut:
            for buffer in (self.all, self.out):  # errors have no note of ours
                if buffer:
                    buffer.add(CUT)
        self.reply(code)

    def reply(self, code: int | None, limit: str | None = None) -> None:
        """Send the result; `limit`: the one that kept it from starting."""
        output = self.all.value()
        lost = self.all.dropped()
        cut = lost > 0 or self.cut
        # Written as text: building and encoding the dictionary would take a tenth of such a call.
        if not (cut or self.timed_out or self.cancelled or self.out) and code is not None:
            # the common case: omitted fields have their defaults
            alone = ',"alone":true' if children.alone and not children.running else ""
            took = f"{now() - self.started:.6f}"
            header = f'{{"id":{self.call},"r":{{"kind":"exec_result","exit_code":{code},"duration_s":{took}}},'
            header += f'"b":[["output",{len(output)}]]{alone}}}'
            link.send(self.call, header, output)
            return
        fields = {
            "exit_code": code,
            "timed_out": self.timed_out,
            "cancelled": self.cancelled,
            "truncated": cut,
            "dropped_bytes": lost,
            "limit": limit or ("time" if self.timed_out else "output" if cut else None),
            "duration_s": round(now() - self.started, 6),
        }
        pieces = {"output": output}
        if self.out and self.err:
            pieces |= {"stdout": self.out.value(), "stderr": self.err.value()}
        link.answer(self.call, "exec_result", fields, pieces)

    def kill(self) -> None:
        """Kill its session."""
        signal_session(self.pid, signals.SIGKILL)
        # a process that even SIGKILL doesn't end (it waits in the kernel) doesn't keep the caller
        self.timer = loop.later(now() + KILL_PATIENCE_S, self.give_up)

    def give_up(self) -> None:
        """Answer although SIGKILL has not ended it."""
        # Taken out first: when it is reaped at last, nobody is to be told.
        if children.running.pop(self.pid, None) is not None:
            self.ended(-9)

    def timeout(self) -> None:
        """Kill it at its deadline."""
        self.timed_out = True
        self.kill()

    def cancel(self) -> None:
        """Kill it for a cancelled call."""
        if self.filters is not None:
            self.cancelled = True
            signal_session(self.pid, signals.SIGKILL)
            self.filters.stop()
        elif self.pid in children.running and not self.cancelled:
            self.cancelled = True
            loop.timers.pop(self.timer, None)
            self.kill()


def op_exec(
    call: int,
    command: CommandLine,
    timeout_s: float | None,
    workdir: str | None,
    env: dict[str, str],
    user: str | None,
    stdin: bytes | None,
    split: bool,
    max_output_bytes: int | None,
) -> None:
    """Run a command and answer when its first process has ended."""
    launch = Launch(command, workdir, env, user)
    task = Command(call, min(max_output_bytes or state.output_bytes, state.output_bytes), split=split)
    source = state.null
    try:
        if stdin is not None:
            source = memory_file(stdin)
        task.pid, outputs = launch.start_on_pipes(source, split=split)
    except OSError as error:
        not_started(task, error, launch)
        return
    finally:
        if source != state.null:
            os.close(source)
    buffers = [[task.all, task.out], [task.all, task.err]] if task.out and task.err else [[task.all]]
    task.pipes = [Pipe(fd, parts) for fd, parts in zip(outputs, buffers, strict=True)]
    children.running[task.pid] = task
    link.calls[call] = task
    # From before the start, which may take long on a busy machine.
    task.ends = task.started + min(timeout_s or state.wall_s, state.wall_s)
    task.wait()


def not_started(task: Command, error: OSError, launch: Launch) -> None:
    """Answer for a command that never ran: exit code None, and the reason as its output."""
    failed = launch.failure(error)
    if launch.program is not None or failed.error == "not_supported" or not os.path.isdir(launch.where):
        raise failed
    task.all.add(f"the command could not be started: {failed.message}\n".encode())
    task.reply(None, failed.limit)
