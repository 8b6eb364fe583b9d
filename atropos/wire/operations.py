"""Operations of calls. What the server must know of each is declared with it; its handler is the slot's runner's."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from atropos.wire.base import MAX_FILE_BYTES, MAX_HOSTS, ChosenId, WireMessage

__all__ = [
    "CommandOrArgv",
    "Exec",
    "Operation",
    "PathOperation",
    "ProcKill",
    "ProcList",
    "ProcRead",
    "ProcStart",
    "ProcWrite",
    "Quiesce",
    "ReadFile",
    "ReadStream",
    "Search",
    "SetNetwork",
    "SlotOperation",
    "StartOperation",
    "Tar",
    "Untar",
    "WriteFile",
    "WriteStream",
]

StreamId = Annotated[ChosenId, Field(description="unique in the lease")]
User = Annotated[str | None, Field(max_length=300, description="name or uid[:group or gid]; None: root")]
CommandOrArgv = str | Annotated[tuple[str, ...], Field(min_length=1)]
"""A shell command line (`/bin/bash -c`, or sh without bash), or a program and its arguments without a shell."""
FILE_DEADLINE_S = 30.0
"""Time limit of an operation that doesn't say its own."""
LaneName = Literal["main", "side", "concurrent"]
"""One after the other; beside that, as for a background process; each at once. See `sandbox.server.calls.lanes`."""


class SlotOperation(WireMessage):
    """Base of operations.

    Attributes:
        answer: kind of its result; a failure is an `op_error`.
        withheld: fields that the slot's runner doesn't get.
    """

    answer: ClassVar[str] = "done"
    withheld: ClassVar[frozenset[str]] = frozenset({"op"})

    @property
    def lane(self) -> LaneName:
        """Which calls of its lease it waits for."""
        return "main"

    @property
    def waits(self) -> bool:
        """Whether it waits for something in the slot, so that others of its lane need not wait for it."""
        return False

    def time_limit_s(self, wall_s: float) -> float:  # noqa: ARG002 (others' limit)
        """The time that it may take, in seconds; `wall_s`: that of a command which doesn't say."""
        return FILE_DEADLINE_S


def _check_env(env: dict[str, str]) -> dict[str, str]:
    for name, value in env.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise ValueError(f"{name!r:.80}: a variable has a name, no '=' in it, and no zero byte in name or value")
    return env


class StartOperation(SlotOperation):
    """Base of operations that start a program."""

    command: CommandOrArgv
    workdir: str | None = Field(default=None, description="None: /workspace")
    env: Annotated[dict[str, str], AfterValidator(_check_env)] = Field(default_factory=dict)
    user: User = None
    concurrent: bool = Field(default=False, description="run now; neither wait for other calls nor keep them waiting")

    @property
    def lane(self) -> LaneName:
        """As it asks for."""
        return "concurrent" if self.concurrent else "main"


class PathOperation(SlotOperation):
    """Base of operations on a file or folder."""

    path: str


class StreamOperation(PathOperation):
    """Base of operations whose bytes travel beside the call; they end when no bytes move."""

    withheld = frozenset({"op", "stream"})
    stream: StreamId

    def time_limit_s(self, wall_s: float) -> float:  # noqa: ARG002
        """Endless."""
        return math.inf


class SideOperation(SlotOperation):
    """Base of operations that wait for no command."""

    @property
    def lane(self) -> LaneName:
        """That of calls which wait for no command."""
        return "side"


class Exec(StartOperation):
    """Run a command in its own session and wait for it: after the calls before it, or beside them if `concurrent`."""

    answer = "exec_result"
    withheld = frozenset({"op", "clean_env", "concurrent"})
    op: Literal["exec"] = "exec"
    timeout_s: float | None = Field(default=None, gt=0, description="None: the server's wall-time limit")
    clean_env: bool = Field(default=False, description="start from the slot's first environment and PATH alone")
    stdin: bytes | None = None
    split: bool = Field(default=False, description="stdout and stderr apart; combined by arrival")
    max_output_bytes: int | None = Field(default=None, gt=0)

    def time_limit_s(self, wall_s: float) -> float:
        """Its own, within that of all commands."""
        return min(self.timeout_s or wall_s, wall_s)


class ReadFile(PathOperation):
    """Read a file's bytes, from `offset`, at most `max_bytes`."""

    answer = "file_result"
    op: Literal["read_file"] = "read_file"
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(default=MAX_FILE_BYTES, gt=0, le=MAX_FILE_BYTES)
    user: User = None


class WriteFile(PathOperation):
    """Write a file and create its folders; replaced atomically unless `append`.

    `if_sha256`: only if it is unchanged.
    """

    op: Literal["write_file"] = "write_file"
    data: bytes
    mode: int | None = Field(default=None, ge=0, le=0o7777)
    append: bool = False
    if_sha256: str | None = Field(
        default=None, description="refuse with error 'changed' when the file has another hash"
    )
    user: str | None = Field(
        default=None, max_length=300, description="name or uid[:group or gid], who writes it in place; None: root"
    )


class Search(PathOperation):
    """Search file contents by regular expression, or list files by name when `pattern` is empty."""

    answer = "search_result"
    op: Literal["search"] = "search"
    pattern: str
    path: str = "."
    glob: str | None = None
    max_matches: int = Field(default=200, gt=0, le=10_000)
    context: int = Field(default=0, ge=0, le=20)
    ignore_case: bool = False


class Untar(PathOperation):
    """Unpack an uncompressed tar archive below `path`, which is created if needed."""

    op: Literal["untar"] = "untar"
    data: bytes
    owners: bool = Field(default=False, description="give members the archive's uid and gid; else root's")


class Tar(PathOperation):
    """Pack a file or folder as an uncompressed tar archive; one above `max_bytes` is refused as `too_large`."""

    answer = "file_result"
    op: Literal["tar"] = "tar"
    max_bytes: int = Field(default=MAX_FILE_BYTES, gt=0, le=MAX_FILE_BYTES)


class WriteStream(StreamOperation):
    """Write a file, or unpack a tar archive below a folder, from `PUT /v1/leases/{id}/streams/{stream}`.

    A file is replaced atomically once it is complete; a stream that breaks off leaves the old one.
    """

    op: Literal["write_stream"] = "write_stream"
    tar: bool = False
    mode: int | None = Field(default=None, ge=0, le=0o7777)


class ReadStream(StreamOperation):
    """Send a file from `offset` on, or a file or folder as a tar archive, to `GET /v1/leases/{id}/streams/{stream}`.

    `Done.count` is the number of bytes sent; more than `max_bytes` are refused as `too_large`.
    """

    op: Literal["read_stream"] = "read_stream"
    tar: bool = False
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(gt=0)


class Quiesce(SlotOperation):
    """Kill every process in the slot but the runner; files stay."""

    op: Literal["quiesce"] = "quiesce"


class SetNetwork(SideOperation):
    """Change which hosts the lease's programs reach, within the server's policy; open connections are closed.

    `hosts`: names, `*.suffixes`, addresses and networks, each with an optional `:PORT`; empty: no network; None: the
    server's policy alone, as at the start of the lease.
    """

    op: Literal["set_network"] = "set_network"
    hosts: tuple[Annotated[str, Field(max_length=270)], ...] | None = Field(default=None, max_length=MAX_HOSTS)


class ProcStart(StartOperation):
    """Start a background process with a rolling buffer of its output; with `pty`, on a terminal of its own."""

    answer = "proc_state"
    withheld = frozenset({"op", "concurrent"})
    op: Literal["proc_start"] = "proc_start"
    pty: bool = False
    split: bool = Field(default=False, description="keep stderr apart, to be read by `ProcState.errors`")
    hold: bool = Field(
        default=False,
        description="keep it until it is read to its end; on pipes block it while half of the buffer is unread",
    )
    rows: int = Field(default=24, ge=1, le=1000)
    cols: int = Field(default=80, ge=1, le=1000)
    buffer_bytes: int = Field(default=200_000, ge=1024, le=4_000_000)


class ProcRead(SideOperation):
    """State and output of a background process.

    Waits up to `wait_s` until it exits, or for output beyond `offset` (`until="output"`), or until no output came for
    `quiet_s`. Offsets count all bytes that the process has written.
    """

    answer = "proc_state"
    op: Literal["proc_read"] = "proc_read"
    id: str
    offset: int = Field(default=0, ge=0)
    max_bytes: int = Field(default=200_000, gt=0, le=4_000_000)
    wait_s: float = Field(default=0, ge=0)
    until: Literal["exit", "output", "quiet"] = "exit"
    quiet_s: float = Field(default=0.3, gt=0)

    @property
    def waits(self) -> bool:
        """Whether it waits for the process."""
        return self.wait_s > 0

    def time_limit_s(self, wall_s: float) -> float:
        """What it waits, within the limit of commands."""
        return min(self.wait_s, wall_s)


class ProcWrite(SideOperation):
    """Write to a background process's stdin or terminal; optionally close it, or change the window size."""

    op: Literal["proc_write"] = "proc_write"
    id: str
    data: bytes = b""
    eof: bool = False
    rows: int | None = Field(default=None, ge=1, le=1000)
    cols: int | None = Field(default=None, ge=1, le=1000)


class ProcKill(SideOperation):
    """Send a signal to a background process's whole session; `TERM` is followed by `KILL` after a grace time."""

    answer = "proc_state"
    op: Literal["proc_kill"] = "proc_kill"
    id: str
    signal: Literal["TERM", "KILL", "INT", "HUP", "QUIT", "USR1", "USR2"] = "TERM"


class ProcList(SideOperation):
    """List all background processes of the lease, ended ones included."""

    answer = "proc_listing"
    op: Literal["proc_list"] = "proc_list"


Operation = Annotated[
    Exec
    | ReadFile
    | WriteFile
    | Search
    | Untar
    | Tar
    | WriteStream
    | ReadStream
    | Quiesce
    | SetNetwork
    | ProcStart
    | ProcRead
    | ProcWrite
    | ProcKill
    | ProcList,
    Field(discriminator="op"),
]
