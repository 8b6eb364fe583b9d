"""Files and archives between here and a slot, as streams of their own beside the calls.

The call says what is read or written and how that ended; its bytes travel in HTTP requests, in both directions with
back-pressure to the file. A write goes in pieces that are sent again when a connection breaks: the server knows how
much it has. A read that breaks off is read again from where its caller says.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator

from atropos.aio import Backoff, Tasks, backoff_s
from atropos.errors import BackendUnavailable, OutcomeUnknown
from atropos.slots.client.call_stream import PAUSE_S
from atropos.slots.client.sandbox_client import SandboxClient
from atropos.wire import Done, Lease, OpError, OpResult, ReadStream, WriteStream

ENDED_S = 5.0
"""Longest that a stream's call is waited for when the stream has broken off, in seconds."""
READ_TRIES = 5
"""Attempts to read what breaks off, each from where a file's last one ended."""


def new_id() -> str:
    """A fresh id for one stream."""
    return secrets.token_urlsafe(12)


async def send(client: SandboxClient, lease: Lease, operation: WriteStream, pieces: Iterator[bytes]) -> OpResult:
    """Write a stream; `pieces` are read in a thread, at most two ahead.

    Raises:
        SandboxError: as a call's.
        OSError: whatever `pieces` raises; the slot then gets nothing.
    """
    async with _both(client.call(lease, operation), _send(client, lease, operation.stream, pieces)) as (call, sending):
        await asyncio.wait([call, sending], return_when=asyncio.FIRST_COMPLETED)
        # A call that has ended says why: the stream's own error would hide that.
        if not call.done():
            await sending
        return await call


async def _send(client: SandboxClient, lease: Lease, stream: str, pieces: Iterator[bytes]) -> None:
    """Send all pieces. The caller cancels this when the call has ended."""

    async def following() -> bytes:
        # In a thread: reading a local file may block, and packing an archive takes CPU.
        return await asyncio.to_thread(next, pieces, b"")

    # One ahead, since the last piece has to be known as such when it is sent.
    offset, piece, after = 0, await following(), await following()
    while after:
        async with Tasks(f"stream {stream}") as tasks:
            reading = tasks.spawn(following(), "piece", awaited=True)
            await _put(client, lease, stream, offset, piece, last=False)
            offset, piece, after = offset + len(piece), after, await reading
    await _put(client, lease, stream, offset, piece, last=True)


async def _put(client: SandboxClient, lease: Lease, stream: str, offset: int, piece: bytes, *, last: bool) -> None:
    """One piece, until the server has it."""
    backoff = Backoff(*PAUSE_S)
    while True:
        try:
            return await client.put_piece(lease, stream, offset, piece, last=last)
        except BackendUnavailable:  # the call says so if the stream is over
            await asyncio.sleep(backoff.failed())


async def receive_all(
    client: SandboxClient, lease: Lease, wanted: Callable[[], ReadStream], write: Callable[[bytes], object]
) -> OpResult:
    """Read what `wanted` says, and again what it then says when the connection breaks off.

    Raises:
        SandboxError: as a call's; `OutcomeUnknown` when it broke off every time.
        OSError: whatever `write` raises.
    """
    for attempt in range(READ_TRIES):
        if (result := await receive(client, lease, wanted(), write)) is not None:
            return result
        await asyncio.sleep(backoff_s(attempt, first_s=0.1, longest_s=2))
    raise OutcomeUnknown(f"lease {lease.lease_id} could not be read: its streams broke {READ_TRIES} times")


async def receive(
    client: SandboxClient, lease: Lease, operation: ReadStream, write: Callable[[bytes], object]
) -> OpResult | None:
    """Read a stream into `write`, once. None: it broke off, after what was written.

    Raises:
        SandboxError: as a call's.
        OSError: whatever `write` raises.
    """
    got = 0

    async def copy() -> None:
        nonlocal got
        async for chunk in client.get_stream(lease, operation.stream):
            got += len(chunk)
            write(chunk)

    async with _both(client.call(lease, operation), copy()) as (call, copying):
        await asyncio.wait([call, copying], return_when=asyncio.FIRST_COMPLETED)
        if call.done() and not isinstance(call.result(), Done):
            return call.result()
        try:
            await copying
        except BackendUnavailable:
            await asyncio.wait([call], timeout=ENDED_S)
            return call.result() if call.done() and call.exception() is None and _held_up(call.result()) else None
        result = await call
        # The body ended in order but is short: a proxy may end a response that broke off.
        return None if isinstance(result, Done) and result.count != got else result


def _held_up(result: OpResult) -> bool:
    """Whether the slot ended the stream: to read it again would take as long again, and end so."""
    return isinstance(result, OpError) and result.error == "timeout"


@contextlib.asynccontextmanager
async def _both(
    call: Coroutine[object, object, OpResult], copy: Coroutine[object, object, None]
) -> AsyncGenerator[tuple[asyncio.Task[OpResult], asyncio.Task[None]]]:
    """Two tasks that end with the block."""
    async with Tasks("stream") as tasks:
        yield tasks.spawn(call, "call", awaited=True), tasks.spawn(copy, "bytes", awaited=True)
