"""The calls that a ToolServer has seen: a call that is sent again is not run again."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from dataclasses import dataclass

from atropos.api.http import Refusal
from atropos.errors import OutcomeUnknown
from atropos.tools.models import ToolResult, fingerprint
from atropos.tools.tool_server.messages import ExternalCall, Owner

Key = tuple[Owner, str]
"""Trajectory and call."""


@dataclass
class ToolCallEntry:
    """A call with the future that gives its answer."""

    fingerprint: bytes
    answer: asyncio.Future[ToolResult]
    bytes: int = 500
    finished: float = math.inf


class ToolCallJournal:
    """Running calls; finished calls and ended trajectories, bounded in number, memory and age."""

    def __init__(self, *, calls: int, max_bytes: int, ttl_s: float) -> None:
        self._calls = calls
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._running: dict[Key, ToolCallEntry] = {}
        self._finished: OrderedDict[Key, ToolCallEntry] = OrderedDict()
        self._bytes = 0
        self._lost: float | None = None
        self._finished_of: dict[Owner, set[Key]] = {}
        self._ended: OrderedDict[Owner, float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<ToolCallJournal running={len(self._running)} finished={len(self._finished)} bytes={self._bytes}>"

    def __len__(self) -> int:
        return len(self._running) + len(self._finished)

    def find(self, call: ExternalCall) -> asyncio.Future[ToolResult] | None:
        """The answer of an equal call seen before.

        Raises:
            Refusal: 409, the id was used for another call; 410, the call's trajectory has ended.
        """
        self._forget_old()
        if call.owner in self._ended:
            raise Refusal(410, "trajectory_ended", "the trajectory ended before this call came; the call is not run")
        key = (call.owner, call.call_id)
        entry = self._running.get(key) or self._finished.get(key)
        if entry is None:
            return None
        if entry.fingerprint != fingerprint(call.name, call.arguments):
            raise Refusal(409, "call_id_reused", f"call_id {call.call_id!r} belongs to another call of this trajectory")
        return entry.answer

    def add(self, call: ExternalCall, answer: asyncio.Future[ToolResult]) -> None:
        """Remember a call that starts now."""
        key = (call.owner, call.call_id)
        entry = ToolCallEntry(fingerprint(call.name, call.arguments), answer)
        self._running[key] = entry
        answer.add_done_callback(lambda _: self._done(key, entry))

    def _done(self, key: Key, entry: ToolCallEntry) -> None:
        if self._running.get(key) is not entry:
            return  # its trajectory ended meanwhile
        del self._running[key]
        if entry.answer.cancelled():
            return  # ended with its trajectory
        failure = entry.answer.exception()
        if isinstance(failure, OutcomeUnknown):  # kept: the call must not run again
            # by a future of its own: a failed task keeps its frames, and with them the call's arguments
            entry.answer = asyncio.get_running_loop().create_future()
            entry.answer.set_exception(OutcomeUnknown(str(failure)))
            entry.answer.exception()  # retrieved, so that asyncio doesn't log it
        elif failure is not None:
            return  # the call did not run, or may run again
        else:
            entry.bytes += entry.answer.result().size_bytes()
        entry.finished = time.monotonic()
        self._finished[key] = entry
        self._finished_of.setdefault(key[0], set()).add(key)
        self._bytes += entry.bytes
        self._forget_old()

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._ttl_s
        while self._ended and (len(self._ended) > self._calls or next(iter(self._ended.values())) < oldest):
            self._ended.popitem(last=False)
        while self._finished:
            key, entry = next(iter(self._finished.items()))
            expired = entry.finished < oldest
            if not (expired or len(self._finished) > self._calls or self._bytes > self._max_bytes):
                return
            self._drop(key)
            if not expired:
                self._lost = time.monotonic()

    def _drop(self, key: Key) -> None:
        self._bytes -= self._finished.pop(key).bytes
        remaining = self._finished_of.get(key[0], set())
        remaining.discard(key)
        if not remaining:
            self._finished_of.pop(key[0], None)

    def forget(self, owner: Owner) -> list[asyncio.Future[ToolResult]]:
        """Forget the calls of a trajectory that ended: a later one of that name is a new trajectory.

        Returns:
            The calls that still run.
        """
        for key in list(self._finished_of.get(owner, ())):
            self._drop(key)
        running = [key for key in self._running if key[0] == owner]
        return [self._running.pop(key).answer for key in running]

    def close(self, owner: Owner) -> None:
        """Refuse further calls of a trajectory's life, those in transit included."""
        self._ended[owner] = time.monotonic()
        self._ended.move_to_end(owner)
        self._forget_old()

    def lossy(self) -> bool:
        """Whether a call was forgotten before its time, so that an unknown call may have run."""
        return self._lost is not None and self._lost > time.monotonic() - self._ttl_s

    def running(self) -> list[asyncio.Future[ToolResult]]:
        """The calls that run now."""
        return [entry.answer for entry in self._running.values()]
