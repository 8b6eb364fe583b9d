"""The command line of bubblewrap for one slot: a pure function, so that what a slot sees stands in one place."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from atropos.sandbox.host.files.skeleton import Base
from atropos.sandbox.host.files.volumes import GATE, NEXT, Volume
from atropos.sandbox.programs.spawner import SECCOMP_FD, STATUS_FD
from atropos.slot_python import INSIDE

HOSTNAME = "atropos"
CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "SETUID",
    "SETGID",
    "KILL",
    "NET_BIND_SERVICE",
    "SYS_CHROOT",
    "SETPCAP",
    "SETFCAP",
)
"""Those of a usual container, inside the slot's own user namespace; outside of it they mean nothing."""


@functools.cache
def _filtered() -> bool:
    """Whether a seccomp filter lies on this process, as a container's does."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return any(line.split() == ["Seccomp:", "2"] for line in file)


_PID_1_FILES = ("oom_score_adj", "oom_adj", "task/1/oom_score_adj", "task/1/oom_adj")


def command(bwrap: str, volume: Volume, base: Base, empty: str, preload: str, runner: Sequence[str]) -> list[str]:
    """Arguments that start `runner` as PID 1 on a volume's mounts. Bubblewrap runs as root of the slot's namespace.

    Args:
        bwrap: the program.
        volume: the slot's mounts.
        base: which of the host's folders it sees.
        empty: an empty file.
        preload: what covers /etc/ld.so.preload.
        runner: the command of PID 1.

    The caller has made the namespaces of the network and of System V objects already.
    """
    capabilities = [part for name in CAPABILITIES for part in ("--cap-add", f"CAP_{name}")]
    # A container's seccomp profile refuses to set one; ours bear the name already.
    hostname = [] if _filtered() else ["--hostname", HOSTNAME]
    # root of the slot owns PID 1's files; these would make it the first to go when memory runs out
    covered = [part for name in _PID_1_FILES for part in ("--ro-bind", empty, f"/proc/1/{name}")]
    hosts = [part for name in base.host_folders for part in ("--ro-bind", f"{volume.folder}/host-{name}", f"/{name}")]
    return [
        bwrap,
        *("--unshare-pid", "--unshare-uts", "--unshare-cgroup", *hostname),
        *("--die-with-parent", "--new-session", "--as-pid-1"),
        *("--cap-drop", "ALL", *capabilities),
        *("--clearenv", "--setenv", "LC_ALL", "C"),
        *("--bind", volume.root, "/", *hosts),
        *("--ro-bind", f"{volume.folder}/runtime", INSIDE),
        # through it a slot that runs already gets the root of a snapshot; to its programs, it is an empty folder
        *("--ro-bind", f"{volume.folder}/{GATE}", f"{INSIDE}/{NEXT}"),
        # even a foreign loader reads this file: it would run code of a snapshot's maker in PID 1
        *("--ro-bind", preload, "/etc/ld.so.preload"),
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", *covered),
        # a program that made itself dear to the memory killer would have it take PID 1 instead
        *("--remount-ro", "/proc"),
        *("--dev", "/dev", "--dev-bind", f"{volume.folder}/pts", "/dev/pts"),
        *("--bind", f"{volume.data}/shm", "/dev/shm", "--remount-ro", "/dev"),
        *("--chdir", "/"),
        *("--seccomp", str(SECCOMP_FD), "--json-status-fd", str(STATUS_FD)),
        "--",
        *runner,
    ]
