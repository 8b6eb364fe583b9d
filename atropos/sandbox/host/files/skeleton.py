"""The default base, used when no root file system is given: the host's programs over a small /etc of its own.

/usr is seen read-only (each slot through an overlay of its own, so that neither locks nor inotify watches reach the
host or a neighbour); /etc holds copies of what programs look up, and none of the host's users or secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from atropos.sandbox.host.files import added

if TYPE_CHECKING:
    from atropos.wire import ImageInfo

_FOLDERS = (  # noqa: SIM905
    "boot dev etc home media mnt opt proc root run srv sys tmp usr var "
    "var/cache var/lib var/lib/dpkg var/log var/mail var/spool var/tmp workspace .atropos"
).split()
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_COPIED = (  # noqa: SIM905
    "adduser.conf alternatives bash.bashrc ca-certificates ca-certificates.conf debian_version default/useradd "
    "deluser.conf fonts gai.conf host.conf inputrc java-17-openjdk java-21-openjdk ld.so.cache ld.so.conf ld.so.conf.d "
    "ld.so.hwcap locale.alias localtime login.defs magic magic.mime mailcap manpath.config mime.types mke2fs.conf "
    "mysql networks os-release pam.conf pam.d perl profile profile.d protocols python2.7 python3 python3.9 python3.10 "
    "python3.11 python3.12 python3.13 python3.14 R rpc screenrc security services shells skel ssl terminfo timezone "
    "vim wgetrc xattr.conf"
).split()
"""What the skeleton has of the host's /etc."""
_PROGRAMS = (
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/lib/python3/dist-packages",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/local/bin",
    "usr/local/lib",
    "opt",
    "var/lib/dpkg/status",
)
# The copies of all slots' /etc are in the server's memory.
_MAX_COPIED_FILE = 4 << 20
_ACCOUNTS = [
    "root:x:0:0:root:/root:/bin/bash",
    "daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin",
    "bin:x:2:2:bin:/bin:/usr/sbin/nologin",
    "sys:x:3:3:sys:/dev:/usr/sbin/nologin",
    "man:x:6:12:man:/var/cache/man:/usr/sbin/nologin",
    "mail:x:8:8:mail:/var/mail:/usr/sbin/nologin",
    "www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin",
    "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin",
]
_GROUPS = (  # noqa: SIM905
    "root:0 daemon:1 bin:2 sys:3 adm:4 tty:5 disk:6 man:12 mail:8 kmem:15 dialout:20 sudo:27 www-data:33 shadow:42 "
    "utmp:43 staff:50 users:100 nogroup:65534"
).split()
_FILES = {
    **added.FILES,
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nnetworks: files\nprotocols: files\n"
    "services: files\n",
    "environment": "",
    "fstab": "",
    "gshadow": "",
    "ld.so.preload": "",
    "passwd": "".join(f"{line}\n" for line in _ACCOUNTS),
    "shadow": "".join(f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in _ACCOUNTS),
    "group": "".join(f"{name}:x:{gid}:\n" for name, gid in (entry.split(":") for entry in _GROUPS)),
}
_BASHRC = "# ~/.bashrc\nexport PS1='\\u@\\h:\\w\\$ '\n"


@dataclass(frozen=True)
class Base:
    """The base of slots: a lower folder, and read-only folders of the host.

    Each folder of the host has what lies above it, topmost first; so do `layers` lie above the lower folder. `image`
    says what commands in it start with, where it is an image, and `root` what those of its root have beneath that.
    `addition` is the layer of `added`, where it needs one.
    """

    lower: str
    host_folders: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    image: ImageInfo | None = None
    layers: tuple[str, ...] = ()
    addition: str | None = None
    root: dict[str, str] = field(default_factory=dict[str, str])


def root_of(layers: Sequence[str]) -> dict[str, str]:
    """HOME and SHELL of an image's root, by its layers, topmost first: Docker's, and bash only where it is there."""
    has_bash = any(_has(layer, path) for layer in layers for path in ("bin/bash", "usr/bin/bash"))
    home = next((home for layer in layers if (home := _home(layer)) is not None), "/")
    return {"HOME": home, "SHELL": "/bin/bash" if has_bash else "/bin/sh"}


def _has(layer: str, path: str) -> bool:
    """Whether a layer has a file itself, and not behind a link, which could lead anywhere."""
    top = path.partition("/")[0]
    try:
        mode = os.lstat(f"{layer}/{path}").st_mode
    except OSError:
        return False
    # lstat follows all but the last name: a layer's `bin` that is a link would lead into the host.
    return not os.path.islink(f"{layer}/{top}") and (stat.S_ISREG(mode) or stat.S_ISLNK(mode))


def _home(layer: str) -> str | None:
    """Root's home by a layer's /etc/passwd; None where it has none."""
    if not _has(layer, "etc/passwd"):
        return None
    # A layer is someone else's: its passwd may be a link to the host's.
    with contextlib.suppress(OSError), open(os.open(f"{layer}/etc/passwd", os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        for row in (line.decode(errors="replace").split(":") for line in file.read(_MAX_COPIED_FILE).splitlines()):
            if len(row) > 5 and row[2] == "0":
                return row[5] or "/"
    return "/"


def identity(base: Base) -> str:
    """A digest of a base's programs, which changes when one is added, removed or replaced.

    Package managers put a file in its place by a rename, which sets its folder's time.
    """
    seen: list[str] = []
    for path in _PROGRAMS:
        top, _, rest = path.partition("/")
        # each server builds the rest of a skeleton itself
        layers = base.host_folders.get(top, ()) if base.host_folders else (f"{base.lower}/{top}",)
        with contextlib.suppress(OSError, IndexError):
            status = os.stat(f"{layers[-1]}/{rest}")
            seen.append(f"{path} {status.st_mtime_ns} {status.st_size}")
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


def build(folder: str) -> Base:
    """Make the skeleton in `folder`, on the server's own file system."""
    os.mkdir(folder, 0o755)
    for name in _FOLDERS:
        os.mkdir(f"{folder}/{name}", 0o755)
    # chmod, not the mode of mkdir, from which the umask is taken and which sets no sticky bit everywhere.
    for name in ("tmp", "var/tmp"):
        os.chmod(f"{folder}/{name}", 0o1777)
    os.chmod(f"{folder}/root", 0o700)
    os.symlink("/run", f"{folder}/var/run")
    hosts: dict[str, tuple[str, ...]] = {"usr": (_above_usr(f"{folder}-usr"), "/usr")}
    for name in _TOP:
        host = f"/{name}"
        if os.path.islink(host):
            # Debian's merged /usr; relative, so that it resolves wherever the root is mounted.
            os.symlink(os.readlink(host).lstrip("/") or "usr", f"{folder}/{name}")
        elif os.path.isdir(host):
            os.mkdir(f"{folder}/{name}", 0o755)
            hosts[name] = (host,)
    _etc(Path(folder, "etc"))
    Path(folder, "root/.bashrc").write_text(_BASHRC, encoding="utf-8")
    Path(folder, "root/.profile").write_text("[ -f ~/.bashrc ] && . ~/.bashrc\n", encoding="utf-8")
    Path(folder, "var/lib/dpkg/status").touch()
    _chown_to_root(folder)
    return Base(folder, hosts)


def _above_usr(folder: str) -> str:
    """Make what lies above the host's /usr: `pip install` needs no flag in a slot, whose packages are not apt's."""
    os.mkdir(folder, 0o755)
    for mark in Path("/usr").glob("lib/python3*/EXTERNALLY-MANAGED"):  # PEP 668
        above = Path(folder, mark.parent.relative_to("/usr"))
        above.mkdir(0o755, parents=True)
        with contextlib.suppress(OSError):
            # A whiteout, as overlay marks a removed file: a character device 0:0.
            os.mknod(above / mark.name, stat.S_IFCHR, 0)
    _chown_to_root(folder)
    return folder


def _etc(etc: Path) -> None:
    for name in _COPIED:
        (etc / name).parent.mkdir(exist_ok=True)
        _copy(f"/etc/{name}", f"{etc}/{name}")
    for name, text in _FILES.items():
        etc.joinpath(name).write_text(text, encoding="utf-8")
    # As on Debian; `useradd` and `passwd` keep what they find.
    etc.joinpath("shadow").chmod(0o640)
    if not etc.joinpath("mtab").exists():
        etc.joinpath("mtab").symlink_to(added.MTAB)


def _copy(source: str, target: str) -> None:
    """Copy what all users may read of a file or folder of the host; links stay links, private keys are left out."""
    with contextlib.suppress(OSError):
        status = os.lstat(source)
        if stat.S_ISLNK(status.st_mode):
            os.symlink(os.readlink(source), target)
        # What not everyone on the host may read is none of a slot's business, though the server may be root here.
        elif not status.st_mode & stat.S_IROTH:
            return
        elif stat.S_ISDIR(status.st_mode):
            if os.path.basename(source) != "private":
                os.mkdir(target, 0o755)
                for name in os.listdir(source):
                    _copy(f"{source}/{name}", f"{target}/{name}")
        elif stat.S_ISREG(status.st_mode) and status.st_size <= _MAX_COPIED_FILE:
            shutil.copyfile(source, target)
            os.chmod(target, stat.S_IMODE(status.st_mode) & 0o755)


def _chown_to_root(folder: str) -> None:
    """Give everything to the slot's root user."""
    for path, folders, files in os.walk(folder):
        os.chown(path, 0, 0, follow_symlinks=False)
        for name in (*folders, *files):
            os.chown(os.path.join(path, name), 0, 0, follow_symlinks=False)
