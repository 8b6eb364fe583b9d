"""Folders of the host that a server needs: created, or made accessible to an ordinary uid, as root."""

from __future__ import annotations

import errno
import os
import signal
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from atropos.errors import ConfigError, IsolationUnavailable
from atropos.sandbox.boot import namespaces
from atropos.sandbox.linux import syscalls
from atropos.sandbox.linux.cgroups import alive, own_name
from atropos.trees import remove_tree


def needed_paths(bases: Sequence[str]) -> list[str]:
    """Paths that the second stage reads: Python, this package, and the bases."""
    package = Path(__file__).resolve().parents[3]
    paths = [sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, str(package), *sys.path]
    paths += [os.path.dirname(path) for path in (sys.executable, os.path.realpath(sys.executable))]
    paths += bases
    # Both forms: a path is opened by one, and its links resolve to the other.
    both = [form for path in paths if path for form in (os.path.abspath(path), os.path.realpath(path))]
    return [path for path in dict.fromkeys(both) if os.path.exists(path)]


def expose(paths: list[str]) -> None:
    """Make `paths` accessible to an ordinary uid, in this mount namespace alone.

    A closed folder above one (such as /root, mode 700) is covered by an empty one that holds just these paths: the
    server then sees less of the host than before, not more.
    """
    closed: dict[str, list[str]] = {}
    for path in paths:
        top = _closed_ancestor(path)
        if top is not None:
            closed.setdefault(top, []).append(path)
    for top, members in closed.items():
        # Opened before the folder is covered; O_PATH needs no right to read.
        opened = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in sorted(members)]
        syscalls.mount("atropos", top, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=755,size=1m")
        done: list[str] = []
        for path, fd in opened:
            if not any(path.startswith(f"{earlier}/") for earlier in done):
                is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
                os.makedirs(path if is_folder else os.path.dirname(path), 0o755, exist_ok=True)
                if not is_folder:
                    Path(path).touch()
                syscalls.mount(f"/proc/self/fd/{fd}", path, None, syscalls.MS_BIND | syscalls.MS_REC)
                done.append(path)
            os.close(fd)


def map_ids(path: str, base: int, count: int) -> None:
    """Show a root file system that belongs to the host's ids under the slots' ids, by an idmapped mount over itself.

    Where the kernel or the file system has no idmapped mounts it stays as it is; the server then refuses it.
    """
    parent = os.getpid()
    holder = os.fork()
    if holder == 0:
        try:
            syscalls.unshare(syscalls.CLONE_NEWUSER)
            syscalls.die_with(parent)
            # A namespace exists as long as a process is in it: this one waits until its descriptor has been opened.
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    _, status = os.waitpid(holder, os.WUNTRACED)
    if not os.WIFSTOPPED(status):  # it got no namespace
        return
    try:
        namespaces.write_maps(holder, [(0, base, count)])
        with open(f"/proc/{holder}/ns/user", "rb") as namespace:
            syscalls.idmapped_mount(path, namespace.fileno())
    except OSError:
        pass
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def _closed_ancestor(path: str) -> str | None:
    for ancestor in reversed(Path(path).parents):
        # The right to pass through is what the others need; reading the folder is not.
        if not os.stat(ancestor).st_mode & stat.S_IXOTH:
            return str(ancestor)
    return None


def disk(owner: int, slot_group: int) -> str:
    """A new folder on disk for this server's volumes."""
    top = "/var/lib/atropos" if os.geteuid() == 0 else f"/var/tmp/atropos-{os.getuid()}"
    try:
        os.makedirs(top, 0o755, exist_ok=True)
        status = os.lstat(top)
        # /var/tmp is everyone's: another user may have made the name first.
        if not stat.S_ISDIR(status.st_mode) or status.st_uid not in (os.geteuid(), owner):
            raise IsolationUnavailable(f"files on disk: {top} is not a folder of this user's own")
        os.chown(top, owner, -1)  # so that the server can remove its own at the end
        folder = f"{top}/{own_name()}"
        # for the server, and to pass through for the slots' own root, which starts bubblewrap
        os.mkdir(folder, 0o710 if os.geteuid() == 0 else 0o711)
        os.chown(folder, owner, slot_group)  # a container's root has no power over it after that
    except OSError as error:
        raise IsolationUnavailable(f"files on disk: {top} can't be used: {error.strerror}") from error
    return folder


def remove_abandoned(disk: str) -> None:
    """Remove what killed servers left beside this server's folder on disk. Needs power over the ids of their slots."""
    top = os.path.dirname(disk)
    for name in os.listdir(top):
        if not alive(name):
            remove_tree(f"{top}/{name}")


def image_folder(wanted: str | None, owner: int, *, one_user: bool = False) -> tuple[str | None, str]:
    """The folder of the image store, created for the server; or why there is none in the place for it.

    Args:
        wanted: the one that was named.
        owner: the server's uid.
        one_user: slots have root alone, who owns all files of their images: no other slots may have these.

    Raises:
        ConfigError: the one that was named can't be used.
    """
    home = "/var/cache" if os.geteuid() == 0 else os.path.expanduser("~/.cache")
    if wanted is None and home.startswith("~"):  # no HOME and no entry in /etc/passwd
        return None, "image_store.folder: this user has no home folder to hold it; name a folder"
    folder = f"{wanted or f'{home}/atropos/images'}{'/one-user' if one_user else ''}"
    try:
        os.makedirs(folder, 0o755, exist_ok=True)
        if os.geteuid() == 0:
            os.chown(folder, owner, owner)
        # Folders within as well: a store that root has used before has some of root's.
        for part in (folder, *(entry.path for entry in os.scandir(folder) if entry.is_dir())):
            if not os.access(part, os.W_OK | os.X_OK):  # of an earlier user's, such as root
                raise PermissionError(errno.EACCES, f"this user may not write to {part}")
    except OSError as error:
        why = (
            f"image_store.folder: {folder} can't be used: {error.strerror}; "
            "give it to this user, or name another folder"
        )
        if wanted is not None:
            raise ConfigError(why) from error
        return None, why
    return folder, ""


def scratch(state_dir: str | None, *, root: bool) -> str:
    """A mount point for the server's own file system; nothing is ever written into the folder itself."""
    if state_dir is not None:
        path = state_dir
    elif root:
        path = "/run/atropos"
    else:
        import tempfile

        path = os.path.join(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"atropos-{os.getuid()}")
    try:
        os.makedirs(path, 0o755 if root else 0o700, exist_ok=True)
        status = os.lstat(path)
    except OSError as error:
        raise IsolationUnavailable(
            f"state_dir {path} can't be created: {error.strerror}; set it to a folder of your own"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise IsolationUnavailable(f"state_dir {path} is not a folder of this user's own; set it to one that is")
    return path
