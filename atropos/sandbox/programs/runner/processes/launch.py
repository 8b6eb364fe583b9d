"""A command with what it starts with: the same for those that a call waits for and for background processes."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.children import with_room
from atropos.sandbox.programs.runner.opening import write_all
from atropos.sandbox.programs.runner.paths import make_folders, path_of
from atropos.sandbox.programs.runner.processes.spawn import spawn
from atropos.sandbox.programs.runner.start_failures import start_failure
from atropos.sandbox.programs.runner.state import WORKSPACE, block_of, state
from atropos.sandbox.programs.runner.users import identity_of

if TYPE_CHECKING:
    from atropos.sandbox.programs.runner.failures import OpFailed
    from atropos.sandbox.programs.runner.users import Identity

    CommandLine = str | tuple[str, ...]
    """One for a shell, or a program and its arguments."""

ARGUMENT_LIMIT = 120_000
"""The kernel refuses an argument of 128 KiB, so that a longer command goes through a file."""


class Launch:
    """A command that is to start, with its folder, environment and user."""

    __slots__ = ("block", "command", "identity", "program", "where")

    def __init__(self, command: CommandLine, workdir: str | None, env: dict[str, str], user: str | None) -> None:
        self.command = command
        self.program = None if isinstance(command, str) else command[0]
        """None: a shell."""
        self.identity = identity_of(user) if user else None
        login = self.identity.environment() if self.identity else {}
        # The usual call adds nothing: the block is made once for all of them.
        self.block = block_of({**state.environment, **login, **env}) if login or env else state.block
        self.where = path_of(workdir) if workdir else WORKSPACE

    def start_on_pipes(self, source: int, *, split: bool) -> tuple[int, list[int]]:
        """Start it with `source` as its input, and a pipe for what it prints; `split`: another one for its errors.

        Returns:
            Its pid, and where its output, and its errors if apart, are read.
        """
        mine: list[int] = []
        theirs: list[int] = []
        try:
            for _ in range(2 if split else 1):
                read, write = os.pipe2(os.O_CLOEXEC)
                mine.append(read)
                theirs.append(write)
                os.set_blocking(read, False)
            if self.identity:
                give([*theirs, source], self.identity)
            pid = self.start((source, theirs[0], theirs[-1]))
        except BaseException:
            for fd in mine:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        return pid, mine

    def start(self, stdio: tuple[int, int, int], terminal: str | None = None) -> int:
        """Start it on these descriptors, or on a terminal; returns its pid."""
        if isinstance(self.command, str):
            return self.start_shell(self.command, stdio, terminal)
        return self.spawn(self.command, stdio, terminal)

    def start_shell(self, command: str, stdio: tuple[int, int, int], terminal: str | None) -> int:
        """Start bash, or sh where there is none, on a command line of any length."""
        script = -1
        keep: tuple[int, ...] = ()
        data = command.encode("utf-8", "surrogateescape")
        if len(data) > ARGUMENT_LIMIT:
            script = memory_file(data)
            # By a path and not on its input, which is the command's own.
            arguments, keep = (f"/dev/fd/{script}",), (script,)
        else:
            arguments = ("-c", command)
        try:
            return self.spawn(("/bin/bash", *arguments), stdio, terminal, keep)
        # Only after a failed start is it looked at: the usual call pays nothing for these cases.
        except (FileNotFoundError, NotADirectoryError):
            if self.where == WORKSPACE and not os.path.isdir(WORKSPACE):
                make_folders(WORKSPACE)  # the slot's own programs may have removed it
            elif os.path.exists("/bin/bash"):
                raise
            shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
            return self.spawn((shell, *arguments), stdio, terminal, keep)
        finally:
            if script >= 0:
                os.close(script)

    def spawn(
        self, argv: tuple[str, ...], stdio: tuple[int, int, int], terminal: str | None, keep: tuple[int, ...] = ()
    ) -> int:
        """Start a program as it is to start."""
        return with_room(lambda: spawn(argv, self.block, self.where, stdio, keep, self.identity, terminal))

    def failure(self, error: OSError) -> OpFailed:
        """Why it could not start."""
        return start_failure(error, self.where, self.program)


def give(fds: list[int], identity: Identity) -> None:
    """Give a user the pipes and files of its program, which may open them again through /dev/stdout."""
    for fd in fds:
        try:
            if fd != state.null:
                os.fchown(fd, identity.uid, identity.gid)
        except OSError:  # a user that slots can't have is refused when the program starts
            return


def memory_file(data: bytes) -> int:
    """An unlinked file in memory that holds `data`, at its start."""
    # Not a pipe, which holds 64 KiB and would have to be fed while the program reads.
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    try:
        write_all(fd, data)
        os.lseek(fd, 0, 0)
    except OSError:
        os.close(fd)
        raise
    return fd
