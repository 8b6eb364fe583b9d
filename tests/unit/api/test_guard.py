"""Private destinations are refused on the address that is dialled: through names, spellings, redirects and rebinding."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import Any

import pytest

from atropos.api.external.fetch import FetchError, fetch
from atropos.api.external.guard import Guard, guarded_client
from atropos.errors import ConfigError
from atropos.net.egress_policy import EgressRefused, is_public, own_addresses

from .site import Site

PRIVATE = [
    "127.0.0.1",
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "169.254.169.254",
    "100.64.0.1",
    "0.0.0.0",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "192.0.2.1",
    "198.18.0.1",
    "::1",
    "::",
    "fe80::1",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a9fe:a9fe",
    "2002:7f00:1::",
    "2002:0a00:0001::1",
    "::127.0.0.1",
    "2001:db8::1",
    "192.0.0.8",
    "192.88.99.1",
    "fec0::1",
    "3fff::1",
    "64:ff9b:1::7f00:1",
    "64:ff9b:1:808:8:800::",
]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_are_not_public(address: str):
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize("address", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses_are_public(address: str):
    assert is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost.", "::1", "[::1]"]
)
async def test_any_loopback_is_refused(host: str):
    url = f"http://{host}:80/" if host != "::1" else "http://[::1]/"
    guard = Guard()
    with pytest.raises((EgressRefused, OSError)):
        await guard.addresses(*guard.check_url(url))


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://example.org/",
        "gopher://x/",
        "javascript:alert(1)",
        "data:text/html,x",
        "http://",
        "http:///x",
        "//example.org",
        "http://user:pw@example.org/",
        "http://user@127.0.0.1@example.org/",
        "http://[::1",
        "http://example.org:99999/",
        "chrome://settings",
        "",
    ],
)
def test_only_plain_web_addresses_are_opened(url: str):
    with pytest.raises(EgressRefused):
        Guard().check_url(url)


def test_idna_names_are_judged():
    assert Guard().check_url("https://Bücher.example/a") == ("xn--bcher-kva.example", 443)
    with pytest.raises(EgressRefused, match="is not a host name"):
        Guard().check_url("https://\u2603\u200d.example/")


async def test_odd_ports_are_refused():
    guard = Guard()
    with pytest.raises(EgressRefused, match=r"1\.1\.1\.1:25 is not on the list"):
        await guard.addresses("1.1.1.1", 25)
    assert await guard.addresses("1.1.1.1", 443) == [ipaddress.ip_address("1.1.1.1")]


@pytest.mark.parametrize(
    ("rule", "host", "port", "allowed"),
    [
        ("127.0.0.1", "127.0.0.1", 9999, True),
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("127.0.0.1:8080", "127.0.0.1", 8081, False),
        ("127.0.0.0/8", "127.9.9.9", 22, True),
        ("localhost", "localhost", 1234, True),
        ("[::1]:80", "::1", 80, True),
        ("[::1]:80", "::1", 81, False),
        ("10.0.0.0/8", "127.0.0.1", 80, False),
        ("127.0.0.0/8", "localhost", 22, True),
        ("169.254.0.0/16", "169.254.169.254", 80, False),
        ("169.254.169.254", "169.254.169.254", 80, False),
    ],
)
async def test_allow_list_opens_just_that(rule: str, host: str, port: int, allowed: bool):
    guard = Guard([rule])
    if allowed:
        assert await guard.addresses(host, port)
    else:
        with pytest.raises(EgressRefused):
            await guard.addresses(host, port)


@pytest.mark.parametrize("rule", ["", "http://x", "a b", "x:0", "x:99999", "*", "a*.b", "10.0.0.0/99", "x:y"])
def test_a_bad_rule_is_named(rule: str):
    with pytest.raises(ConfigError, match="allow_hosts"):
        Guard([rule])


async def test_own_addresses_are_refused(monkeypatch: pytest.MonkeyPatch):
    own = frozenset({*own_addresses(), ipaddress.ip_address("93.184.215.14")})
    monkeypatch.setattr("atropos.api.external.guard.own_addresses", lambda: own)
    for host in ("93.184.215.14", "::ffff:93.184.215.14", "64:ff9b::5db8:d70e"):
        with pytest.raises(EgressRefused, match="public address"):
            await Guard().addresses(host, 80)
    assert await Guard(["93.184.215.14"]).addresses("93.184.215.14", 80)


async def test_private_redirect_is_refused(site: Site):
    guard = Guard([f"127.0.0.1:{site.port}"])
    async with guarded_client(guard) as client:
        page = await fetch(client, guard, site.url("/redirect?to=/article"), max_bytes=100_000)
        assert page.url.endswith("/article")
        for target in ("http://127.0.0.2/", "http://localhost/", "http://169.254.169.254/latest", "file:///etc/passwd"):
            with pytest.raises(FetchError, match=r"public address|only http"):
                await fetch(client, guard, site.url(f"/redirect?to={target}"), max_bytes=1000)
        with pytest.raises(FetchError, match="redirects"):
            await fetch(client, guard, site.url("/redirect?to=/loop"), max_bytes=1000)


async def test_plain_answer_is_a_page(site: Site):
    guard = Guard(["127.0.0.1"])
    async with guarded_client(guard) as client:
        assert (await fetch(client, guard, site.url("/choices"), max_bytes=1000)).content == b"one of several"


async def test_no_cookies_are_kept(site: Site):
    guard = Guard(["127.0.0.1"])
    async with guarded_client(guard) as client:
        visits = [fetch(client, guard, site.url("/visit"), max_bytes=1000) for _ in range(20)]
        pages = [int((await visit).content) for visit in asyncio.as_completed(visits)]
        assert sorted(pages) == list(range(1, 21))
        assert (await fetch(client, guard, site.url("/visit"), max_bytes=1000)).content == b"21"


async def test_rebinding_changes_no_address(site: Site, monkeypatch: pytest.MonkeyPatch):
    """DNS rebinding: the first answer is public, the second would be loopback."""
    answers = ["1.1.1.1", "127.0.0.1"]
    dialled: list[str] = []

    def lying(host: str, port: int, **_: object):
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (answers.pop(0), port))]

    async def connect(self: object, host: str, port: int, **_: object):
        dialled.append(host)
        raise OSError("not really")

    monkeypatch.setattr(socket, "getaddrinfo", lying)
    monkeypatch.setattr("httpcore.AnyIOBackend.connect_tcp", connect)
    guard = Guard()
    async with guarded_client(guard) as client:
        with pytest.raises((FetchError, OSError)):
            await fetch(client, guard, "http://rebind.example/", max_bytes=1000)
        assert dialled == ["1.1.1.1"]
        with pytest.raises(FetchError, match="public address"):
            await fetch(client, guard, "http://rebind.example/", max_bytes=1000)
    assert dialled == ["1.1.1.1"]


async def test_dead_name_servers_block_nothing(monkeypatch: pytest.MonkeyPatch):
    answering, look_up = threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: Any, **options: Any):
        if host.endswith(".dead.example"):
            answering.wait(300)
            raise socket.gaierror
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    monkeypatch.setattr("atropos.api.external.guard.RESOLVE_S", 300)
    guard = Guard(["localhost"])
    dead = [asyncio.create_task(guard.addresses(f"n{number}.dead.example", 443)) for number in range(40)]
    try:
        async with asyncio.timeout(60):
            await asyncio.to_thread(lambda: None)
            assert await guard.addresses("localhost", 443)
        assert not any(one.done() for one in dead)
    finally:
        answering.set()
        await asyncio.gather(*dead, return_exceptions=True)


async def test_long_page_is_read_to_the_bound(site: Site):
    guard = Guard(["127.0.0.1"])
    async with guarded_client(guard) as client:
        page = await fetch(client, guard, site.url("/endless"), max_bytes=100_000)
        assert (len(page.content), page.truncated) == (100_000, True)


async def test_bomb_is_read_to_the_bound(site: Site):
    guard = Guard(["127.0.0.1"])
    async with guarded_client(guard) as client:
        page = await fetch(client, guard, site.url("/bomb"), max_bytes=1_000_000)
        assert (len(page.content), page.truncated) == (1_000_000, True)


@pytest.mark.parametrize("how", ["members", "zlib", "plain"])
async def test_a_page_is_unpacked(site: Site, how: str):
    guard = Guard(["127.0.0.1"])
    async with guarded_client(guard) as client:
        page = await fetch(client, guard, site.url(f"/packed?how={how}"), max_bytes=1000)
        assert (page.content, page.truncated) == (b"one two", False)
        page = await fetch(client, guard, site.url(f"/packed?how={how}"), max_bytes=5)
        assert (page.content, page.truncated) == (b"one t", True)


@pytest.mark.parametrize("how", ["twice", "zstd", "unknown", "broken"])
async def test_unasked_encodings_stay_packed(site: Site, how: str):
    guard = Guard(["127.0.0.1"])
    async with guarded_client(guard) as client:
        with pytest.raises(FetchError, match=r"not requested|can't be unpacked"):
            await fetch(client, guard, site.url(f"/packed?how={how}"), max_bytes=1000)
