"""Gives a running slot another root. One process for each change, forked before it is needed by the spawner.

A process that has entered a slot's user namespace can't leave it, so each changes one root and ends. Standard library
only, as the spawner that it is forked from.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import Any

from atropos.sandbox.linux import syscalls

_MAX_REQUEST = 1 << 12


def serve_one(requests: socket.socket, parent: int) -> None:
    """In the fork: wait for a request, which may go to any waiting process; answer it; end.

    A request is JSON, with two descriptors: the slot's PID 1 (pidfd) and a socket for the answer. That is `b"done"`, or
    why there is no other root.
    """
    try:
        signal.set_wakeup_fd(-1)
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        data, fds, _, _ = socket.recv_fds(requests, _MAX_REQUEST, 2)
        if not data:
            return
        slot, answer = fds
        request: dict[str, Any] = json.loads(data)
        try:
            _change_root(slot, request["creator"], request["root"])
            said = b"done"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}".encode()
        os.write(answer, said)
    finally:
        os._exit(0)


def _change_root(slot: int, creator: int | None, waiting: str) -> None:
    """Enter a slot's user and mount namespaces and make what waits there the root of all that is in it.

    Only the PID 1 that bubblewrap started is in it yet. The kernel moves its root and working directory along; it stays
    without any capability to mount, before and after.
    """
    if creator is not None:  # the maker of a user namespace has every capability in it, and this one needs no other
        os.setresgid(creator, creator, creator)
        os.setresuid(creator, creator, creator)
    syscalls.setns(slot, syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    before = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    os.chdir(waiting)
    wanted = os.stat(".")
    for name in ("proc", "dev"):
        syscalls.mount(f"/{name}", name, None, syscalls.MS_MOVE)
    syscalls.pivot_root(".", ".")
    os.fchdir(before)
    syscalls.umount(".")
    os.chdir("/")
    for path in ("/", "/proc/1/root/", "/proc/1/cwd/"):
        found = os.stat(path)
        if (found.st_dev, found.st_ino) != (wanted.st_dev, wanted.st_ino):
            raise OSError(f"{path} is not the new root")
