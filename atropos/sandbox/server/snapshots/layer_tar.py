"""Layers as tar streams: packed and unpacked by a program of its own, `programs/snapshot_tar.py`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from atropos.errors import NotSupported, SandboxError
from atropos.sandbox.programs import snapshot_tar

COPY_BYTES = 1 << 18
SILENT_S = 60.0
"""Longest pause of a sender before its archive is refused, in seconds."""
PROGRAM = os.path.abspath(snapshot_tar.__file__)


class InvalidSnapshot(SandboxError):
    """An archive that no server can have exported."""

    code = "invalid_snapshot"
    retryable = False


def has_zstd() -> bool:
    """Whether archives can be compressed here: by the program, since the image carries no binding."""
    return shutil.which("zstd") is not None


async def _program(mode: str, layers: Sequence[str], *, compress: bool) -> asyncio.subprocess.Process:
    if compress and not has_zstd():
        raise NotSupported("zstd is not installed on this server; request a plain tar (without zstd=1)")
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
    """Wait for the program's end; raises `SandboxError` where it failed."""
    assert process.stderr is not None
    # Bounded: the program prints one line, but it has read what a client sent.
    message = (await process.stderr.read(4096)).decode(errors="replace").strip()
    if await process.wait() != 0:
        kind = InvalidSnapshot if process.returncode == snapshot_tar.INVALID else SandboxError
        raise kind(f"{what}: {' '.join(message.split()) or f'exit code {process.returncode}'}")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.stdin is not None:
        process.stdin.close()  # ends its zstd, which outlives it and which asyncio would wait for
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        while process.stdout is not None and await process.stdout.read(COPY_BYTES):
            pass  # asyncio reports its end once its output has been read
        await process.wait()


@contextlib.asynccontextmanager
async def packed_layers(
    layers: Sequence[str], what: str, *, compress: bool = False
) -> AsyncGenerator[AsyncIterator[bytes]]:
    """Layers, topmost first, as one (zstd) tar. The caller keeps them while it is read.

    Raises:
        NotSupported: zstd is asked for and not installed.
        SandboxError: while it is read: packing failed.
    """
    process = await _program("pack", layers, compress=compress)

    async def chunks() -> AsyncIterator[bytes]:
        assert process.stdout is not None
        while chunk := await process.stdout.read(COPY_BYTES):
            yield chunk
        await _ended(process, f"{what} could not be exported")

    try:
        yield chunks()
    finally:
        # A reader that goes away must not leave the program behind, with the layers' folders open.
        await asyncio.shield(_stop(process))


async def unpack_layers(
    folders: Sequence[str], what: str, chunks: AsyncIterator[bytes], *, compressed: bool = False
) -> None:
    """Fill empty folders with the layers that `packed_layers` packed.

    Raises:
        NotSupported: it is compressed, and zstd is not installed.
        InvalidSnapshot: no server packed it.
        SandboxError: it broke off, or could not be written.
    """
    process = await _program("unpack", folders, compress=compressed)
    what = f"{what} could not be imported"
    assert process.stdin is not None
    try:
        try:
            while (chunk := await _next(chunks)) is not None:
                process.stdin.write(chunk)
                # Back-pressure: the sender is not read faster than the program writes to the disk.
                await process.stdin.drain()
        except TimeoutError:
            raise SandboxError(f"{what}: nothing came for {SILENT_S:g} s") from None
        except (OSError, SandboxError) as error:
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
