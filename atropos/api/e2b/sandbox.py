"""One sandbox: a slot on lease, and the commands and watchers that clients keep in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Literal

from atropos.aio import Tasks
from atropos.api.accounts.account import Account, Latest
from atropos.api.e2b import messages
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.recipes import SandboxStart
from atropos.slots.slot import Slot
from atropos.slots.slot.ports import PortForward
from atropos.slots.slot.processes import Process
from atropos.slots.slot.snapshots import Snapshot
from atropos.wire import SlotLimits

ENVD_VERSION = "0.6.0"
"""The latest version of E2B's daemon that is supported in full: later ones store metadata of files."""
_FIRST = datetime.min.replace(tzinfo=UTC).timestamp()
_LAST = datetime(9999, 12, 31, tzinfo=UTC).timestamp()
MAX_USER_CHARS = 300
"""Longest name of a user that a slot is asked for."""
Listing = dict[str, tuple[int, str, int, int, float]]
"""By path: inode, kind, mode, size, time of the last change."""


@dataclass(eq=False)
class E2bCommand:
    """A process, and what it was started as.

    Attributes:
        followers: streams that read its output.
        draining: reads and discards the output while there are none, so that the process doesn't block.
        killing: kills it at its deadline.
    """

    process: Process
    start: messages.Start
    followers: int = 0
    draining: asyncio.Task[None] | None = None
    killing: asyncio.Task[None] | None = None

    @property
    def pty(self) -> bool:
        """Whether it is on a terminal."""
        return self.start.pty is not None

    def info(self) -> Json:
        """As `List` tells it."""
        tag = {} if self.start.tag is None else {"tag": self.start.tag}
        return {"pid": self.process.pid, "config": self.start.process.model_dump(exclude_none=True), **tag}


@dataclass(eq=False)
class Watcher:
    """A watched folder with its last listing; None: not listed yet."""

    path: str
    depth: int
    user: str | None
    listing: Listing | None = None


@dataclass(eq=False)
class E2bSandbox:
    """A slot on lease to clients of the E2B API; while it is paused, a snapshot of it.

    Attributes:
        slot: while it is paused, the one that it had.
        hosts: what it reaches of what the pool allows; None: all of it.
        account: whose it is.
        start: how it started, and starts again when it resumes.
        traffic_token: what requests to its servers have to carry; None: nothing.
        end: on the monotonic clock, as `began`: a step of the system's clock ends none and prolongs none.
        on_timeout: what becomes of it at its end.
        auto_resume: whether a request resumes it while it is paused.
        frozen: its snapshot, since it is paused.
    """

    id: str
    template: str
    slot: Slot
    metadata: Mapping[str, str]
    hosts: Sequence[str] | None
    end: float
    account: Account
    start: SandboxStart
    on_timeout: Literal["kill", "pause"] = "kill"
    auto_resume: bool = False
    traffic_token: str | None = None
    frozen: asyncio.Task[Snapshot] | None = None
    started: float = field(default_factory=lambda: round(time.time(), 6))  # as clients see it
    began: float = field(default_factory=time.monotonic)
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is resumed or ended."""
    # in its slot: none in a copy of this one, which has another
    commands: dict[int, E2bCommand] = field(init=False, default_factory=dict[int, E2bCommand])
    latest: Latest = field(init=False, default_factory=Latest)
    watchers: dict[str, Watcher] = field(init=False, default_factory=dict[str, Watcher])
    tasks: Tasks = field(init=False, default_factory=lambda: Tasks("E2B sandbox"))
    """What goes on for clients: it ends with the sandbox at the latest."""
    forwards: dict[int, PortForward] = field(init=False, default_factory=dict[int, PortForward])
    """Of its servers' ports; they end with the slot."""
    forwarding: asyncio.Lock = field(init=False, default_factory=asyncio.Lock)

    def forget(self, command: E2bCommand, how: str | None = None) -> None:
        """A command has ended, by itself or as `how` says."""
        if self.commands.pop(command.process.pid, None) is not None:
            self.account.note("command", self.id, pid=command.process.pid, outcome=how or command.process.exit_code)
        if command.killing is not None:
            command.killing.cancel()

    def stop(self, how: str) -> None:
        """End what goes on in it, since its slot is given back: its commands too have ended as `how` says."""
        self.tasks.stop()
        for command in list(self.commands.values()):
            self.forget(command, how)

    @property
    def state(self) -> Literal["running", "paused"]:
        """As clients filter by it."""
        return "running" if self.frozen is None else "paused"

    @property
    def place(self) -> str:
        """Where it stands in a list: these strings are in the order of the starts."""
        return f"{self.started:.6f}-{self.id}"

    def info(self, limits: SlotLimits) -> Json:
        """As clients see it."""
        return {
            "sandboxID": self.id,
            "templateID": self.template,
            "alias": self.template,
            "clientID": "atropos",
            "startedAt": iso(self.started),
            "endAt": iso(self.started + self.end - self.began),
            "envdVersion": ENVD_VERSION,
            "cpuCount": max(1, int(limits.cpu_quota or 1)),
            "memoryMB": self.slot.room.memory_mib,
            "diskSizeMB": limits.disk_mib or 0,
            "state": self.state,
            "lifecycle": {"autoResume": self.auto_resume, "onTimeout": self.on_timeout},
            "metadata": dict(self.metadata),
        }


def iso(moment: float) -> str:
    """A time as the protocol writes it, which has the years 1 to 9999 alone; no number is the last of them."""
    return datetime.fromtimestamp(max(_FIRST, min(_LAST, moment)), UTC).isoformat().replace("+00:00", "Z")


def user_named(name: str) -> str | None:
    """The slot's user of a name; None, its root, for E2B's default user.

    Raises:
        RpcError: no user is called that.
    """
    if len(name) > MAX_USER_CHARS:
        raise RpcError("invalid_argument", f"user: there is none with a name of {len(name)} characters")
    return None if name in {"", "user", "root"} else name
