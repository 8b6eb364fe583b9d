"""Where tools may connect: public addresses, and what the operator lists. Checked on the address that is dialled.

A name is resolved once and the connection goes to exactly the address that was checked, so that neither a redirect nor
a name server that changes its mind (DNS rebinding) leads anywhere else.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httpcore
import httpx

from atropos.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NAT64 = (ipaddress.ip_network("64:ff9b::/96"), ipaddress.ip_network("64:ff9b:1::/48"))
_RESOLVE_S = 10.0
_MAX_ADDRESSES = 8
_PORTS = frozenset({80, 443, 8000, 8080, 8443})
"""Ports that web pages live on. Others (mail, databases, management) need an entry in the allow-list."""


class Forbidden(Exception):
    """The destination may not be reached; the message says why."""


@dataclass(frozen=True)
class Rule:
    """One entry of the allow-list: a host name, `*.suffix` or address range, with or without a port."""

    host: str | None
    network: Network | None
    port: int | None


def parse_rule(text: str) -> Rule:
    """Read one entry: `host`, `host:port`, `*.suffix`, `10.0.0.0/8`, `127.0.0.1:8080`, `[::1]:80`.

    Raises:
        ConfigError: it is none of these.
    """
    host, port = text.strip().lower(), None
    if "/" not in host:
        if host.startswith("["):
            host, _, rest = host[1:].partition("]")
            port = rest.removeprefix(":") or None
        elif host.count(":") == 1:
            host, _, port = host.partition(":")
    if port is not None and not (port.isdigit() and 0 < int(port) < 65_536):
        raise ConfigError(f"allow_hosts: {text!r} has no valid port")
    number = int(port) if port else None
    try:
        return Rule(None, ipaddress.ip_network(host, strict=False), number)
    except ValueError:
        pass
    if not host or any(c in host for c in " /:@") or "*" in host.removeprefix("*."):
        raise ConfigError(f"allow_hosts: {text!r} is neither host, host:port, *.suffix nor an address range")
    return Rule(host, None, number)


def _translated(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address that an IPv6 address is only another spelling of (mapped, NAT64)."""
    if any(address in network for network in _NAT64):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped


def is_public(address: Address) -> bool:
    """Whether an address, and each it stands for, is reachable from the whole internet and nothing else."""
    if isinstance(address, ipaddress.IPv6Address):
        translated = _translated(address)
        if translated is not None:
            return is_public(translated)
        carried = [one for one in (address.sixtofour, *(address.teredo or ())) if one is not None]
        if not all(is_public(one) for one in carried):
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


class Guard:
    """Decides on destinations. One a ToolServer."""

    def __init__(self, allow: Iterable[str] = ()) -> None:
        self._rules = [parse_rule(text) for text in allow]

    def _named(self, host: str, port: int) -> bool:
        for rule in self._rules:
            if rule.host is None or rule.port not in {None, port}:
                continue
            if host == rule.host or (rule.host.startswith("*.") and host.endswith(rule.host[1:])):
                return True
        return False

    def _ranged(self, address: Address, port: int) -> bool:
        return any(
            rule.network is not None and rule.port in {None, port} and address in rule.network for rule in self._rules
        )

    def check_url(self, url: str) -> tuple[str, int]:
        """Host and port of an address that is well-formed; where it leads is found out when it is dialled.

        Raises:
            Forbidden: not http or https, no host, or a user name in it.
        """
        try:
            parts = urlsplit(url.strip())
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise Forbidden(f"{url[:200]!r} is not a valid address: {error}") from None
        if parts.scheme not in {"http", "https"}:
            raise Forbidden(f"{url[:200]!r}: only http:// and https:// addresses can be opened")
        if not host:
            raise Forbidden(f"{url[:200]!r} names no host")
        if parts.username is not None or parts.password is not None:
            raise Forbidden("addresses with a user name or password in them are refused")
        return host.rstrip(".").lower(), port or (443 if parts.scheme == "https" else 80)

    async def addresses(self, host: str, port: int) -> Sequence[str]:
        """The addresses of a host that may be dialled.

        Raises:
            Forbidden: one of them is private or local, or the port is not for web pages, and no rule allows it.
            OSError: the name does not resolve.
        """
        host = host.rstrip(".").lower()
        found = await _resolve(host, port)
        named = self._named(host, port)
        for address in found:
            if named or self._ranged(address, port):
                continue
            if not is_public(address):
                raise Forbidden(f"{host} leads to {address}, which is not a public address; it can't be opened")
            if port not in _PORTS:
                raise Forbidden(f"port {port} of {host} can't be opened; only {', '.join(map(str, sorted(_PORTS)))}")
        return [str(address) for address in found]


async def _resolve(host: str, port: int) -> list[Address]:
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_RESOLVE_S):
            # getaddrinfo also reads the odd spellings of addresses (127.1, 0x7f000001, 2130706433)
            infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except TimeoutError:
        raise OSError(f"{host} did not resolve within {_RESOLVE_S:g} s") from None
    except UnicodeError:
        raise OSError(f"{host[:100]!r} is not a host name") from None
    found: list[Address] = []
    for info in infos:
        address = ipaddress.ip_address(str(info[4][0]).partition("%")[0])
        if address not in found:
            found.append(address)
    if not found:
        raise OSError(f"{host} has no address")
    return found[:_MAX_ADDRESSES]


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
                    address, port, timeout=timeout, local_address=local_address, socket_options=socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                last = error
        assert last is not None
        raise last

    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.AsyncNetworkStream:
        """Refuse: pages don't live behind Unix sockets."""
        del timeout, socket_options
        raise Forbidden(f"{path} is a local socket")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await self._inner.sleep(seconds)


class _GuardedTransport(httpx.AsyncHTTPTransport):
    """httpx's own transport on a guarded network."""

    def __init__(self, guard: Guard, *, connections: int) -> None:
        super().__init__(trust_env=False)
        # httpx has no argument for the network backend: its pool is replaced by one that has
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=httpx.create_ssl_context(trust_env=False),
            max_connections=connections,
            max_keepalive_connections=20,
            keepalive_expiry=15,
            http1=True,
            network_backend=_GuardedBackend(guard),
        )


def guarded_client(guard: Guard, *, timeout_s: float = 20, connections: int = 100) -> httpx.AsyncClient:
    """An HTTP client that reaches only what the guard allows, redirects included; no cookies kept, no proxy read."""
    return httpx.AsyncClient(
        transport=_GuardedTransport(guard, connections=connections),
        timeout=httpx.Timeout(timeout_s),
        follow_redirects=False,
        trust_env=False,
        headers={
            "User-Agent": "Mozilla/5.0 (compatible; atropos-web-extract)",
            "Accept": "text/html,application/xhtml+xml,application/pdf,text/*;q=0.9,*/*;q=0.5",
            "Accept-Language": "en,*;q=0.5",
            "Accept-Encoding": "gzip",
        },
    )
