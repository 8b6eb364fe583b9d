"""Starting programs: a shell on a command line, without a copy of this process."""

from __future__ import annotations

import posix as os
from _posixsubprocess import fork_exec
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.children import children, with_room
from atropos.sandbox.programs.runner.paths import exists
from atropos.sandbox.programs.runner.state import state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ARGUMENT_LIMIT = 120_000
"""The kernel refuses an argument of 128 KiB, so that a longer command goes through a file."""


def spawn(
    argv: Sequence[str], block: list[bytes], workdir: str, stdio: tuple[int, int, int], keep: tuple[int, ...]
) -> int:
    """Start a program in a session of its own. vfork underneath: nothing of this process is copied.

    The C part of `subprocess` does it, with fewer calls to the kernel than posix_spawn. By the time vfork returns, the
    child has become the program or written its report.
    """
    kept = tuple(sorted((state.exec_report, *keep)))
    stdin, stdout, stderr = stdio
    state.expose_children()
    try:
        pid = fork_exec(
            *(argv, (argv[0].encode(),), False, kept, workdir, block, stdin, -1, -1, stdout, -1, stderr),
            # the child closes one end of the pipe that `subprocess` would have here: any descriptor does
            *(children.wake, state.exec_report, False, True, -1, None, None, None, -1, None, True),  # pyright: ignore[reportArgumentType]
        )
    finally:
        state.protect_self()
    report = os.pread(state.exec_report, 64, 0)
    if report:
        os.ftruncate(state.exec_report, 0)
        os.lseek(state.exec_report, 0, 0)
        number = int(report.split(b":")[1], 16)
        raise OSError(number, os.strerror(number))
    return pid


def shell(command: str, start: Callable[[tuple[str, ...], tuple[int, ...]], int]) -> int:
    """Start bash, or sh where there is none, on a command line of any length; `start(argv, keep)` does it."""
    script = -1
    keep: tuple[int, ...] = ()
    if len(command) > ARGUMENT_LIMIT:
        script = memory_file(command.encode("utf-8", "surrogateescape"))
        arguments, keep = (f"/dev/fd/{script}",), (script,)
    else:
        arguments = ("-c", command)
    try:
        return with_room(lambda: start(("/bin/bash", *arguments), keep))
    except FileNotFoundError:
        if exists("/bin/bash"):
            raise
        return with_room(lambda: start(("/bin/sh", *arguments), keep))
    finally:
        if script >= 0:
            os.close(script)


def memory_file(data: bytes) -> int:
    """An unlinked file in memory that holds `data`, at its start."""
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, 0)
    except OSError:
        os.close(fd)
        raise
    return fd
