"""Snapshots between servers: their layers leave as a tar stream and arrive as layers of another server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.errors import NotSupported, SandboxError
from atropos.sandbox.contract import Layer, Sandbox
from atropos.sandbox.programs import snapshot_tar
from atropos.sandbox.server.snapshot_store import MAX_LAYERS, StoredSnapshot
from atropos.wire import SnapshotInfo

if TYPE_CHECKING:
    from atropos.sandbox.server.core import Core

COPY_BYTES = 1 << 18
SILENT_S = 60.0
"""Longest pause of a sender before its archive is given up, in seconds."""
PROGRAM = os.path.abspath(snapshot_tar.__file__)


class InvalidSnapshot(SandboxError):
    """An archive that no server can have exported."""

    code = "invalid_snapshot"
    retryable = False


@dataclass(frozen=True)
class IncomingSnapshot:
    """A snapshot that is being sent here."""

    snapshot_id: str
    layers: int
    base: str | None
    owner: str
    compressed: bool


def has_zstd() -> bool:
    """Whether archives can be compressed here: by the program, since the image carries no binding."""
    return shutil.which("zstd") is not None


async def _program(mode: str, layers: list[str], *, compress: bool) -> asyncio.subprocess.Process:
    if compress and not has_zstd():
        raise NotSupported("zstd is not installed on this server; ask for a plain tar (without zstd=1)")
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        PROGRAM,
        mode,
        *(["--zstd"] if compress else []),
        *layers,
        stdin=asyncio.subprocess.PIPE if mode == "unpack" else asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if mode == "pack" else asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        limit=COPY_BYTES,
    )


async def _ended(process: asyncio.subprocess.Process, what: str) -> None:
    """Its end, which must be a good one."""
    assert process.stderr is not None
    said = (await process.stderr.read(4096)).decode(errors="replace").strip()
    if await process.wait() != 0:
        kind = InvalidSnapshot if process.returncode == snapshot_tar.INVALID else SandboxError
        raise kind(f"{what}: {' '.join(said.split()) or f'exit code {process.returncode}'}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@contextlib.asynccontextmanager
async def exported(core: Core, snapshot: StoredSnapshot, *, compress: bool) -> AsyncGenerator[AsyncIterator[bytes]]:
    """The archive of a snapshot, which is kept while it is read.

    Raises:
        NotSupported: zstd is asked for and not installed.
    """
    # Before the program is started, which takes a while: a layer that is dropped meanwhile would be read as an empty one.
    core.snapshots.hold(snapshot.layers)
    snapshot.touched_at = core.now()
    try:
        paths = [layer.path for layer in snapshot.layers]
        async with _packed(paths, f"snapshot {snapshot.id}", compress=compress) as chunks:
            yield chunks
    finally:
        core.workspaces.let_go(snapshot.layers)


@contextlib.asynccontextmanager
async def _packed(layers: list[str], what: str, *, compress: bool) -> AsyncGenerator[AsyncIterator[bytes]]:
    process = await _program("pack", layers, compress=compress)

    async def chunks() -> AsyncIterator[bytes]:
        assert process.stdout is not None
        while chunk := await process.stdout.read(COPY_BYTES):
            yield chunk
        await _ended(process, f"{what} could not be exported")

    try:
        yield chunks()
    finally:
        await asyncio.shield(_stop(process))


def packed_layer(layer: str, what: str) -> contextlib.AbstractAsyncContextManager[AsyncIterator[bytes]]:
    """One layer, which the caller keeps while it is read, as a tar."""
    return _packed([layer], what, compress=False)


async def unpack_layer(folder: str, what: str, chunks: AsyncIterator[bytes]) -> None:
    """Fill an empty folder with a layer that `packed_layer` packed.

    Raises:
        InvalidSnapshot: it is none.
        SandboxError: it broke off, or could not be written.
    """
    await _feed([folder], what, chunks, compressed=False)


async def copy_layer(core: Core, sandbox: Sandbox) -> Layer:
    """A layer of what a slot has written so far; its programs go on.

    Raises:
        SandboxError: it doesn't fit, or a file was cut while it was read.
    """
    what = f"what {sandbox.name} wrote"

    async def fill(folder: str) -> None:
        async with packed_layer(sandbox.written, what) as chunks:
            await unpack_layer(folder, what, chunks)

    async with core.unpacking:
        return await core.host.import_layer(f"layer-{uuid.uuid4().hex[:12]}", fill)


async def imported(core: Core, wanted: IncomingSnapshot, chunks: AsyncIterator[bytes]) -> SnapshotInfo:
    """Make a snapshot of an archive, after those before it. Under an id that is here already, the one that is here.

    Raises:
        NotSupported: too many layers, an unknown base, or zstd is not installed.
        PoolFull: a bound on snapshots is reached.
        InvalidSnapshot: no server exported such an archive, or it broke off; nothing is left of it.
        SandboxError: it doesn't fit, or could not be written; nothing is left of it.
    """
    while (arriving := core.arriving.get(wanted.snapshot_id)) is not None:
        await arriving.wait()  # the connection broke, and whoever sent it sends it again
    known = core.snapshots.by_id.get(wanted.snapshot_id)
    if known is not None:
        return known.info
    if not 1 <= wanted.layers <= MAX_LAYERS:
        raise NotSupported(f"layers: {wanted.layers} is not between 1 and {MAX_LAYERS}")
    core.images.use(wanted.base)
    core.workspaces.reserve(())
    over = core.arriving[wanted.snapshot_id] = asyncio.Event()
    # Its own task: a client that goes away ends the stream, and so the import, but doesn't interrupt the tidying.
    try:
        layers = await asyncio.shield(core.spawn(_unpack(core, wanted, chunks)))
        snapshot = core.snapshots.commit(
            wanted.snapshot_id, layers[0], layers[1:], wanted.owner, wanted.base, core.now()
        )
    except BaseException:
        core.snapshots.abandon()
        raise
    finally:
        del core.arriving[wanted.snapshot_id]
        over.set()
    core.counters["snapshots_imported"] += 1
    return snapshot.info


async def _unpack(core: Core, wanted: IncomingSnapshot, chunks: AsyncIterator[bytes]) -> list[Layer]:
    """Feed one program that fills all layers at once: each level of nesting holds one more folder open."""
    layers: list[Layer] = []

    async def level(folders: list[str]) -> None:
        if len(folders) == wanted.layers:
            await _feed(folders, f"snapshot {wanted.snapshot_id}", chunks, compressed=wanted.compressed)
            return

        async def fill(folder: str) -> None:
            await level([*folders, folder])

        layers.append(await core.host.import_layer(f"layer-{uuid.uuid4().hex[:12]}", fill))

    try:
        async with core.unpacking:
            await level([])
    except BaseException:
        core.workspaces.drop_layers(layers)
        raise
    layers.reverse()  # the innermost, which is the last folder and the lowest layer, was done first
    return layers


async def _feed(folders: list[str], what: str, chunks: AsyncIterator[bytes], *, compressed: bool) -> None:
    process = await _program("unpack", folders, compress=compressed)
    what = f"{what} could not be imported"
    assert process.stdin is not None
    try:
        try:
            while (chunk := await _next(chunks)) is not None:
                process.stdin.write(chunk)
                await process.stdin.drain()
        except TimeoutError:
            raise SandboxError(f"{what}: nothing came for {SILENT_S:g} s") from None
        except Exception as error:
            # Either the program refused what it read, and says so, or the sender went away.
            process.stdin.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await _ended(process, what)
            raise SandboxError(f"{what}: it did not arrive whole ({error!r})") from error
        process.stdin.close()
        await _ended(process, what)
    finally:
        await asyncio.shield(_stop(process))


async def _next(chunks: AsyncIterator[bytes]) -> bytes | None:
    async with asyncio.timeout(SILENT_S):
        return await anext(chunks, None)
