"""One leased slot, as its holder sees it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Generator, Mapping, Sequence
from typing import Self

from atropos import tracing, wire
from atropos.aio import Tasks, done_within
from atropos.errors import ConfigError, LeaseExpired, NotSupported, SandboxError, SlotLost
from atropos.net.egress_policy import parse
from atropos.resources import Resources
from atropos.slots.containers.counters import Measured
from atropos.slots.containers.fleet import Ticket
from atropos.slots.containers.link import ContainerLink
from atropos.slots.slot.arguments import named_if_wrong
from atropos.slots.slot.files import SlotFiles
from atropos.slots.slot.processes import Process, one_command, reading
from atropos.slots.slot.profile import PLAIN, Profile
from atropos.slots.slot.results import ExecResult, answered, file_error
from atropos.slots.slot.snapshots import Snapshot
from atropos.slots.slot.uploads import PIECE_BYTES

RELEASE_WAIT_S = 10.0
"""How long `Slot.release` waits for the server's confirmation; the release itself continues in the background."""
ALIVE_S = 5.0
"""Longest a slot may take to answer a liveness check. 2 ms are usual; hundreds of busy programs in it on a machine with
a load of ten times its cores made it 0.9 s."""


class Slot(SlotFiles):
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
            self.end(LeaseExpired(f"slot {self.name} was released"))
            self._releasing = self.link.state.give_back(self.link.release(self.lease), f"release {self.name}")
            for other in self.group:
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
            raise type(self._over)(*self._over.args)

    @contextlib.contextmanager
    def _measured(self, op: str) -> Generator[Measured]:
        self._check_held()
        self._due += 1
        with self.link.state.counters.measure_operation(op) as outcome:
            yield outcome
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
    async def exec(
        self,
        command: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        stdin: bytes | str | None = None,
        split: bool = False,
        clean_env: bool = False,
        max_output_bytes: int | None = None,
        concurrent: bool = False,
    ) -> ExecResult:
        """Run a command in its own session and wait for its main process.

        Args:
            command: a line for bash, or a program and its arguments, which run without a shell; for a program that
                isn't there or may not be executed the result's `error` starts with `not_found` or `permission`.
            timeout_s: then the whole session is killed; None: the slot's wall-time limit.
            workdir: None: the profile's, else /workspace.
            env: added to the slot's environment.
            user: one of the slot's own users, as `name`, `uid`, `name:group` or `uid:gid`, with its groups, HOME, USER
                and LOGNAME; None: root. For one that the slot doesn't have, the result's `error` says so.
            stdin: what it reads, of any length: beyond 4 MiB it is a file of the slot's /tmp until the command has
                ended. None: nothing.
            split: give stdout and stderr apart as well.
            clean_env: start from the slot's first environment and PATH alone.
            max_output_bytes: keep less output than the slot's limit.
            concurrent: run it now, beside the slot's other calls, which don't wait for it; after those before it where
                `stdin` is longer than 4 MiB. The slot runs 64 of these at once; further ones wait. A `snapshot` or
                `view` waits until none runs.
        """
        data = stdin.encode() if isinstance(stdin, str) else stdin
        operation = wire.Exec(
            command=one_command(command),
            timeout_s=timeout_s,
            workdir=workdir,
            env=dict(env or {}),
            user=user,
            stdin=data,
            split=split,
            clean_env=clean_env,
            max_output_bytes=max_output_bytes,
            concurrent=concurrent,
        )
        large = data is not None and len(data) > PIECE_BYTES
        return ExecResult.of(await (self._run_on_file(operation) if large else self.run(operation)))

    async def _run_on_file(self, operation: wire.Exec) -> wire.OpResult:
        """Run a command whose stdin is too large for a call: it reads a file, which is removed when it has ended."""
        path = f"/tmp/.stdin-{secrets.token_hex(8)}"
        assert operation.stdin is not None
        changes = {"command": reading(path, operation.command), "stdin": None}
        remove = wire.Exec(command=("rm", "-f", path), workdir="/", user="0:0", concurrent=operation.concurrent)
        try:
            result = await self._write(path, operation.stdin, user=operation.user)
            if not isinstance(result, wire.OpError):
                result = await self.run(operation.model_copy(update=changes))
            await self.run(remove)
        except asyncio.CancelledError:
            self.link.state.tasks.spawn(self._run_unless_over(remove), f"removal of {path} in {self.name}")
            raise
        return result

    async def _run_unless_over(self, operation: wire.Operation) -> None:
        with contextlib.suppress(SandboxError):
            await self.run(operation)

    @named_if_wrong
    async def start(
        self,
        command: str | Sequence[str],
        *,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        pty: tuple[int, int] | None = None,
        split: bool = False,
        hold: bool = False,
        buffer_bytes: int = 200_000,
        concurrent: bool = False,
    ) -> Process:
        """Start a background process, which runs until it ends, is killed or the lease ends.

        Args:
            command: as for `exec`.
            workdir: as for `exec`.
            env: as for `exec`.
            user: as for `exec`.
            pty: (rows, columns) of a terminal of its own; None: pipes, its output and errors in one.
            split: on pipes, its errors are read apart, from `Process.errors`.
            hold: it is kept until it is read to its end, or killed; on pipes it waits while half of `buffer_bytes`
                waits to be read: then nothing falls out.
            buffer_bytes: output kept until it is read; older output falls out and is counted.
            concurrent: as for `exec`.

        Raises:
            OSError: it can't be started; `FileNotFoundError`, `PermissionError` … where they apply.
        """
        rows, cols = pty or (24, 80)
        operation = wire.ProcStart(
            command=one_command(command),
            workdir=workdir,
            env=dict(env or {}),
            user=user,
            pty=pty is not None,
            split=split,
            hold=hold,
            rows=rows,
            cols=cols,
            buffer_bytes=buffer_bytes,
            concurrent=concurrent,
        )
        return Process(self.run, answered(await self.run(operation), wire.ProcState))

    async def processes(self) -> list[Process]:
        """All background processes of the lease, oldest first, ended ones included; each is read from its start.

        Raises:
            OSError: the slot refused.
        """
        listing = answered(await self.run(wire.ProcList()), wire.ProcListing)
        return [Process(self.run, state) for state in listing.processes]

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

    async def quiesce(self) -> int:
        """Kill every process in the slot; files stay. Returns how many there were."""
        return answered(await self.run(wire.Quiesce()), wire.Done, "/").count

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
        wanted = wire.MountRequest(epoch=self.lease.epoch, path=path, of=other, source=source, read_only=read_only)
        result = await self.link.client.mount(self.lease, wanted)
        if result.refused is not None:
            raise file_error(result.refused)

    # -------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self, *, keep_running: bool = False) -> Snapshot:
        """Freeze the workspace as it is; this slot and any number of others continue above it.

        The snapshot lives in this slot's container until it is dropped, and is copied to another one when a fork lands
        there.

        Args:
            keep_running: the slot's processes only stop for as long as what was written is copied; else they end.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted; the slot is then lost.
            NotSupported: the server makes none.
            QuotaReached: its share may keep no more.
        """
        self.ticket.share.check_snapshot(stays=keep_running)
        if not keep_running or (await self._signal_all("STOP")).exit_code != 0:
            return await self._snapshot(beside=False)
        snapshots: list[Snapshot] = []
        try:
            snapshots.append(await self._snapshot(beside=True))
        finally:
            going_on = self.link.state.tasks.spawn(self._signal_all("CONT"), f"going on in {self.name}", awaited=True)
            try:
                await asyncio.shield(going_on)
            except BaseException:
                for snapshot in snapshots:
                    snapshot.start_drop()
                raise
        return snapshots[0]

    async def _signal_all(self, signal: str) -> ExecResult:
        return await self.exec(f"kill -{signal} -1", workdir="/", user="0:0", timeout_s=10)

    async def _snapshot(self, *, beside: bool) -> Snapshot:
        self._check_held()
        task = self.link.state.tasks.spawn(self._freeze(beside=beside), f"snapshot {self.name}", awaited=True)
        self._due += 1
        try:
            snapshot = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_drop_unwanted)
            raise
        self._due -= 1
        return snapshot

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

    async def settle(self) -> None:
        """Make the slot's present files part of its views' root; before untrusted programs run in it.

        Where programs run, they stop for as long as what was written is copied, and go on; else it is frozen.

        Raises:
            SandboxError: as `snapshot`.
        """
        await (await self.snapshot(keep_running=True)).drop()

    async def _freeze(self, *, beside: bool) -> Snapshot:
        info = await self.link.client.snapshot(self.lease, beside=beside)
        return Snapshot(self.link, info, self.limits, self.ticket)

    async def keep(self, key: str, settings: wire.ImageSettings | None = None) -> wire.ImageInfo:
        """Keep the workspace as an image of the host, a layer on the lease's; then release the slot.

        Leases get it by its source, `atropos-build:KEY`, also after the pool has ended. Its running processes end.

        Args:
            key: SHA-256, in hexadecimal, of what it was made of and how; what is kept under a key already stays.
            settings: what commands on the image start with; None: nothing of its own.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted.
            ImageUnavailable: the store has no room.
            NotSupported: the lease started from a snapshot.
        """
        async with await self.snapshot() as snapshot:
            request = wire.KeepRequest(key=key, **(settings or wire.ImageSettings()).model_dump())
            image = await self.link.client.images.keep(snapshot.id, request)
        await self.release()
        return image

    def end(self, reason: SandboxError) -> None:
        """The lease is over, and why; for the pool alone."""
        if self._over is None or isinstance(self._over, LeaseExpired):
            self._over = reason


def _drop_unwanted(task: asyncio.Task[Snapshot]) -> None:
    """Nobody waits for the snapshot any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().start_drop()
