"""What operations in a slot give back: programs' ends as values, files' errors as Python's own."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TypeVar

from atropos import wire

R = TypeVar("R", bound=wire.WireMessage)


@dataclass(frozen=True)
class ExecResult:
    """How a command ended: a value, whatever happened.

    Attributes:
        exit_code: -N when signal N ended it; None when it never started (`error` says why).
        output: stdout and stderr in the order written, head and tail when `truncated`; not UTF-8 is replaced.
        output_bytes: the same, as it was.
        stdout / stderr: apart, when `split` was asked for; as they were in `stdout_bytes` and `stderr_bytes`.
        dropped_bytes: how much is missing from a truncated output.
        limit: the limit that ended or truncated it, e.g. "memory"; None when none did.
        duration_s: from start to end, as the slot saw it.
        error: why it never started, e.g. a workdir that isn't there.
    """

    exit_code: int | None
    output: str
    output_bytes: bytes
    stdout: str | None = None
    stderr: str | None = None
    stdout_bytes: bytes | None = None
    stderr_bytes: bytes | None = None
    timed_out: bool = False
    cancelled: bool = False
    truncated: bool = False
    dropped_bytes: int = 0
    limit: wire.Limit | None = None
    duration_s: float = 0.0
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Whether it ran and exited with 0."""
        return self.exit_code == 0

    @classmethod
    def of(cls, result: wire.OpResult) -> ExecResult:
        """From the wire's result."""
        if isinstance(result, wire.OpError):
            text = result.message
            return cls(None, text, text.encode(), limit=result.limit, error=f"{result.error}: {text}")
        if not isinstance(result, wire.CommandResult):
            raise TypeError(f"the answer to an exec is a {result.kind}")
        output = result.output.decode(errors="replace")
        # A program that was killed has no exit code of its own, but did start.
        started = result.exit_code is not None or result.timed_out or result.cancelled
        return cls(
            exit_code=result.exit_code,
            output=output,
            output_bytes=result.output,
            stdout=None if result.stdout is None else result.stdout.decode(errors="replace"),
            stderr=None if result.stderr is None else result.stderr.decode(errors="replace"),
            stdout_bytes=result.stdout,
            stderr_bytes=result.stderr,
            timed_out=result.timed_out,
            cancelled=result.cancelled,
            truncated=result.truncated,
            dropped_bytes=result.dropped_bytes,
            limit=result.limit,
            duration_s=result.duration_s,
            error=None if started else f"not_started: {output.rstrip()}",
        )


class SlotFileError(OSError):
    """A file operation that the slot refused, with `errno` as the system would have set it.

    A missing file, a folder in the place of a file and a refused permission are Python's own subclasses as well
    (`FileNotFoundError` …). None of them is an infrastructure failure; any other `OSError` is of this machine.
    """


class SlotFileNotFoundError(SlotFileError, FileNotFoundError):
    """There is no such file in the slot."""


class SlotIsADirectoryError(SlotFileError, IsADirectoryError):
    """A folder of the slot is in the place of a file."""


class SlotNotADirectoryError(SlotFileError, NotADirectoryError):
    """A file of the slot is in the place of a folder."""


class SlotPermissionError(SlotFileError, PermissionError):
    """The slot's user may not do this."""


class SlotFileExistsError(SlotFileError, FileExistsError):
    """There is something of this name in the slot already."""


_ERRNO: dict[str, int] = {
    "not_found": errno.ENOENT,
    "is_directory": errno.EISDIR,
    "not_directory": errno.ENOTDIR,
    "not_regular": errno.EINVAL,
    "permission": errno.EACCES,
    "exists": errno.EEXIST,
    "changed": errno.ESTALE,
    "too_large": errno.EFBIG,
    "bad_path": errno.EINVAL,
    "unknown_user": errno.EINVAL,
    "no_space": errno.ENOSPC,
    "timeout": errno.ETIMEDOUT,
    "not_supported": errno.EOPNOTSUPP,
    "limit": errno.EDQUOT,
}
_KINDS: dict[int, type[SlotFileError]] = {
    errno.ENOENT: SlotFileNotFoundError,
    errno.EISDIR: SlotIsADirectoryError,
    errno.ENOTDIR: SlotNotADirectoryError,
    errno.EACCES: SlotPermissionError,
    errno.EEXIST: SlotFileExistsError,
}


def file_error(problem: wire.OpError, path: str | None = None) -> SlotFileError:
    """The exception for an operation on a file, or on a process, that failed in the slot."""
    number = _ERRNO.get(problem.error, errno.EIO)
    return _KINDS.get(number, SlotFileError)(number, problem.message or os.strerror(number), path)


def answered(result: wire.OpResult, kind: type[R], path: str | None = None) -> R:
    """The result of an operation, which is of this kind. `path`: what the error names.

    Raises:
        OSError: the slot refused.
    """
    if isinstance(result, wire.OpError):
        raise file_error(result, path)
    assert isinstance(result, kind)
    return result
