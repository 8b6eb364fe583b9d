"""The cgroups of one slot: its limits, and the kernel's counts of when they were reached."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.sandbox.linux.cgroups import Cgroups, CgroupTree

if TYPE_CHECKING:
    from atropos.wire import Limit, SlotLimits

Counts = dict[str, bytes]
"""The kernel's files with counts of a slot's limits, by name."""
_MIB = 1024 * 1024
_OWN_PROCESSES = 1
"""The runner, which is in the slot's cgroup."""
_KERNELS_PERIOD_US = 100_000
_PERIOD_US = 10_000
"""Period of a slot's CPU quota: a longer one makes others wait longer, a shorter one costs more timer interrupts."""
_LEAST_QUOTA_US = 1000
"""The kernel's least quota."""


def ceiling(limits: SlotLimits, slots: int) -> float | None:
    """Most cores that one slot may use; None: all of them.

    Without a configured quota, half of them where there are other slots. Programs that compute need no ceiling for a
    fair share, but the kernel (EEVDF, Linux 6.18) is unfair to them where others only wake each other: the pipes of one
    slot kept another from its core for 5 s. For measurements see docs/decisions/0011-a-slot-has-a-cpu-ceiling.md.
    """
    cores = len(os.sched_getaffinity(0))
    most = limits.cpu_quota
    if most is None:
        most = max(1.0, cores / 2) if slots > 1 else cores
    return most if most < cores else None


def settings(tree: CgroupTree, limits: SlotLimits, most_cores: float | None) -> list[tuple[str, str, bool]]:
    """The files of a slot's cgroup to write: (file, value, whether a failure is an error)."""
    memory, pids = str(limits.memory_mib * _MIB), str(limits.pids + _OWN_PROCESSES)
    quota, period = _quota(most_cores)
    asked = limits.cpu_quota is not None  # cgroup v1 refuses a quota above a container's own, which is then the ceiling
    lines: list[tuple[str, str, bool]] = []
    if "memory" in tree.controllers and tree.version == 1:
        lines += [
            ("memory.limit_in_bytes", memory, True),
            # Equal to the memory: no swap. Not needed: a kernel without swap accounting lacks the file.
            ("memory.memsw.limit_in_bytes", memory, False),
            # on v1, TCP buffers don't count towards the limit above: 2 GB could be queued in a 400 MB container
            ("memory.kmem.tcp.limit_in_bytes", str(limits.memory_mib * _MIB // 8), False),
        ]
    elif "memory" in tree.controllers:
        # oom.group 0: one program is killed, as on v1; with 1 PID 1 would go as well, and the slot be lost.
        lines += [("memory.max", memory, True), ("memory.swap.max", "0", False), ("memory.oom.group", "0", False)]
    if "pids" in tree.controllers:
        lines.append(("pids.max", pids, True))
    if "cpu" in tree.controllers and tree.version == 1:
        lines.append(("cpu.shares", str(max(2, limits.cpu_weight * 1024 // 100)), True))
        if quota:
            # Before the quota, which the kernel checks against the period that is set.
            lines.append(("cpu.cfs_period_us", str(period), asked))
        lines.append(("cpu.cfs_quota_us", str(quota or -1), asked))
    elif "cpu" in tree.controllers:
        lines.append(("cpu.weight", str(limits.cpu_weight), True))
        lines.append(("cpu.max", _in_v2_form(quota, period), asked))
    return lines


def _quota(most_cores: float | None) -> tuple[int, int]:
    """Microseconds of CPU time in a period, and the period; 0: there is no ceiling."""
    if most_cores is None:
        return 0, 0
    # Below a tenth of a core the short period would need less than the kernel's least quota.
    period = _PERIOD_US if most_cores * _PERIOD_US >= _LEAST_QUOTA_US else 10 * _PERIOD_US
    return max(_LEAST_QUOTA_US, int(most_cores * period)), period


def _in_v2_form(quota: int, period: int) -> str:
    return f"{quota or 'max'} {period or _KERNELS_PERIOD_US}"


@dataclass(frozen=True)
class _Event:
    """The kernel's counts of a limit.

    Attributes:
        limit: the limit's name in results.
        stops: (file, key) of the count of stopped programs, whichever cgroup's limit it was.
        hits: (file, key) of a count that grows only with the slot's own limit; None: so does `stops`.
    """

    limit: Limit
    stops: tuple[str, bytes]
    hits: tuple[str, bytes] | None = None


_PEAKS = ("memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes")
"""cgroup v1's peak of memory use since its last reset: with swap where that is counted, since both have one limit."""
_PEAK = "peak"
_CHARGE_BYTES = 64 * os.sysconf("SC_PAGESIZE")
"""The kernel charges memory in pieces of up to this size: a limit is reached when less than that is left."""
# A slot's oom_kill also counts kills for the limit of the container or for memory of the host. Version 1 has no count
# of its own limit: failcnt doesn't change on Linux 6.18.
_EVENTS = {
    (1, "memory"): _Event("memory", ("memory.oom_control", b"oom_kill "), (_PEAK, b"")),
    (2, "memory"): _Event("memory", ("memory.events", b"oom_kill "), ("memory.events", b"oom ")),
    (1, "pids"): _Event("pids", ("pids.events", b"max ")),
    (2, "pids"): _Event("pids", ("pids.events", b"max ")),
}


class SlotCgroup:
    """The cgroups of one slot, from before its first process until after its last.

    Args:
        cgroups: the server's.
        name: of the groups that are made.
        limits: the slot's.
        most_cores: see `ceiling`.
        ready: those of `CgroupTree.ready` that no slot has; one is taken, and given back by `remove`.
        cpu_max: a file that says the ceiling in the form of cgroup v2, where the kernel has none.
    """

    def __init__(
        self,
        cgroups: Cgroups,
        name: str,
        limits: SlotLimits,
        most_cores: float | None,
        ready: list[str],
        cpu_max: str,
    ) -> None:
        self.paths: list[str] = []
        self.cpu_max = (
            cpu_max if any(tree.version == 1 and "cpu" in tree.controllers for tree in cgroups.trees) else None
        )
        """A file that says the ceiling in the form of cgroup v2, where the kernel has none."""
        self._trees = cgroups.trees
        self._ready = ready
        self._limits, self._most_cores = limits, most_cores
        self._events: list[_Event] = []
        self._files: dict[str, int] = {}
        """Descriptors of the files of `Counts`."""
        self._peaks = 0
        """How often the peak of memory use was at the limit (cgroup v1)."""
        try:
            for tree in cgroups.trees:
                if tree.ready and ready:
                    # Others may have taken all (slots that are still ending): then the group below the server's own
                    # will do.
                    path = ready.pop()
                else:
                    path = f"{tree.path}/{name}"
                    os.mkdir(path)
                self.paths.append(path)
                for file, value, needed in settings(tree, limits, most_cores):
                    _write(f"{path}/{file}", value, needed=needed)
                self._watch(tree, path)
            self._say_ceiling()
        except OSError:
            self.remove()
            raise

    def _watch(self, tree: CgroupTree, path: str) -> None:
        for event in (_EVENTS.get((tree.version, controller)) for controller in tree.controllers):
            if event is None:
                continue
            self._events.append(event)
            file, _ = event.stops
            self._files[file] = os.open(f"{path}/{file}", os.O_RDONLY | os.O_CLOEXEC)
            if event.hits == (_PEAK, b""):
                peak = next(f"{path}/{name}" for name in _PEAKS if os.path.exists(f"{path}/{name}"))
                self._files[_PEAK] = os.open(peak, os.O_RDWR | os.O_CLOEXEC)

    def change(self, limits: SlotLimits, most_cores: float | None) -> None:
        """Set other limits; only differences are written.

        Raises:
            OSError: the kernel refuses one.
        """
        raised = limits.memory_mib > self._limits.memory_mib
        for tree, path in zip(self._trees, self.paths, strict=True):
            had = settings(tree, self._limits, self._most_cores)
            lines = [line for line in settings(tree, limits, most_cores) if line not in had]
            if raised:  # cgroup v1: the memory limit may never exceed that of memory and swap
                lines.sort(key=lambda line: "memsw" not in line[0])
            for file, value, needed in lines:
                _write(f"{path}/{file}", value, needed=needed)
        self._limits, self._most_cores = limits, most_cores
        self._say_ceiling()

    def _say_ceiling(self) -> None:
        """Write `cpu_max`, in place: the slot has it mounted."""
        if self.cpu_max is not None:
            quota, period = _quota(self._most_cores)
            with open(self.cpu_max, "w", encoding="ascii") as file:
                file.write(f"{_in_v2_form(quota, period)}\n")

    def mounts(self) -> list[tuple[str, str]]:
        """Its files as the slot may see them: where they are, and the place below /sys/fs/cgroup."""
        shown = list(zip(self._trees, self.paths, strict=True))
        # A machine with both has the limits in v2.
        if any(tree.version == 2 for tree, _ in shown):
            return [(path, "") for tree, path in shown if tree.version == 2]
        mounts = [(path, f"/{controller}") for tree, path in shown for controller in tree.controllers]
        return mounts if self.cpu_max is None else [*mounts, (self.cpu_max, "/cpu.max")]

    def counts(self) -> Counts:
        """Read the kernel's counts; see `stops`."""
        texts = {file: os.pread(fd, 4096, 0) for file, fd in self._files.items()}
        if _PEAK in texts:
            # Counted and reset here, so that a later stop is told apart from this one.
            if int(texts[_PEAK]) + _CHARGE_BYTES > self._limits.memory_mib * _MIB:
                self._peaks += 1
                os.write(self._files[_PEAK], b"0")  # resets it to the present use
            texts[_PEAK] = b"%d" % self._peaks
        return texts

    def stops(self, before: Counts, after: Counts) -> dict[Limit, bool]:
        """What killed programs between two `counts`: the slot's own limit, or (False) that of its container or host."""
        if after == before or not after:  # its cgroups are gone
            return {}
        return {
            event.limit: event.hits is None or _grown(event.hits, before, after)
            for event in self._events
            if _grown(event.stops, before, after)
        }

    def kill(self) -> None:
        """Kill all processes: at once (`cgroup.kill`, Linux 5.14), or one by one on older kernels and cgroup v1."""
        for path in self.paths:
            with contextlib.suppress(OSError):
                try:
                    _write(f"{path}/cgroup.kill", "1", needed=True)
                except FileNotFoundError:
                    # May miss what forks meanwhile; callers repeat it until the group can be removed.
                    with open(f"{path}/cgroup.procs", "rb") as file:
                        pids = [int(pid) for pid in file.read().split()]
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the cgroups; False when one is still in use."""
        for fd in self._files.values():
            os.close(fd)
        self._files = {}
        remaining: list[str] = []
        made_ahead = {path for tree in self._trees for path in tree.ready}
        for path in self.paths:
            # It may still be full of a slot that has not ended: then it is neither removed nor given on.
            if path in made_ahead and _is_empty(path):
                self._ready.append(path)
                continue
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError:
                remaining.append(path)
        self.paths = remaining
        if self.cpu_max is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.cpu_max)
        return not remaining


def _is_empty(path: str) -> bool:
    with open(f"{path}/cgroup.procs", "rb") as file:
        return not file.read(1)


def _grown(counter: tuple[str, bytes], before: Counts, after: Counts) -> bool:
    file, key = counter
    return _count(after[file], key) > _count(before[file], key)


def _count(text: bytes, key: bytes) -> int:
    at = text.find(key)
    return int(text[at + len(key) :].split(None, 1)[0]) if at >= 0 else 0


def _write(path: str, value: str, *, needed: bool) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if needed:
            raise
        return
    try:
        os.write(fd, value.encode())
    except OSError as error:
        if needed:
            raise OSError(error.errno, f"{path} = {value}: {error.strerror}") from error
    finally:
        os.close(fd)
