"""Where slots and external tools may connect to: by the host's name first, then by every address it has right now.

The connection is made to an address that was judged, never by name again, so that a second answer of the name server
changes nothing (DNS rebinding). Redirects are new requests and are judged like any other.

Public addresses are reached where a rule allows the host. A private one is reached only where the operator names it: by
an exact host name (wherever that leads), an address or a network. Link-local addresses and the metadata services of
clouds are never reached.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from atropos.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
WEB_PORTS = frozenset({80, 443})
"""Ports that are open to slots where a rule names none."""
MOST_PORTS = 64
"""Different ports in `egress_allow`: each has a listening socket in every slot's gateway."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_SIX_TO_FOUR = ipaddress.IPv6Network("2002::/16")
_SPECIAL: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in ("192.0.0.0/24", "192.88.99.0/24", "64:ff9b:1::/48", "3fff::/20", "5f00::/16", "fec0::/10")
)
"""Special ranges (IANA's registries) that not every Python's own tables know."""
_NEVER: tuple[Network, ...] = tuple(
    ipaddress.ip_network(text)
    for text in (
        *("0.0.0.0/32", "::/128", "169.254.0.0/16", "fe80::/10", "224.0.0.0/4", "ff00::/8", "255.255.255.255/32"),
        *("fd00:ec2::254/128", "fd20:ce::254/128", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
    )
)
"""No rule opens these: link-local and multicast addresses, and what clouds answer with credentials at (AWS, Google,
Alibaba, Azure, Oracle)."""
_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?\Z"
)


class EgressRefused(Exception):
    """Not allowed; the text says why and is shown to the program that asked."""


@dataclass(frozen=True)
class Rule:
    """One entry of an allow or deny list.

    Attributes:
        host: `public`, a name, `*.suffix`, an address or a network.
        ports: None: every one.
        network: `host`, where it is an address or a network.
    """

    host: str
    ports: frozenset[int] | None = None
    network: Network | None = None

    def __str__(self) -> str:
        return f"{self.host}:{min(self.ports)}" if self.ports is not None and len(self.ports) == 1 else self.host

    def covers(self, port: int) -> bool:
        """Whether the rule is about this port."""
        return self.ports is None or port in self.ports

    def matches(self, host: str, port: int) -> bool:
        """Whether a request by name (or literal address) falls under this rule."""
        if not self.covers(port):
            return False
        if self.host == "public":
            return True
        if self.network is not None:
            address = literal(host)
            return address is not None and address in self.network
        if self.host.startswith("*."):
            # With its dot: `*.example.com` is neither `badexample.com` nor `example.com` itself.
            return host.endswith(self.host[1:])
        return host == self.host

    def names(self, host: str, address: Address, port: int) -> bool:
        """Whether the rule names exactly this destination, by its host or its address."""
        if self.network is not None:
            return self.covers(port) and address in self.network
        # A wildcard names nobody: whoever owns a name below it could point it into a private network.
        return self.host != "public" and not self.host.startswith("*.") and self.matches(host, port)


def parse(text: str, *, field: str, ports: frozenset[int] | None = None) -> Rule:
    """A rule as it is written: `public`, `pypi.org`, `*.debian.org`, `git.example.com:9418`, `203.0.113.0/24`.

    Args:
        text: one entry of a list.
        field: the list's name, for the message.
        ports: what the rule is about where it names no port.

    Raises:
        ConfigError: it is none of these; names the field.
    """
    entry = text.strip().lower().rstrip(".")
    host, colon, digits = entry.rpartition(":")
    # A colon within an IPv6 address begins no port, unless the address stands in brackets.
    if colon and not digits.startswith("//") and (host.endswith("]") or ":" not in host):
        if not digits.isdecimal() or not 0 < int(digits) < 65_536:
            raise ConfigError(f"{field}: {text!r}: a port is 1 to 65535")
        ports = frozenset({int(digits)})
    else:
        host = entry
    with contextlib.suppress(ValueError):
        return Rule(host, ports, _plain_network(ipaddress.ip_network(host.strip("[]"), strict=False)))
    if host == "public" or _NAME.match(host.removeprefix("*.")):
        return Rule(host, ports)
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
    """The canonical form of an address: IPv4 for IPv4-mapped IPv6, which the kernel treats as the same."""
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
    """What may be reached.

    Attributes:
        allow: rules of which one must match the request.
        deny: rules of which none may match the request or an address of it.
        own_by_name: whether this machine's own addresses, loopback included, are reached where a rule names them.
    """

    allow: tuple[Rule, ...]
    deny: tuple[Rule, ...] = ()
    own_by_name: bool = False

    @classmethod
    def of_slots(cls, allow: Iterable[str], deny: Iterable[str] = ()) -> Policy:
        """What all slots of a server may reach, from `egress_allow` and `egress_deny`.

        Raises:
            ConfigError: an entry can't be read, or there are too many different ports.
        """
        policy = cls(
            tuple(parse(entry, field="egress_allow", ports=WEB_PORTS) for entry in allow),
            tuple(parse(entry, field="egress_deny") for entry in deny),
        )
        if len(policy.ports) > MOST_PORTS:
            raise ConfigError(f"egress_allow: {len(policy.ports)} different ports are allowed; at most {MOST_PORTS}")
        return policy

    @property
    def ports(self) -> list[int]:
        """The ports that a rule opens by their numbers."""
        return sorted(frozenset[int]().union(*(rule.ports or () for rule in self.allow)))

    def judge_name(self, host: str, port: int) -> str:
        """The canonical form of a host.

        Raises:
            EgressRefused: the name or port isn't allowed.
        """
        name = host.removeprefix("[").removesuffix("]").lower().rstrip(".")
        address = literal(name)
        if address is None and not _NAME.match(name):
            raise EgressRefused(f"{host[:200]!r} is not a host name")
        name = name if address is None else str(address)
        # what a name leads to may be in a network that is allowed
        by_address = address is None and any(rule.network is not None and rule.covers(port) for rule in self.allow)
        if not by_address and not any(rule.matches(name, port) for rule in self.allow):
            allowed = ", ".join(map(str, self.allow)) or "none"
            any_port = any(rule.ports is None for rule in self.allow)
            ports = "any" if any_port else ", ".join(map(str, self.ports))
            raise EgressRefused(
                f"{name}:{port} is not on the list of allowed hosts ({allowed}; ports {ports or 'none'})"
            )
        # Denied networks are asked once the addresses are known (`judge_addresses`).
        if any(rule.network is None and rule.matches(name, port) for rule in self.deny):
            raise EgressRefused(f"{name}:{port} is on the list of denied hosts")
        return name

    def denied_names(self, port: int | None = None) -> list[str]:
        """Names denied on a port (None: on any) whose addresses must not be reached under other names either."""
        rules = [rule for rule in self.deny if rule.network is None and (port is None or rule.covers(port))]
        return [rule.host for rule in rules if "*" not in rule.host and rule.host != "public"]

    def judge_addresses(
        self, name: str, port: int, addresses: Sequence[Address], own: frozenset[Address]
    ) -> list[Address]:
        """Those of a name's addresses that may be connected to, in canonical form.

        Args:
            name: from `judge_name`.
            port: as asked for.
            addresses: those that the name resolves to now.
            own: this machine's addresses, and those of names denied on this port.

        Raises:
            EgressRefused: none is left.
        """
        good = [plain(address) for address in addresses if self._reaches(name, port, address, own)]
        if good:
            return good
        shown = ", ".join(str(address) for address in addresses[:3]) or "no address"
        raise EgressRefused(f"{name} leads to {shown}: only public addresses can be reached, and none that is denied")

    def _reaches(self, name: str, port: int, address: Address, own: frozenset[Address]) -> bool:
        # Judged in every form: a NAT64 or 6to4 address of a private IPv4 one must not pass as a public IPv6 one.
        every = forms(address)
        denied = [rule.network for rule in self.deny if rule.network is not None]
        if any(form in network for form in every for network in (*denied, *_NEVER)):
            return False
        # This machine's own addresses lead to what listens here, the sandbox server among it, however public they are.
        local = any(form in own or form.is_loopback for form in every)
        if local and not self.own_by_name:
            return False
        if any(rule.names(name, plain(address), port) for rule in self.allow):
            return True
        by_name = any(rule.matches(name, port) for rule in self.allow)
        return by_name and not local and is_public(address)


@dataclass(frozen=True)
class Narrowed:
    """A policy within another: what both allow is reached, and nothing else.

    Attributes:
        outer: the operator's.
        inner: what one slot is left with of it.
    """

    outer: Policy
    inner: Policy

    @classmethod
    def to(cls, outer: Policy, hosts: Iterable[str]) -> Narrowed:
        """A policy within which only these hosts are reached, on the ports that it allows.

        Raises:
            ConfigError: an entry can't be read.
        """
        return cls(outer, Policy(tuple(parse(entry, field="network") for entry in hosts)))

    @property
    def ports(self) -> list[int]:
        """As `Policy.ports`."""
        return self.outer.ports

    def judge_name(self, host: str, port: int) -> str:
        """As `Policy.judge_name`."""
        # The operator's first: its refusal is the one that is shown.
        return self.inner.judge_name(self.outer.judge_name(host, port), port)

    def judge_addresses(
        self, name: str, port: int, addresses: Sequence[Address], own: frozenset[Address]
    ) -> list[Address]:
        """As `Policy.judge_addresses`."""
        return self.inner.judge_addresses(name, port, self.outer.judge_addresses(name, port, addresses, own), own)


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, also inside IPv6 forms that carry an IPv4 address."""
    address, *inner = forms(address)
    if any(address in network for network in (*_SPECIAL, *_NEVER)):
        return False
    if inner:
        return is_public(inner[0])
    return address.is_global and not address.is_multicast and not address.is_reserved


def own_addresses() -> frozenset[Address]:
    """The addresses of this network namespace's own interfaces, from the kernel's routing tables."""
    addresses: set[Address] = set()
    with contextlib.suppress(OSError), open("/proc/net/fib_trie", encoding="ascii") as file:
        addresses.update(map(ipaddress.ip_address, re.findall(r"\|-- (\S+)\s+/32 host LOCAL", file.read())))
    with contextlib.suppress(OSError), open("/proc/net/if_inet6", encoding="ascii") as file:
        addresses.update(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in file)
    return frozenset(addresses)
