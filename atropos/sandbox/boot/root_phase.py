"""Leaving privilege behind, before the server listens, starts a thread or reads a request.

As root: what only root can do is done (a /proc without masks, cgroup directories, a way to files under closed folders),
then this process enters a user namespace that maps a range of ids that nobody else uses, and executes itself again.
Kernel-wise it is from then on an ordinary uid without a capability over the host or the container. As an ordinary user:
the same with the ids of /etc/subuid, or with one's own id alone.

The second stage finds its configuration and what the first one prepared in an inherited memory file.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from atropos.errors import IsolationUnavailable
from atropos.sandbox.linux import disks, syscalls
from atropos.sandbox.linux.cgroups import Cgroups, Tree, alive, claim, own_name, release
from atropos.sandbox.linux.trees import remove_tree

if TYPE_CHECKING:
    from atropos.config import ServerConfig

ID_BASE = 100_000
"""First host id of the range: above every account, below what systemd gives to its own containers."""
SLOT_IDS = 65_536
CREATORS = 1024
"""Uids from which slots' namespaces are created, one each, so that the kernel counts their objects apart."""
SERVER_CAPABILITIES = frozenset(
    ("SYS_ADMIN", "SETUID", "SETGID", "SETFCAP", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL")
)
_STAGE = "ATROPOS_STAGE2_FD"


@dataclass(frozen=True)
class Entered:
    """What the second stage knows of the first.

    Attributes:
        scratch: a mount point for the server's own files.
        slot_ids: how many ids a slot has, from 0 on.
        creators: first uid and number of those that slots' user namespaces are created from; none: the server's own.
        cgroups: the hierarchies claimed.
        parent: pid of the process that started the server.
        root: whether the first stage was root.
        disk: a folder on disk for volumes, when the configuration wants them there.
        cells: where its sized places are mounted; None: `no_cells` says why there are none.
        images: a descriptor of each one's image.
    """

    scratch: str
    slot_ids: int
    creators: tuple[int, int]
    cgroups: Cgroups
    parent: int
    root: bool
    disk: str | None = None
    cells: str | None = None
    images: tuple[int, ...] = ()
    no_cells: str = "the server was not started as root"


@dataclass(frozen=True)
class Settings:
    """What the first stage needs to know of a configuration, and its text for the second.

    The first stage doesn't check it: the library that does takes ten times as long to load as all of this stage.
    """

    text: str
    volume: str
    base: str | None
    bases: dict[str, str]
    die_with_parent: bool
    state_dir: str | None
    plan: disks.Plan | None = None

    @classmethod
    def of(cls, config: ServerConfig) -> Settings:
        """Those of a configuration that has been checked."""
        values = config.model_dump(mode="json")
        values["token"] = config.token.get_secret_value()
        bases = dict(config.bases)
        plan = disks.Plan.of(config) if config.volume == "disk" else None
        return cls(
            json.dumps(values), config.volume, config.base, bases, config.die_with_parent, config.state_dir, plan
        )

    @classmethod
    def glance(cls, text: bytes) -> Settings | None:
        """Those in a text that the second stage will check; None when it has to be checked at once."""
        try:
            data: Any = json.loads(text)
            volume, bases = data.get("volume", "memory"), data.get("bases", {})
            ends, paths = data.get("die_with_parent", False), (data.get("base"), data.get("state_dir"))
            plain = volume == "memory" and type(ends) is bool
            plain = plain and all(path is None or type(path) is str for path in paths)
            if not plain or not all(type(part) is str for item in bases.items() for part in item):
                return None
            return cls(text.decode(), volume, paths[0], bases, ends, paths[1])
        except (ValueError, AttributeError, TypeError, RecursionError):
            return None


_entered: Entered | None = None
_text: str | None = None


def inherited() -> str | None:
    """The text of the configuration that the first stage passed on; None in the first stage."""
    _load()
    return _text


def inherited_config() -> ServerConfig | None:
    """The configuration that the first stage passed on; None in the first stage."""
    from atropos.config import ServerConfig

    text = inherited()
    return None if text is None else ServerConfig.model_validate_json(text)


def entered() -> Entered:
    """What the first stage prepared.

    Raises:
        RuntimeError: `enter` has not been called.
    """
    _load()
    if _entered is None:
        raise RuntimeError("root_phase.enter(config) must be called first, before any thread or event loop")
    return _entered


def enter(config: ServerConfig | Settings) -> None:
    """Leave privilege: in the first stage this executes the program again and doesn't return; in the second it does.

    Raises:
        IsolationUnavailable: the host or container doesn't allow it; the message says what to change.
    """
    _load()
    if _entered is not None:
        if config.die_with_parent:
            _arm(_entered.parent)
        return
    parent = os.getppid()
    if config.die_with_parent:
        _arm(parent)
    check_programs()
    _first_stage(config if isinstance(config, Settings) else Settings.of(config), parent)


def undo() -> None:
    """Take back what the first stage made, where the server didn't come so far as to do it itself."""
    if _entered is not None:
        release(_entered.cgroups)
        if _entered.disk is not None:
            remove_tree(_entered.disk)


def _load() -> None:
    global _entered, _text
    text = os.environ.pop(_STAGE, None)
    if text is None:
        return
    with os.fdopen(int(text), "rb") as file:
        data = json.loads(file.read())
    _text = data["config"]
    raw: dict[str, Any] = data["entered"]
    trees = tuple(Tree(t["version"], t["path"], tuple(t["controllers"])) for t in raw["cgroups"]["trees"])
    _entered = Entered(
        scratch=raw["scratch"],
        slot_ids=raw["slot_ids"],
        creators=(raw["creators"][0], raw["creators"][1]),
        cgroups=Cgroups(trees, raw["cgroups"]["missing"]),
        parent=raw["parent"],
        root=raw["root"],
        disk=raw["disk"],
        cells=raw["cells"],
        images=tuple(raw["images"]),
        no_cells=raw["no_cells"],
    )
    for fd in _entered.images:
        os.set_inheritable(fd, False)


def _arm(parent: int) -> None:
    """End with the process that started us. A change of ids or of a namespace disarms it, so each stage does it."""
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def check_programs() -> None:
    """Raise `IsolationUnavailable` where bubblewrap isn't installed."""
    if shutil.which("bwrap") is None:
        raise IsolationUnavailable(
            "bubblewrap is not installed: no program named 'bwrap' on PATH (apt-get install bubblewrap)"
        )


def _capable() -> bool:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("CapEff:"):
                caps = int(line.split()[1], 16)
                needed = ("SYS_ADMIN", "SETUID", "SETGID")
                return os.geteuid() == 0 and all(caps >> syscalls.CAPABILITIES[n] & 1 for n in needed)
    return False


def _first_stage(config: Settings, parent: int) -> NoReturn:
    root = _capable()
    scratch = _scratch(config, root=root)
    entered = Entered(scratch, 1, (0, 0), Cgroups(), parent, root)
    entered = _as_root(config, entered) if root else _as_user(config, entered)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.keep_only(SERVER_CAPABILITIES)
    if config.die_with_parent:
        _arm(parent)
    _execute_again(config, entered)


def _execute_again(config: Settings, entered: Entered) -> NoReturn:
    fd = os.memfd_create("atropos-config", 0)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(json.dumps({"config": config.text, "entered": asdict(entered)}).encode())
    os.lseek(fd, 0, os.SEEK_SET)
    for inherited in (fd, *entered.images):
        os.set_inheritable(inherited, True)
    environment = {**os.environ, _STAGE: str(fd)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


# ------------------------------------------------------------------------------------------------------------ as root


def _as_root(config: Settings, entered: Entered) -> Entered:
    base, slot_ids, creators = _free_range()
    server = base + slot_ids  # kernel-wise: a uid of its own, so that no slot can use up what is counted per user
    try:
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
        if _proc_is_masked():
            syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC)
        syscalls.mount("atropos", entered.scratch, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
    except OSError as error:
        raise IsolationUnavailable(
            f"{error}: the container must keep CAP_SYS_ADMIN and a seccomp profile that allows mount and unshare "
            "(see nomad/ and docker/sandbox/ for the least that is needed)"
        ) from error
    cgroups = claim(f"{entered.scratch}/cgroups", server, server)
    disk = _disk(server, base) if config.volume == "disk" else None
    cells, images, no_cells = None, list[int](), ""
    if disk is not None and config.plan is not None:
        try:
            images = disks.make(config.plan, disk, f"{entered.scratch}/cells", server, base)
            cells = f"{entered.scratch}/cells"
        except OSError as error:
            no_cells = f"no file system of a given size could be made: {error}"
    _expose(_needed_paths(config))
    for path in filter(None, (config.base, *config.bases.values())):
        if os.path.isdir(path) and os.stat(path).st_uid == 0:
            _show_as_ours(path, base, slot_ids)
    own = f"{entered.scratch}/server"
    os.mkdir(own, 0o755)
    _enter_namespaces(_write_maps([(0, base, slot_ids + 1 + creators)]), before=lambda: _become(server))
    return replace(
        entered,
        scratch=own,
        slot_ids=slot_ids,
        creators=(slot_ids + 1, creators) if creators else (0, 0),
        cgroups=cgroups,
        disk=disk,
        cells=cells,
        images=tuple(images),
        no_cells=no_cells,
    )


def _free_range() -> tuple[int, int, int]:
    """(first id outside, ids of a slot, ids to create namespaces from), of what this namespace maps itself."""
    with open("/proc/self/uid_map", encoding="ascii") as file:
        extents = [(int(inside), int(count)) for inside, _, count in (line.split() for line in file)]
    wanted = SLOT_IDS + 1 + CREATORS
    for inside, count in extents:
        if inside <= ID_BASE and inside + count >= ID_BASE + wanted:
            return ID_BASE, SLOT_IDS, CREATORS
    inside, count = max(extents, key=lambda extent: extent[1])
    room = inside + count - max(inside, 1000)
    if room < 4096:
        raise IsolationUnavailable(
            f"this container maps only {count} user ids; {wanted} from {ID_BASE} on are needed (user namespace remapping "
            "of the container engine: widen its range in /etc/subuid, or turn it off for this container)"
        )
    return max(inside, 1000), room - 1 - CREATORS, CREATORS


def _proc_is_masked() -> bool:
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        mounts = [(line.split()[4], line.partition(" - ")[2]) for line in file]
    covered = any(at.startswith("/proc/") and not at.startswith("/proc/sys/fs/binfmt_misc") for at, _ in mounts)
    return covered or any(at == "/proc" and "hidepid" in rest for at, rest in mounts)


def _become(uid: int) -> None:
    """Become an ordinary uid, keeping what the next step needs: some kernels refuse user namespaces to others."""
    syscalls.prctl(syscalls.PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    syscalls.set_capabilities(frozenset({syscalls.CAPABILITIES["SYS_ADMIN"]}))


def _needed_paths(config: ServerConfig | Settings) -> list[str]:
    """What the second stage reads by path: Python, this package, and the bases."""
    package = Path(__file__).resolve().parents[3]
    wanted = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(package), *sys.path]
    wanted += [os.path.dirname(path) for path in (sys.executable, os.path.realpath(sys.executable))]
    wanted += [path for path in (config.base, *config.bases.values()) if path]
    both = [form for path in wanted if path for form in (os.path.abspath(path), os.path.realpath(path))]
    return [path for path in dict.fromkeys(both) if os.path.exists(path)]


def _expose(paths: list[str]) -> None:
    """Make `paths` reachable for an ordinary uid, in this mount namespace alone.

    A closed folder above one (such as /root, mode 700) is covered by an empty one that holds just these paths: the
    server then sees less of the host than before, not more.
    """
    closed: dict[str, list[str]] = {}
    for path in paths:
        top = _closed_ancestor(path)
        if top is not None:
            closed.setdefault(top, []).append(path)
    for top, members in closed.items():
        opened = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in sorted(members)]
        syscalls.mount("atropos", top, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
        done: list[str] = []
        for path, fd in opened:
            if not any(path.startswith(f"{earlier}/") for earlier in done):
                if stat.S_ISDIR(os.fstat(fd).st_mode):
                    os.makedirs(path, 0o755, exist_ok=True)
                else:
                    os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
                    Path(path).touch()
                syscalls.mount(f"/proc/self/fd/{fd}", path, None, syscalls.MS_BIND | syscalls.MS_REC)
                done.append(path)
            os.close(fd)


def _show_as_ours(path: str, base: int, count: int) -> None:
    """Let a root file system that belongs to the host's ids appear under the slots' ids (an idmapped mount over itself).

    Where the kernel or the file system has no idmapped mounts it stays as it is; the server then says what to do.
    """
    ready_r, ready_w = os.pipe()
    hold_r, hold_w = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(hold_w)
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            os.write(ready_w, b"x")
            os.read(hold_r, 1)
        finally:
            os._exit(0)
    os.close(ready_w)
    os.close(hold_r)
    try:
        if os.read(ready_r, 1):
            _write_maps([(0, base, count)])(holder)
            with open(f"/proc/{holder}/ns/user", "rb") as namespace:
                syscalls.idmapped_mount(path, namespace.fileno())
    except OSError:
        pass
    finally:
        os.close(ready_r)
        os.close(hold_w)
        os.waitpid(holder, 0)


def _closed_ancestor(path: str) -> str | None:
    for ancestor in reversed(Path(path).parents):
        if not os.stat(ancestor).st_mode & stat.S_IXOTH:
            return str(ancestor)
    return None


# ------------------------------------------------------------------------------------------------- as an ordinary user


def _as_user(config: Settings, entered: Entered) -> Entered:
    uid, gid = os.getuid(), os.getgid()
    cgroups = claim_delegated(uid, gid)
    entered = replace(entered, disk=_disk(uid, gid) if config.volume == "disk" else None)
    ids = _subordinate("/etc/subuid"), _subordinate("/etc/subgid")
    ranged = min(count for _, count in ids) >= 4096 and all(shutil.which(p) for p in ("newuidmap", "newgidmap"))
    if ranged:
        slot_ids = min(SLOT_IDS, ids[0][1], ids[1][1])
        creators = max(0, min(CREATORS, ids[0][1] - slot_ids, ids[1][1] - slot_ids))
        maps = [
            [
                (0, first, slot_ids),
                (slot_ids, own, 1),
                *([(slot_ids + 1, first + slot_ids, creators)] if creators else []),
            ]
            for (first, _), own in zip(ids, (uid, gid), strict=True)
        ]
        _enter_namespaces(_newidmap(maps[0], maps[1]))
        entered = replace(entered, slot_ids=slot_ids, creators=(slot_ids + 1, creators) if creators else (0, 0))
    else:
        _unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            Path("/proc/self", file).write_text(text, encoding="ascii")
    try:
        syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    except OSError as error:
        raise IsolationUnavailable(_why_no_userns(error)) from error
    return replace(entered, cgroups=cgroups)


def claim_delegated(uid: int, gid: int) -> Cgroups:
    """The cgroups an ordinary user may make: those that systemd delegated to it (cgroup v2)."""
    missing = "not delegated to this user (run as root, or under 'systemd-run --user --scope -p Delegate=yes')"
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        path = next((line.split(":", 2)[2].strip() for line in file if line.startswith("0::")), None)
    own = Path(f"/sys/fs/cgroup{path}") if path is not None else None
    if own is None or not os.access(own, os.W_OK) or not (own / "cgroup.controllers").exists():
        return Cgroups((), dict.fromkeys(("memory", "pids", "cpu"), missing))
    return claim("/nonexistent", uid, gid)


def _subordinate(file: str) -> tuple[int, int]:
    import pwd

    names = {str(os.getuid())}
    try:
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        pass
    try:
        with open(file, encoding="utf-8") as lines:
            ranges = [line.strip().split(":") for line in lines]
    except OSError:
        return 0, 0
    found = [
        (int(r[1]), int(r[2])) for r in ranges if len(r) == 3 and r[0] in names and r[1].isdigit() and r[2].isdigit()
    ]
    return max(found, key=lambda extent: extent[1], default=(0, 0))


# ----------------------------------------------------------------------------------------------------------- namespaces


def _unshare(flags: int) -> None:
    try:
        syscalls.unshare(flags)
    except OSError as error:
        raise IsolationUnavailable(_why_no_userns(error)) from error


def _enter_namespaces(write_maps: Callable[[int], None], before: Callable[[], None] | None = None) -> None:
    """Enter a user and mount namespace; a short-lived child that stayed outside writes the maps, then is gone."""
    main = os.getpid()
    go_r, go_w = os.pipe()
    told_r, told_w = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(go_w)
        message = b""
        try:
            if os.read(go_r, 1):
                write_maps(main)
        except BaseException as error:  # it travels to the parent through the pipe
            message = f"{error}".encode(errors="replace") or b"failed"
        os.write(told_w, message)
        os._exit(0)
    os.close(told_w)
    os.close(go_r)
    try:
        if before is not None:
            before()
        _unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        os.write(go_w, b"x")
        message = os.read(told_r, 4096)
    finally:
        os.close(go_w)
        os.close(told_r)
        os.waitpid(writer, 0)
    if message:
        raise IsolationUnavailable(f"user ids could not be mapped: {message.decode(errors='replace')}")


def _write_maps(extents: list[tuple[int, int, int]]) -> Callable[[int], None]:
    text = "".join(f"{inside} {outside} {count}\n" for inside, outside, count in extents)

    def write(pid: int) -> None:
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{pid}/{name}").write_text(text, encoding="ascii")

    return write


def _newidmap(uids: list[tuple[int, int, int]], gids: list[tuple[int, int, int]]) -> Callable[[int], None]:
    import subprocess

    def write(pid: int) -> None:
        for program, extents in (("newuidmap", uids), ("newgidmap", gids)):
            numbers = [str(number) for extent in extents for number in extent]
            done = subprocess.run([program, str(pid), *numbers], check=False, capture_output=True, text=True)
            if done.returncode:
                raise OSError(f"{program}: {done.stderr.strip()}; check /etc/subuid and /etc/subgid")

    return write


def _why_no_userns(error: OSError) -> str:
    """What to change where the kernel refuses a user namespace."""

    def setting(name: str) -> str | None:
        try:
            return Path("/proc/sys", name).read_text(encoding="ascii").strip()
        except OSError:
            return None

    if setting("user/max_user_namespaces") == "0":
        return "user namespaces are off: sysctl -w user.max_user_namespaces=15000"
    if setting("kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are for root alone here: sysctl -w kernel.unprivileged_userns_clone=1"
    if setting("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor restricts user namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or a profile "
            "for this Python that allows 'userns'"
        )
    if error.errno == errno.ENOSPC:
        return "too many user namespaces, or nested too deep: raise sysctl user.max_user_namespaces"
    if error.errno == errno.EINVAL:
        return "this kernel has no user namespaces (CONFIG_USER_NS)"
    return (
        f"no user namespace could be made ({error}): a container's seccomp profile must allow unshare, mount and clone"
    )


def _disk(owner: int, slot_group: int) -> str:
    """A new folder on disk for this server's volumes; those of servers that are no more are removed."""
    top = "/var/lib/atropos" if os.geteuid() == 0 else f"/var/tmp/atropos-{os.getuid()}"
    try:
        os.makedirs(top, 0o755, exist_ok=True)
        found = os.lstat(top)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in (os.geteuid(), owner):
            raise IsolationUnavailable(f"volume='disk': {top} is not a folder of this user's own")
        os.chown(top, owner, -1)  # so that the server can remove its own at the end
        for name in os.listdir(top):
            if not alive(name):
                remove_tree(f"{top}/{name}")
        folder = f"{top}/{own_name()}"
        os.mkdir(folder, 0o700)
        # for the server, and to pass through for the slots' own root, which starts bubblewrap
        os.chown(folder, owner, slot_group)
        os.chmod(folder, 0o710 if os.geteuid() == 0 else 0o711)
    except OSError as error:
        raise IsolationUnavailable(f"volume='disk': {top} can't be used: {error.strerror}") from error
    return folder


def _scratch(config: Settings, *, root: bool) -> str:
    """A folder to mount the server's own file system on; nothing is ever written into the folder itself."""
    if config.state_dir is not None:
        path = config.state_dir
    elif root:
        path = "/run/atropos"
    else:
        import tempfile

        path = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"atropos-{os.getuid()}")
    try:
        os.makedirs(path, 0o755 if root else 0o700, exist_ok=True)
        found = os.lstat(path)
    except OSError as error:
        raise IsolationUnavailable(
            f"state_dir {path} can't be made: {error.strerror}; set it to a folder of one's own"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise IsolationUnavailable(f"state_dir {path} is not a folder of this user's own; set it to one that is")
    return path
