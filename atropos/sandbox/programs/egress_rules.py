"""Where a slot may connect to: a host is judged by its name first, then by every address that the name has right now.

The connection is made to an address that was judged, never by name again, so that a second answer of the name server
changes nothing. Redirects come back through the proxy as new requests and are judged like any other.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atropos.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
PORTS = frozenset({80, 443})
"""Ports that are open where a rule names none."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "3fff::/20", "5f00::/16", "fec0::/10")
)
"""Special ranges (IANA's registries) that not every Python's own tables know."""
_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z"
)


class Refused(Exception):
    """Not allowed; the text says why and is shown to the program that asked."""


@dataclass(frozen=True)
class Rule:
    """One entry of an allow or deny list. `host`: `public`, a name, `*.suffix`, an address or a network."""

    host: str
    port: int | None = None
    network: Network | None = None

    def matches(self, host: str, port: int) -> bool:
        """Whether a request by name (or literal address) falls under this rule."""
        if port != self.port if self.port is not None else port not in PORTS:
            return False
        if self.host == "public":
            return True
        if self.network is not None:
            address = literal(host)
            return address is not None and address in self.network
        if self.host.startswith("*."):
            return host.endswith(self.host[1:])
        return host == self.host


def parse(text: str, *, field: str) -> Rule:
    """A rule as it is written: `public`, `pypi.org`, `*.debian.org`, `git.example.com:9418`, `203.0.113.0/24`.

    Raises:
        ConfigError: it is none of these; names the field.
    """
    entry = text.strip().lower().rstrip(".")
    host, colon, digits = entry.rpartition(":")
    port: int | None = None
    if colon and ":" not in host and digits.isdecimal():
        port = int(digits)
        if not 0 < port < 65_536:
            raise ConfigError(f"{field}: {text!r}: a port is 1 to 65535")
    else:
        host = entry
    try:
        return Rule(host, port, _plain_network(ipaddress.ip_network(host.strip("[]"), strict=False)))
    except ValueError:
        pass
    if host == "public" or _NAME.match(host.removeprefix("*.")):
        return Rule(host, port)
    raise ConfigError(
        f"{field}: {text!r} is not 'public', a host name, a *.suffix, an address or a network (each may end in :PORT)"
    )


def literal(host: str) -> Address | None:
    """The address that a host is written as, if it is one; odd spellings of addresses are names that don't exist.

    A zone (`%eth0`) is one of them: it would make two spellings of one address differ.
    """
    if "%" in host:
        return None
    try:
        return plain(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
    except ValueError:
        return None


def plain(address: Address) -> Address:
    """The one spelling of an address: IPv4 where it is IPv4 in an IPv6 coat, which the kernel takes for the same."""
    if isinstance(address, ipaddress.IPv6Address):
        if address.scope_id is not None:
            address = ipaddress.IPv6Address(int(address))
        return address.ipv4_mapped or address
    return address


def _plain_network(network: Network) -> Network:
    inner = network.network_address.ipv4_mapped if isinstance(network, ipaddress.IPv6Network) else None
    if inner is None or network.prefixlen < 96:
        return network
    return ipaddress.IPv4Network((inner, network.prefixlen - 96))


def forms(address: Address) -> tuple[Address, ...]:
    """An address, and the IPv4 one that a tunnel or translator would make of it."""
    address = plain(address)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _SIX_TO_FOUR:
            inner = address.sixtofour
            assert inner is not None
            return address, inner
        if address in _NAT64:
            return address, ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
    return (address,)


@dataclass(frozen=True)
class Policy:
    """What all slots of a server may reach.

    Attributes:
        allow: rules of which one must match the request.
        deny: rules of which none may match the request or an address of it.
    """

    allow: tuple[Rule, ...]
    deny: tuple[Rule, ...] = ()

    @classmethod
    def of(cls, allow: Iterable[str], deny: Iterable[str] = ()) -> Policy:
        """From the configuration's lists.

        Raises:
            ConfigError: an entry can't be read.
        """
        return cls(
            tuple(parse(entry, field="egress_allow") for entry in allow),
            tuple(parse(entry, field="egress_deny") for entry in deny),
        )

    def judge_name(self, host: str, port: int) -> str:
        """The host in its one spelling.

        Raises:
            Refused: the name or port isn't allowed.
        """
        name = host.removeprefix("[").removesuffix("]").lower().rstrip(".")
        address = literal(name)
        if address is None and not _NAME.match(name):
            raise Refused(f"{host[:200]!r} is not a host name")
        name = name if address is None else str(address)
        if not any(rule.matches(name, port) for rule in self.allow):
            allowed = ", ".join(f"{rule.host}:{rule.port}" if rule.port else rule.host for rule in self.allow)
            raise Refused(f"{name}:{port} is not on the list of allowed hosts ({allowed or 'none'}; ports 80 and 443)")
        if any(rule.network is None and _denies(rule, name, port) for rule in self.deny):
            raise Refused(f"{name}:{port} is on the list of denied hosts")
        return name

    @property
    def denied_names(self) -> list[str]:
        """The names on the deny list whose addresses aren't to be reached under other names either."""
        return [rule.host for rule in self.deny if rule.network is None and "*" not in rule.host and "." in rule.host]

    def judge_addresses(self, name: str, addresses: Sequence[Address], own: frozenset[Address]) -> list[Address]:
        """Those of a name's addresses that may be connected to, each in its one spelling.

        Args:
            name: for the message.
            addresses: what the name has right now.
            own: addresses that are never reached: the container's own, and those of denied names.

        Raises:
            Refused: none is left.
        """
        good = [plain(address) for address in addresses if all(self._public(form, own) for form in forms(address))]
        if good:
            return good
        shown = ", ".join(str(address) for address in addresses[:3]) or "no address"
        raise Refused(f"{name} leads to {shown}: only public addresses can be reached")

    def _public(self, address: Address, own: frozenset[Address]) -> bool:
        if address in own or any(rule.network is not None and address in rule.network for rule in self.deny):
            return False
        return is_public(address)


def _denies(rule: Rule, name: str, port: int) -> bool:
    return (rule.port is None or rule.port == port) and (
        name.endswith(rule.host[1:]) if rule.host.startswith("*.") else name == rule.host
    )


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, also inside IPv6 forms that carry an IPv4 address."""
    address, *inner = forms(address)
    if any(address in network for network in _NEVER):
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if inner:
            return is_public(inner[0])
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved
