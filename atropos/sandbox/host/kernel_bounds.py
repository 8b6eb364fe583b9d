"""Bounds of the kernel's own objects in a slot's namespaces."""

from __future__ import annotations

import os

from atropos.sandbox.linux.sysctl import sysctl
from atropos.wire import SlotLimits


def counters(shares: int) -> dict[str, int]:
    """The kernel's bounds in a slot's user namespace: no more namespaces, and its share of what a user may watch."""
    namespaces = ("pid", "net", "mnt", "ipc", "uts", "cgroup")
    return {
        **dict.fromkeys((f"max_{kind}_namespaces" for kind in namespaces), 1),
        "max_user_namespaces": 0,
        "max_time_namespaces": 0,
        "max_inotify_instances": max(4, sysctl("fs/inotify/max_user_instances", 128) // shares),
        "max_inotify_watches": max(1024, sysctl("fs/inotify/max_user_watches", 65_536) // shares),
        "max_fanotify_groups": 0,
        "max_fanotify_marks": 0,
    }


def ipc_bounds(limits: SlotLimits) -> dict[str, int | str]:
    """Bounds of System V objects.

    These outlive the programs that made them, and what they hold is the slot's memory: without bounds, one bomb leaves
    none to the programs after it.
    """
    return {
        "shmall": (limits.memory_mib << 20) // 4 // os.sysconf("SC_PAGESIZE"),
        "msgmni": 64,
        "sem": "32000 32000 500 1000",
    }
