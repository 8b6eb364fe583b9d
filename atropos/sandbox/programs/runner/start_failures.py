"""Why a command could not be started, explained for the model."""

from __future__ import annotations

import errno
import os
from stat import S_ISREG

from atropos.sandbox.programs.runner.failures import ERROR_OF_ERRNO, OpFailed, limit_of_errno, text

NO_SUCH_ID = "slots have no such user: numbers end at 65,535, and a server that an ordinary user started has root alone"
SHELLS = ("/bin/bash", "/bin/sh")
REASON_OF_LIMIT = {"pids": "the slot's limit of processes is reached", "memory": "the slot's memory is used up"}


class ShellHeld(BlockingIOError):
    """A program holds a lease (F_SETLEASE) on the file that was to be executed, or stopped the start."""


class UserRefused(OSError):
    """The kernel doesn't let a program run as this user."""


def start_failure(error: OSError, where: str, program: str | None) -> OpFailed:
    """The answer for a command that could not start in the folder `where`; `program` None: it was a shell."""
    if isinstance(error, ShellHeld):
        holder = "stops others as they start, or holds a lease (F_SETLEASE) on the shell"
        return OpFailed("io", f"a program that runs in this slot {holder}; end it first")
    if isinstance(error, UserRefused):
        return OpFailed("not_supported", NO_SUCH_ID)
    number = error.errno or 0
    if number in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EEXIST) and not os.path.isdir(where):
        return OpFailed(
            ERROR_OF_ERRNO[number],
            f"the working directory does not exist or can't be entered: {where} (removed or replaced in this slot?)",
        )
    limit = limit_of_errno(number)
    if program is not None:
        return OpFailed(ERROR_OF_ERRNO.get(number, "io"), f"{os.strerror(number)}: {text(program)}", limit)
    reason = REASON_OF_LIMIT.get(limit or "") or shell_failure(number)
    return OpFailed(ERROR_OF_ERRNO.get(number, "io"), reason, limit)


def shell_failure(number: int) -> str:
    """What is wrong with the shell where the kernel refused to execute it with this error."""
    if number not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.ENOEXEC, errno.ELOOP, errno.ETXTBSY):
        return os.strerror(number)
    reason = "neither /bin/bash nor /bin/sh exists in this slot (were they removed?)"
    for path in SHELLS:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if not S_ISREG(status.st_mode):
            reason = f"the shell {path} is not a file any more in this slot"
        elif not status.st_mode & 0o111:
            reason = f"the shell {path} is not executable in this slot (mode {status.st_mode & 0o7777:o})"
        elif number == errno.ENOEXEC:
            reason = f"the shell {path} is not a program any more in this slot"
        elif number == errno.ETXTBSY:
            reason = f"the shell {path} is being written to by a program of this slot"
        else:
            reason = f"the shell {path} exists in this slot, but the loader that it names is missing or not executable"
        break
    return f"{reason}; operations on files still work"
