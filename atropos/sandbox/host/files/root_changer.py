"""Changes the root of a running slot, from a server thread that enters the slot's mount namespace and returns."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

from atropos.sandbox.linux import syscalls


class RootChanger:
    """One thread, whose root and working directory are its own: the kernel lets no other change its mount namespace."""

    def __init__(self) -> None:
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = ThreadPoolExecutor(1, "roots", initializer=syscalls.unshare, initargs=(syscalls.CLONE_FS,))

    async def change(self, slot: int, waiting: str) -> None:
        """Make the folder `waiting`, as a slot sees it, the root of the slot.

        Args:
            slot: handle on its PID 1 (pidfd), which alone runs in it.
            waiting: where the new root is mounted.

        Raises:
            OSError: it could not be done; the slot must be stopped.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._change, slot, waiting)

    def _change(self, slot: int, waiting: str) -> None:
        syscalls.setns(slot, syscalls.CLONE_NEWNS)
        try:
            _pivot(waiting)
        finally:
            syscalls.setns(self._home, syscalls.CLONE_NEWNS)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
        os.close(self._home)


def _pivot(waiting: str) -> None:
    """In the slot: make what waits there the root of all that is in it.

    Only PID 1 is in it yet. The kernel moves its root and working directory along.
    """
    before = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(waiting)
        wanted = os.stat(".")
        for name in ("proc", "dev"):
            syscalls.mount(f"/{name}", name, None, syscalls.MS_MOVE)
        syscalls.pivot_root(".", ".")
        os.fchdir(before)
        syscalls.umount(".")
    finally:
        os.close(before)
    os.chdir("/")
    for path in ("/", "/proc/1/root/", "/proc/1/cwd/"):
        found = os.stat(path)
        if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
            raise OSError(f"{path} is not the new root")
