"""A secret of some hosts, which the egress proxy has (`insertion`) and the slot has not: what it may be."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from dataclasses import dataclass

from atropos.errors import ConfigError
from atropos.net.egress_policy import Rule, parse

MIN_CHARS = 8
"""Shortest credentials: shorter ones can't be told from an answer's other text."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,100}\Z")
# Printable ASCII: a line break would begin another header.
_VALUE = re.compile(r"[!-~](?:[ -~]*[!-~])?\Z")
_OURS = frozenset(
    {"host", "connection", "content-length", "transfer-encoding", "expect", "te", "trailer", "upgrade", "keep-alive"}
    | {"proxy-authorization", "proxy-connection", "accept-encoding", "range", "if-range"}
)
"""Headers that the proxy itself writes or drops."""


def host_rule(text: str, *, tls: bool) -> Rule:
    """For which requests a secret is: `api.example.com`, `*.example.com`, an address, each with `:PORT` or not.

    Raises:
        ConfigError: it is none of these.
    """
    rule = parse(text, field="hosts", ports=frozenset({443 if tls else 80}))
    if rule.host == "public" or (rule.network is not None and rule.network.num_addresses > 1):
        raise ConfigError(f"hosts: {text!r} is not one host: write a name, a *.suffix or an address")
    return rule


def check_header(name: str) -> str:
    """The header that a secret goes into, in lower case.

    Raises:
        ConfigError: it is none, or one that the proxy writes itself.
    """
    if not _TOKEN.match(name) or name.lower() in _OURS:
        raise ConfigError(f"header: {name!r} can't carry a secret")
    return name.lower()


def check_value(value: str) -> str:
    """A header's value.

    Raises:
        ConfigError: it is none, or too short; the message is without it.
    """
    if not _VALUE.match(value):
        raise ConfigError("value: a header's value is printable ASCII on one line, without spaces around it")
    if min(map(len, credentials(value.encode()))) < MIN_CHARS:
        raise ConfigError(f"value: at least {MIN_CHARS} characters of credentials, to be found in answers")
    return value


def credentials(value: bytes) -> list[bytes]:
    """What of a header's value is secret: all, or what follows its scheme; of Basic, the password, too."""
    scheme, _, rest = value.rpartition(b" ")
    if scheme.lower() == b"basic":
        try:
            # The user's name is no secret, and often a common word that answers are full of.
            return [rest, base64.b64decode(rest, validate=True).partition(b":")[2]]
        except ValueError:
            pass
    return [rest]


@dataclass(frozen=True)
class HostSecret:
    """One header for the hosts that it is for.

    Attributes:
        rules: which requests get it.
        tls: whether they are made by TLS, which the proxy ends; else without.
    """

    rules: tuple[Rule, ...]
    header: bytes
    value: bytes
    tls: bool

    @classmethod
    def of(cls, hosts: Iterable[str], header: str, value: str, *, tls: bool) -> HostSecret:
        """From what was checked at the edge."""
        return cls(tuple(host_rule(host, tls=tls) for host in hosts), header.encode(), value.encode(), tls)

    def matches(self, name: str, port: int) -> bool:
        """Whether it is for this host, by its canonical name (`Policy.judge_name`)."""
        return any(rule.matches(name, port) for rule in self.rules)
