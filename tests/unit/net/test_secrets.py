"""Secrets go to the hosts that they are for, and a program that asks for them finds none in any answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import html
import json
import ssl
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos.net import relay
from atropos.net.authority import Authority
from atropos.net.insertion import Blot, BlottedStream, SlotSecrets
from atropos.net.secrets import HostSecret, host_rule
from atropos.wire import EgressSecret
from tests.egress.echo import serve

TOKEN, KEY = "tok-4f9a1c77+e2b05/d63", "key-b8812d04f6c9e35a"
PASSWORD = base64.b64encode(b"deploy:" + KEY.encode()).decode()
HOST, OTHER = "files.example.org", "other.example.net"


class World:
    """Two hosts that send requests back, and the egress of a slot that has secrets of one of them."""

    def __init__(self, folder: Path) -> None:
        self.seen, self.known = folder / "seen", folder / "authority.pem"
        self.seen.touch()
        self.servers = serve(self.known, self.seen, (0, 0))
        self.plain, self.tls = (each.server_address[1] for each in self.servers)
        rules = [host_rule(f"{HOST}:{self.tls}", tls=True)]
        self.signer = Authority.make(rules)
        self.secrets = SlotSecrets(
            [
                HostSecret.of([f"{HOST}:{self.plain}"], "authorization", f"Bearer {TOKEN}", tls=False),
                HostSecret.of([f"{HOST}:{self.plain}"], "x-api-key", KEY, tls=False),
                HostSecret(tuple(rules), b"authorization", f"Basic {PASSWORD}".encode(), tls=True),
            ],
            self.signer,
        )

    async def dial(self, host: str, port: int):
        return host.lower(), *await asyncio.open_connection("::1", port)

    def trusting(self) -> ssl.SSLContext:
        """What programs of the slot trust."""
        return ssl.create_default_context(cadata=self.signer.certificate)

    @contextlib.asynccontextmanager
    async def connected(
        self, way: str, host: str, port: int
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection that a program of the slot believes to have to a host: by the proxy's CONNECT, or without."""
        moved = {"spend": lambda _: None, "admit": lambda: None, "secrets": self.secrets}

        async def by_proxy(reader, writer):
            await relay.relay(reader, writer, self.dial, **moved)

        async def without(reader, writer):
            relay.hold(writer)
            await relay.tunnel(reader, writer, self.dial, host, port, **moved)

        async with await asyncio.start_server(without if way == "direct" else by_proxy, "127.0.0.1", 0) as proxy:
            reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
            try:
                if way == "connect":
                    writer.write(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                    assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                yield reader, writer
            finally:
                writer.close()

    async def ask(
        self, way: str, path: str, *headers: str, method: str = "GET", host: str = HOST, port: int | None = None
    ) -> bytes:
        """All that a host answers. `way`: `proxy`, `connect` (by TLS, through the proxy), `direct`, or `direct tls`."""
        how, tls = way.split(maxsplit=1)[0], way in {"connect", "direct tls"}
        port = port or (self.tls if tls else self.plain)
        target = f"http://{host}:{port}{path}" if way == "proxy" and path.startswith("/") else path
        async with self.connected(how, host, port) as (reader, writer):
            if tls:
                await writer.start_tls(self.trusting(), server_hostname=host)
            lines = [f"{method} {target} HTTP/1.1", "Host: whatever.example.com", "Connection: close", *headers, "", ""]
            writer.write("\r\n".join(lines).encode("latin-1"))
            with contextlib.suppress(ConnectionResetError):
                return await reader.read()
            return b""

    def got(self, path: str) -> str:
        """What hosts were asked for by a path: Host, Authorization, X-Api-Key."""
        return "\n".join(line for line in self.seen.read_text().splitlines() if line.startswith(path))


WAYS = ("proxy", "direct", "connect", "direct tls")


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = World(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.known))
    relay._trusted.cache_clear()
    yield made
    relay._trusted.cache_clear()
    for server in made.servers:
        server.shutdown()
        server.server_close()


def finds(text: bytes) -> list[str]:
    """What of the secrets a program finds in a text."""
    lowered = text.lower()
    return [each for each in (TOKEN, KEY, PASSWORD) if each.lower().encode() in lowered]


@pytest.mark.parametrize("way", WAYS)
async def test_secrets_go_one_way(world: World, way: str):
    tls = "tls" in way or way == "connect"
    for form in ("echo", "headers", "status", "gzip", "base64", "escaped", "bytes", "no-http", "redirect"):
        said = await world.ask(
            way, f"/{form}", "Accept-Encoding: gzip", "Authorization: Bearer mine", "X-Api-Key: mine"
        )
        assert finds(said) == [], form
        assert said.startswith(b"HTTP/1.1 "), form
        wanted = f"Basic {PASSWORD} | mine" if tls else f"Bearer {TOKEN} | {KEY}"
        assert world.got(f"/{form}") == f"/{form} | {HOST}:{world.tls if tls else world.plain} | {wanted}"


@pytest.mark.parametrize("way", WAYS)
async def test_answers_come_unpacked(world: World, way: str):
    echoed = await world.ask(way, "/echo", "Accept-Encoding: gzip, br", "Range: bytes=0-20", "If-Range: x")
    assert b"GET /echo" in echoed
    assert b"identity" in echoed
    assert b"range" not in echoed.lower()
    assert b" 403 egress refused: the host packs its answer unasked" in await world.ask(way, "/gzip")


@pytest.mark.parametrize("way", WAYS)
async def test_connection_headers_drop_no_secret(world: World, way: str):
    await world.ask(way, "/hop", "Connection: authorization, x-api-key")
    assert "None" not in world.got("/hop").split(" | ")[2]


@pytest.mark.parametrize("way", WAYS)
async def test_trace_is_refused(world: World, way: str):
    for method in ("TRACE", "TRACK"):
        assert b" 403 egress refused" in await world.ask(way, "/trace", method=method)
    assert world.got("/trace") == ""


@pytest.mark.parametrize("way", WAYS[1:])
async def test_another_host_is_refused(world: World, way: str):
    for target in (f"http://{OTHER}/absolute", f"{OTHER}:443", "*"):
        assert b" 403 egress refused" in await world.ask(way, target)
    assert world.seen.read_text() == ""


@pytest.mark.parametrize("way", ["proxy", "direct"])
async def test_other_hosts_get_no_secret(world: World, way: str):
    for host in (OTHER, "sub.files.example.org", "files.example.org.evil.example", "::1"):
        await world.ask(way, "/other", host=f"[{host}]" if host == "::1" and way == "proxy" else host)
    assert world.got("/other").count("None | None") == 4
    assert finds(world.seen.read_bytes()) == []


async def test_tls_secrets_stay_in_tls(world: World):
    for way in ("proxy", "direct"):
        await world.ask(way, "/plain-to-tls", port=world.tls)
    async with world.connected("connect", HOST, world.plain) as (reader, writer):  # a tunnel, which nobody reads
        writer.write(b"GET /through HTTP/1.1\r\nConnection: close\r\n\r\n")
        assert b"/through" in await reader.read()
    assert finds(world.seen.read_bytes()) == []


async def test_secrets_need_certificate(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SSL_CERT_FILE")
    relay._trusted.cache_clear()
    for way in ("connect", "direct tls"):
        assert b" 502 egress: " in await world.ask(way, "/unknown")
    assert world.seen.read_text() == ""


async def test_authority_for_no_other(world: World):
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        async with await asyncio.start_server(
            lambda *_: None, "127.0.0.1", 0, ssl=world.signer.context(OTHER)
        ) as server:
            where = server.sockets[0].getsockname()
            await asyncio.open_connection(*where, ssl=world.trusting(), server_hostname=OTHER)


async def test_events_are_not_held_back(world: World):
    async with world.connected("direct", HOST, world.plain) as (reader, writer):
        writer.write(b"GET /events HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"event\n\n")


# -------------------------------------------------------------------------------------------------------------- parts


@given(st.binary(max_size=40), st.sampled_from([TOKEN.encode(), base64.b64encode(TOKEN.encode()), TOKEN.upper().encode()]),
       st.binary(max_size=40), st.lists(st.integers(0, 150), max_size=8))  # fmt: skip
def test_a_cut_secret_is_found(before, secret, after, cuts):
    stream, data = BlottedStream(Blot([TOKEN.encode()])), before + secret + after
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [stream.feed(data[start:end]) for start, end in pairwise(edges)]
    said = b"".join(pieces) + stream.feed(b"", last=True)
    assert len(said) == len(data)
    assert (said[: len(before)], said[len(data) - len(after) :]) == (before, after)
    assert secret not in said


ODD = 'pass"wo\\rd/<of>&a+b c~'


@pytest.mark.parametrize(
    "spelling",
    [
        ODD,
        ODD.upper(),
        ODD.encode().hex(),
        ODD.encode().hex().upper(),
        quote(ODD),
        quote(ODD, safe=""),
        html.escape(ODD),
        json.dumps(ODD)[1:-1],
        json.dumps(ODD)[1:-1].replace("/", "\\/"),
    ],
)
def test_each_spelling_is_blotted(spelling: str):
    blotted = Blot([ODD.encode()]).out_of(f"<{spelling}><{spelling}>".encode())
    assert blotted == 2 * f"<{'*' * len(spelling)}>".encode()


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
@given(st.binary(max_size=9), st.binary(max_size=9))
def test_base64_around_it_is_blotted(encode, before, after):
    text, most = encode(before + ODD.encode() + after), len(before) + len(ODD)
    start, end = -(-len(before) * 8 // 6), most * 8 // 6  # what the secret alone decides
    blotted = Blot([ODD.encode()]).out_of(text)
    assert blotted == text[:start] + b"*" * (end - start) + text[end:]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"hosts": ("public",)}, "hosts: 'public' is not one host"),
        ({"hosts": ("10.0.0.0/8",)}, "hosts: '10.0.0.0/8' is not one host"),
        ({"hosts": ("https://a.example",)}, "hosts: 'https://a.example' is not"),
        ({"header": "Host"}, "header: 'Host' can't carry a secret"),
        ({"header": "a b"}, "header: 'a b' can't carry a secret"),
        ({"value": "Bearer a\r\nb: c0123456789"}, "value: a header's value is printable ASCII"),
        ({"value": "Bearer short"}, "value: at least 8 characters"),
        ({"value": "Basic " + base64.b64encode(b"longer-user-name:short").decode()}, "value: at least 8 characters"),
    ],
)
def test_wrong_secret_is_not_shown(wrong: dict, why: str):
    with pytest.raises(ValueError, match=why) as refused:
        EgressSecret(**{"hosts": ("a.example",), "value": f"Bearer {TOKEN}", **wrong})
    assert wrong.get("value", TOKEN) not in str(refused.value)


def test_secrets_are_in_no_repr():
    secret = EgressSecret.basic(["a.example"], "deploy", KEY)
    assert finds(repr(secret).encode() + str(secret).encode()) == []
    assert EgressSecret.model_validate_json(secret.model_dump_json()) == secret
