"""A slow or broken network between an image store and its registry."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class Between:
    """What stands between a store and its registry, and lets `left` bytes of answers through before it acts.

    Args:
        host: the registry.
        left: bytes; None: all.
        cuts: whether connections end then; else they stay and nothing comes.
        pause_s: after each piece.
        address: where it listens.
    """

    def __init__(
        self, host: str, left: int | None, *, cuts: bool = True, pause_s: float = 0.0, address: str = "127.0.0.1"
    ) -> None:
        self.address = address
        self.target, self.left, self.cuts, self.pause_s = host.split(":"), left, cuts, pause_s
        self.auth_file = None
        self.asked: list[str] = []
        """Paths of all requests."""

    async def __aenter__(self) -> Self:
        self.server = await asyncio.start_server(self._pass, self.address, 0)
        self.host = f"{self.address}:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_) -> None:
        self.server.close()

    @property
    def blobs(self) -> list[str]:
        """Paths of requests for blobs."""
        return [path for path in self.asked if "/blobs/" in path]

    async def _pass(self, reader, writer) -> None:
        back, forth = await asyncio.open_connection(*self.target)

        async def up() -> None:
            while data := await reader.read(65_536):
                if data.startswith(b"GET "):
                    self.asked.append(data.split()[1].decode())
                forth.write(data)

        asking = asyncio.create_task(up())
        with contextlib.suppress(ConnectionError):
            while data := await back.read(65_536):
                acts = False
                if self.left is not None:
                    data, self.left = data[: self.left], max(0, self.left - len(data))
                    acts = not self.left
                writer.write(data)
                await writer.drain()
                await asyncio.sleep(self.pause_s)
                if acts:
                    await asyncio.sleep(0 if self.cuts else 60)
                    break
        asking.cancel()
        for each in (writer, forth):
            # An abort takes back what was written and has not gone on yet.
            if self.left == 0:
                each.transport.abort()
            else:
                each.close()
