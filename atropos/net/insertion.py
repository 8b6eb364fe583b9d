"""Secrets of hosts: put into requests by the egress proxy, and blotted out of the answers.

A program in a slot has none of them. It can only cause requests that carry one, to the hosts that the secret is for.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from atropos.net.authority import Authority
from atropos.net.secrets import HostSecret, credentials

_DROPPED = frozenset({b"accept-encoding", b"range", b"if-range"})
"""Headers that ask for an answer in which a secret can't be found: packed, or in pieces."""


@dataclass(frozen=True)
class Insertion:
    """What goes into the requests for one host, and must not come back.

    Attributes:
        authority: where TLS is ended for them.
    """

    headers: tuple[tuple[bytes, bytes], ...]
    authority: Authority | None
    blot: Blot

    def into(self, headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """A request's headers (names in lower case) with the secrets instead of what the program wrote there."""
        # The program's own header of that name goes: of two, a server may take either.
        replaced = _DROPPED.union(name for name, _ in self.headers)
        others = [pair for pair in headers if pair[0] not in replaced]
        return [*others, *self.headers, (b"accept-encoding", b"identity")]


class SlotSecrets:
    """The secrets of one slot.

    Args:
        secrets: all of them.
        authority: signs for the hosts of those with `tls`.
    """

    def __init__(self, secrets: Sequence[HostSecret] = (), authority: Authority | None = None) -> None:
        self._secrets = secrets
        self._authority = authority

    def of(self, name: str, port: int, *, tls: bool | None = None) -> Insertion | None:
        """Those for one host; None: there are none.

        Args:
            name: canonical.
            port: that is connected to.
            tls: what the program begins with, TLS or a request; None: what is expected on this port.
        """
        matching = [each for each in self._secrets if each.matches(name, port)]
        # TLS wins over plain: a host with both kinds never gets the first one's secret unencrypted.
        ended = any(each.tls for each in matching)
        matching = [each for each in matching if each.tls == ended]
        if not matching or tls not in {None, ended}:
            return None
        values = [part for each in matching for part in credentials(each.value)]
        headers = {each.header: each.value for each in reversed(matching)}  # of two for one header the first
        return Insertion(tuple(headers.items()), self._authority if ended else None, Blot(values))


NO_SECRETS = SlotSecrets()

# -------------------------------------------------------------------------------------------------------------- answers


class Blot:
    """Overwrites values with asterisks, as many as they are long, as they were or in a usual encoding."""

    def __init__(self, values: Iterable[bytes]) -> None:
        # In any case: percent-encoding and hexadecimal are written in both.
        self._spellings = frozenset(each.lower() for value in values for each in _spellings(value))
        self._longest = max(map(len, self._spellings))

    def out_of(self, data: bytes) -> bytes:
        """Whole data without them."""
        blotted, lowered = bytearray(data), data.lower()
        for each in self._spellings:
            at = lowered.find(each)
            while at >= 0:
                blotted[at : at + len(each)] = b"*" * len(each)
                # From the next byte, not from the end of this one: occurrences may overlap.
                at = lowered.find(each, at + 1)
        return bytes(blotted)

    def unfinished(self, data: bytes) -> int:
        """How many bytes at the end of data may be the beginning of one."""
        lowered = data[-self._longest :].lower()
        for count in range(min(self._longest - 1, len(lowered)), 0, -1):
            if any(each.startswith(lowered[-count:]) for each in self._spellings):
                return count
        return 0


class BlottedStream:
    """Data that comes in pieces, blotted. What may be the beginning of a secret is held until its end is known."""

    def __init__(self, blot: Blot) -> None:
        self._blot = blot
        self._held = b""

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        """More of it; what can go on. `last`: there is no more."""
        data = self._blot.out_of(self._held + data)
        held = 0 if last else self._blot.unfinished(data)
        self._held = data[len(data) - held :]
        return data[: len(data) - held]


def _spellings(value: bytes) -> list[bytes]:
    text = value.decode()
    spellings = [
        value,
        value.hex().encode(),
        quote(text, safe="").encode(),
        quote(text).encode(),
        html.escape(text).encode(),
    ]
    spellings += [json.dumps(text)[1:-1].encode(), json.dumps(text)[1:-1].replace("/", "\\/").encode()]
    for before in range(3):  # within a longer text its first and last characters depend on the neighbours
        whole = (before + len(value)) * 8 // 6
        spellings.append(base64.b64encode(bytes(before) + value)[(0, 2, 3)[before] : whole])
    # The alphabet for URLs (RFC 4648, 5).
    spellings += [each.translate(bytes.maketrans(b"+/", b"-_")) for each in spellings[-3:]]
    return spellings
