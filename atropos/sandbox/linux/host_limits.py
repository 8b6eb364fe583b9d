"""How many slots this host's limits allow: each limit that a live slot uses a part of, per host, per user or per process.

`read` asks the kernel, `rooms` decides; a slot's own limits are elsewhere (`cgroups`, `SlotLimits`).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NEARLY = 0.97
"""Part of a limit from which on it is named as what a start failed for."""

BUSY = 2.0
"""Load per core from which on it is named as what may have taken a start too long."""


@dataclass(frozen=True)
class HostLimit:
    """One limit of the host, of a user or of a process.

    Attributes:
        name: as its setting is called.
        value: how much there may be.
        used: how much of it is in use, by everybody whom it counts; 0 where that can't be read.
        per_slot: what a live slot uses of it, before its programs do anything.
        fix: how to raise it.
    """

    name: str
    value: int
    used: int
    per_slot: float
    fix: str

    @property
    def slots(self) -> int:
        """How many more slots find room under it."""
        return max(0, int((self.value - self.used) / self.per_slot))


def rooms(limits: Sequence[HostLimit]) -> list[HostLimit]:
    """The limits by the number of slots that they have room for; the one that ends first is the first."""
    return sorted(limits, key=lambda limit: limit.slots)


def nearly_reached(limits: Sequence[HostLimit]) -> list[HostLimit]:
    """The limits of which hardly anything is left."""
    return [limit for limit in limits if limit.used > NEARLY * limit.value]


def named() -> str:
    """The limits of which hardly anything is left, to follow an error's text; '' where there are none."""
    found = nearly_reached(read())
    return "".join(f"; {one.name} is nearly reached ({one.used} of {one.value}): {one.fix}" for one in found)


def load() -> str:
    """The load, to follow the text of an error about time; '' where the machine has no more to do than it can."""
    average, cores = os.getloadavg()[0], os.cpu_count() or 1
    if average < BUSY * cores:
        return ""
    return f"; the load is {average:.0f} on {cores} cores, which alone may be why: try again when it is lower"


def read(volume: str = "memory") -> list[HostLimit]:
    """What the kernel says now. A limit that it doesn't have, or doesn't show, is left out.

    Args:
        volume: "memory" or "disk": whether each slot's files are on a loop device.
    """
    found = [*_processes(), *_namespaces(), *_files(), *_memory()]
    if volume == "disk":
        used = len(list(Path("/sys/block").glob("loop*/loop/backing_file")))
        found.append(HostLimit("loop devices", 1 << 20, used, 2, "use volume='memory'"))  # the kernel's minor numbers
    return found


def _processes() -> list[HostLimit]:
    """A live slot is bubblewrap and its PID 1; each has one thread."""
    running = _running()
    found: list[HostLimit] = []
    for name, path in (("kernel.pid_max", "kernel/pid_max"), ("kernel.threads-max", "kernel/threads-max")):
        found += _sysctl(name, path, running, 2)
    for folder in (*Path("/sys/fs/cgroup").glob("pids"), Path("/sys/fs/cgroup")):
        most = _number(f"{folder}/pids.max")
        if most is not None:
            used = _number(f"{folder}/pids.current") or 0
            found.append(HostLimit(f"{folder}/pids.max", most, used, 2, "raise the container's limit of processes"))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:
        found.append(HostLimit("RLIMIT_NPROC", most, 0, 2, "raise the user's limit of processes (ulimit -Hu)"))
    return found


def _namespaces() -> list[HostLimit]:
    """A mount namespace for bubblewrap's caller and one for the slot; else one of each kind. Their use isn't shown."""
    each = {"user": 1, "pid": 1, "net": 1, "mnt": 2, "ipc": 1, "uts": 1, "cgroup": 1}
    return [
        limit
        for kind, count in each.items()
        for limit in _sysctl(f"user.max_{kind}_namespaces", f"user/max_{kind}_namespaces", 0, count)
    ]


def _files() -> list[HostLimit]:
    """Descriptors and mounts of the server; open files, Unix sockets and inotify instances of the host."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    found = [
        HostLimit(
            "RLIMIT_NOFILE",
            hard if hard != resource.RLIM_INFINITY else 1 << 30,
            len(os.listdir("/proc/self/fd")),
            10,
            "raise the server's limit of open files (ulimit -Hn; LimitNOFILE= of a unit), or use more containers",
        )
    ]
    open_files = _text("/proc/sys/fs/file-nr").split()
    if len(open_files) == 3:
        found += _sysctl("fs.file-max", "fs/file-max", int(open_files[0]), 60)
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = sum(1 for _ in file)
    # eight of a slot's own, seven more when it stands on a snapshot; its own namespace has a bound of its own
    found += _sysctl("fs.mount-max", "fs/mount-max", mounts, 15)
    found += _sysctl("fs.pipe-user-pages-hard", "fs/pipe-user-pages-hard", 0, 16, unlimited=0)
    return found


def _memory() -> list[HostLimit]:
    """What an idle slot takes; and cgroups, of which the memory controller has ids of 16 bits."""
    found: list[HostLimit] = []
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in _text("/proc/meminfo").splitlines()}
    if "MemAvailable" in kib:
        total = kib["MemTotal"] >> 10
        used = total - (kib["MemAvailable"] >> 10)
        found.append(HostLimit("memory (MiB)", total, used, 4, "more memory, or more hosts"))
    for line in _text("/proc/cgroups").splitlines():
        name, _, count, _ = line.split("\t")
        if name == "memory":
            fix = "remove cgroups that nothing uses; the kernel has no setting for this"
            found.append(HostLimit("memory cgroups", 65_535, int(count), 1, fix))
    return found


def _sysctl(name: str, path: str, used: int, per_slot: float, unlimited: int | None = None) -> list[HostLimit]:
    value = _number(f"/proc/sys/{path}")
    if value is None or value == unlimited:
        return []
    return [HostLimit(name, value, used, per_slot, f"sysctl -w {name}={2 * value}")]


def _running() -> int:
    """Threads on this machine."""
    loads = _text("/proc/loadavg").split()
    return int(loads[3].partition("/")[2]) if len(loads) > 3 else 0


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
