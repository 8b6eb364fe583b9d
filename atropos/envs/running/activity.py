"""The trajectories in flight and what each does now; a few dictionary writes a call."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator
from dataclasses import dataclass, field

from atropos.tools import ToolCall

MODEL = "model"
"""Shown between tool calls, hooks included."""


@dataclass
class Running:
    """A trajectory's attempt. Times on the monotonic clock; `call` is the tool call that runs."""

    item: str
    since: float = field(default_factory=time.monotonic)
    call: ToolCall | None = None
    doing_since: float = field(default_factory=time.monotonic)
    calls: int = 0


class Activity:
    """Attempts by trajectory id, from their slot's admission to its release."""

    def __init__(self) -> None:
        self.running: dict[str, Running] = {}

    @contextlib.contextmanager
    def attempt(self, trajectory_id: str, item: str) -> Generator[None]:
        """Around an attempt."""
        self.running[trajectory_id] = Running(item)
        try:
            yield
        finally:
            # Each attempt has an id of its own, so this is never a later one's.
            del self.running[trajectory_id]

    @contextlib.contextmanager
    def call(self, trajectory_id: str, call: ToolCall) -> Generator[None]:
        """Around a tool call; calls outside of attempts, as in a group's set-up, aren't shown."""
        running = self.running.get(trajectory_id)
        if running is None:
            yield
            return
        running.call, running.doing_since = call, time.monotonic()
        try:
            yield
        finally:
            running.call, running.doing_since = None, time.monotonic()
            running.calls += 1
