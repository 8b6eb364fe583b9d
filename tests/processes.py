"""Processes of our own: what still runs below this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
from collections.abc import Collection
from pathlib import Path

from tests.waiting import SLOWNESS


def adopt_orphans() -> None:
    """Whatever a process of ours leaves behind becomes this process's child, and is counted (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def descendants(root: int | None = None, but: Collection[int] = ()) -> dict[int, str]:
    """The living processes below one, with their command lines; zombies and what is below `but` are not among them."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(entry)] = int(parent)
    found: dict[int, str] = {}
    front = {root or os.getpid()}
    while front:
        front = {pid for pid, parent in parents.items() if parent in front and pid not in found and pid not in but}
        for pid in front:
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


async def gone_within(seconds: float, root: int | None = None, but: Collection[int] = ()) -> list[str]:
    """Wait until no process is left below `root` (besides `but`); answers those that are."""
    deadline = asyncio.get_running_loop().time() + seconds * SLOWNESS
    while left := descendants(root, but):
        if asyncio.get_running_loop().time() > deadline:
            return [f"{pid}: {line}" for pid, line in left.items()]
        await asyncio.sleep(0.05)
    return []
