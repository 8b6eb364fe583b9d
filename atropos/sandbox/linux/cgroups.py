"""Our cgroup in each hierarchy, on cgroup v1 and v2.

The root phase creates it for the server's uid (`claim`); the server creates and removes a child of it for each slot
(`slot_cgroup`). The CPU controller of cgroup v1 is another matter: the root phase creates the groups of slots
themselves, beside the server's process, so that a slot weighs as much as a program
(docs/decisions/0014-a-slot-weighs-as-a-program.md). Controllers that the host lacks are in `missing`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from atropos.cgroup_paths import (
    CONTROLLERS,
    PREFIX,
    REST,
    SHOWN,
    TOP,
    Hierarchy,
    may_live,
    mount_point,
    of_this_process,
    places,
    remove_tree,
    server_name,
)
from atropos.sandbox.linux import syscalls


@dataclass(frozen=True)
class CgroupTree:
    """Our cgroup in one hierarchy, and its controllers.

    Attributes:
        ready: groups made ahead, each for one slot at a time, which the server may not make; empty where it may.
    """

    version: int
    path: str
    controllers: Sequence[str]
    ready: Sequence[str] = ()


@dataclass(frozen=True)
class Cgroups:
    """Our cgroups in all hierarchies, and why other controllers are missing."""

    trees: tuple[CgroupTree, ...] = ()
    missing: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def controllers(self) -> frozenset[str]:
        """Those that slots are limited by here."""
        return frozenset(name for tree in self.trees for name in tree.controllers)


_SERVER_WEIGHT = 1000
"""cpu.weight of the server's own leaf on cgroup v2."""
_TRIES = 100
"""Attempts to create a cgroup that other servers remove while it is empty."""
_VANISHED = (errno.ENOENT, errno.ENODEV)
"""The kernel's errors for a cgroup that is being removed."""


def own_name() -> str:
    """A name of this process, by which later servers find what a killed one left."""
    return PREFIX + server_name(os.getpid())


def alive(name: str) -> bool:
    """Whether the process of an `own_name` may still be there."""
    return may_live(name.removeprefix(PREFIX))


def claim(mounts: str, uid: int, slots: int = 0) -> Cgroups:
    """Create our cgroup in every hierarchy with a controller, owned by `uid`. Needs privilege.

    Args:
        mounts: a folder in which hierarchies may be mounted.
        uid: the server's uid, as seen from here, and its gid.
        slots: how many the server has.
    """
    trees: list[CgroupTree] = []
    reasons: dict[str, str] = {}
    for hierarchy in of_this_process():
        try:
            tree = (
                _claim_v1(hierarchy, mounts, uid, slots)
                if hierarchy.version == 1
                else _claim_v2(hierarchy, mounts, uid)
            )
        except OSError as error:
            for name in hierarchy.controllers or CONTROLLERS:  # cgroup v2 is the last, and may offer any
                reasons.setdefault(name, str(error))
        else:
            if tree.controllers:
                trees.append(tree)
    cgroups = Cgroups(tuple(trees))
    missing = [name for name in CONTROLLERS if name not in cgroups.controllers]
    return replace(cgroups, missing={name: reasons.get(name, "no cgroup hierarchy offers it") for name in missing})


def claim_delegated(uid: int) -> Cgroups:
    """The cgroups that an ordinary user may create: below one that systemd delegated to it (cgroup v2)."""
    missing = "not delegated to this user (run as root, or under 'systemd-run --user --scope -p Delegate=yes')"
    for hierarchy in of_this_process():
        own = Path(f"/sys/fs/cgroup{hierarchy.path}")
        if hierarchy.version == 2 and os.access(own, os.W_OK) and (own / "cgroup.controllers").exists():
            # No hierarchy can be mounted without privilege: the folder is never made, and the existing mount is used.
            return claim("/nonexistent", uid)
    return Cgroups((), dict.fromkeys(CONTROLLERS, missing))


def _mounted(hierarchy: Hierarchy, mounts: str) -> Path:
    """The hierarchy's mount point: a new one, or an existing one where mounting is refused."""
    kind, name = ("cgroup2", "unified") if hierarchy.version == 2 else ("cgroup", ",".join(hierarchy.controllers))
    target = Path(mounts, name)
    try:
        target.mkdir(parents=True, exist_ok=True)
        # A container's own mount is often read-only, or shows only its own group.
        syscalls.mount("none", str(target), kind, 0, None if hierarchy.version == 2 else name)
    except OSError:
        there = mount_point(hierarchy)
        if there is None:
            raise
        return there
    return target


def _make_own(parent: Path, uid: int) -> Path:
    """Create our cgroup in the one that all servers share, which others remove while it is empty."""
    top = parent / TOP
    ours = top / own_name()
    _within(top, lambda: os.mkdir(ours))
    with contextlib.suppress(OSError):
        for entry in (*top.glob(f"{PREFIX}*"), *parent.glob(f"{PREFIX}[0-9]*-[0-9]*-[0-9]*-[0-9]*")):
            # Also names of earlier versions, which had no common folder.
            if not alive(entry.name):  # a killed server's
                remove_tree(entry)
    _give(top, uid)
    return ours


def _make(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def _within(folder: Path, action: Callable[[], object]) -> None:
    """Create a cgroup and act in it; both are retried where another server removed it in between."""
    for retries in reversed(range(_TRIES)):
        _make(folder)
        try:
            action()
        except OSError as error:
            if error.errno not in _VANISHED or not retries:
                raise
        else:
            return


def _claim_v1(hierarchy: Hierarchy, mounts: str, uid: int, slots: int) -> CgroupTree:
    (parent,) = places(hierarchy, _mounted(hierarchy, mounts))
    ours = _make_own(parent, uid)
    if "cpuset" in hierarchy.controllers:
        for folder in (ours.parent, ours):
            for name in ("cpuset.cpus", "cpuset.mems"):
                # A new cpuset is empty on v1, and takes no process until it has CPUs and memory nodes.
                (folder / name).write_text((parent / name).read_text())
            (folder / "cgroup.clone_children").write_text("1")  # a slot's has what this one has
    _give(ours, uid)
    controllers = tuple(name for name in hierarchy.controllers if name in SHOWN)
    # A group beside the server's must limit nothing but the weight: memory is to be counted below the container's.
    weighs = "cpu" in controllers and not {"memory", "pids"} & set(controllers)
    # a slot that ends keeps its group until all of it is gone, and the next one has started by then
    ready = [_make_ready(ours, number, uid) for number in range(2 * slots + 2)] if weighs else []
    return CgroupTree(1, str(ours), controllers, ready)


def _make_ready(ours: Path, number: int, uid: int) -> str:
    group = ours.parent.parent / f"{ours.name}-{number}"
    group.mkdir()
    _give(group, uid, ("cpu.shares", "cpu.cfs_period_us", "cpu.cfs_quota_us"))
    return str(group)


def _claim_v2(hierarchy: Hierarchy, mounts: str, uid: int) -> CgroupTree:
    mount = _mounted(hierarchy, mounts)
    own, beside = places(hierarchy, mount)
    offered = set((own / "cgroup.controllers").read_text().split()) & set(CONTROLLERS)
    if not offered:
        return CgroupTree(2, str(own), ())
    # A cgroup with processes can't delegate controllers. So ours is below the own cgroup where nothing else runs in it,
    # or where it is a container's, else beside it; and where that isn't allowed, below the own cgroup if it was
    # delegated to this user.
    tried = [(own, _is_a_container(own, mount)), (beside, False)]
    if uid != 0 and own.stat().st_uid == uid == os.geteuid():
        tried.append((own, True))
    failures: list[OSError] = []
    for parent, may_move in tried:
        try:
            return _claim_v2_under(parent, uid, may_move=may_move)
        except OSError as error:
            failures.append(error)
    raise failures[0]


def _is_a_container(own: Path, mount: Path) -> bool:
    """Whether this cgroup is a container's: it is the root of the namespace, or PID 1's."""
    return own == mount or "1" in (own / "cgroup.procs").read_text().split()


def _claim_v2_under(parent: Path, uid: int, *, may_move: bool) -> CgroupTree:
    names = [name for name in CONTROLLERS if name in (parent / "cgroup.controllers").read_text().split()]
    offered = " ".join(f"+{name}" for name in names)
    ours = _make_own(parent, uid)
    top, server = ours.parent, ours / "server"
    rest = top / REST
    try:
        _make(rest)
        server.mkdir()
        # "0" is the writer itself. Before controllers are enabled: v2 refuses them for a group with processes.
        (server / "cgroup.procs").write_text("0")
        if not set(names) <= set((parent / "cgroup.subtree_control").read_text().split()):
            # "No internal processes": a group other than the root delegates controllers only while it is empty
            # (cgroups(7)).
            _empty(parent, rest, may_move=may_move)
            (parent / "cgroup.subtree_control").write_text(offered)
        (top / "cgroup.subtree_control").write_text(offered)
        # Top down: a group can enable only what its parent has enabled.
        (ours / "cgroup.subtree_control").write_text(offered)
        if "cpu" in names:
            # beside slots of weight 100 each, none of which may slow down the server of all
            (server / "cpu.weight").write_text(str(_SERVER_WEIGHT))
            if _is_real_root(parent):  # beside processes of weight 100 each: a program's on each CPU
                (top / "cpu.weight").write_text(str(min(10_000, 100 * len(os.sched_getaffinity(0)))))
    except OSError:
        with contextlib.suppress(OSError):
            # Out of our leaf again, which could not be removed with this process in it.
            (parent / "cgroup.procs").write_text("0")
        remove_tree(ours)
        for path in (rest, top):  # unless another server has something there
            with contextlib.suppress(OSError):
                path.rmdir()
        raise
    for path in (rest, ours, server):
        _give(path, uid)
    return CgroupTree(2, str(ours), tuple(names))


def _is_real_root(cgroup: Path) -> bool:
    # Only the root of the whole hierarchy lacks the file; that of a cgroup namespace has it.
    return not (cgroup / "cgroup.type").exists()


def _empty(parent: Path, rest: Path, *, may_move: bool) -> None:
    """Move the processes of a cgroup to a leaf, so that it can delegate controllers.

    Raises:
        OSError: there are processes that are not ours to move.
    """
    if _is_real_root(parent):
        return  # it may have processes and delegate controllers
    for _ in range(20):  # processes may fork meanwhile
        others = (parent / "cgroup.procs").read_text().split()
        if not others:
            return
        if not may_move:
            raise OSError(f"{len(others)} other processes run in this server's cgroup; start it in a scope of its own")
        for pid in others:
            _move(pid, rest)


def _move(pid: str, rest: Path) -> None:
    """Move a process ("0": this one) to the leaf for other processes."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        _within(rest, lambda: (rest / "cgroup.procs").write_text(pid))


def _give(path: Path, uid: int, settings: Sequence[str] = ()) -> None:
    if uid == os.geteuid():
        return
    # What the kernel's delegation asks for (cgroups(7)); limits stay with whoever set them.
    for name in ("", "cgroup.procs", "cgroup.threads", "cgroup.subtree_control", "tasks", *settings):
        with contextlib.suppress(FileNotFoundError):
            os.chown(path / name, uid, uid)


def release(cgroups: Cgroups) -> None:
    """Remove our cgroups at the end of the server; the next server removes those that are left."""
    for tree in cgroups.trees:
        path = Path(tree.path)
        if tree.version == 2:
            with contextlib.suppress(OSError):
                _move("0", path.parent / REST)
        for group in (path, *map(Path, tree.ready)):  # the latter are for whoever started the server, if it may not
            remove_tree(group)
