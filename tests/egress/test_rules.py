"""Which addresses and names the proxy's rules let through."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from atropos.errors import ConfigError
from atropos.net.egress_policy import EgressRefused, Policy, is_public, literal, own_addresses, parse

OWN = frozenset({ipaddress.ip_address("93.184.215.1"), ipaddress.ip_address("2606:4700:10::1")})
PUBLIC = Policy.of_slots(["public"])


def reached(policy: Policy, host: str, port: int = 80) -> str:
    name = policy.judge_name(host, port)
    address = literal(name)
    assert address is not None
    (good,) = policy.judge_addresses(name, port, [address], OWN)
    return str(good)


@pytest.mark.parametrize(
    "host",
    ["169.254.169.254", "10.0.0.1", "172.16.0.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255",
     "192.0.0.8", "192.88.99.1", "198.18.0.1", "240.0.0.1", "::1", "::", "fe80::1", "fd00:ec2::254", "fec0::1", "ff02::1",
     "::ffff:169.254.169.254", "::169.254.169.254", "64:ff9b::169.254.169.254", "64:ff9b:1::a9fe:a9fe", "2002:a9fe:a9fe::1",
     "2001:0:1::1", "3fff::1", "5f00::1", "::ffff:0:169.254.169.254", "93.184.215.1", "::ffff:93.184.215.1", "64:ff9b::93.184.215.1",
     "2002:5db8:d701::1", "2606:4700:10::1", "2606:4700:10::1%1", "2606:4700:10::2%1", "2606:4700:10::1%lo", "[2606:4700:10::1%25lo]"],
)  # fmt: skip
def test_private_are_refused(host: str) -> None:
    with pytest.raises(EgressRefused):
        reached(PUBLIC, host)


@pytest.mark.parametrize(
    ("host", "address"),
    [("93.184.215.14", "93.184.215.14"), ("[2606:4700:10::2]", "2606:4700:10::2"), ("::ffff:93.184.215.14", "93.184.215.14"),
     ("93.184.215.14.", "93.184.215.14"), ("64:ff9b::93.184.215.14", "64:ff9b::5db8:d70e")],
)  # fmt: skip
def test_public_are_reached(host: str, address: str) -> None:
    assert reached(PUBLIC, host) == address


@pytest.mark.parametrize(
    "deny",
    ["93.184.215.0/24", "93.184.215.14", "::ffff:93.184.215.14", "::ffff:93.184.215.0/120", "::ffff:0.0.0.0/96"],
)
@pytest.mark.parametrize(
    "host", ["93.184.215.14", "::ffff:93.184.215.14", "2002:5db8:d70e::1", "64:ff9b::93.184.215.14"]
)
def test_denied_are_refused(deny: str, host: str) -> None:
    with pytest.raises(EgressRefused):
        reached(Policy.of_slots(["public"], [deny]), host)


def test_denied_names_addresses_too() -> None:
    policy = Policy.of_slots(["public"], ["nomad.example.org", "*.internal.example.org", "10.0.0.0/8"])
    assert policy.denied_names() == ["nomad.example.org"]
    on_a_port = Policy.of_slots(["public"], ["git.example.org:9418"])
    assert (on_a_port.denied_names(443), on_a_port.denied_names()) == ([], ["git.example.org"])
    assert Policy.of_slots(["10.0.0.0/8"], ["db", "public"]).denied_names() == ["db"]
    nomad = ipaddress.ip_address("93.184.215.14")
    with pytest.raises(EgressRefused, match="leads to"):
        policy.judge_addresses("other.example.org", 80, [nomad], OWN | {nomad})


@pytest.mark.parametrize(
    "host", ["0x7f.1", "2130706433", "127.1", "0177.0.0.1", "1.2.3", "[[::1]]", "a b", "a\0b", "ａ.org", "x" * 300, ""]
)
def test_odd_spellings_are_names(host: str) -> None:
    assert literal(host) is None
    assert not any(is_public(a) for a in [literal(host)] if a is not None)


MIRROR = ipaddress.ip_address("10.9.8.7")


@pytest.mark.parametrize(
    ("allow", "name", "port"),
    [
        (["mirror.corp"], "mirror.corp", 80),
        (["mirror.corp:8443"], "mirror.corp", 8443),
        (["10.9.0.0/16"], "mirror.corp", 443),
        (["10.9.1.1/16"], "mirror.corp", 443),
        (["10.9.8.7"], "10.9.8.7", 80),
        (["public", "10.9.8.7:3141"], "mirror.corp", 3141),
    ],
)
def test_named_private_are_reached(allow: list[str], name: str, port: int):
    policy = Policy.of_slots(allow)
    assert policy.judge_addresses(policy.judge_name(name, port), port, [MIRROR], OWN) == [MIRROR]


@pytest.mark.parametrize(
    ("allow", "name", "port"),
    [
        (["public"], "mirror.corp", 80),
        (["*.corp"], "mirror.corp", 80),
        (["mirror.corp"], "other.corp", 80),
        (["mirror.corp"], "10.9.8.7", 80),
        (["mirror.corp"], "mirror.corp", 8080),
        (["public", "mirror.corp:8443"], "mirror.corp", 80),
        (["10.9.9.0/24"], "mirror.corp", 80),
        (["public", "10.9.9.0/24"], "mirror.corp", 80),
        (["10.9.8.7:3141"], "mirror.corp", 80),
    ],
)
def test_other_private_stay_shut(allow: list[str], name: str, port: int):
    policy = Policy.of_slots(allow)
    with pytest.raises(EgressRefused):
        policy.judge_addresses(policy.judge_name(name, port), port, [MIRROR], OWN)


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "fe80::1", "fd00:ec2::254", "100.100.100.200", "127.0.0.1", "::1", "0.0.0.0", "224.0.0.1",
     "93.184.215.1", "2606:4700:10::1", "64:ff9b::169.254.169.254", "::ffff:169.254.169.254"],
)  # fmt: skip
def test_no_rule_opens_metadata(address: str):
    policy = Policy.of_slots(["named.example.org", address, "0.0.0.0/0", "::/0"])
    for name in ("named.example.org", address):
        with pytest.raises(EgressRefused, match="leads to"):
            policy.judge_addresses(policy.judge_name(name, 80), 80, [ipaddress.ip_address(address)], OWN)


@pytest.mark.parametrize(
    ("allow", "host", "port", "listed"),
    [
        (["pypi.org", "git.example.org:9418"], "pypi.example.org", 80, "pypi.org, git.example.org:9418; ports 80, 443, 9418"),
        (["*.debian.org"], "debian.org", 80, r"\*.debian.org; ports 80, 443"),
        (["*.debian.org"], "deb.debian.org", 81, r"\*.debian.org; ports 80, 443"),
        (["10.9.0.0/16:81"], "93.184.215.14", 81, "10.9.0.0/16:81; ports 81"),
        ([], "pypi.org", 80, "none; ports none"),
    ],
)  # fmt: skip
def test_a_refusal_lists_what_is_allowed(allow: list[str], host: str, port: int, listed: str):
    with pytest.raises(EgressRefused, match=rf"^{host}:{port} is not on the list of allowed hosts \({listed}\)$"):
        Policy.of_slots(allow).judge_name(host, port)


def test_suffixes_open_what_is_below():
    assert Policy.of_slots(["*.debian.org"]).judge_name("Deb.debian.org.", 443) == "deb.debian.org"
    with pytest.raises(EgressRefused, match="ports any"):
        Policy((parse("*.debian.org", field="network"),)).judge_name("debian.org", 22)


def test_denied_names_are_refused():
    policy = Policy.of_slots(["public"], ["evil.example.org", "*.evil.example.org:80", "10.0.0.0/8"])
    for host in ("evil.example.org", "EVIL.example.org.", "very.evil.example.org"):
        with pytest.raises(EgressRefused, match="is on the list of denied hosts"):
            policy.judge_name(host, 80)
    assert policy.judge_name("very.evil.example.org", 443) == "very.evil.example.org"
    assert policy.judge_name("good.example.org", 80) == "good.example.org"


def test_tunnels_lead_nowhere_denied():
    """Where the operator opens a range of 6to4, which no Python takes for public ones."""
    policy = Policy.of_slots(["2002::/16"], ["10.0.0.0/8"])
    assert reached(policy, "2002:5db8:d70e::1") == "2002:5db8:d70e::1"
    with pytest.raises(EgressRefused):
        reached(policy, "2002:a09:807::1")


def test_zones_make_no_other_address():
    assert PUBLIC.judge_addresses("x.org", 80, [ipaddress.ip_address("2606:4700:10::2%1")], OWN) == [
        ipaddress.ip_address("2606:4700:10::2")
    ]
    with pytest.raises(EgressRefused):
        PUBLIC.judge_addresses("x.org", 80, [ipaddress.ip_address("2606:4700:10::1%1")], OWN)


def test_names_may_lead_nowhere():
    with pytest.raises(EgressRefused, match="leads to no address"):
        PUBLIC.judge_addresses("x.org", 80, [], OWN)


def test_denied_wins_over_named():
    policy = Policy.of_slots(["mirror.corp"], ["10.0.0.0/8"])
    with pytest.raises(EgressRefused):
        policy.judge_addresses("mirror.corp", 80, [MIRROR], OWN)


def test_too_many_ports_refused():
    assert len(Policy.of_slots([f"db.example.org:{port}" for port in range(1, 65)]).ports) == 64
    with pytest.raises(ConfigError, match="egress_allow: 65 different ports are allowed; at most 64"):
        Policy.of_slots([f"db.example.org:{port}" for port in range(1, 66)])


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("https://pypi.org", "is not 'public', a host name"),
        ("http://pypi.org:80/", "is not 'public', a host name"),
        ("pypi.org:https", "a port is 1 to 65535"),
        ("pypi.org:65536", "a port is 1 to 65535"),
        ("pypi.org:0", "a port is 1 to 65535"),
    ],
)
def test_a_bad_rule_is_explained(entry: str, words: str):
    with pytest.raises(ConfigError, match=f"egress_allow: '{entry}'.* {words}"):
        Policy.of_slots([entry])


def test_own_addresses_are_known():
    own = own_addresses()
    assert ipaddress.ip_address("127.0.0.1") in own
    assert (ipaddress.ip_address("::1") in own) == ("lo" in Path("/proc/net/if_inet6").read_text())
