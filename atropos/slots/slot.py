"""One leased slot, as its holder sees it."""

from __future__ import annotations

import asyncio
import io
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Self

from atropos import tracing, wire
from atropos.errors import LeaseExpired, NotSupported, SandboxError
from atropos.net.egress_policy import parse
from atropos.slots import file_streams
from atropos.slots.container_link import ContainerLink
from atropos.slots.processes import Process, one_command, process_state, reading
from atropos.slots.profile import PLAIN, Profile
from atropos.slots.results import ExecResult, file_error
from atropos.slots.snapshots import Snapshot
from atropos.slots.uploads import PIECE_BYTES, archive_of, pieces, pieces_of

RELEASE_WAIT_S = 10.0
"""How long `Slot.release` waits for the server's confirmation; the release itself goes on behind it."""
MAX_READ_BYTES = 256 * 1024 * 1024
"""Longest file that `read_file` holds in memory, unless its caller allows more."""
MAX_ARCHIVE_BYTES = 64 * 1024**3
"""Longest archive that `download_to` writes, unless its caller allows more."""
IN_CALL_BYTES = 256 * 1024
"""A file up to this size goes in its call; a larger one as a stream of its own, which calls of others pass."""


class Slot:
    """A private machine-like workspace for one trajectory, until it is released.

    Not to be made by hand: `SlotPool.lease` or `SlotPool.acquire` gives one. Calls run in the order given.

    Every method raises `SlotLost` when the slot or its container is gone, `OutcomeUnknown` when a call may or may not
    have run, `LeaseExpired` after the end of the lease; a command's own failure is a result.
    """

    __slots__ = ("_lease", "_link", "_over", "_releasing", "limits", "mib", "network", "profile", "trajectory_id")

    def __init__(self, link: ContainerLink, lease: wire.Lease, request: wire.LeaseRequest, mib: int) -> None:
        self._link = link
        self._lease = lease
        self.network = request.network
        """Whether it has a way out at all; see `set_network`."""
        self.limits = request.limits
        """What it has instead of the pool's limits."""
        self.mib = mib
        """Memory of its container that it takes."""
        self._over: SandboxError | None = None
        self._releasing: asyncio.Task[None] | None = None
        self.trajectory_id = request.trajectory_id
        self.profile: Profile = PLAIN
        """What later operations start with where they don't say: folder, variables, user."""

    @property
    def lease(self) -> wire.Lease:
        """The lease: its id, slot, epoch and the server's boot id."""
        return self._lease

    @property
    def link(self) -> ContainerLink:
        """The container that it is in; for the pool alone."""
        return self._link

    @property
    def name(self) -> str:
        """The slot's name on its server."""
        return self._lease.slot

    @property
    def image(self) -> wire.ImageInfo | None:
        """The image that it stands on; None: the pool's base, or a snapshot's."""
        return self._lease.image

    @property
    def container(self) -> str:
        """The backend's id of the container that the slot is in."""
        return self._link.container.id

    @property
    def lost(self) -> SandboxError | None:
        """Why the slot can't be used any more; None while it can."""
        return self._over

    def __repr__(self) -> str:
        state = "held" if self._over is None else type(self._over).__name__
        return f"<Slot {self.name} epoch {self._lease.epoch} of {self.container} for {self.trajectory_id!r}: {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def release(self) -> None:
        """Give the slot back: everything in it is ended and forgotten. Idempotent; goes on when cancelled."""
        task = self.start_release()
        if task is not None and not task.done():
            await asyncio.wait([task], timeout=RELEASE_WAIT_S)  # which cancels nothing when it is cancelled

    def start_release(self) -> asyncio.Task[None] | None:
        """Give the slot back in the background; for the pool alone. None: there is nothing to give back."""
        if self._releasing is None and self._over is None:
            self.end(LeaseExpired(f"slot {self.name} was released"))
            self._releasing = self._link.state.give_back(
                self._link.release(self._lease, self.mib), f"release {self.name}"
            )
        return self._releasing

    async def capabilities(self) -> wire.Capabilities:
        """What the slot's container can isolate, as its start-up probe found it."""
        return await self._link.client.capabilities()

    # ------------------------------------------------------------------------------------------------- operations

    async def run(self, operation: wire.Operation, *, call_id: str | None = None) -> wire.OpResult:
        """Run one operation. Cancelling the awaiting task kills what it started.

        Args:
            operation: any of `atropos.wire`'s.
            call_id: the idempotency key; None: a fresh one.
        """
        if self._over is not None:
            raise type(self._over)(*self._over.args)
        if self.profile is not PLAIN:
            operation = self.profile.applied(operation)
        with (
            self._link.state.counters.measure_operation(operation.op) as outcome,
            tracing.span(operation.op, "client", atropos__container=self.container, atropos__slot=self.name) as span,
        ):
            answer = await self._link.client.call(self._lease, operation, call_id=call_id)
            outcome.result = wire.outcome(answer)
            span.set(atropos__result=outcome.result)
        return answer

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
    ) -> ExecResult:
        """Run a command in its own session and wait for its main process.

        Args:
            command: a line for bash, or a program and its arguments, which run without a shell; for a program that isn't
                there or may not be executed the result's `error` starts with `not_found` or `permission`.
            timeout_s: then the whole session is killed; None: the slot's wall-time limit.
            workdir: None: the profile's, else /workspace.
            env: added to the slot's environment.
            user: one of the slot's own users, as `name`, `uid`, `name:group` or `uid:gid`, with its groups, HOME, USER
                and LOGNAME; None: root. For one that the slot doesn't have, the result's `error` says so.
            stdin: what it reads, of any length: beyond 8 MiB it is a file of the slot's /tmp until the command has
                ended. None: nothing.
            split: give stdout and stderr apart as well.
            clean_env: start from the slot's first environment and PATH alone.
            max_output_bytes: keep less output than the slot's limit.
        """
        data = stdin.encode() if isinstance(stdin, str) else stdin
        kept = None
        if data is not None and len(data) > PIECE_BYTES:
            kept = f"/tmp/.stdin-{secrets.token_hex(8)}"
            if (refused := await self._write(kept, data, user=user)) is not None:
                return ExecResult.of(refused)
            command, data = reading(kept, command), None
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
        )
        result = await self.run(operation)
        if kept is not None:
            await self.run(wire.Exec(command=("rm", "-f", kept), user="0:0"))
        return ExecResult.of(result)

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
    ) -> Process:
        """Start a background process, which goes on until it ends, is killed or the lease is over.

        Args:
            command: as for `exec`.
            workdir: as for `exec`.
            env: as for `exec`.
            user: as for `exec`.
            pty: (rows, columns) of a terminal of its own; None: pipes, its output and errors in one.
            split: on pipes, its errors are read apart, from `Process.errors`.
            hold: on pipes, it waits while half of `buffer_bytes` waits to be read: then nothing falls out.
            buffer_bytes: output kept until it is read; older output falls out and is counted.

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
        )
        return Process(self.run, process_state(await self.run(operation)))

    async def processes(self) -> list[Process]:
        """All background processes of the lease, oldest first, ended ones included; each is read from its start."""
        listing = await self.run(wire.ProcList())
        assert isinstance(listing, wire.ProcListing)
        return [Process(self.run, state) for state in listing.processes]

    async def set_network(self, hosts: Sequence[str] | None) -> None:
        """Change what the slot's programs reach, at once and until the lease ends; open connections are cut.

        Args:
            hosts: of what the pool allows (`egress_allow`), only these: names, `*.suffixes`, addresses and networks, each
                with `:PORT` or not. Empty: nothing. None: all that the pool allows.

        Raises:
            ConfigError: an entry is none of these.
            NotSupported: hosts are named, and the lease has no network.
        """
        for entry in hosts or ():
            parse(entry, field="network")
        result = await self.run(wire.SetNetwork(hosts=None if hosts is None else tuple(hosts)))
        if isinstance(result, wire.OpError):
            raise NotSupported(result.message)

    async def quiesce(self) -> int:
        """Kill every process in the slot; files stay. Returns how many there were."""
        result = await self.run(wire.Quiesce())
        if isinstance(result, wire.OpError):
            raise file_error(result, "/")
        return result.count if isinstance(result, wire.Done) else 0

    # ------------------------------------------------------------------------------------------------------ files

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES, user: str | None = None) -> bytes:
        """A file's content.

        Args:
            path: absolute, or below /workspace.
            max_bytes: longest file to read; its size is known before any more than a piece of it is.
            user: whose permissions count, as for `exec`; None: root's.

        Raises:
            OSError: it can't be read, or is longer (`errno.EFBIG`); `FileNotFoundError`, `IsADirectoryError` … where
                they apply.
        """
        most = PIECE_BYTES if user else IN_CALL_BYTES  # streams are root's
        place = self.profile.path(path)
        parts: list[bytes] = []
        got = 0

        def keep(chunk: bytes) -> None:
            nonlocal got
            parts.append(chunk)
            got += len(chunk)

        def rest() -> wire.ReadStream:
            return wire.ReadStream(path=place, stream=file_streams.new_id(), offset=got, max_bytes=max_bytes - got)

        while True:
            wanted = min(most, max(1, max_bytes - got))
            result = await self.run(wire.ReadFile(path=path, offset=got, max_bytes=wanted, user=user))
            if isinstance(result, wire.OpError):
                raise file_error(result, path)
            assert isinstance(result, wire.FileResult)
            if result.size > max_bytes:
                message = f"the file has {result.size:,} bytes, more than max_bytes ({max_bytes:,})"
                raise file_error(wire.OpError(error="too_large", message=message), path)
            keep(result.data)
            if len(result.data) < wanted or got >= max_bytes:
                return b"".join(parts)
            if not user:  # also where that was all: the kernel's own files don't say how long they are
                await self._read_stream(path, keep, rest)
                return b"".join(parts)

    async def _read_stream(
        self, path: str, write: Callable[[bytes], object], wanted: Callable[[], wire.ReadStream]
    ) -> None:
        """Read a stream that `wanted` asks for, again after each break; `path` is what an error names."""
        with self._link.state.counters.measure_operation("read_stream") as outcome:
            result = await file_streams.receive_all(self._link.client, self._lease, wanted, write)
            outcome.result = wire.outcome(result)
        if isinstance(result, wire.OpError):
            raise file_error(result, path)

    async def _write_stream(
        self, path: str, pieces: Iterator[bytes], *, tar: bool = False, mode: int | None = None
    ) -> wire.OpError | None:
        operation = wire.WriteStream(path=self.profile.path(path), stream=file_streams.new_id(), tar=tar, mode=mode)
        with self._link.state.counters.measure_operation(operation.op) as outcome:
            result = await file_streams.send(self._link.client, self._lease, operation, pieces)
            outcome.result = wire.outcome(result)
        return result if isinstance(result, wire.OpError) else None

    async def write_file(
        self, path: str, data: bytes | str, mode: int | None = None, *, user: str | None = None
    ) -> None:
        """Write a file, making its parents; root's is replaced atomically.

        Args:
            path: absolute, or below /workspace.
            data: its content.
            mode: None: that of the file it replaces, else 0644.
            user: who writes it, in place and with that user's permissions; None: root.

        Raises:
            OSError: it can't be written.
        """
        content = data.encode() if isinstance(data, str) else data
        if (refused := await self._write(path, content, mode, user)) is not None:
            raise file_error(refused, path)

    async def _write(
        self, path: str, data: bytes, mode: int | None = None, user: str | None = None
    ) -> wire.OpError | None:
        """Write a file: as a stream where it is large and root's; what the slot said against it."""
        if len(data) > IN_CALL_BYTES and not user:
            return await self._write_stream(path, pieces(data), mode=mode)
        append = False
        for piece in pieces(data):
            operation = wire.WriteFile(path=path, data=piece, mode=None if append else mode, append=append, user=user)
            result = await self.run(operation)
            if isinstance(result, wire.OpError):
                return result
            append = True
        return None

    async def upload(self, source: str | Path, path: str) -> None:
        """Copy a local file to `path`, or a local folder's contents into the folder `path`; links stay links.

        Both go as they are read, so neither has to fit in memory.

        Raises:
            OSError: the source can't be read, or the slot can't take it.
        """
        source = Path(source)
        if await asyncio.to_thread(source.is_dir):
            refused = await self._write_stream(path, archive_of(source), tar=True)
        else:
            mode = (await asyncio.to_thread(source.stat)).st_mode & 0o7777
            refused = await self._write_stream(path, pieces_of(source), mode=mode)
        if refused is not None:
            raise file_error(refused, path)

    async def download(self, path: str, *, max_bytes: int = wire.MAX_FILE_BYTES) -> bytes:
        """A file or folder as an uncompressed tar archive.

        Args:
            path: absolute, or below /workspace.
            max_bytes: longest archive.

        Raises:
            OSError: it can't be read, or is longer (`errno.EFBIG`).
        """
        archive = io.BytesIO()
        await self._download(path, archive, max_bytes)
        return archive.getvalue()

    async def download_to(self, path: str, target: str | Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        """As `download`, into a local file, as it comes: the archive doesn't have to fit in memory.

        Raises:
            OSError: as `download`; or the local file can't be written.
        """
        with await asyncio.to_thread(open, target, "wb") as archive:
            await self._download(path, archive, max_bytes)

    async def _download(self, path: str, archive: BinaryIO, max_bytes: int) -> None:
        place = self.profile.path(path)

        def wanted() -> wire.ReadStream:
            archive.seek(0)
            archive.truncate()
            return wire.ReadStream(path=place, stream=file_streams.new_id(), tar=True, max_bytes=max_bytes)

        await self._read_stream(path, archive.write, wanted)

    # -------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self) -> Snapshot:
        """Freeze the workspace as it is; this slot and any number of others go on above it.

        Its running processes end. The snapshot lives in this slot's container until it is dropped, and is copied to
        another one when a fork lands there.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted; the slot is then lost.
            NotSupported: the server makes none.
        """
        return await self._snapshot()

    async def _snapshot(self, *, beside: bool = False) -> Snapshot:
        if self._over is not None:
            raise type(self._over)(*self._over.args)
        task = self._link.state.tasks.spawn(self._freeze(beside=beside), f"snapshot {self.name}", awaited=True)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_drop_unwanted)
            raise

    async def view(self, folders: Sequence[str] = ("/workspace",)) -> None:
        """Run later operations in a view of this slot: a sandbox with processes, mounts and a root of its own.

        Its root is what the lease started from, or its last `snapshot`: nothing that was written since is in it but
        `folders` and the top-level folders that no usual system has (`/app`, `/data` …), as they are and as they change.
        What is written in the view, the slot's own programs never see. They go on, with the CPU time that others leave,
        and their servers answer on the loopback that both share. A `snapshot` ends the view and freezes the slot itself.

        Raises:
            NotSupported: a folder can't be shown, as `/` or `/proc`; nothing has changed.
            SlotLost: the slot is gone.
        """
        if self._over is not None:
            raise type(self._over)(*self._over.args)
        await self._link.client.view(self._lease, folders)

    async def settle(self) -> None:
        """Make what is in the slot part of what its views stand on; before anything untrusted runs in it.

        Where programs run, they stop for as long as what was written is copied, and go on; else it is frozen.

        Raises:
            SandboxError: as `snapshot`.
        """
        running = (await self.exec("kill -STOP -1", timeout_s=10)).exit_code == 0
        try:
            settled = await self._snapshot(beside=running)
        finally:
            if running:
                await self.exec("kill -CONT -1", timeout_s=10)
        await settled.drop()

    async def _freeze(self, *, beside: bool) -> Snapshot:
        info = await self._link.client.snapshot(self._lease, beside=beside)
        return Snapshot(self._link, info, self.limits)

    async def keep(self, key: str, settings: wire.ImageSettings | None = None) -> wire.ImageInfo:
        """Keep the workspace as an image of the host, on what the lease stands on; then give the slot back.

        Leases get it by its source, `atropos-build:KEY`, also after the pool has ended. Its running processes end.

        Args:
            key: SHA-256, in hexadecimal, of what it was made of and how; what is kept under a key already stays.
            settings: what commands on the image start with; None: nothing of its own.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted.
            ImageUnavailable: the store has no room.
            NotSupported: the lease stands on a snapshot.
        """
        async with await self.snapshot() as snapshot:
            wanted = wire.KeepRequest(key=key, **(settings or wire.ImageSettings()).model_dump())
            image = await self._link.client.images.keep(snapshot.id, wanted)
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
