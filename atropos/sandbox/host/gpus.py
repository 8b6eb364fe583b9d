"""The GPUs of one slot: what `cdi` says of each is mounted in it, and taken out of what is left of it."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos.images import stack
from atropos.sandbox.host.files.root_changer import RootChanger
from atropos.sandbox.linux import sockets
from atropos.wire import Exec

if TYPE_CHECKING:
    from atropos.sandbox.host.cdi import Device

_LIBRARIES = "/etc/ld.so.conf.d/00-atropos-gpus.conf"
# POSIX sh, which every base has. -n: a link to a folder is replaced, not followed.
_LINK = 'mkdir -p "${2%/*}"; [ "$(readlink "$2")" = "$1" ] || [ ! -w "${2%/*}" ] || ln -sfn "$1" "$2"'
_CACHE = (
    f'mkdir -p /etc/ld.so.conf.d; printf "%s\\n" "$@" > {_LIBRARIES}; '
    "PATH=$PATH:/sbin; ! command -v ldconfig || ldconfig"
)


class SlotGpus:
    """The GPUs of a slot.

    Attributes:
        env: variables of its programs.
    """

    def __init__(self, devices: Iterable[Device]) -> None:
        self._devices = tuple(devices)
        self.env = {name: value for device in self._devices for name, value in device.env}
        self._links = dict.fromkeys(link for device in self._devices for link in device.links)
        self._mount_points: list[str] = []

    async def mount(self, roots: RootChanger, slot: int) -> None:
        """Mount their nodes and files in a slot (pidfd of its PID 1), and make their links in /dev.

        Raises:
            OSError: it could not be done; the slot must be stopped.
        """
        # Devices of one kind share files; each is mounted once.
        binds = {bind.target: bind for device in self._devices for bind in device.binds}
        in_dev = [link for link in self._links if _in_dev(link[1])]
        self._mount_points = await roots.bind(slot, [binds[target] for target in sorted(binds)], in_dev)

    def make_links(self) -> Exec:
        """The command that makes other links and the cache of libraries, by the slot's own programs, as its root.

        A root that is the host's /usr can't be written, and has them.
        """
        lines = [f"set -- {shlex.join(link)}; {_LINK}" for link in self._links if not _in_dev(link[1])]
        if folders := dict.fromkeys(folder for device in self._devices for folder in device.libraries):
            lines.append(f"set -- {shlex.join(folders)}; {_CACHE}")
        return Exec(command="\n".join(lines) or ":", workdir="/", user="0", timeout_s=60)

    def leave(self, upper: str) -> None:
        """After the slot's processes have ended: close what they sent and nobody received, and remove mount points.

        Args:
            upper: the upper folder of the slot's root, which may become a snapshot.
        """
        # A descriptor in a message that nobody received keeps its device open until the kernel collects it.
        sockets.collect_garbage()
        mount_points, self._mount_points = self._mount_points, []
        # Deepest first: a folder can be removed once it is empty.
        for path in reversed(mount_points):
            if _in_dev(path):
                continue
            folder, name = os.path.split(path)
            with contextlib.ExitStack() as opened, contextlib.suppress(OSError):
                for part in stack.find([upper], folder, opened).parts:
                    status = os.stat(name, dir_fd=part.fd, follow_symlinks=False)
                    # Only what is still as it was made: empty files and folders. What a program put there is the
                    # slot's.
                    if stat.S_ISDIR(status.st_mode):
                        os.rmdir(name, dir_fd=part.fd)
                    elif stat.S_ISREG(status.st_mode) and not status.st_size:
                        os.unlink(name, dir_fd=part.fd)


def _in_dev(path: str) -> bool:
    """Whether it is in /dev, which is a slot's own, and which its programs can't write."""
    return path.startswith("/dev/")
