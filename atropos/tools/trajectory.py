"""The executor's state of one trajectory between its calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from atropos.errors import SandboxError
from atropos.tools.base import ToolError, ToolLimits, ToolScope, tool_states
from atropos.tools.running import tool_code

if TYPE_CHECKING:
    from atropos.slots import Slot, Snapshot
    from atropos.tools.tool_server.client import Life

FINISH_S = 5.0
"""How long a release waits for one tool's `ToolState.finish`."""
Peer = Literal["pool", "ToolServer"]

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class TrajectoryState:
    """One trajectory's lease and queue. Everything here ends with its release."""

    id: str
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    slot: Slot | None = None
    parked: Snapshot | None = None
    """What the next slot starts from, where the last one was given back for a fork's."""
    acquire_s: float = 0.0
    state: dict[str, object] = field(default_factory=dict[str, object])
    broken: SandboxError | None = None
    released: bool = False
    life: Life | None = None
    """On the ToolServer, where it has made calls."""
    unanswered: set[Peer] = field(default_factory=set[Peer])
    """Who has not answered a request of the trajectory, which was cancelled or is pending."""
    calls: set[asyncio.Task[object]] = field(default_factory=set["asyncio.Task[object]"])
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    recorded: dict[str, str] = field(default_factory=dict[str, str])
    """Recordings of sessions that were there before a view was opened."""

    @property
    def empty(self) -> bool:
        """Whether there is nothing to release: no slot, nothing on a ToolServer, no unanswered call."""
        nothing = self.slot is None and self.parked is None and self.life is None and not self.unanswered
        return nothing and self.broken is None

    async def drop_parked(self) -> None:
        """Drop the snapshot of a slot that was given back, if there is one."""
        snapshot, self.parked = self.parked, None
        if snapshot is not None:
            await snapshot.drop()

    @contextlib.contextmanager
    def requesting(self, peer: Peer) -> Generator[None]:
        """Surrounds a request; a cancelled one stays in `unanswered`."""
        self.unanswered.add(peer)
        try:
            yield
        except Exception:
            self.unanswered.discard(peer)
            raise
        self.unanswered.discard(peer)

    async def end_sessions(self, limits: ToolLimits) -> None:
        """Make tools forget their sessions, whose recordings are kept."""
        await self.finish_states(limits)
        self.recorded = self.recordings()
        self.state.clear()

    async def finish_states(self, limits: ToolLimits) -> None:
        """Let the tools' states finish while the slot is still there."""
        scope = ToolScope(self.id, "release", limits, self.state, self.slot)
        for state in tool_states(self.state) if self.broken is None else ():
            try:
                async with asyncio.timeout(FINISH_S):
                    with tool_code():
                        await state.finish(scope)
            except (SandboxError, ToolError, TimeoutError) as error:
                _log.info("release of %s: a tool could not finish: %s", self.id, error)
            except Exception:
                _log.exception("release of trajectory %s: %s.finish failed", self.id, type(state).__name__)

    def recordings(self) -> dict[str, str]:
        """Recorded terminals by session id, as asciinema v2 text."""
        return self.recorded | {
            name: text for one in tool_states(self.state) for name, text in one.recordings().items()
        }
