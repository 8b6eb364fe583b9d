"""A minimal Debian in namespaces of its own, as a machine with no more on it than the README asks for.

What debootstrap makes is kept in ~/.cache/atropos/debian, and so is what apt, pip and uv fetch there (2 GB a release);
each machine is a fresh copy. Its network is this machine's, and so are its package sources.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import ssl
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

from atropos.cgroup_paths import own_places, remove_tree
from tests.cgroups import make as make_cgroup
from tests.engines import ROOT

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
KEPT = Path(os.environ.get("ATROPOS_CACHE") or CACHE / "atropos") / "debian"
NAMED = "git,make,python3"
"""What the README asks for."""
USERS = {"root": ("/root", 0), "somebody": ("/home/somebody", 1000)}
"""Their homes and ids."""
ENTER = """
top=$1 kept=$2 user=$3 home=$4 command=$5
shift 5
for folder; do echo $$ >"$folder/cgroup.procs"; done
exec unshare --mount --pid --ipc --uts --fork --kill-child --propagation private sh -euc '
  mount --bind "$1" "$1"
  cd "$1"
  mount -t proc proc proc
  mount --rbind /sys sys
  mount --rbind /dev dev
  mount -t devpts -o newinstance,ptmxmode=666 pts dev/pts
  mount -t tmpfs -o mode=1777 shm dev/shm
  mount -t tmpfs -o mode=1777 tmp tmp
  mount -t tmpfs -o mode=755 run run
  mount --bind "$2/archives" var/cache/apt/archives
  mount --bind "$2/homes/$3" ".$4"
  pivot_root . mnt
  cd "$4"
  umount -l /mnt
  exec setpriv --reuid "$3" --regid "$3" --init-groups sh -c "$5"
' sh "$top" "$kept" "$user" "$home" "$command"
"""
REGISTRIES = re.compile(r"(PIP|UV)_(?!FIND_LINKS).*|(https?|all|no)_proxy", re.IGNORECASE)
"""Variables that say where packages come from."""
BUNDLE = "/etc/ssl/authorities.pem"
"""Whom this machine trusts."""


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    code: int
    output: str


class Machine:
    """A running system whose users have the working tree, as `git clone` brings it, in their homes.

    Args:
        top: its root file system.
        kept: what was fetched on such a machine before; the homes of its users are there.
        cgroups: in which its programs run.
    """

    def __init__(self, top: Path, kept: Path, cgroups: list[Path]) -> None:
        self._top = top
        self._kept = kept
        self._cgroups = cgroups

    def run(self, command: str, user: str = "root") -> Ended:
        """Run a shell command in a user's clone, in namespaces that end with it."""
        home, _ = USERS[user]
        env = {name: value for name, value in os.environ.items() if REGISTRIES.fullmatch(name)}
        env |= dict.fromkeys(("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"), BUNDLE)
        env |= {"HOME": home, "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        given = [self._top, self._kept, user, home, f"cd atropos && {command}", *self._cgroups]
        done = subprocess.run(
            ["sh", "-c", ENTER, "sh", *map(str, given)],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        return Ended(done.returncode, done.stdout)

    def check(self, command: str, user: str = "root") -> str:
        """As `run`; the command must succeed. Returns what it printed."""
        ended = self.run(command, user)
        assert ended.code == 0, f"{command}\n{ended.output[-5000:]}"
        return ended.output


@contextlib.contextmanager
def base(release: str) -> Generator[Path]:
    """What is kept of a release, made where it isn't yet: `root`, which nobody changes, and `archives` of apt. One at a
    time has it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = KEPT / release
    with (KEPT / f"{release}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for left in KEPT.glob(f"{release}-*"):
            shutil.rmtree(left)
        if not kept.exists():
            _make(release, kept)
        yield kept


@contextlib.contextmanager
def machine(release: str) -> Generator[Machine]:
    """A fresh machine; one of a release at a time."""
    with contextlib.ExitStack() as stack:
        kept = stack.enter_context(base(release))
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{release}-", dir=KEPT)), "root")
        subprocess.run(["cp", "-a", kept / "root", top], check=True)
        _configure(top)
        for user, (_, uid) in USERS.items():
            _clone(kept / "homes" / user, uid)
        cgroups = [place / f"debian-{os.getpid()}" for place in own_places()]
        for folder in cgroups:
            make_cgroup(folder)
            stack.callback(remove_tree, folder)
        yield Machine(top, kept, cgroups)


def _make(release: str, kept: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"{release}-", dir=KEPT) as name:
        part = Path(name, "made")
        for folder in ("archives/partial", *(f"homes/{user}" for user in USERS)):
            (part / folder).mkdir(parents=True)
        # in namespaces of their own, what it mounts and starts ends with it
        command = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "debootstrap", "--variant=minbase"]
        command += [f"--include={NAMED}", release, str(part / "root"), *_mirror()]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{shlex.join(command)}\n{(done.stdout + done.stderr)[-3000:]}"
        for user, (_, uid) in USERS.items():
            if uid:
                adding = ["chroot", part / "root", "useradd", "--create-home", "--uid", str(uid), user]
                subprocess.run(adding, check=True)
        (part / "root/var/cache/apt/archives").mkdir(exist_ok=True)
        part.rename(kept)


def _mirror() -> list[str]:
    """Where this machine has Debian's packages from; debootstrap knows a place otherwise."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian", "Label: Debian"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return found[:1]


def _configure(top: Path) -> None:
    """Let packages be fetched as on this machine."""
    asked = subprocess.run(["apt-config", "dump"], capture_output=True, text=True, check=True).stdout
    lines = [line for line in asked.splitlines() if line.startswith(("Acquire::http", "Acquire::Check-"))]
    (top / "etc/apt/apt.conf.d/99fetching").write_text("\n".join(lines) + "\n")
    trusted = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
    if trusted is not None:
        (top / BUNDLE[1:]).parent.mkdir(exist_ok=True)
        shutil.copy(trusted, top / BUNDLE[1:])
    for path in ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf"):
        if os.path.exists(path):
            shutil.copy(path, f"{top}{path}")


def _clone(home: Path, uid: int) -> None:
    """Leave in a home nothing but what was fetched, and the working tree."""
    for path in home.iterdir():
        if path.name != ".cache":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    clone = home / "atropos"
    clone.mkdir()
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout
    there = [name for name in names.split(b"\0") if name and os.path.lexists(os.path.join(os.fsencode(ROOT), name))]
    packed = subprocess.run(
        ["tar", "-c", "--null", "-T", "-"], cwd=ROOT, input=b"\0".join(there), capture_output=True, check=True
    )
    subprocess.run(["tar", "-x", "-C", clone], input=packed.stdout, check=True)
    os.chown(home, uid, uid)
    subprocess.run(["chown", "-R", f"{uid}:{uid}", clone], check=True)
