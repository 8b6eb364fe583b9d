"""HTTP for external tools that reaches public addresses and what the operator allows, by the slots' egress policy."""

from __future__ import annotations

import asyncio
import functools
import ssl
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import cast
from urllib.parse import urlsplit

import httpcore
import httpx

from atropos.net.egress_policy import Address, EgressRefused, Policy, Rule, literal, own_addresses, parse
from atropos.net.relay import look_up

RESOLVE_S = 10.0
"""Timeout of looking a name up."""
_TIMEOUT_S = 20.0
_MAX_ADDRESSES = 8
_MAX_RESOLVERS = 128
"""Threads that look names up, at most; not asyncio's few, which a page with dead name servers would take from all
others."""
PAGE_PORTS = frozenset({80, 443, 8000, 8080, 8443})
"""Ports of web pages. Others (mail, databases, management) need an entry in the allow-list."""


class Guard:
    """Decides on destinations. One a ToolServer."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        listed = (parse(text, field="allow_hosts") for text in allow)
        self._policy = Policy((Rule("public", PAGE_PORTS), *listed), own_by_name=True)
        self._resolvers = ThreadPoolExecutor(_MAX_RESOLVERS, "resolve")

    def check_url(self, url: str) -> tuple[str, int]:
        """Host and port of a well-formed URL; the host is resolved when it is dialled.

        Raises:
            EgressRefused: not http or https, no host, or a user name in it.
        """
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise EgressRefused(f"{url[:200]!r} is not a valid address: {error}") from None
        if parts.scheme not in {"http", "https"}:
            raise EgressRefused(f"{url[:200]!r}: only http:// and https:// addresses can be opened")
        if not host:
            raise EgressRefused(f"{url[:200]!r} names no host")
        if parts.username is not None or parts.password is not None:
            raise EgressRefused("addresses with a user name or password in them are refused")
        if not host.isascii():
            try:
                host = httpx.URL(scheme="http", host=host).raw_host.decode("ascii")
            except httpx.InvalidURL:
                raise EgressRefused(f"{host[:200]!r} is not a host name") from None
        return host.rstrip(".").lower(), port or (443 if parts.scheme == "https" else 80)

    async def addresses(self, host: str, port: int) -> Sequence[Address]:
        """The addresses of a host that may be dialled.

        Raises:
            EgressRefused: all of them are private or local, or the port is not for web pages, and no rule allows it.
            OSError: the name does not resolve.
        """
        name = self._policy.judge_name(host, port)
        address = literal(name)
        addresses = await self._look_up(name, port) if address is None else [address]
        return self._policy.judge_addresses(name, port, addresses, own_addresses())

    async def _look_up(self, name: str, port: int) -> list[Address]:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(RESOLVE_S):
                addresses = await loop.run_in_executor(self._resolvers, look_up, name, port)
        except TimeoutError:
            raise OSError(f"{name} did not resolve within {RESOLVE_S:g} s") from None
        except UnicodeError:
            raise OSError(f"{name[:100]!r} is not a host name") from None
        return addresses[:_MAX_ADDRESSES]


class _GuardedBackend(httpcore.AsyncNetworkBackend):
    """Dials only what the guard allows, and exactly the address it checked."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._inner = cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to one of a host's allowed addresses."""
        try:
            addresses = await self._guard.addresses(host, port)
        except OSError as error:
            raise httpcore.ConnectError(f"{host}: {error.strerror or error}") from error
        last: Exception | None = None
        for address in addresses:
            try:
                return await self._inner.connect_tcp(
                    str(address), port, timeout=timeout, local_address=local_address, socket_options=socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        assert last is not None
        raise last

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: there are no pages on Unix sockets."""
        del timeout, socket_options
        raise EgressRefused(f"{path} is a local socket")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._inner.sleep(seconds)


@functools.cache
def _tls() -> ssl.SSLContext:
    """All clients share it: reading the certificates of all authorities takes 20 ms of CPU."""
    return httpx.create_ssl_context(trust_env=False)


class _GuardedTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport on a guarded network."""

    def __init__(self, guard: Guard) -> None:
        tls = _tls()
        super().__init__(verify=tls, trust_env=False)
        # httpx has no argument for the network backend, so its pool is replaced
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=100,
            max_keepalive_connections=20,
            keepalive_expiry=15,
            http1=True,
            network_backend=_GuardedBackend(guard),
        )


def guarded_client(guard: Guard) -> httpx.AsyncClient:
    """An HTTP client that reaches only what the guard allows, redirects included; no cookies kept, no proxy read."""
    return httpx.AsyncClient(
        transport=_GuardedTransport(guard),
        timeout=_TIMEOUT_S,
        follow_redirects=False,
        trust_env=False,
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=())),
        headers={
            "User-Agent": "Mozilla/5.0 (compatible; atropos-web-extract)",
            "Accept": "text/html,application/xhtml+xml,application/pdf,text/*;q=0.9,*/*;q=0.5",
            "Accept-Language": "en,*;q=0.5",
            "Accept-Encoding": "gzip",
        },
    )
