"""Drops privileges before the server listens, starts a thread or reads a request.

As root, this process does what only root can: a /proc without masks, cgroup directories, access to files below closed
folders. It then enters a user namespace that maps an unused range of ids, and executes itself again. To the kernel it
is now an ordinary uid without a capability over the host or the container. As an ordinary user: the same with the ids
of /etc/subuid, or with the user's own id alone.

The second stage finds its configuration and what the first one prepared in an inherited memory file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atropos.errors import ConfigError, IsolationUnavailable
from atropos.sandbox.boot import folders, namespaces
from atropos.sandbox.linux import disks, syscalls
from atropos.sandbox.linux.cgroups import Cgroups, CgroupTree, claim, claim_delegated, release
from atropos.trees import remove_tree

if TYPE_CHECKING:
    from atropos.config import ServerConfig

_TO_ENTER_SLOTS = ("SYS_CHROOT", "SYS_PTRACE")
"""Capabilities needed to enter a mount namespace by the pidfd of its PID 1, which is not dumpable."""
_OF_FILES = ("SETFCAP", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID")
SERVER_CAPABILITIES = frozenset(("SYS_ADMIN", "SETUID", "SETGID", "KILL", "NET_ADMIN", *_OF_FILES, *_TO_ENTER_SLOTS))
"""In the server's own user namespace: NET_ADMIN is for the networks of its slots, and of none that it came from."""
_STAGE = "ATROPOS_STAGE2_FD"


@dataclass(frozen=True)
class Entered:
    """What the first stage passes to the second.

    Attributes:
        scratch: a mount point for the server's own files.
        parent: pid of the process that the server ends with; None: it outlives that one.
        cgroups: the hierarchies claimed.
        slot_ids: how many ids a slot has, from 0 on. The next one is the server's.
        creators: how many come after it, from which slots' user namespaces are created; 0: from the server's own.
        disk: a folder on disk for volumes, when the configuration wants any there.
        cells: where the cells of that folder are mounted; None: `no_cells` says why there are none.
        images: a descriptor of each cell's image.
        cells_mib: files that fit into all cells together.
        image_folder: where the store of images is; None: `no_images` says why there is none.
    """

    scratch: str
    parent: int | None
    cgroups: Cgroups
    slot_ids: int
    creators: int
    disk: str | None = None
    cells: str | None = None
    images: Sequence[int] = ()
    cells_mib: int = 0
    no_cells: str = "the server was not started as root"
    image_folder: str | None = None
    no_images: str = ""


@dataclass(frozen=True)
class RootPhaseSettings:
    """What the first stage needs to know of a configuration, and its text for the second.

    The first stage doesn't check it: the library that does takes ten times as long to load as all of this stage.
    """

    text: str
    base: str | None
    bases: dict[str, str]
    die_with_parent: bool
    state_dir: str | None
    slots: int
    cells: disks.CellPlan | None = None
    image_folder: str | None = None

    @property
    def base_paths(self) -> list[str]:
        """The root file systems that slots may start from."""
        return [path for path in (self.base, *self.bases.values()) if path]

    @classmethod
    def of(cls, config: ServerConfig) -> RootPhaseSettings:
        """Settings of a checked configuration."""
        return cls(
            config.revealed(),
            config.base,
            config.bases,
            config.die_with_parent,
            config.state_dir,
            config.slots,
            disks.CellPlan.of(config),
            config.image_store.folder,
        )

    @classmethod
    def parse_unchecked(cls, text: bytes) -> RootPhaseSettings | None:
        """Settings from a text that the second stage will check; None when it must be checked now."""
        try:
            data: Any = json.loads(text)
            bases = data.get("bases", {})
            folder = data.get("image_store", {}).get("folder")
            ends, paths = data.get("die_with_parent", False), (data.get("base"), data.get("state_dir"), folder)
            slots = data.get("slots")
            plain = data.get("volume") != "disk" and data.get("largest_disk_mib") is None
            # type(), not isinstance: True is an int, and what looks odd is checked by the second stage's library.
            plain = plain and type(ends) is bool and type(slots) is int and 0 < slots <= 1000
            plain = plain and all(path is None or type(path) is str for path in paths)
            if not plain or not all(type(part) is str for item in bases.items() for part in item):
                return None
            return cls(text.decode(), paths[0], bases, ends, paths[1], slots, image_folder=folder)
        except (ValueError, AttributeError, TypeError, RecursionError):
            return None


def passed_on() -> tuple[str, Entered] | None:
    """The configuration's text and what the first stage prepared, once; None in the first stage."""
    number = os.environ.pop(_STAGE, None)
    if number is None:
        return None
    with os.fdopen(int(number), "rb") as file:
        text, raw = json.loads(file.read())
    trees, missing = raw["cgroups"]["trees"], raw["cgroups"]["missing"]
    raw["cgroups"] = Cgroups(tuple(CgroupTree(**tree) for tree in trees), missing)
    entered = Entered(**raw)
    for fd in entered.images:
        # Inherited through our own exec, but not by what the server starts.
        os.set_inheritable(fd, False)
    if entered.parent is not None:
        # Once more: an exec of a program with other credentials may clear it, as may the change of ids (prctl(2)).
        syscalls.die_with(entered.parent)
    return text, entered


def undo(entered: Entered) -> None:
    """Undo what the first stage made, if the server failed before it could."""
    release(entered.cgroups)
    if entered.disk is not None:
        remove_tree(entered.disk)


def _capable() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                caps = int(line.split()[1], 16)
                needed = ("SYS_ADMIN", "SETUID", "SETGID")
                return os.geteuid() == 0 and all(caps >> syscalls.CAPABILITIES[n] & 1 for n in needed)
    return False


def enter(config: RootPhaseSettings) -> NoReturn:
    """Drop privileges, and execute the program again. Before any thread or event loop.

    Raises:
        IsolationUnavailable: the host or container doesn't allow it; the message says what to change.
        ConfigError: a base holds the server's own folder, or the image store's folder can't be used.
    """
    parent = os.getppid() if config.die_with_parent else None
    if parent is not None:
        syscalls.die_with(parent)
    os.umask(0o022)  # the server's own user and those of slots read what is created here
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent may leave it ignored, and then no child can be waited for
    if shutil.which("bwrap") is None:
        raise IsolationUnavailable(
            "bubblewrap is not installed: no program named 'bwrap' on PATH (apt-get install bubblewrap)"
        )
    root = _capable()
    scratch = folders.scratch(config.state_dir, root=root)
    for path in config.base_paths:
        if Path(os.path.realpath(scratch)).is_relative_to(os.path.realpath(path)):
            raise ConfigError(
                f"base: {path} holds the server's own folder {scratch}; give a root file system in a folder of its own"
            )
    entered = (_as_root if root else _as_user)(config, scratch, parent)
    # From here on no set-user-id program of the host can give privilege back.
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.keep_only(SERVER_CAPABILITIES)
    if parent is not None:
        syscalls.die_with(parent)
    _execute_again(config, entered)


def _execute_again(config: RootPhaseSettings, entered: Entered) -> NoReturn:
    # In memory: the token in it is never a file, an argument or a variable that others could read.
    fd = os.memfd_create("atropos-config", 0)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(json.dumps((config.text, asdict(entered))).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    for inherited in (fd, *entered.images):
        os.set_inheritable(inherited, True)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _STAGE: str(fd)})


# ------------------------------------------------------------------------------------------------------------ as root


def _as_root(config: RootPhaseSettings, scratch: str, parent: int | None) -> Entered:
    extents = namespaces.free_extents(Path("/proc/self/uid_map").read_text(encoding="ascii"))
    base, slot_ids = extents[0][1], sum(count for *_, count in extents) - 1 - namespaces.CREATORS
    # a uid of its own, so that no slot can use up what the kernel counts per user
    server = namespaces.outside(extents, slot_ids)
    # Cgroups, disks and folders below are mounted in the server's own namespace, and end with it.
    _mount_own(scratch)
    cgroups = claim(f"{scratch}/cgroups", server, config.slots)
    disk = None if config.cells is None else folders.disk(server, base)
    if disk is not None:
        folders.remove_abandoned(disk)
    cells, images, cells_mib, no_cells = None, list[int](), 0, ""
    if disk is not None and config.cells is not None:
        try:
            images, cells_mib = disks.make(config.cells, disk, f"{scratch}/cells", server, base)
            cells = f"{scratch}/cells"
        except OSError as error:
            no_cells = f"no file system of a given size could be made: {error.strerror or error}"
    image_folder, no_images = folders.image_folder(config.image_folder, server)
    folders.expose([*folders.needed_paths(config.base_paths), *filter(None, [image_folder])])
    for path in config.base_paths:
        if os.path.isdir(path) and os.stat(path).st_uid == 0:
            folders.map_ids(path, base, slot_ids)
    own = f"{scratch}/server"
    # The second stage mounts its own file system there: what root has mounted is locked for it (mount_namespaces(7)).
    os.mkdir(own, 0o755)
    namespaces.enter_namespaces(lambda pid: namespaces.write_maps(pid, extents), before=lambda: _become(server))
    return Entered(
        own,
        parent,
        cgroups,
        slot_ids,
        namespaces.CREATORS,
        disk=disk,
        cells=cells,
        images=images,
        cells_mib=cells_mib,
        no_cells=no_cells,
        image_folder=image_folder,
        no_images=no_images,
    )


def _mount_own(scratch: str) -> None:
    """Enter a mount namespace of the server's own, with a whole /proc and a scratch folder."""
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        # The kernel mounts a new proc in a user namespace only where nothing of the visible one is covered.
        if _proc_is_masked():
            syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        syscalls.mount("atropos", scratch, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
    except OSError as error:
        raise IsolationUnavailable(
            f"{error}: the container must keep CAP_SYS_ADMIN and a seccomp profile that allows mount and unshare "
            "(see nomad/ and docker/sandbox/ for the least that is needed)"
        ) from error


def _proc_is_masked() -> bool:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = [(line.split()[4], line.partition(" - ")[2]) for line in file]
    covered = any(at.startswith("/proc/") and not at.startswith("/proc/sys/fs/binfmt_misc") for at, _ in mounts)
    return covered or any(at == "/proc" and "hidepid" in rest for at, rest in mounts)


def _become(uid: int) -> None:
    """Become an ordinary uid, keeping what the next step needs: some kernels refuse user namespaces to others."""
    # Else the change of uid below clears all capabilities (capabilities(7)).
    syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
    # While root: an ordinary user may not, and would keep root's groups.
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.set_capabilities(frozenset({syscalls.CAPABILITIES["SYS_ADMIN"]}))


# ------------------------------------------------------------------------------------------------- as an ordinary user


def _as_user(config: RootPhaseSettings, scratch: str, parent: int | None) -> Entered:
    uid, gid = os.getuid(), os.getgid()
    cgroups = claim_delegated(uid)
    disk = None if config.cells is None else folders.disk(uid, gid)
    (first_uid, uids), (first_gid, gids) = namespaces.subordinate("/etc/subuid"), namespaces.subordinate("/etc/subgid")
    ids, slot_ids, creators = min(uids, gids), 1, 0
    one_user = ids < 4096 or not all(shutil.which(program) for program in ("newuidmap", "newgidmap"))
    image_folder, no_images = folders.image_folder(config.image_folder, uid, one_user=one_user)
    if not one_user:
        slot_ids = min(namespaces.SLOT_IDS, ids)
        creators = min(namespaces.CREATORS, ids - slot_ids)

        def extents(first: int, own: int) -> list[namespaces.Extent]:
            mapped = (0, first, slot_ids), (slot_ids, own, 1), (slot_ids + 1, first + slot_ids, creators)
            return [extent for extent in mapped if extent[2]]

        namespaces.enter_namespaces(
            lambda pid: namespaces.write_subordinate_maps(pid, extents(first_uid, uid), extents(first_gid, gid))
        )
    else:
        namespaces.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        # Without "deny" an unprivileged process may not write gid_map (user_namespaces(7)).
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", file).write_text(text, encoding="ascii")
    try:
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    except OSError as error:
        raise IsolationUnavailable(namespaces.why_no_userns(error)) from error
    if disk is not None:
        folders.remove_abandoned(disk)
    return Entered(
        scratch, parent, cgroups, slot_ids, creators, disk=disk, image_folder=image_folder, no_images=no_images
    )
