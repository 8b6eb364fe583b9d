"""The files of a slot, as its holder reads and writes them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from atropos import wire
from atropos.slots.client import file_streams
from atropos.slots.containers.counters import Measured
from atropos.slots.containers.link import ContainerLink
from atropos.slots.slot.arguments import named_if_wrong
from atropos.slots.slot.profile import Profile
from atropos.slots.slot.results import answered, file_error
from atropos.slots.slot.uploads import PIECE_BYTES, archive_of, pieces, pieces_of

MAX_READ_BYTES = 256 * 1024 * 1024
"""Longest file that `read_file` holds in memory, unless its caller allows more."""
MAX_ARCHIVE_BYTES = 64 * 1024**3
"""Longest file or archive that `read_file_to` and `download_to` write, unless their caller allows more."""
_ZEROS = bytes(64 * 1024)
"""What becomes a hole of a local file, and the length of its blocks."""
IN_CALL_BYTES = 256 * 1024
"""A file up to this size goes in its call; a larger one as a stream of its own, which calls of others pass."""


def _with_holes(file: BinaryIO, data: bytes) -> None:
    """Append to a new file; blocks of zeros become holes."""
    for start in range(0, len(data), len(_ZEROS)):
        block = data[start : start + len(_ZEROS)]
        if block == _ZEROS[: len(block)]:
            file.seek(len(block), os.SEEK_CUR)
        else:
            file.write(block)


@contextlib.asynccontextmanager
async def _whole(target: str | Path) -> AsyncGenerator[BinaryIO]:
    """A local file to write, which replaces the old one at the end of the body; on failure nothing is changed."""
    # Beside the target: a rename is atomic within one file system alone.
    partial = Path(f"{target}.{secrets.token_hex(4)}.part")
    try:
        with await asyncio.to_thread(open, partial, "wb") as file:
            yield file
        await asyncio.to_thread(os.replace, partial, target)
    finally:
        await asyncio.to_thread(partial.unlink, missing_ok=True)


class SlotFiles(ABC):
    """The part of `Slot` that moves files."""

    __slots__ = ()
    link: ContainerLink
    lease: wire.Lease
    profile: Profile

    @abstractmethod
    async def run(self, operation: wire.Operation, *, call_id: str | None = None) -> wire.OpResult:
        """Run one operation."""

    @abstractmethod
    def _measured(self, op: str) -> AbstractContextManager[Measured]:
        """Context of one operation, which sets its outcome."""

    @named_if_wrong
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
        parts: list[bytes] = []
        await self._read(path, parts.append, max_bytes, user)
        return b"".join(parts)

    @named_if_wrong
    async def read_file_to(self, path: str, target: str | Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        """As `read_file`, as root, to a local file, which is there once it is whole and doesn't have to fit in memory.

        A file that is mostly holes takes as little room here as in the slot.

        Raises:
            OSError: as `read_file`; or the local file can't be written.
        """
        async with _whole(target) as file:
            await self._read(path, functools.partial(_with_holes, file), max_bytes, None)
            file.truncate(file.tell())

    async def _read(self, path: str, write: Callable[[bytes], object], max_bytes: int, user: str | None) -> None:
        most = PIECE_BYTES if user else IN_CALL_BYTES  # streams are root's
        place = self.profile.path(path)
        got = 0

        def keep(chunk: bytes) -> None:
            nonlocal got
            write(chunk)
            got += len(chunk)

        def rest() -> wire.ReadStream:
            remaining = max(1, max_bytes - got)  # none where a stream broke off at its very end
            return wire.ReadStream(path=place, stream=file_streams.new_id(), offset=got, max_bytes=remaining)

        while True:
            # At least a byte: the answer also says how long the file is.
            size = min(most, max(1, max_bytes - got))
            result = await self.run(wire.ReadFile(path=path, offset=got, max_bytes=size, user=user))
            file = answered(result, wire.FileResult, path)
            if file.size > max_bytes:
                message = f"the file has {file.size:,} bytes, more than max_bytes ({max_bytes:,})"
                raise file_error(wire.OpError(error="too_large", message=message), path)
            keep(file.data)
            if len(file.data) < size or got >= max_bytes:
                return
            if not user:  # also where that was all: the kernel's own files don't say how long they are
                await self._read_stream(path, keep, rest)
                return

    @named_if_wrong
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
        answered(await self._write(path, content, mode, user), wire.Done, path)

    async def _write(self, path: str, data: bytes, mode: int | None = None, user: str | None = None) -> wire.OpResult:
        """Write a file: as a stream where it is large and root's."""
        if len(data) > IN_CALL_BYTES and not user:
            return await self._write_stream(path, pieces(data), mode=mode)
        parts = pieces(data)
        # The first piece replaces, the others append: not atomic, which is a user's file anyhow.
        result = await self.run(wire.WriteFile(path=path, data=next(parts), mode=mode, user=user))
        for piece in parts:
            if isinstance(result, wire.OpError):
                break
            result = await self.run(wire.WriteFile(path=path, data=piece, append=True, user=user))
        return result

    @named_if_wrong
    async def upload(self, source: str | Path, path: str, *, mode: int | None = None) -> None:
        """Copy a local file to `path`, or a local folder's contents into the folder `path`; links stay links.

        Both go as they are read, so neither has to fit in memory. A folder's sockets and devices stay behind.

        Args:
            source: the file or folder.
            path: absolute, or below /workspace.
            mode: of a file; None: its own.

        Raises:
            OSError: the source can't be read, or the slot can't take it.
        """
        source = Path(source)
        if await asyncio.to_thread(source.is_dir):
            result = await self._write_stream(path, archive_of(source), tar=True)
        else:
            if mode is None:
                mode = (await asyncio.to_thread(source.stat)).st_mode & 0o7777
            result = await self._write_stream(path, pieces_of(source), mode=mode)
        answered(result, wire.Done, path)

    @named_if_wrong
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

    @named_if_wrong
    async def download_to(self, path: str, target: str | Path, *, max_bytes: int = MAX_ARCHIVE_BYTES) -> None:
        """As `download`, to a local file, which is there once it is whole and doesn't have to fit in memory.

        Raises:
            OSError: as `download`; or the local file can't be written.
        """
        async with _whole(target) as archive:
            await self._download(path, archive, max_bytes)

    async def _download(self, path: str, archive: BinaryIO, max_bytes: int) -> None:
        place = self.profile.path(path)

        def wanted() -> wire.ReadStream:
            archive.seek(0)
            archive.truncate()
            return wire.ReadStream(path=place, stream=file_streams.new_id(), tar=True, max_bytes=max_bytes)

        await self._read_stream(path, archive.write, wanted)

    async def _read_stream(
        self, path: str, write: Callable[[bytes], object], wanted: Callable[[], wire.ReadStream]
    ) -> None:
        """Read a stream that `wanted` asks for, again after each break; `path` is what an error names."""
        with self._measured("read_stream") as outcome:
            result = await file_streams.receive_all(self.link.client, self.lease, wanted, write)
            outcome.result = wire.outcome(result)
        answered(result, wire.Done, path)

    async def _write_stream(
        self, path: str, content: Iterator[bytes], *, tar: bool = False, mode: int | None = None
    ) -> wire.OpResult:
        """Write a file, or unpack an archive."""
        operation = wire.WriteStream(path=self.profile.path(path), stream=file_streams.new_id(), tar=tar, mode=mode)
        with self._measured(operation.op) as outcome:
            result = await file_streams.send(self.link.client, self.lease, operation, content)
            outcome.result = wire.outcome(result)
        return result
