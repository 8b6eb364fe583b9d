"""The calls that run in one slot: handed to its PID 1, answered in time, and watched while their programs run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from atropos.errors import SlotLost
from atropos.sandbox.host.limit_watch import LimitWatch
from atropos.sandbox.host.runner_link import RunnerLink
from atropos.sandbox.linux import stopped_children
from atropos.wire import Exec, Operation, OpResult, StartOperation

if TYPE_CHECKING:
    from atropos.sandbox.contract import OnResult

ANSWER_GRACE_S = 15.0
"""How much longer than an operation's own limit an answer may take before the slot counts as broken."""
CHECK_S = 0.5
"""Interval between checks of pending calls and of running programs, in seconds."""


class SlotCalls:
    """The calls of one slot.

    Args:
        watch: which limits its programs reach.
        wall_s: longest time of a command that names none.
        pid: the slot's PID 1, as the server sees it; None: not started, or ended.
        fail: ends the slot, for a reason.

    Attributes:
        channel: to PID 1; None before its start.
    """

    def __init__(
        self, watch: LimitWatch, wall_s: float, pid: Callable[[], int | None], fail: Callable[[str], None]
    ) -> None:
        self.watch = watch
        self.wall_s = wall_s
        self.channel: RunnerLink | None = None
        self._pid = pid
        self._fail = fail
        self._loop = asyncio.get_running_loop()
        self._pending: dict[str, tuple[int, float]] = {}
        """Number in the channel and when its answer is due, of each call that runs."""
        self._programs = False
        """Whether programs may be running, with or without a call."""
        self._watchdog: asyncio.TimerHandle | None = None
        self._stuck: set[int] = set()

    def __len__(self) -> int:
        return len(self._pending)

    def begin(
        self, call_id: str, operation: Operation, arguments: dict[str, object], done: OnResult, *, stream: int = -1
    ) -> None:
        """Start an operation in a live slot; see `contract.Sandbox.begin`.

        Args:
            call_id: names it in `cancel` and `forget`.
            operation: what is done.
            arguments: what PID 1 is given of it.
            done: gets the result.
            stream: a descriptor that travels with it; -1: none.
        """
        channel = self.channel
        assert channel is not None
        self.watch.record_start(call_id, operation)
        # Background processes run on without a call, so that the watchdog can't go by pending calls alone.
        self._programs = self._programs or isinstance(operation, StartOperation)

        def ended(result: OpResult | Exception) -> None:
            if isinstance(operation, Exec):
                self._programs = not channel.alone
            try:
                result, refused = self.watch.of_result(call_id, result, alone=channel.alone)
            except SlotLost as error:  # the slot ends: no later call may rely on what was killed
                # Not from within the channel's own reading: `_fail` closes it.
                self._loop.call_soon(self._fail, str(error))
                result, refused = error, False
            if refused:  # end leftover processes, so that later commands can fork
                # The call stays open until they have ended: the next one would fail to fork for the same reason.
                last = channel.call("end_leftovers", {}, lambda _: over(result))
                self._pending[call_id] = (last, self._loop.time() + ANSWER_GRACE_S)
            else:
                over(result)

        def over(result: OpResult | Exception) -> None:
            self._pending.pop(call_id, None)
            self.watch.forget(call_id)
            done(result)

        number = channel.call(operation.op, arguments, ended, answer=operation.answer, descriptor=stream)
        # PID 1 keeps the limit itself; the server only notices where it does not answer.
        limit_s = operation.time_limit_s(self.wall_s)
        self._pending[call_id] = (number, self._loop.time() + limit_s + ANSWER_GRACE_S)
        if self._watchdog is None:
            self._watchdog = self._loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        """Check pending calls and running programs: one timer for all of them, while there are any."""
        late = 0.0 if self._watchdog is None else self._loop.time() - self._watchdog.when()
        self._watchdog = None
        pid = self._pid()
        if not (self._pending or self._programs) or pid is None:
            return
        if late > CHECK_S:  # this process was stopped, and PID 1 perhaps too: its answers may still arrive
            self._pending = {call_id: (number, due + late) for call_id, (number, due) in self._pending.items()}
        if self._pending and min(due for _, due in self._pending.values()) <= self._loop.time():
            self._fail("PID 1 of the slot did not answer in time")
            return
        # A stopped child before its exec would leave PID 1 waiting for it; what was stopped twice is killed.
        self._stuck = stopped_children.kill_stopped_children(pid, self._stuck)
        too_many = self._programs and self.watch.too_many_sockets(pid, self._loop.time())
        if too_many and self.channel is not None:
            self.watch.record_socket_kill(list(self._pending))
            self.channel.call("end_all", {}, lambda _: None)
        self._watchdog = self._loop.call_later(CHECK_S, self._check)

    def cancel(self, call_id: str) -> None:
        """Kill what the call started."""
        call = self._pending.get(call_id)
        if call is not None and self.channel is not None:
            number, due = call
            # A cancelled call has to end soon, whatever its own limit was.
            if due == math.inf:
                self._pending[call_id] = (number, self._loop.time() + ANSWER_GRACE_S)
            self.channel.cancel(number)

    def forget(self, call_id: str) -> None:
        """Kill what the call started, and ignore its answer."""
        call = self._pending.pop(call_id, None)
        self.watch.forget(call_id)
        if call is not None and self.channel is not None:
            self.channel.cancel(call[0], forget=True)

    def stop_watching(self) -> None:
        """The slot has ended: nothing is checked any more."""
        if self._watchdog is not None:
            self._watchdog.cancel()
