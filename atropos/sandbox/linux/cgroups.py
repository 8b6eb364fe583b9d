"""Per-slot limits of memory, processes and CPU, on cgroup v1 and v2.

The root phase makes one directory of our own in every hierarchy and gives it to the server's uid (`claim`); the server
makes and removes a child of it for each slot (`SlotCgroup`). What a host doesn't offer is named in `missing`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from atropos.cgroup_paths import (
    CONTROLLERS,
    PREFIX,
    REST,
    TOP,
    Hierarchy,
    mount_point,
    of_this_process,
    places,
    remove_tree,
)
from atropos.sandbox.linux import syscalls

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


@dataclass(frozen=True)
class Tree:
    """One hierarchy's directory of ours, and the controllers that work in it."""

    version: int
    path: str
    controllers: tuple[str, ...]


@dataclass(frozen=True)
class Cgroups:
    """All hierarchies that the root phase could claim, and why the other controllers are missing."""

    trees: tuple[Tree, ...] = ()
    missing: dict[str, str] = field(default_factory=dict[str, str])


_SERVER_WEIGHT = 1000
"""cpu.weight of the server's own leaf on cgroup v2."""
_TRIES = 100
"""How often a folder is made anew that somebody else removes as an empty one, before that is taken for a fault."""
_VANISHED = (errno.ENOENT, errno.ENODEV)
"""What the kernel says of a folder that is being removed."""


def own_name() -> str:
    """A directory name that tells which process made it, so that a later server can sweep what a killed one left."""
    return f"{PREFIX}{os.getpid()}-{_start_time(os.getpid())}"


def _start_time(pid: int) -> str:
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[19].decode()


def alive(name: str) -> bool:
    """Whether the process that made a directory of this name is still there."""
    pid, _, started = name.removeprefix(PREFIX).partition("-")
    try:
        return _start_time(int(pid)) == started
    except (OSError, ValueError):
        return False


def sweep(parent: Path) -> None:
    """Remove the directories of servers that are no more."""
    with contextlib.suppress(OSError):
        for entry in parent.glob(f"{PREFIX}*"):
            if not alive(entry.name):
                remove_tree(entry)


def claim(mounts: str, uid: int, gid: int) -> Cgroups:
    """Make our directory in every hierarchy that offers a controller, owned by `uid`. Run before privilege is left.

    Args:
        mounts: a folder in which hierarchies may be mounted.
        uid: the server's uid, as seen from here.
        gid: its gid.
    """
    trees: list[Tree] = []
    missing: dict[str, str] = {}
    for hierarchy in of_this_process():
        wanted = [name for name in hierarchy.controllers if name in CONTROLLERS]
        try:
            tree = (
                _claim_v1(hierarchy, mounts, uid, gid)
                if hierarchy.version == 1
                else _claim_v2(hierarchy, mounts, uid, gid)
            )
        except OSError as error:
            missing.update(dict.fromkeys(wanted or (), str(error)))
            if hierarchy.version == 2:
                missing["v2"] = str(error)
        else:
            if tree.controllers:
                trees.append(tree)
    had = {name for tree in trees for name in tree.controllers}
    reason = missing.pop("v2", "no cgroup hierarchy offers it")
    for name in CONTROLLERS:
        if name in had:
            missing.pop(name, None)
        else:
            missing.setdefault(name, reason)
    return Cgroups(tuple(trees), missing)


def _mounted(hierarchy: Hierarchy, mounts: str) -> Path:
    """The hierarchy's mount point: one of our own, or the one that is there when ours is refused."""
    kind, name = ("cgroup2", "unified") if hierarchy.version == 2 else ("cgroup", ",".join(hierarchy.controllers))
    target = Path(mounts, name)
    try:
        target.mkdir(parents=True, exist_ok=True)
        syscalls.mount("none", str(target), kind, 0, None if hierarchy.version == 2 else name)
    except OSError:
        there = mount_point(hierarchy)
        if there is None:
            raise
        return there
    return target


def _make_own(parent: Path, uid: int, gid: int) -> Path:
    """Our folder, in the one that all servers share; who finds that one empty may remove it at any moment."""
    top = parent / TOP
    ours = top / own_name()
    _within(top, lambda: os.mkdir(ours))
    sweep(parent)
    sweep(top)
    _give(top, uid, gid)
    return ours


def _make(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def _within(folder: Path, action: Callable[[], object]) -> None:
    """Make a folder and do something in it: both once more where somebody removed it, empty, in between."""
    for left in reversed(range(_TRIES)):
        _make(folder)
        try:
            action()
        except OSError as error:
            if error.errno not in _VANISHED or not left:
                raise
        else:
            return


def _claim_v1(hierarchy: Hierarchy, mounts: str, uid: int, gid: int) -> Tree:
    (parent,) = places(hierarchy, _mounted(hierarchy, mounts))
    ours = _make_own(parent, uid, gid)
    if "cpu" in hierarchy.controllers:
        # A group's weight is spread over the CPUs that it runs on: this is one ordinary program's weight on each, so
        # that all slots together weigh no less than the server, and no more.
        with contextlib.suppress(OSError):
            (ours / "cpu.shares").write_text(str(1024 * (os.cpu_count() or 1)))
    _give(ours, uid, gid)
    return Tree(1, str(ours), tuple(name for name in hierarchy.controllers if name in CONTROLLERS))


def _claim_v2(hierarchy: Hierarchy, mounts: str, uid: int, gid: int) -> Tree:
    mount = _mounted(hierarchy, mounts)
    own, beside = places(hierarchy, mount)
    offered = set((own / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    if not offered:
        return Tree(2, str(own), ())
    error: OSError | None = None
    # A cgroup with processes of its own can't hand controllers down, so ours is made where that works: under the own
    # cgroup when nothing else runs in it or when it is a container's, else beside it; and where that isn't allowed
    # under the own cgroup after all, when it was delegated to this user.
    tried = [(own, _is_a_container(own, mount)), (beside, False)]
    if uid != 0 and own.stat().st_uid == uid == os.geteuid():
        tried.append((own, True))
    for parent, may_move in tried:
        try:
            return _claim_v2_under(parent, uid, gid, may_move=may_move)
        except OSError as failed:
            error = error or failed
    raise error or OSError("no place for a cgroup")


def _is_a_container(own: Path, mount: Path) -> bool:
    """Whether everything in this cgroup belongs to one container: it is the root that the namespace shows, or PID 1's."""
    return own == mount or "1" in (own / "cgroup.procs").read_text().split()


def _claim_v2_under(parent: Path, uid: int, gid: int, *, may_move: bool) -> Tree:
    names = [name for name in CONTROLLERS if name in (parent / "cgroup.controllers").read_text().split()]
    offered = " ".join(f"+{name}" for name in names)
    ours = _make_own(parent, uid, gid)
    top, server = ours.parent, ours / "server"
    rest = top / REST
    try:
        _make(rest)
        server.mkdir()
        (server / "cgroup.procs").write_text("0")
        if not set(names) <= set((parent / "cgroup.subtree_control").read_text().split()):
            _empty(parent, rest, may_move=may_move)
            (parent / "cgroup.subtree_control").write_text(offered)
        (top / "cgroup.subtree_control").write_text(offered)
        (ours / "cgroup.subtree_control").write_text(offered)
        if "cpu" in names:
            # beside the slots, of which each weighs 100: what one of them does must not slow down what serves all
            (server / "cpu.weight").write_text(str(_SERVER_WEIGHT))
            if _is_real_root(parent):  # beside processes of which each weighs 100 on its CPU, see `_claim_v1`
                (top / "cpu.weight").write_text(str(min(10_000, 100 * (os.cpu_count() or 1))))
    except OSError:
        with contextlib.suppress(OSError):
            (parent / "cgroup.procs").write_text("0")
        remove_tree(ours)
        for path in (rest, top):  # unless another server has something there
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    for path in (rest, ours, server):
        _give(path, uid, gid)
    return Tree(2, str(ours), tuple(names))


def _is_real_root(cgroup: Path) -> bool:
    return not (cgroup / "cgroup.type").exists()


def _empty(parent: Path, rest: Path, *, may_move: bool) -> None:
    """Move what runs in a cgroup that is to hand controllers down to a leaf.

    Raises:
        OSError: others run in it, and they are not ours to move.
    """
    if _is_real_root(parent):
        return  # it may hold processes and hand controllers down alike
    for _ in range(20):  # what is moved may fork meanwhile
        others = (parent / "cgroup.procs").read_text().split()
        if not others:
            return
        if not may_move:
            raise OSError(f"{len(others)} other processes run in this server's cgroup; start it in a scope of its own")
        for pid in others:
            _move(pid, rest)


def _move(pid: str, rest: Path) -> None:
    """Move a process ("0": this one) to the leaf for the rest."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        _within(rest, lambda: (rest / "cgroup.procs").write_text(pid))


def _give(path: Path, uid: int, gid: int) -> None:
    if uid == os.geteuid():
        return
    for name in ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks"):
        with contextlib.suppress(FileNotFoundError):
            os.chown(path / name, uid, gid)


def ceiling(limits: SlotLimits, slots: int) -> float | None:
    """Most cores that one slot may use; None: all of them.

    Unless a quota is configured, half of them where others share them. A fair share needs no ceiling as long as programs
    compute, but the kernel (EEVDF, Linux 6.18) shares badly between programs that only wake each other: the pipes of one
    slot kept a neighbour from its core for 5 s. See docs/security.md for what was measured with which ceiling.
    """
    cores = len(os.sched_getaffinity(0))
    most = limits.cpu_quota
    if most is None:
        most = max(1.0, cores / 2) if slots > 1 else cores
    return most if most < cores else None


def settings(tree: Tree, limits: SlotLimits, most_cores: float | None) -> list[tuple[str, str, bool]]:
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

    def _watch(self, tree: Tree, path: str) -> None:
        for event in (_EVENTS.get((tree.version, controller)) for controller in tree.controllers):
            if event is None:
                continue
            self._events.append(event)
            file, _ = event.stops
            self._files[file] = os.open(f"{path}/{file}", os.O_RDONLY | os.O_CLOEXEC)
            if event.hits == (_PEAK, b""):
                peak = next(f"{path}/{name}" for name in _PEAKS if os.path.exists(f"{path}/{name}"))
                self._peak = os.open(peak, os.O_RDWR | os.O_CLOEXEC)

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


def release(cgroups: Cgroups) -> None:
    """Remove our directories when the server ends; what can't be removed now is swept by the next server."""
    for tree in cgroups.trees:
        path = Path(tree.path)
        if tree.version == 2:
            with contextlib.suppress(OSError):
                _move("0", path.parent / REST)
        remove_tree(path)
