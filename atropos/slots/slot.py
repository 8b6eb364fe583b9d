"""One leased slot, as its holder sees it."""

from __future__ import annotations

import asyncio
import io
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from atropos import wire
from atropos.errors import LeaseExpired, SandboxError
from atropos.slots.results import ExecResult, file_error

if TYPE_CHECKING:
    from atropos.slots.container_link import Link
    from atropos.slots.snapshots import Snapshot

PIECE_BYTES = 8 * 1024 * 1024
"""Files travel in pieces of this size: well below the wire's bound, so that calls of others pass between them."""


class Slot:
    """A private machine-like workspace for one trajectory, until it is released.

    Not to be made by hand: `SlotPool.lease` or `SlotPool.acquire` gives one. Calls run in the order given.

    Every method raises `SlotLost` when the slot or its container is gone, `OutcomeUnknown` when a call may or may not
    have run, `LeaseExpired` after the end of the lease; a command's own failure is a result.
    """

    __slots__ = ("_lease", "_link", "_over", "releasing", "trajectory_id")

    def __init__(self, link: Link, lease: wire.Lease, trajectory_id: str) -> None:
        self._link = link
        self._lease = lease
        self._over: SandboxError | None = None
        self.releasing: asyncio.Task[None] | None = None
        self.trajectory_id = trajectory_id

    @property
    def lease(self) -> wire.Lease:
        """The lease: its id, slot, epoch and the server's boot id."""
        return self._lease

    @property
    def link(self) -> Link:
        """The container that it is in; for the pool alone."""
        return self._link

    @property
    def name(self) -> str:
        """The slot's name on its server."""
        return self._lease.slot

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
        await self._link.pool.returns.release(self)

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
        return await self._link.client.call(self._lease, operation, call_id=call_id)

    async def exec(
        self,
        command: str,
        *,
        timeout_s: float | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes | str | None = None,
        split: bool = False,
        clean_env: bool = False,
        max_output_bytes: int | None = None,
    ) -> ExecResult:
        """Run a shell command line in its own session and wait for its main process.

        Args:
            command: passed to bash.
            timeout_s: then the whole session is killed; None: the slot's wall-time limit.
            workdir: None: /workspace.
            env: added to the slot's environment.
            stdin: what it reads; None: nothing.
            split: give stdout and stderr apart as well.
            clean_env: start from the slot's first environment and PATH alone.
            max_output_bytes: keep less output than the slot's limit.
        """
        operation = wire.Exec(
            command=command,
            timeout_s=timeout_s,
            workdir=workdir,
            env=dict(env or {}),
            clean_env=clean_env,
            stdin=stdin.encode() if isinstance(stdin, str) else stdin,
            split=split,
            max_output_bytes=max_output_bytes,
        )
        return ExecResult.of(await self.run(operation))

    async def quiesce(self) -> int:
        """Kill every process in the slot; files stay. Returns how many there were."""
        result = await self.run(wire.Quiesce())
        if isinstance(result, wire.OpError):
            raise file_error(result, "/")
        return result.count if isinstance(result, wire.Done) else 0

    # ------------------------------------------------------------------------------------------------------ files

    async def read_file(self, path: str) -> bytes:
        """A file's content.

        Raises:
            OSError: it can't be read; `FileNotFoundError`, `IsADirectoryError` … where they apply.
        """
        pieces: list[bytes] = []
        offset = 0
        while True:
            result = await self.run(wire.ReadFile(path=path, offset=offset, max_bytes=PIECE_BYTES))
            if isinstance(result, wire.OpError):
                raise file_error(result, path)
            assert isinstance(result, wire.FileResult)
            pieces.append(result.data)
            offset += len(result.data)
            if not result.data or offset >= result.size:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def write_file(self, path: str, data: bytes | str, mode: int | None = None) -> None:
        """Write a file, making its parents. Up to 8 MiB it is replaced atomically; a larger one grows in pieces.

        Raises:
            OSError: it can't be written.
        """
        content = data.encode() if isinstance(data, str) else data
        first = True
        for piece in _pieces(content):
            operation = wire.WriteFile(path=path, data=piece, mode=mode if first else None, append=not first)
            result = await self.run(operation)
            if isinstance(result, wire.OpError):
                raise file_error(result, path)
            first = False

    async def upload(self, source: str | Path, path: str) -> None:
        """Copy a local file to `path`, or a local folder's contents into the folder `path`; links stay links.

        Raises:
            OSError: the source can't be read, or the slot can't take it.
        """
        source = Path(source)
        if not source.is_dir():
            content, mode = await asyncio.to_thread(lambda: (source.read_bytes(), source.stat().st_mode & 0o7777))
            return await self.write_file(path, content, mode)
        bundles = _bundles(source)
        large: list[tuple[str, Path]] = []
        while (bundle := await asyncio.to_thread(next, bundles, None)) is not None:
            result = await self.run(wire.Untar(path=path, data=bundle.archive))
            if isinstance(result, wire.OpError):
                raise file_error(result, path)
            large += bundle.large
        for name, file in large:
            await self.upload(file, f"{path.rstrip('/')}/{name}")
        return None

    async def download(self, path: str) -> bytes:
        """A file or folder as an uncompressed tar archive of at most 32 MiB.

        Raises:
            OSError: it can't be read, or is larger (`errno.EFBIG`).
        """
        result = await self.run(wire.Tar(path=path))
        if isinstance(result, wire.OpError):
            raise file_error(result, path)
        assert isinstance(result, wire.FileResult)
        return result.data

    # -------------------------------------------------------------------------------------------------- snapshots

    async def snapshot(self) -> Snapshot:
        """Freeze the workspace as it is; this slot and any number of others go on above it.

        Its running processes end. The snapshot lives in this slot's container until it is dropped, and is copied to
        another one when a fork lands there.

        Raises:
            SandboxError: a writer was left, so that it can't be trusted; the slot is then lost.
            NotSupported: the server makes none.
        """
        return await self._link.pool.snapshots.take(self)

    def end(self, reason: SandboxError) -> None:
        """The lease is over, and why; for the pool alone."""
        if self._over is None or isinstance(self._over, LeaseExpired):
            self._over = reason


# ---------------------------------------------------------------------------------------------------------- transport


def _pieces(content: bytes) -> Iterator[bytes]:
    yield content[:PIECE_BYTES]
    for start in range(PIECE_BYTES, len(content), PIECE_BYTES):
        yield content[start : start + PIECE_BYTES]


class _Bundle:
    """A tar archive of about PIECE_BYTES at most, and the files too large for one."""

    __slots__ = ("archive", "large")

    def __init__(self, archive: bytes, large: list[tuple[str, Path]]) -> None:
        self.archive = archive
        self.large = large


def _bundles(folder: Path) -> Iterator[_Bundle]:
    """A folder's contents as archives, in an order in which folders come before what is in them."""
    buffer, large = io.BytesIO(), list[tuple[str, Path]]()
    archive = tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115 (many of them)
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if file.is_file() and not file.is_symlink() and file.stat().st_size > PIECE_BYTES:
            large.append((name, file))
            continue
        archive.add(file, name, recursive=False, filter=_plain)
        if buffer.tell() > PIECE_BYTES:
            archive.close()
            yield _Bundle(buffer.getvalue(), large)
            buffer, large = io.BytesIO(), []
            archive = tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT)  # noqa: SIM115
    archive.close()
    yield _Bundle(buffer.getvalue(), large)


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Who owns a file here means nothing there; sockets and devices stay behind."""
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None
