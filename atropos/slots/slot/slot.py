"""One leased slot, as its holder sees it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Sequence
from typing import Self

from atropos import tracing, wire
from atropos.aio import Tasks, done_within
from atropos.errors import ConfigError, LeaseExpired, NotSupported, SandboxError, SlotLost
from atropos.net.egress_policy import parse
from atropos.resources import Resources
from atropos.slots.containers.counters import Measured
from atropos.slots.containers.link import ContainerLink
from atropos.slots.containers.seats import Ticket
from atropos.slots.slot.arguments import named_if_wrong
from atropos.slots.slot.profile import PLAIN, Profile
from atropos.slots.slot.results import file_error
from atropos.slots.slot.snapshots import SlotSnapshots

RELEASE_WAIT_S = 10.0
"""How long `Slot.release` waits for the server's confirmation; the release itself continues in the background."""
ALIVE_S = 5.0
"""Longest a slot may take to answer a liveness check. 2 ms are usual; hundreds of busy programs in it on a machine with
a load of ten times its cores made it 0.9 s."""


class Slot(SlotSnapshots):
    """A private machine-like workspace for one trajectory, until it is released.

    Not to be made by hand: `SlotPool.lease` or `SlotPool.acquire` gives one. Calls run in the order given, but for
    `exec(concurrent=True)` and calls on background processes, which wait for no command.

    Every method raises `SlotLost` when the slot or its container is gone, `OutcomeUnknown` when a call may or may not
    have run, `LeaseExpired` after the end of the lease; a command's own failure is a result.
    """

    __slots__ = (
        "_due",
        "_over",
        "_releasing",
        "group",
        "lease",
        "limits",
        "limits_reached",
        "link",
        "network",
        "profile",
        "ticket",
        "trajectory_id",
    )

    def __init__(self, link: ContainerLink, lease: wire.Lease, request: wire.LeaseRequest, ticket: Ticket) -> None:
        self.link = link
        """The container that it is in; for the pool alone."""
        self.lease = lease
        """The lease: its id, slot, epoch and the server's boot id."""
        self.network = request.network
        """Whether the lease has egress; see `set_network`."""
        self.limits = request.limits
        """What it has instead of the pool's limits."""
        self.limits_reached: set[wire.Limit] = set()
        """What stopped its programs, or kept a file from being written, as far as answers said so; `processes` asks for
        all."""
        self.ticket = ticket
        """The acquire that it came of; for the pool alone."""
        self._over: SandboxError | None = None
        self._releasing: asyncio.Task[None] | None = None
        self._due = 0
        """Operations without an answer: running, cancelled, or failed with the infrastructure."""
        self.trajectory_id = request.trajectory_id
        self.group: list[Slot] = [self]
        """Those that share its network and end with it, itself among them; see `SlotPool.join`."""
        self.profile: Profile = PLAIN
        """What later operations start with where they don't say: folder, variables, user."""

    @property
    def name(self) -> str:
        """The slot's name on its server."""
        return self.lease.slot

    @property
    def room(self) -> Resources:
        """What it takes of its container."""
        return self.ticket.room

    @property
    def image(self) -> wire.ImageInfo | None:
        """Its image; None: the pool's base, or a snapshot's."""
        return self.lease.image

    @property
    def container(self) -> str:
        """The backend's id of the container that the slot is in."""
        return self.link.container.id

    @property
    def lost(self) -> SandboxError | None:
        """Why the slot can't be used any more; None while it can."""
        return self._over

    def __repr__(self) -> str:
        state = "held" if self._over is None else type(self._over).__name__
        return f"<Slot {self.name} epoch {self.lease.epoch} of {self.container} for {self.trajectory_id!r}: {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def release(self) -> None:
        """Give the slot back, with those of its `group`: everything in it is ended and discarded.

        Idempotent; continues when cancelled.
        """
        task = self.start_release()
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=RELEASE_WAIT_S)  # cancelling the wait cancels nothing

    def start_release(self) -> asyncio.Task[None] | None:
        """Give the slot back in the background; for the pool alone. None: there is nothing to give back."""
        if self._releasing is None and self._over is None:
            # At once: calls that come while it is given back must not reach the server.
            self.end(LeaseExpired(f"slot {self.name} was released"))
            self._releasing = self.link.state.give_back(self.link.release(self.lease), f"release {self.name}")
            for other in self.group:
                # The server ends the whole group in any case; so their holders hear it in the same way.
                other.start_release()
        return self._releasing

    async def capabilities(self) -> wire.Capabilities:
        """What the slot's container can isolate, as its start-up probe found it."""
        return await self.link.client.capabilities()

    # ------------------------------------------------------------------------------------------------- operations

    async def run(self, operation: wire.Operation, *, call_id: str | None = None) -> wire.OpResult:
        """Run one operation. Cancelling the awaiting task kills what it started.

        Args:
            operation: any of `atropos.wire`'s.
            call_id: the idempotency key; None: a fresh one.
        """
        if self.profile is not PLAIN:
            operation = self.profile.applied(operation)
        with (
            self._measured(operation.op) as outcome,
            tracing.span(operation.op, "client", atropos__container=self.container, atropos__slot=self.name) as span,
        ):
            answer = await self.link.client.call(self.lease, operation, call_id=call_id)
            outcome.result = wire.outcome(answer)
            self._note_limit(answer)
            span.set(atropos__result=outcome.result)
        return answer

    def _note_limit(self, answer: wire.OpResult) -> None:
        limit = getattr(answer, "limit", None)
        if isinstance(answer, wire.OpError) and answer.error == "no_space":
            limit = limit or "disk"
        if limit is not None:
            self.limits_reached.add(limit)
        if isinstance(answer, wire.ProcListing):
            self.limits_reached.update(answer.limits)

    def _check_held(self) -> None:
        """Raise why the lease is over, if it is."""
        if self._over is not None:
            self._due += 1
            # A new exception each time: one that is raised twice gathers tracebacks of both.
            raise type(self._over)(*self._over.args)

    @contextlib.contextmanager
    def _measured(self, op: str) -> Generator[Measured]:
        self._check_held()
        self._due += 1
        with self.link.state.counters.measure_operation(op) as outcome:
            yield outcome
        # Not in a `finally`: an operation that was cancelled or failed has no answer, which `check_alive` goes by.
        self._due -= 1

    async def check_alive(self) -> None:
        """After an operation was cancelled before its answer came, check that the slot answers at all.

        The silence of one that is frozen or cut off says nothing about what ran in it.

        Raises:
            SlotLost: it gives no sign of life.
        """
        if not self._due:
            return
        async with Tasks(f"slot {self.name}") as tasks:
            asking = tasks.spawn(self.run(wire.ProcList()), "alive", awaited=True)  # this call waits for no other
            if not await done_within(asking, ALIVE_S):
                raise SlotLost(f"slot {self.name} of container {self.container} does not answer")
            asking.result()

    @named_if_wrong
    async def set_network(self, hosts: Sequence[str] | None) -> None:
        """Change what the slot's programs reach, at once and until the lease ends; open connections are cut.

        Args:
            hosts: of what the pool allows (`egress_allow`), only these: names, `*.suffixes`, addresses and networks,
                each with `:PORT` or not. Empty: nothing. None: all that the pool allows.

        Raises:
            ConfigError: an entry is none of these, or there are more than 256.
            NotSupported: hosts are named, and the lease has no network.
        """
        if hosts is not None and len(hosts) > wire.MAX_HOSTS:
            raise ConfigError(
                f"network: {len(hosts)} hosts; at most {wire.MAX_HOSTS}, networks and *.suffixes name many"
            )
        for entry in hosts or ():
            parse(entry, field="network")
        result = await self.run(wire.SetNetwork(hosts=None if hosts is None else tuple(hosts)))
        if isinstance(result, wire.OpError):
            raise NotSupported(result.message)

    @named_if_wrong
    async def mount(self, source: str, path: str, *, of: Slot | None = None, read_only: bool = False) -> None:
        """Have a folder or file of another slot of the group at a path here; before programs run in either.

        Args:
            source: absolute, in the other slot; what was mounted there by this method isn't seen.
            path: absolute; made where it is missing.
            of: the other slot. None: this one, whose own folder, under both paths, becomes read-only there.
            read_only: whether it can't be written here.

        Raises:
            OSError: there is no such folder or file, or nothing of its kind can be there; `FileNotFoundError`,
                `NotADirectoryError` … where they apply.
            NotSupported: the slots are of no group.
        """
        self._check_held()
        other = (of or self).lease.lease_id
        request = wire.MountRequest(epoch=self.lease.epoch, path=path, of=other, source=source, read_only=read_only)
        result = await self.link.client.mount(self.lease, request)
        if result.refused is not None:
            raise file_error(result.refused)

    @named_if_wrong
    async def view(
        self,
        folders: Sequence[str] = ("/workspace",),
        *,
        optional: Sequence[str] = (),
        programs: Sequence[str] = (),
        home: str | None = None,
        as_layer: bool = False,
    ) -> wire.ViewInfo:
        """Run later operations in a view of this slot: a sandbox with processes, mounts and a root of its own.

        Its root is what the lease started from, or its last `snapshot`: nothing that was written since is in it but
        `folders` and those top-level folders of the root that no usual system has (`/app`, `/data` …), as they are and,
        while programs of the slot run, as they change. What is written in the view, the slot's own programs never see.
        They go on, with the CPU time that others leave, and their servers answer on the loopback that both share. A
        `snapshot` ends the view and freezes the slot itself.

        Args:
            folders: absolute; one that the slot lacks is an empty one.
            optional: folders that are shown where the slot has them.
            programs: folders below these that stay as the root has them, where it has programs there (`.venv` …).
            home: a folder that the view has at `wire.VIEW_HOME`, too, as its root has it.
            as_layer: renames across the edge of a folder work also while programs of the slot run, whose new files are
                then not shown.

        Returns:
            The folders that the view shows, and those of `programs` that are as the root has them.

        Raises:
            NotSupported: a folder can't be shown, as `/` or `/proc`; nothing has changed.
            SlotLost: the slot is gone.
        """
        self._check_held()
        view_folders = wire.ViewFolders(
            folders=tuple(folders), optional=tuple(optional), programs=tuple(programs), home=home, as_layer=as_layer
        )
        return await self.link.client.view(self.lease, view_folders)

    def end(self, reason: SandboxError) -> None:
        """The lease is over, and why; for the pool alone."""
        # A loss explains more than a release that was under way; the first loss stays.
        if self._over is None or isinstance(self._over, LeaseExpired):
            self._over = reason
