"""Bounds of the kernel's own objects in a slot's namespaces."""

from __future__ import annotations

import os

from atropos.sandbox.linux.sysctl import sysctl
from atropos.wire import SlotLimits


def counters(shares: int) -> dict[str, int]:
    """The kernel's bounds in a slot's user namespace: no more namespaces, and its share of what a user may watch."""
    # One each is what the slot's start makes itself; the kernel counts them in the user namespace that owns them.
    namespaces = ("pid", "net", "mnt", "ipc", "uts", "cgroup")
    return {
        **dict.fromkeys((f"max_{kind}_namespaces" for kind in namespaces), 1),
        # A program in a user namespace of its own would have all capabilities there, and much more of the kernel in
        # reach.
        "max_user_namespaces": 0,
        "max_time_namespaces": 0,
        # Counted in every ancestor namespace, too: without shares one slot could use up the server's.
        "max_inotify_instances": max(4, sysctl("fs/inotify/max_user_instances", 128) // shares),
        "max_inotify_watches": max(1024, sysctl("fs/inotify/max_user_watches", 65_536) // shares),
        # fanotify's events come from whole file systems, those of the base among them.
        "max_fanotify_groups": 0,
        "max_fanotify_marks": 0,
    }


def ipc_bounds(limits: SlotLimits) -> dict[str, int | str]:
    """Bounds of System V objects.

    These outlive the programs that made them, and what they hold is the slot's memory: without bounds, one bomb leaves
    none to the programs after it.
    """
    return {
        # In pages: a quarter of the slot's memory.
        "shmall": (limits.memory_mib << 20) // 4 // os.sysconf("SC_PAGESIZE"),
        "msgmni": 64,
        # SEMMSL, SEMMNS, SEMOPM and SEMMNI (proc_sys_kernel(5)): the kernel's own values but for fewer in all.
        "sem": "32000 32000 500 1000",
    }
