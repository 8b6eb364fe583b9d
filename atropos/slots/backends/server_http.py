"""The few questions a backend asks a sandbox server: does it answer, who uses it, let it drain.

Calls and leases are not its business: those travel by `atropos.slots.client`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time

import aiohttp
from pydantic import ValidationError

from atropos.net.tls import client_context
from atropos.wire import DrainRequest, Health, Status, client_name

ANSWER_S = 3.0
"""How long a server may take to answer one of these questions, in seconds."""
DOUBT_S = 12.0
"""More than two of the longest heartbeats that a pool sets, in seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_HEALTH_PAUSE_S = 0.02, 0.5, 0.1
"""Pauses between two questions; a start waits for the first answer, so that one is asked for more often, in seconds."""


class ServerHttp:
    """Asks sandbox servers over HTTP. One a backend; close it when done."""

    def __init__(self) -> None:
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | bool = True
        self._certificate: str | None = None

    def trust(self, certificate: str | None) -> None:
        """The only certificate, in PEM, that servers at https:// addresses may show from now on."""
        if certificate != self._certificate:
            self._certificate = certificate
            self._tls = True if certificate is None else client_context(certificate)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            timeout = aiohttp.ClientTimeout(total=ANSWER_S)
            self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(force_close=True))
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def healthy(self, url: str) -> bool:
        """Whether the server answers and takes work, or drains; False when it is not there (yet), starts or is broken."""
        try:
            async with self._open().get(f"{url}/v1/health", ssl=self._tls) as answer:
                health = Health.model_validate_json(await answer.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValidationError):
            return False
        return health.status in {"ok", "draining"}

    async def until_healthy(self, url: str, within_s: float) -> bool:
        """Wait for the first good answer; False when `within_s` seconds went by without one."""
        pause = FIRST_PAUSE_S
        try:
            async with asyncio.timeout(within_s):
                while not await self.healthy(url):
                    await asyncio.sleep(pause)
                    pause = min(pause * 1.3, LONGEST_HEALTH_PAUSE_S)
        except TimeoutError:
            return False
        return True

    async def status(self, url: str, token: str) -> Status | None:
        """Slots, leases and clients of a server; None when it doesn't say."""
        with contextlib.suppress(TimeoutError):
            return await self._status(url, token)
        return None

    async def _status(self, url: str, token: str) -> Status | None:
        """As `status`.

        Raises:
            TimeoutError: no answer within `ANSWER_S`, which may mean that the server is busy.
        """
        try:
            async with self._open().get(f"{url}/v1/status", headers=_bearer(token), ssl=self._tls) as answer:
                return Status.model_validate_json(await answer.read()) if answer.ok else None
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError, ValidationError):
            return None

    async def _status_in_the_end(self, url: str, token: str) -> Status | None:
        """As `status`; one that is too busy to answer is asked again for `DOUBT_S`: what it holds must not be ended."""
        deadline = time.monotonic() + DOUBT_S
        while time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return await self._status(url, token)
        return None

    async def until_idle(self, url: str, token: str) -> None:
        """Wait until no lease is left on a draining server, or it doesn't answer any more."""
        while (status := await self._status_in_the_end(url, token)) is not None and status.leased:  # noqa: ASYNC110 (another process)
            await asyncio.sleep(LONGEST_PAUSE_S)

    async def used_by_others(self, url: str, token: str, client_id: str) -> bool:
        """Whether a live client beside the asking one works on the server. The dead are waited out for a while.

        A client that holds leases but has no connection may be about to connect again, or be dead: which of the two is
        known after two heartbeats.
        """
        mine, deadline = client_name(client_id), time.monotonic() + DOUBT_S
        while (status := await self._status_in_the_end(url, token)) is not None:
            if any(each != mine for each in status.connected):
                return True
            if all(each == mine for each in status.live):
                return False
            if time.monotonic() > deadline:
                return True
            await asyncio.sleep(LONGEST_PAUSE_S)
        return False

    async def drain(self, url: str, token: str, deadline_s: float) -> bool:
        """Ask a server to take no new leases; its leases may go on for `deadline_s` seconds. False: it didn't answer.

        As long as there may be leases that go on, one that is too busy to answer is asked again for `DOUBT_S`.
        """
        body = DrainRequest(deadline_s=deadline_s).model_dump_json()
        headers = _bearer(token) | {"Content-Type": "application/json"}
        until = time.monotonic() + (DOUBT_S if deadline_s else 0)
        while True:
            try:
                async with self._open().post(f"{url}/v1/drain", data=body, headers=headers, ssl=self._tls) as answer:
                    return answer.ok
            except TimeoutError:
                if time.monotonic() >= until:
                    return False
            except (aiohttp.ClientError, OSError):
                return False


def _bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}
