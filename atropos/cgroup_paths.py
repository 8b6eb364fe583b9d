"""Where a process's cgroups are, and how sandbox servers name their own.

Known to the server, which makes them, and to whoever started it, who removes what a server can't: it has left the
privilege for the folder that all servers share, and one that was killed removes nothing. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path

CONTROLLERS = ("memory", "pids", "cpu")
"""Those that slots are limited by."""
SHOWN = (*CONTROLLERS, "cpuacct", "cpuset")
"""Those of cgroup v1 that programs look for before they believe any: the JVM."""
TOP, REST = "atropos", "rest"
"""The one folder for all servers, which they may write to, so that each can remove its own when it ends; and on cgroup
v2 the leaf in it for processes that must not stay where they were."""
PREFIX = "atropos-"
"""A server's own folder is named so, then by its `server_name`; its groups that were made ahead, beside `TOP`, by a
number after that."""


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; unique together with its pid.

    None: there is no such process.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # Behind the last parenthesis: a program's name may have blanks and parentheses itself (proc_pid_stat(5),
            # field 22).
            return int(file.read().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def server_name(pid: int) -> str:
    """The name of a server by its process: id and start time, and the namespace in which the id means something."""
    return f"{pid}-{start_time(pid)}-{os.stat('/proc/self/ns/pid').st_ino}"


def may_live(name: str) -> bool:
    """Whether the process of a `server_name` is still there, or can't be seen from here, being of another namespace."""
    pid, started, namespace, *_ = [*name.split("-"), "", ""]
    # A pid means nothing in another namespace, so in doubt it lives.
    if namespace != str(os.stat("/proc/self/ns/pid").st_ino):
        return True
    return pid.isdecimal() and str(start_time(int(pid))) == started


@dataclass(frozen=True)
class Hierarchy:
    """A line of /proc/self/cgroup: a hierarchy, and where in it this process is."""

    version: int
    controllers: tuple[str, ...]
    path: str


def of_this_process() -> list[Hierarchy]:
    """Every hierarchy that may offer one of `CONTROLLERS` or `SHOWN`, that of cgroup v2 as the last of them."""
    hierarchies: list[Hierarchy] = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # a kernel without cgroups
        return []
    for line in lines:
        number, names, path = line.split(":", 2)
        controllers = tuple(name for name in names.split(",") if name)
        # cgroup v2 has hierarchy 0 and no names (cgroups(7)).
        if number == "0":
            hierarchies.append(Hierarchy(2, (), path))
        elif set(controllers) & set(SHOWN):
            hierarchies.append(Hierarchy(1, controllers, path))
    return hierarchies


def mount_point(hierarchy: Hierarchy) -> Path | None:
    """Where it is mounted already, so that this process's own folder is below; None when it isn't."""
    kind = "cgroup2" if hierarchy.version == 2 else "cgroup"
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            mount, _, file_system = line.partition(" - ")
            at, (mounted, _source, options) = mount.split()[4], file_system.split()[:3]
            matches = mounted == kind and (kind == "cgroup2" or set(hierarchy.controllers) <= set(options.split(",")))
            if matches and os.path.isdir(f"{at}/{hierarchy.path}"):
                return Path(at)
    return None


def places(hierarchy: Hierarchy, mount: Path) -> list[Path]:
    """The folders in which a server that is started here may make `TOP`, the likeliest first.

    On cgroup v2 a group with processes of its own can't hand controllers down: beside it is a place, too.
    """
    own = Path(f"{mount}/{hierarchy.path}")
    if hierarchy.version == 1:
        return [own]
    if own.name == REST and own.parent.name == TOP:
        own = own.parent.parent  # another server has moved this one's parent
    return [own, own.parent if own != mount else own]


def own_places() -> list[Path]:
    """All places of a server that this process starts, in every hierarchy that can be seen from here."""
    mounted = [(one, mount_point(one)) for one in of_this_process()]
    return list(dict.fromkeys(place for one, mount in mounted if mount is not None for place in places(one, mount)))


def remove_server(places: list[Path], server: str) -> bool:
    """Remove the folders of a server that has ended, and those that all servers share where no other is left.

    Another server may be starting at the same moment: it makes what vanished once more. What this process may not
    remove stays.

    Args:
        places: see `own_places`.
        server: what its folder is named by, after `PREFIX`.

    Returns:
        False while something of it is in use: a killed server's processes take a moment to end.
    """
    ended = True
    for place in places:
        top = place / TOP
        for group in (top / f"{PREFIX}{server}", *place.glob(f"{PREFIX}{server}-*")):
            ended = remove_tree(group) and ended
        for folder in (top / REST, top):
            with contextlib.suppress(OSError):  # others are in it
                folder.rmdir()
    return ended


def remove_tree(path: Path) -> bool:
    """Remove a tree of cgroups, as far as this process may. False where processes still run in it."""
    ended = True
    with contextlib.suppress(OSError):
        # From below: a cgroup with children can't be removed. Its files vanish with it.
        for child in path.iterdir():
            if child.is_dir():
                ended = remove_tree(child) and ended
    try:
        path.rmdir()
    except OSError as error:
        ended = ended and error.errno != errno.EBUSY
    return ended
