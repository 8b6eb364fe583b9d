"""A backend's requests to a sandbox server: its health, its status, draining. For leases see `atropos.slots.client`."""

from __future__ import annotations

import asyncio
import ssl
import time

import aiohttp
from pydantic import ValidationError

from atropos.net.tls import client_context
from atropos.wire import DrainRequest, Health, Status, client_name

ANSWER_S = 3.0
"""How long a server may take to answer, in seconds."""
DOUBT_S = 12.0
"""More than two of the longest heartbeats that a pool sets, in seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_HEALTH_PAUSE_S = 0.02, 0.5, 0.1
"""Pauses between two requests, in seconds; shorter ones for health, which starts wait for."""


class ServerHttp:
    """HTTP requests of one backend to its servers; close it when done."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | bool = True
        self._certificate: str | None = None

    def trust(self, certificate: str | None) -> None:
        """Set the only certificate, in PEM, that is accepted from servers at https:// addresses."""
        if certificate != self._certificate:
            self._certificate = certificate
            self._tls = True if certificate is None else client_context(certificate)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            # A connection for each request: they are rare, and addresses of ended containers are used again by others.
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def healthy(self, url: str) -> bool:
        """Whether the server answers and is ok or draining; False when it can't be reached or is broken."""
        try:
            async with self._open().get(f"{url}/v1/health", ssl=self._tls) as answer:
                health = Health.model_validate_json(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError):
            return False
        # A draining server works: it has leases, and will end by itself.
        return health.status in {"ok", "draining"}

    async def until_healthy(self, url: str, within_s: float) -> bool:
        """Wait until it is healthy; False when `within_s` seconds went by first."""
        pause = FIRST_PAUSE_S
        try:
            async with asyncio.timeout(within_s):
                while not await self.healthy(url):
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.3, LONGEST_HEALTH_PAUSE_S)
        except TimeoutError:
            return False
        return True

    async def status(self, url: str, token: str, *, patience_s: float = 0.0) -> Status | None:
        """A server's status; None when it doesn't answer. `patience_s`: see `_ask`."""
        raw = await self._ask("GET", f"{url}/v1/status", token, patience_s=patience_s)
        try:
            return None if raw is None else Status.model_validate_json(raw)
        except ValidationError:
            return None

    async def _ask(
        self, method: str, url: str, token: str, *, patience_s: float, body: str | None = None
    ) -> bytes | None:
        """The answer to a request; None: there is none, or it is a refusal.

        The request is retried for `patience_s` where the server is too busy to answer within `ANSWER_S`: it may hold
        leases.
        """
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        until = time.monotonic() + patience_s
        while True:
            try:
                async with self._open().request(method, url, data=body, headers=headers, ssl=self._tls) as answer:
                    return await answer.read() if answer.ok else None
            except TimeoutError:
                if time.monotonic() >= until:
                    return None
            # Nobody listens: no lease can be there. A time-out is another matter, see above.
            except (aiohttp.ClientError, OSError):
                return None

    async def until_idle(self, url: str, token: str) -> None:
        """Wait until a draining server has no lease, or doesn't answer."""
        while (status := await self.status(url, token, patience_s=DOUBT_S)) is not None and status.leased:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(LONGEST_PAUSE_S)

    async def used_by_others(self, url: str, token: str, client_id: str) -> bool:
        """Whether a live client other than `client_id` uses the server.

        A client with leases and without a connection may be reconnecting, or dead, which is clear after two heartbeats.
        """
        mine, deadline = client_name(client_id), time.monotonic() + DOUBT_S
        while (status := await self.status(url, token, patience_s=DOUBT_S)) is not None:
            if any(each != mine for each in status.connected):
                return True
            if all(each == mine for each in status.live):
                return False
            # In doubt it is in use: to keep a container costs less than to end another run's leases.
            if time.monotonic() > deadline:
                return True
            await asyncio.sleep(LONGEST_PAUSE_S)
        return False

    async def drain(self, url: str, token: str, deadline_s: float) -> bool:
        """Ask a server to take no new leases; its leases have `deadline_s` seconds. False: it didn't answer.

        Unless `deadline_s` is 0, the request is retried for `DOUBT_S` where the server is too busy to answer.
        """
        body = DrainRequest(deadline_s=deadline_s).model_dump_json()
        # With 0 the container is removed next, whether it has answered or not.
        patience_s = DOUBT_S if deadline_s else 0
        return await self._ask("POST", f"{url}/v1/drain", token, patience_s=patience_s, body=body) is not None
