"""Finds which limit of a slot ended a program, from the kernel's counters alone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection

from atropos.errors import SlotLost
from atropos.sandbox.host.files import volumes
from atropos.sandbox.linux import sockets
from atropos.sandbox.linux.slot_cgroup import Counts, SlotCgroup
from atropos.wire import CommandResult, Limit, Operation, OpResult, ProcListing, ProcState, SlotLimits

CLOSING_S = 2.0
"""Time that the sockets of killed programs may take to close. Until then, excess sockets kill nothing more."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)
"""Exit codes of a program, or of a shell whose program, was killed."""
_MAX_BACKGROUND = 64
"""Background processes that PID 1 keeps."""


class LimitWatch:
    """The limits of one slot, and what they have ended.

    Args:
        slot: its name, for messages.
        cgroup: where the kernel counts.
        volume: what its files are on.
        limits: how many sockets it may have follows from its memory.
    """

    def __init__(self, slot: str, cgroup: SlotCgroup, volume: volumes.Volume, limits: SlotLimits) -> None:
        self._slot = slot
        self._cgroup = cgroup
        self._volume = volume
        self.viewed: LimitWatch | None = None
        """Of the slot that this one is a view of."""
        # The cgroup may have served an earlier slot (decision 14), so that only differences mean anything.
        self._first = cgroup.counts()
        self._idle: Counts | None = None
        """The counts while nothing runs in the slot that could change them, so that a call need not read them."""
        self._most_sockets = sockets.most(limits.memory_mib << 20)
        self._closing, self._closing_until = 0, 0.0
        """Sockets of killed programs that were still open at the last check, and when they must be closed."""
        self._before: dict[str, Counts] = {}
        """The counts when a call began that starts a program."""
        self._commands: dict[str, bool] = {}
        """The commands that run, by call, and whether others ran at the same time."""
        self._cut: set[str] = set()
        """Calls whose programs were killed because the slot had too many sockets."""
        self._background: dict[str, Counts | Limit | None] = {}
        """The counts when a background process was started; once it has ended, the limit that ended it."""

    def record_start(self, call_id: str, operation: Operation) -> None:
        """Record the start of an operation, before it is handed to PID 1."""
        if operation.op == "exec":
            # Read before PID 1 knows of the command: a program may be killed before this process runs again.
            self._before[call_id] = self._idle or self._cgroup.counts()
            self._commands[call_id] = False
            if len(self._commands) > 1:
                # Not only the new one: the kernel's counts can't be told apart for any of them.
                self._commands = dict.fromkeys(self._commands, True)
        elif operation.op == "proc_start":
            self._before[call_id] = self._cgroup.counts()
        elif operation.op == "proc_kill":
            self._background.pop(operation.id, None)  # it is being ended, not limited
        self._idle = None

    def forget(self, call_id: str) -> None:
        """Drop the record of a call that was answered."""
        self._before.pop(call_id, None)
        self._commands.pop(call_id, None)
        self._cut.discard(call_id)

    def of_result(
        self, call_id: str, result: OpResult | Exception, *, alone: bool
    ) -> tuple[OpResult | Exception, bool]:
        """Add to a result which limit ended its program; also whether forks fail because of leftover processes.

        Args:
            call_id: the call.
            result: as PID 1 sent it. Repeated reads of a background process agree.
            alone: nothing else runs in the slot.

        Raises:
            SlotLost: see `_exceeded`.
        """
        before = self._before.get(call_id)
        if isinstance(result, CommandResult) and before is not None:
            return self._of_command(call_id, result, before, alone=alone)
        if isinstance(result, ProcListing):
            processes = tuple(self._of_state(each) for each in result.processes)
            return result.model_copy(update={"processes": processes, "limits": tuple(self.reached())}), False
        if isinstance(result, ProcState):
            if before is not None:
                self._record_background(result.id, before)
            return self._of_state(result), False
        return result, False

    def _of_command(
        self, call_id: str, result: CommandResult, before: Counts, *, alone: bool
    ) -> tuple[CommandResult, bool]:
        """`of_result` of a command.

        The kernel counts for the whole slot: of commands that ran at the same time, `memory` is said of those that were
        killed, and `pids` of those that failed.
        """
        after = self._cgroup.counts()
        limit = next(iter(self._exceeded(before, after)), None)
        if alone:
            self._idle = after
        refused = limit == "pids" and not alone
        # PID 1 has named what ended it, which is more certain than counts of the whole slot.
        if result.timed_out or result.cancelled or (result.limit is not None and result.limit != "output"):
            return result, refused
        code = result.exit_code
        # Others ran beside it: the limit was theirs where this one succeeded or was not killed.
        if self._commands.get(call_id) and (code == 0 or (limit == "memory" and code not in _KILLED)):
            limit = None
        if call_id in self._cut and code == -signal.SIGKILL:
            limit = "files"
        # A full volume has no counter: it is asked for where a command failed without another reason.
        if limit is None and code != 0:
            limit = volumes.exhausted(self._volume)
        return result if limit is None else result.model_copy(update={"limit": limit}), refused

    def _record_background(self, ident: str, before: Counts) -> None:
        self._background[ident] = before
        # PID 1 keeps no more, so that nobody will ask for the oldest again.
        while len(self._background) > _MAX_BACKGROUND:
            del self._background[next(iter(self._background))]

    def _of_state(self, state: ProcState) -> ProcState:
        known = self._background.get(state.id)
        if known is None or state.running:
            return state
        if isinstance(known, dict):
            limits = self._exceeded(known, self._cgroup.counts())
            # Kept: counts go on after its end, and a later read must not name another program's limit.
            known = self._background[state.id] = next(iter(limits), None) if state.exit_code in _KILLED else None
        return state.model_copy(update={"limit": known})

    def reached(self) -> set[Limit]:
        """The limits that ended any program of the slot, whoever started it, and what it has no more of.

        Raises:
            SlotLost: see `_exceeded`.
        """
        limits: set[Limit] = {*self._exceeded(self._first, self._cgroup.counts())}
        if full := volumes.exhausted(self._volume):
            limits.add(full)
        # Tests in a view talk to servers in the slot: what these lack, the tests lack.
        return limits if self.viewed is None else limits | self.viewed.reached()

    def _exceeded(self, before: Counts, after: Counts) -> Collection[Limit]:
        """The slot's limits that ended programs between two counts.

        Raises:
            SlotLost: programs were killed because the container or the host had no memory left. That is no result.
        """
        stops = self._cgroup.stops(before, after)
        if not all(stops.values()):
            raise SlotLost(
                f"programs of slot {self._slot} were killed though it kept its limits: its container, or the host, ran "
                "out of memory (container_memory_mib is less than its slots may use together)"
            )
        return stops

    def too_many_sockets(self, pid: int, now: float) -> bool:
        """Whether the slot of this PID 1 has too many open; those of killed programs get `CLOSING_S` to close."""
        used = sockets.used(pid)
        if used <= self._most_sockets:
            self._closing = 0
        # Killed programs' sockets close one by one (TCP's in FIN_WAIT among them): falling is good enough for a while.
        elif used <= self._closing and now < self._closing_until:
            self._closing = used
        else:
            # maxsize: the next check accepts any number, as the kill may not have begun yet.
            self._closing, self._closing_until = sys.maxsize, now + CLOSING_S
            return True
        return False

    def record_socket_kill(self, calls: list[str]) -> None:
        """Record that all programs are killed for too many sockets: those of these calls, and background processes."""
        self._cut.update(calls)
        running = [key for key, at in self._background.items() if isinstance(at, dict)]
        self._background.update(dict.fromkeys(running, "files"))
