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

    async def change(self, slot: int, new_root: str) -> None:
        """Make the folder `new_root`, as a slot sees it, the root of the slot.

        Args:
            slot: pidfd of its PID 1, the only process in it.
            new_root: where the new root is mounted.

        Raises:
            OSError: it could not be done; the slot must be stopped.
        """
        await asyncio.get_running_loop().run_in_executor(self._thread, self._change, slot, new_root)

    def _change(self, slot: int, new_root: str) -> None:
        syscalls.setns(slot, syscalls.CLONE_NEWNS)
        try:
            _pivot(new_root)
        finally:
            syscalls.setns(self._home, syscalls.CLONE_NEWNS)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
        os.close(self._home)


def _pivot(new_root: str) -> None:
    """In the slot's mount namespace, make `new_root` the root.

    The kernel moves the root and working directory of PID 1 along.
    """
    before = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.chdir(new_root)
        wanted = os.stat(".")
        for name in ("proc", "dev", "sys"):
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
