"""Settings of this slot from the server's first message, and descriptors that stay open."""

from __future__ import annotations

import os

WORKSPACE = "/workspace"


class RunnerState:
    """Set once, by `main` and by the server's first message."""

    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self.block: dict[bytes, bytes] = {}
        """The environment as programs get it."""
        self.output_bytes = 1_000_000
        self.wall_s = 3600.0
        self.special: set[int] = set()
        """Device numbers of /proc and the like, where a plain file may block or be this very process, and of the
        read-only mounts that a slot itself needs, which belong to no workspace."""
        self.oom = -1
        """This process's own oom_score_adj, which nobody inside can open."""
        self.own_score = b"0"
        """What it was at the start; the kernel may refuse a lower one."""
        self.null = -1

    def expose_children(self) -> None:
        """Let children inherit a score by which the kernel kills them before this process when memory runs out."""
        if self.oom >= 0:
            os.pwrite(self.oom, b"1000", 0)

    def protect_self(self) -> None:
        """Undo `expose_children`."""
        if self.oom >= 0:
            os.pwrite(self.oom, self.own_score, 0)


state = RunnerState()


def is_special(device: int) -> bool:
    """Whether a device number is /proc's or the like, or of the slot's own mounts (`RunnerState.special`)."""
    return device in state.special


def block_of(environment: dict[str, str]) -> dict[bytes, bytes]:
    """An environment as programs get it.

    Raises:
        ValueError: a name that no environment can hold.
    """
    block: dict[bytes, bytes] = {}
    for name, value in environment.items():
        if not name or "=" in name:
            raise ValueError("illegal environment variable name")
        block[name.encode("utf-8", "surrogateescape")] = value.encode("utf-8", "surrogateescape")
    return block
