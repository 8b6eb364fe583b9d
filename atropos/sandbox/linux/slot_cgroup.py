"""The cgroups of one slot: its limits, and the kernel's counts of programs that they stopped."""

from __future__ import annotations

import contextlib
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.sandbox.linux.cgroups import Cgroups, CgroupTree

if TYPE_CHECKING:
    from atropos.config import SlotLimits
    from atropos.wire import Limit

Counts = dict[str, bytes]
"""The files with the kernel's counts of a slot's limits, by their names."""
_MIB = 1024 * 1024
_OWN_PROCESSES = 2
"""bwrap's monitor and the runner count in a slot's cgroup and are not the program's."""
_PERIOD_US = 10_000
"""How often a slot's quota of CPU time is given anew: the longer, the longer it can keep others waiting, the shorter, the
more timers interrupt everybody."""
_LEAST_QUOTA_US = 1000
"""The kernel's own bound."""


def ceiling(limits: SlotLimits, slots: int) -> float | None:
    """Most cores that one slot may use; None: all of them.

    Unless a quota is configured, half of them where others share them. A fair share needs no ceiling as long as programs
    compute, but the kernel (EEVDF, Linux 6.18) shares badly between programs that only wake each other: the pipes of one
    slot kept a neighbour from its core for 5 s. See docs/decisions/0011-a-slot-has-a-cpu-ceiling.md for what was measured with which ceiling.
    """
    cores = len(os.sched_getaffinity(0))
    most = limits.cpu_quota
    if most is None:
        most = max(1.0, cores / 2) if slots > 1 else cores
    return most if most < cores else None


def settings(tree: CgroupTree, limits: SlotLimits, most_cores: float | None) -> list[tuple[str, str, bool]]:
    """What to write into a slot's directory: (file, value, whether it is an error that it can't be written)."""
    memory, pids = str(limits.memory_mib * _MIB), str(limits.pids + _OWN_PROCESSES)
    quota = period = 0
    if most_cores is not None:
        period = _PERIOD_US if most_cores * _PERIOD_US >= _LEAST_QUOTA_US else 10 * _PERIOD_US
        quota = max(_LEAST_QUOTA_US, int(most_cores * period))
    asked = limits.cpu_quota is not None  # cgroup v1 takes no quota above a container's own, which is then the ceiling
    lines: list[tuple[str, str, bool]] = []
    if "memory" in tree.controllers and tree.version == 1:
        lines += [
            ("memory.limit_in_bytes", memory, True),
            ("memory.memsw.limit_in_bytes", memory, False),
            # TCP buffers are not charged to the limit above on v1: 2 GB could be queued in a 400 MB container
            ("memory.kmem.tcp.limit_in_bytes", str(limits.memory_mib * _MIB // 8), False),
        ]
    elif "memory" in tree.controllers:
        lines += [("memory.max", memory, True), ("memory.swap.max", "0", False), ("memory.oom.group", "0", False)]
    if "pids" in tree.controllers:
        lines.append(("pids.max", pids, True))
    if "cpu" in tree.controllers and tree.version == 1:
        lines.append(("cpu.shares", str(max(2, limits.cpu_weight * 1024 // 100)), True))
        if quota:
            lines += [("cpu.cfs_period_us", str(period), asked), ("cpu.cfs_quota_us", str(quota), asked)]
    elif "cpu" in tree.controllers:
        lines.append(("cpu.weight", str(limits.cpu_weight), True))
        if quota:
            lines.append(("cpu.max", f"{quota} {period}", asked))
    return lines


@dataclass(frozen=True)
class _Event:
    """How the kernel counts that a limit has stopped a program.

    Attributes:
        limit: the limit's name in results.
        stops: (file, key) of the count of programs that were stopped, by whichever limit.
        hits: (file, key) of the count that also grows when it was the slot's own limit; None: `stops` says so.
    """

    limit: Limit
    stops: tuple[str, bytes]
    hits: tuple[str, bytes] | None = None


_PEAKS = ("memory.memsw.max_usage_in_bytes", "memory.max_usage_in_bytes")
"""cgroup v1's highest use since it was last reset: with swap, where that is counted, since both have one limit."""
_PEAK = "peak"
_CHARGE_BYTES = 64 * 4096
"""The kernel charges memory in pieces of up to this size: a limit is hit when less than that is left."""
# A slot's oom_kill also counts what the memory killer of the container or of the host takes from it. Version 1 has no
# count of its own limit: failcnt stands still on Linux 6.18.
_EVENTS = {
    (1, "memory"): _Event("memory", ("memory.oom_control", b"oom_kill "), (_PEAK, b"")),
    (2, "memory"): _Event("memory", ("memory.events", b"oom_kill "), ("memory.events", b"oom ")),
    (1, "pids"): _Event("pids", ("pids.events", b"max ")),
    (2, "pids"): _Event("pids", ("pids.events", b"max ")),
}


class SlotCgroup:
    """The cgroups of one slot, from before its first process until after its last. `most_cores`: see `ceiling`."""

    def __init__(self, cgroups: Cgroups, name: str, limits: SlotLimits, most_cores: float | None) -> None:
        self.paths: list[str] = []
        self._trees = cgroups.trees
        self._set = (limits, most_cores)
        self._events: list[_Event] = []
        self._files: dict[str, int] = {}
        """Descriptors of the files with the kernel's counts, by their names."""
        self._peak = -1
        self._peaks = 0
        """How often the highest use of memory was found at the limit (cgroup v1)."""
        self._memory_bytes = limits.memory_mib * _MIB
        try:
            for tree in cgroups.trees:
                path = f"{tree.path}/{name}"
                os.mkdir(path)
                self.paths.append(path)
                for file, value, needed in settings(tree, limits, most_cores):
                    _write(f"{path}/{file}", value, needed=needed)
                self._watch(tree, path)
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
                self._peak = os.open(peak, os.O_RDWR | os.O_CLOEXEC)

    def give_way(self) -> None:
        """Let its programs have only the CPU time that the other slots leave."""
        for tree, path in zip(self._trees, self.paths, strict=True):
            if "cpu" in tree.controllers:
                file, value = ("cpu.shares", "2") if tree.version == 1 else ("cpu.weight", "1")
                _write(f"{path}/{file}", value, needed=False)

    def change(self, limits: SlotLimits, most_cores: float | None) -> None:
        """Set other limits; only what differs is written.

        Raises:
            OSError: the kernel refuses one.
        """
        old, cores_before = self._set
        if most_cores is None and cores_before is not None:  # "no ceiling" writes nothing
            most_cores = float(os.cpu_count() or 1)
        raised = limits.memory_mib > old.memory_mib
        for tree, path in zip(self._trees, self.paths, strict=True):
            had = settings(tree, old, cores_before)
            lines = [line for line in settings(tree, limits, most_cores) if line not in had]
            if raised:  # cgroup v1: memory may at no moment exceed memory and swap together
                lines.sort(key=lambda line: "memsw" not in line[0])
            for file, value, needed in lines:
                _write(f"{path}/{file}", value, needed=needed)
        self._set = (limits, most_cores)
        self._memory_bytes = limits.memory_mib * _MIB

    def counts(self) -> Counts:
        """The kernel's counts of the limits that have stopped a program, as it writes them; see `exceeded`."""
        found = {file: os.pread(fd, 4096, 0) for file, fd in self._files.items()}
        if self._peak >= 0:
            if int(os.pread(self._peak, 64, 0)) + _CHARGE_BYTES > self._memory_bytes:
                self._peaks += 1
                os.write(self._peak, b"0")  # it starts again from what is in use
            found[_PEAK] = b"%d" % self._peaks
        return found

    def exceeded(self, before: Counts, after: Counts) -> Limit | None:
        """The limit of this slot that has stopped a program between two `counts`."""
        for event in self._stopped(before, after):
            if self._hit(event, before, after):
                return event.limit
        return None

    def killed_from_above(self, before: Counts, after: Counts) -> bool:
        """Whether a program was killed between two `counts` for want of memory in the container or on the host."""
        return any(not self._hit(event, before, after) for event in self._stopped(before, after))

    def _stopped(self, before: Counts, after: Counts) -> list[_Event]:
        if after == before:
            return []
        return [event for event in self._events if _grown(event.stops, before, after)]

    @staticmethod
    def _hit(event: _Event, before: Counts, after: Counts) -> bool:
        return event.hits is None or _grown(event.hits, before, after)

    def kill(self) -> None:
        """Kill every process in it at once (`cgroup.kill`, Linux 5.14), or one by one on older kernels and cgroup v1."""
        for path in self.paths:
            with contextlib.suppress(OSError):
                try:
                    _write(f"{path}/cgroup.kill", "1", needed=True)
                except FileNotFoundError:
                    with open(f"{path}/cgroup.procs", "rb") as file:
                        pids = [int(pid) for pid in file.read().split()]
                    for pid in pids:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the directories; False when one is still in use."""
        for fd in (*self._files.values(), *([self._peak] if self._peak >= 0 else ())):
            os.close(fd)
        self._files, self._peak = {}, -1
        left: list[str] = []
        for path in self.paths:
            try:
                os.rmdir(path)
            except FileNotFoundError:
                pass
            except OSError:
                left.append(path)
        self.paths = left
        return not left


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
