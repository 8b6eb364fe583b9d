"""How many slots this host's limits allow: those per host, user or process that a live slot uses a part of.

`read` asks the kernel, `rooms` decides. For a slot's own limits see `cgroups` and `SlotLimits`.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos.sandbox.linux.sysctl import sysctl

NEARLY = 0.97
"""Used part of a limit from which the error of a failed start names it."""

USED_UP = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC}
"""Errors of a machine that can do what was asked, but not now."""
BUSY = 2.0
"""Load per core from which the error of a start that took too long names it."""


@dataclass(frozen=True)
class HostLimit:
    """One limit of the host, of a user or of a process.

    Attributes:
        name: of its setting.
        value: the limit.
        used: the part in use; 0 where that can't be read.
        per_slot: what an idle slot uses.
        fix: how to raise it.
    """

    name: str
    value: int
    used: int
    per_slot: float
    fix: str

    @property
    def slots(self) -> int:
        """How many more slots it allows."""
        return max(0, int((self.value - self.used) / self.per_slot))


def rooms(limits: Sequence[HostLimit]) -> list[HostLimit]:
    """The limits by the number of slots that they allow, the tightest first."""
    return sorted(limits, key=lambda limit: limit.slots)


def nearly_reached(limits: Sequence[HostLimit]) -> list[HostLimit]:
    """The limits that are almost reached."""
    return [limit for limit in limits if limit.used > NEARLY * limit.value]


def named() -> str:
    """The limits that are almost reached, as the end of an error's text; '' where there are none."""
    reached = nearly_reached(read())
    return "".join(f"; {one.name} is nearly reached ({one.used} of {one.value}): {one.fix}" for one in reached)


def load() -> str:
    """The load, as the end of a timeout's text; '' where it is below `BUSY`."""
    average, cores = os.getloadavg()[0], os.cpu_count() or 1
    if average < BUSY * cores:
        return ""
    return f"; the load is {average:.0f} on {cores} cores, which may be the reason: try again when it is lower"


def read() -> list[HostLimit]:
    """The limits and their use now, without those that the kernel lacks or doesn't show."""
    return [*_processes(), *_namespaces(), *_files(), *_memory()]


def _processes() -> list[HostLimit]:
    """A slot is its PID 1, of one thread."""
    loads = _text("/proc/loadavg").split()
    running = int(loads[3].partition("/")[2]) if len(loads) > 3 else 0  # threads on this machine
    limits: list[HostLimit] = []
    for name, path in (("kernel.pid_max", "kernel/pid_max"), ("kernel.threads-max", "kernel/threads-max")):
        limits += _sysctl(name, path, running, 1)
    # v1 has a folder for the controller; v2, in a container, its own group at the top.
    for folder in (*Path("/sys/fs/cgroup").glob("pids"), Path("/sys/fs/cgroup")):
        most = _number(f"{folder}/pids.max")
        if most is not None:
            used = _number(f"{folder}/pids.current") or 0
            limits.append(HostLimit(f"{folder}/pids.max", most, used, 1, "raise the container's limit of processes"))
    most = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    # The kernel lets root pass this limit (CAP_SYS_RESOURCE, CAP_SYS_ADMIN).
    if most != resource.RLIM_INFINITY and os.geteuid() != 0:
        limits.append(HostLimit("RLIMIT_NPROC", most, 0, 1, "raise the user's limit of processes (ulimit -Hu)"))
    return limits


def _namespaces() -> list[HostLimit]:
    """One of each kind a slot, and one for the gateway of a slot with a network; the kernel shows no use."""
    return [
        limit
        for kind in ("user", "pid", "net", "mnt", "ipc", "uts", "cgroup")
        for limit in _sysctl(f"user.max_{kind}_namespaces", f"user/max_{kind}_namespaces", 0, 2 if kind == "net" else 1)
    ]


def _files() -> list[HostLimit]:
    """Descriptors and mounts of the server; open files, Unix sockets and inotify instances of the host."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = hard if hard != resource.RLIM_INFINITY else 1 << 30
    fix = "raise the server's limit of open files (ulimit -Hn; LimitNOFILE= of a unit), or use more containers"
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is left to count them with
        return [HostLimit("RLIMIT_NOFILE", most, most, 10, fix)]
    limits = [HostLimit("RLIMIT_NOFILE", most, used, 10, fix)]
    open_files = _text("/proc/sys/fs/file-nr").split()
    if len(open_files) == 3:
        limits += _sysctl("fs.file-max", "fs/file-max", int(open_files[0]), 60)
    with open("/proc/self/mountinfo", "rb") as file:
        mounts = sum(1 for _ in file)
    # sixteen for a slot on cgroup v1, and seven more on a snapshot; the slot's namespace has its own bound
    limits += _sysctl("fs.mount-max", "fs/mount-max", mounts, 23)
    # A pipe has 16 pages, and 0 means no limit (pipe(7)).
    limits += _sysctl("fs.pipe-user-pages-hard", "fs/pipe-user-pages-hard", 0, 16, unlimited=0)
    return limits


def _memory() -> list[HostLimit]:
    """Memory of an idle slot; and cgroups, whose ids in the memory controller have 16 bits."""
    limits: list[HostLimit] = []
    kib = {line.partition(":")[0]: int(line.split()[1]) for line in _text("/proc/meminfo").splitlines()}
    if "MemAvailable" in kib:
        total = kib["MemTotal"] >> 10
        used = total - (kib["MemAvailable"] >> 10)
        limits.append(HostLimit("memory (MiB)", total, used, 4, "more memory, or more hosts"))
    for line in _text("/proc/cgroups").splitlines():
        name, _, count, _ = line.split("\t")
        if name == "memory":
            fix = "remove cgroups that nothing uses; the kernel has no setting for this"
            limits.append(HostLimit("memory cgroups", 65_535, int(count), 1, fix))
    return limits


def _sysctl(name: str, path: str, used: int, per_slot: float, unlimited: int | None = None) -> list[HostLimit]:
    value = sysctl(path, 0)
    if value <= 0 or value == unlimited:
        return []
    return [HostLimit(name, value, used, per_slot, f"sysctl -w {name}={2 * value}")]


def _number(path: str) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() and int(text) > 0 else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
