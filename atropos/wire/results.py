"""Results of operations."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from atropos.wire.base import DEFERRED, WireMessage
from atropos.wire.limits import Limit

__all__ = [
    "OP_RESULT",
    "CommandResult",
    "Done",
    "FileResult",
    "Match",
    "OpError",
    "OpResult",
    "ProcListing",
    "ProcState",
    "SearchResult",
    "outcome",
]


class CommandResult(WireMessage):
    """How a command ended. `exit_code` is -N when signal N ended it; None only when it never started."""

    kind: Literal["exec_result"] = "exec_result"
    exit_code: int | None
    output: bytes = Field(description="stdout and stderr in the order written; head and tail when truncated")
    stdout: bytes | None = None
    stderr: bytes | None = None
    timed_out: bool = False
    cancelled: bool = False
    truncated: bool = False
    dropped_bytes: int = Field(default=0, ge=0)
    limit: Limit | None = None
    duration_s: float = Field(ge=0, allow_inf_nan=False)


class FileResult(WireMessage):
    """A file's bytes from the requested offset, and its size."""

    kind: Literal["file_result"] = "file_result"
    data: bytes
    size: int
    mode: int
    sha256: str | None = Field(default=None, description="of the whole file, when it was read whole")


class Done(WireMessage):
    """An operation without another result succeeded; `count` is its number of bytes, files or processes."""

    kind: Literal["done"] = "done"
    count: int = 0


class Match(WireMessage):
    """One matching line (or, for a search by name, a file: line 0)."""

    path: str
    line: int
    text: str
    context: bool = False


class SearchResult(WireMessage):
    """Matches by path and line; `truncated` when a bound ended the search."""

    kind: Literal["search_result"] = "search_result"
    matches: tuple[Match, ...]
    files: int
    truncated: bool = False


class ProcState(WireMessage):
    """A background process: output from `offset` on, and how it ended, if it did."""

    kind: Literal["proc_state"] = "proc_state"
    id: str
    command: str
    pid: int
    running: bool
    exit_code: int | None = None
    output: bytes = b""
    offset: int = Field(default=0, description="of the first byte in `output`")
    total_bytes: int = Field(default=0, description="written by the process so far")
    dropped_bytes: int = Field(default=0, description="that the rolling buffer dropped before `offset`")
    uptime_s: float = Field(default=0, allow_inf_nan=False)
    pty: bool = False
    errors: str | None = Field(default=None, description="id under which `ProcRead` reads its stderr, kept apart")
    limit: Limit | None = None


class ProcListing(WireMessage):
    """The lease's background processes, oldest first, without output."""

    kind: Literal["proc_listing"] = "proc_listing"
    processes: tuple[ProcState, ...]
    limits: tuple[Limit, ...] = Field(
        default=(), description="that ended programs of the lease up to now, these or others, or are used up"
    )


class OpError(WireMessage):
    """The operation failed inside the slot: a value that the model may read, no fault of the infrastructure."""

    kind: Literal["op_error"] = "op_error"
    error: Literal[
        "not_found",
        "is_directory",
        "not_directory",
        "not_regular",
        "permission",
        "exists",
        "changed",
        "too_large",
        "bad_pattern",
        "bad_path",
        "no_space",
        "timeout",
        "unknown_process",
        "unknown_user",
        "not_supported",
        "limit",
        "io",
    ]
    message: str
    limit: Limit | None = None


OpResult = Annotated[
    CommandResult | FileResult | Done | SearchResult | ProcState | ProcListing | OpError, Field(discriminator="kind")
]
OP_RESULT: TypeAdapter[OpResult] = TypeAdapter(OpResult, config=DEFERRED)


def outcome(result: OpResult) -> str:
    """A result in one word, for metrics: ok, failed (exit code), timeout, cancelled, limit, or error."""
    if isinstance(result, OpError):
        return "error"
    if not isinstance(result, CommandResult):
        return "ok"
    if result.timed_out or result.cancelled:
        return "timeout" if result.timed_out else "cancelled"
    if result.limit is not None:
        return "limit"
    return "ok" if result.exit_code == 0 else "failed"
