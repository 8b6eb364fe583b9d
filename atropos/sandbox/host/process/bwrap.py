"""The command line of bubblewrap for one slot: a pure function, so that what a slot sees stands in one place."""

from __future__ import annotations

from atropos.sandbox.host.files.skeleton import Base
from atropos.sandbox.host.files.volumes import GATE, NEXT, Volume
from atropos.sandbox.host.process.runtime import PAUSE
from atropos.slot_python import INSIDE


def command(bwrap: str, volume: Volume, base: Base, preload: str) -> list[str]:
    """Arguments that make the root of a volume's mounts, in a mount namespace where a program then waits.

    Args:
        bwrap: the program.
        volume: the slot's mounts.
        base: which of the host's folders it sees.
        preload: what covers /etc/ld.so.preload.

    Whoever runs it is root of the slot's user namespace, has forked the first process of its PID namespace, and adds
    the descriptors of that namespace and of bubblewrap's reports.
    """
    hosts = [part for name in base.host_folders for part in ("--ro-bind", f"{volume.folder}/host-{name}", f"/{name}")]
    return [
        bwrap,  # not with --die-with-parent: with --pidns it may kill its own child, whose first parent ends at once
        *("--bind", volume.root, "/", *hosts),
        *("--ro-bind", f"{volume.folder}/runtime", INSIDE),
        # through it a slot that runs already gets the root of a snapshot; to its programs, it is an empty folder
        *("--ro-bind", f"{volume.folder}/{GATE}", f"{INSIDE}/{NEXT}"),
        # even a foreign loader reads this file: it would run code of a snapshot's maker in the private Python
        *("--ro-bind", preload, "/etc/ld.so.preload"),
        *("--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"),
        # a program that made itself dear to the memory killer would have it take PID 1 instead
        *("--remount-ro", "/proc"),
        *("--dir", "/sys"),  # PID 1 mounts it
        *("--dev", "/dev", "--dev-bind", f"{volume.folder}/pts", "/dev/pts"),
        *("--bind", f"{volume.data}/shm", "/dev/shm", "--remount-ro", "/dev"),
        *("--", f"{INSIDE}/{PAUSE}"),
    ]
