"""Text frames of a WebSocket, written cheaply: each call travels in one, and aiohttp's writer costs more than that.

Both ends of the stream between a pool and a sandbox server go through here.
"""

from __future__ import annotations

from collections.abc import Iterable

import aiohttp

SENDING_FAILURES = (aiohttp.ClientError, OSError, RuntimeError)
"""What sending on a connection that breaks raises."""


def batch(messages: Iterable[bytes]) -> bytes:
    """Messages in JSON as one array."""
    return b"[" + b",".join(messages) + b"]"


def unmasked(text: bytes) -> bytes:
    """A whole text frame as a server sends it, unmasked (RFC 6455, 5.2)."""
    size = len(text)
    if size < 126:
        # 0x81: a final frame (FIN) of text.
        return bytes((0x81, size)) + text
    if size < 65_536:
        return b"\x81\x7e" + size.to_bytes(2, "big") + text
    return b"\x81\x7f" + size.to_bytes(8, "big") + text


async def send(socket: aiohttp.ClientWebSocketResponse, text: bytes) -> None:
    """Send a text frame as a client, and wait while the connection takes no more. Raises `SENDING_FAILURES`."""
    await socket.send_frame(text, aiohttp.WSMsgType.TEXT)


def send_now(socket: aiohttp.ClientWebSocketResponse, text: bytes) -> None:
    """Send a text frame as a client without a turn of the event loop; nobody waits for room.

    Raises `SENDING_FAILURES`.
    """
    sending = socket.send_frame(text, aiohttp.WSMsgType.TEXT)
    try:
        sending.send(None)
    except StopIteration:
        return  # as a rule: all of it is with the transport
    sending.close()  # it is written; what is waited for is room for more, and the next sender waits for that too


def text_of(received: aiohttp.WSMessage) -> str | bytes | None:
    """The text of what was received; None: the connection is over."""
    # Close, error and end of connection alike: aiohttp answers pings itself.
    if received.type not in {aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY}:
        return None
    return received.data
