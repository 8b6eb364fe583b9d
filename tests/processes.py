"""Processes of our own: what still runs below this one."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import socket
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.waiting import SLOWNESS


def adopt_orphans() -> None:
    """Whatever a process of ours leaves behind becomes this process's child, and is counted (PR_SET_CHILD_SUBREAPER)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


async def be_stopped(seconds: float) -> None:
    """Have this process stopped and continued, as `kill -STOP`, a debugger or a suspended virtual machine does."""
    pid = os.getpid()
    script = f"kill -STOP {pid}; sleep {seconds}; kill -CONT {pid}"
    await (await asyncio.create_subprocess_exec("sh", "-c", script)).wait()


@contextlib.contextmanager
def _limited(limit: int, most: int) -> Iterator[None]:
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def files_end_at(size: int) -> contextlib.AbstractContextManager[None]:
    """For all that this process writes meanwhile, as on a disk that is nearly full."""
    return _limited(resource.RLIMIT_FSIZE, size)


def out_of_descriptors() -> contextlib.AbstractContextManager[None]:
    """This process opens nothing more meanwhile."""
    return _limited(resource.RLIMIT_NOFILE, 3)


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A port for a program that ends and comes back at it: the kernel gives it to nobody else meanwhile."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the program's own socket may then listen beside it
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def descendants(root: int | None = None, but: Collection[int] = ()) -> dict[int, str]:
    """The living processes below one, with their command lines; zombies and what is below `but` are not among them."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (found := _state_and_parent(int(entry))) is not None and found[0] not in "ZX":
            children.setdefault(found[1], []).append(int(entry))
    lines: dict[int, str] = {}
    todo = [root or os.getpid()]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if pid not in but]
        todo += below
        for pid in below:
            with contextlib.suppress(OSError):
                lines[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return lines


def first_processes(root: int | None = None, namespace: str | None = None) -> list[int]:
    """PID 1 of each slot below one, or of the one whose programs see this PID namespace.

    A command of a slot has its name too, until it runs a program.
    """
    found = []
    for pid, line in descendants(root).items():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if (
                "atropos-runner" in line
                and re.search(r"^NSpid:.*\t1$", status, re.MULTILINE)
                and namespace in (None, os.readlink(f"/proc/{pid}/ns/pid"))
            ):
                found.append(pid)
    return found


def running(command: str, root: int | None = None) -> int:
    """How many living processes below one have `command` in their command line."""
    return sum(command in line for line in descendants(root).values())


def parent_of(pid: int) -> int | None:
    """The process above a living one; None once it is gone."""
    found = _state_and_parent(pid)
    return None if found is None else found[1]


def alive(pids: Collection[int]) -> set[int]:
    """Those that are neither gone nor zombies that only wait for a reaper."""
    return {pid for pid in pids if (found := _state_and_parent(pid)) is not None and found[0] not in "ZX"}


def _state_and_parent(pid: int) -> tuple[str, int] | None:
    # asked of every process of the machine many times a second
    try:
        fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return None
    try:
        state, parent = os.read(fd, 4096).rpartition(b")")[2].split(None, 2)[:2]
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
    return state.decode(), int(parent)


async def gone_within(seconds: float, root: int | None = None, but: Collection[int] = ()) -> list[str]:
    """Wait until no process is left below `root` (besides `but`); answers those that are."""
    deadline = asyncio.get_running_loop().time() + seconds * SLOWNESS
    while left := descendants(root, but):
        if asyncio.get_running_loop().time() > deadline:
            return [f"{pid}: {line}" for pid, line in left.items()]
        await asyncio.sleep(0.05)
    return []
