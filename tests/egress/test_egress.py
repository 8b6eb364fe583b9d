"""Egress in a small internet of the tests' own: what is allowed works, and nothing else can be reached."""

from __future__ import annotations

import ipaddress

import pytest

from tests.egress.apart import MARKS, apart
from tests.egress.world import FAR, METADATA, PRIVATE, PROGRAMS
from tests.settings import shows

pytestmark = MARKS


def scenario(name: str) -> dict:
    return apart("world", name, timeout_s=240)[0]


@pytest.fixture(scope="module")
def public() -> dict:
    return scenario("public")


@pytest.fixture(scope="module")
def direct() -> dict:
    """The same commands without the variables that name the proxy."""
    return scenario("direct")


REACHED = pytest.mark.parametrize(
    ("what", "output"),
    [
        ("http", "hello from files.example.org to /path?q=1"),
        ("literal", f"hello from {FAR} to /x"),
        ("connect", "hello from files.example.org:443 to /tunnel"),
        ("post", "got 3000000"),
        ("chunked", "got 300000"),
        ("big", "8388608\n"),
        ("python", "hello from files.example.org to /py\n"),
        ("still", "hello from files.example.org to /still"),
        ("mixed", "hello from mixed.example.org to /"),
    ],
)


@REACHED
def test_public_hosts_are_reached(public: dict, what: str, output: str) -> None:
    assert public[what] == [0, output]


@REACHED
def test_public_without_variables(direct: dict, what: str, output: str) -> None:
    assert direct[what] == [0, output]


@pytest.mark.parametrize("how", ["public", "direct"])
def test_lease_knows_its_traffic(request: pytest.FixtureRequest, how: str) -> None:
    moved, _ = request.getfixturevalue(how)["used"]
    assert 3_300_000 + (8 << 20) < moved < 16 << 20


def test_hop_headers_end_here(public: dict) -> None:
    assert public["hop"] == [0, "hello from files.example.org to /"]


def test_git_speaks_through_proxy(public: dict) -> None:
    assert int(public["git"][1]) >= 1


NOT_PUBLIC = [
    "private", "private_literal", "private_connect", "metadata", "metadata_name", "mapped", "nat64", "loopback", "zero", "here",
    "redirect",
]  # fmt: skip


@pytest.mark.parametrize("what", [*NOT_PUBLIC, "decimal", "octal", "port", "unknown", "around"])
def test_private_without_variables(direct: dict, what: str) -> None:
    code, output = direct[what]
    assert code != 0
    assert "hello" not in output


@pytest.mark.parametrize("what", NOT_PUBLIC)
def test_no_private_address(public: dict, what: str) -> None:
    output = public[what][1]
    assert "hello" not in output
    assert "only public addresses can be reached" in output


@pytest.mark.parametrize("what", ["decimal", "octal"])
def test_odd_addresses_lead_nowhere(public: dict, what: str) -> None:
    assert "hello" not in public[what][1]
    assert "egress refused" in public[what][1] or public[what][0] != 0


def test_a_refusal_says_why(public: dict) -> None:
    assert "files.example.org:8080 is not on the list of allowed hosts" in public["port"][1]
    assert "nowhere.example.org has no address" in public["unknown"][1]
    assert f"{PRIVATE} leads to {PRIVATE}" in public["private_literal"][1]
    assert METADATA in public["metadata_name"][1]
    assert "403" in public["odd_scheme"][1]


def test_no_way_around_the_proxy(public: dict) -> None:
    assert public["around"][0] != 0
    assert "hello" not in public["around"][1]


def test_no_request_is_smuggled(public: dict) -> None:
    assert "/one" in public["smuggle"][1]
    assert "/two" not in public["smuggle"][1]


def test_endless_head_is_refused(public: dict) -> None:
    assert " 400 " in public["long_head"][1] or not public["long_head"][1]


@shows("egress_deny")
def test_allow_and_deny_lists() -> None:
    found = scenario("listed")
    assert found["allowed"] == [0, "hello from files.example.org to /a"]
    assert found["suffix"] == [0, "hello from deep.sub.example.org to /b"]
    assert found["port"] == [0, "hello from other.example.net:8080 to /c"]
    for refused in ("other_port", "other", "host_header"):
        assert "is not on the list of allowed hosts" in found[refused][1]
    assert "is on the list of denied hosts" in found["denied"][1]
    assert "only public addresses" in found["denied_net"][1]
    for named in ("mirror", "mirror_net"):
        assert found[named] == [0, "hello from private.example.org to /"]
    for shut in ("metadata", "loop", "metadata_net", "loop_net", "metadata_literal_net"):
        assert "egress refused" in found[shut][1]
    for what, outcome in found.items():
        if what.endswith("_direct") and what != "host_header_direct":
            proxied = found[what.removesuffix("_direct")]
            assert outcome[1] == proxied[1] if "hello" in proxied[1] else "hello" not in outcome[1], what


@shows("egress_mib", "egress_connections")
def test_bytes_and_connections_are_bounded() -> None:
    found = scenario("bounds")
    assert "this slot has 4 connections open already" in found["many"][1]
    lines = found["spent"][1].splitlines()
    assert lines[:2] == ["8388608", "8388608"]
    assert "as many bytes as it may (egress_mib)" in found["spent"][1]
    assert found["neighbour"] == [0, "hello from files.example.org to /neighbour"]
    assert found["again"] == [0, "hello from files.example.org to /again"]


def test_bounds_without_variables() -> None:
    found = scenario("bounds_direct")
    assert found["spent"][1].splitlines()[:2] == ["8388608", "8388608"]
    for refused in ("many", "spent"):  # reset, at once or a moment after it was connected
        assert "curl: (" in found[refused][1]
        assert "hello" not in found[refused][1]
    assert found["again"] == [0, "hello from files.example.org to /again"]


def test_names_answered_in_slot() -> None:
    found = scenario("names")
    (code, four), (code6, six) = found["both"]
    assert (code, code6) == (0, 0)
    assert ipaddress.ip_address(four) in ipaddress.ip_network("198.18.0.0/15")
    assert ipaddress.ip_address(six) in ipaddress.ip_network("fd61:7472:6f70:6f73::/64")
    for same in (found["again"], found["tcp"], *found["other_servers"]):
        assert same == [0, four]
    assert found["refused"] == [3, 3, 3, 3, 2], "no such name; the last can't be looked up now"
    assert found["other_kinds"] == [[0, ""]] * 5, "the name exists, and has none of them"
    assert found["search"][1].split()[0] == four
    assert found["first"] == [0, "220 welcome\nyou said ho"]
    assert found["six"] == [0, "hello from files.example.org to /six"]
    assert found["own_port"] == [0, "ok"], "the slot's programs have all ports"
    assert "refused" in found["udp"][1], "the web's UDP (QUIC) fails at once"
    assert found["many"] == [0, "200"]
    for program in PROGRAMS.keys() & found.keys():
        assert found[program] == [0, "hello from files.example.org to /"], program
    assert found["proxied"] == [0, f"hello from files.example.org to /xhello from {four} to /x"], (
        "through the proxy, too"
    )
    assert found["next"][0] != 0, "an address stands for nothing in the next lease"
    assert "hello" not in found["next"][1]
    assert found["next_sockets"] == "1\n1\n", "no connection is left but the proxy's socket"


def test_a_dead_proxy_is_replaced() -> None:
    found = scenario("ends")
    assert found["before"].endswith("/1")
    assert found["proxies"] == 1
    assert [int(text, 16) for text in found["capabilities"]] == [0]
    assert found["after"].endswith("/2")
    assert found["before_direct"].endswith("/1")
    assert found["after_direct"].endswith("/2")
    assert found["fork"].endswith("/fork")
    assert found["original"].endswith("/orig")
    assert found["off"][0] != 0
    assert found["off"][1].startswith("0\n")
    assert "eth0" not in found["off"][1]
    assert "hello" not in found["off"][1]


def test_network_can_be_narrowed() -> None:
    found = scenario("phases")
    reached = {
        "all": {"files", "other", "deep", "private"},
        "none": set(),
        "some": {"files", "deep"},
        "network": {"private"},
        "public": {"files", "other", "deep"},
        "again": {"files", "other", "deep", "private"},
        "restarted": {"files"},
        "frozen": {"files"},
        **{name: {"files", "other", "deep", "private"} for name in ("next0", "next1", "next2", "fork")},
    }
    hosts = ("files", "other", "deep", "private")
    for phase, expected in reached.items():
        seen = {host for host in hosts if found[f"{phase}_{host}"].startswith("hello")}
        assert seen == expected, (phase, {host: found[f"{phase}_{host}"] for host in hosts})
        direct = {host for host in hosts if found[f"{phase}_{host}_direct"].startswith("hello")}
        assert direct == expected, (phase, {host: found[f"{phase}_{host}_direct"] for host in hosts})
    assert found["none_neighbour"].startswith("hello")
    assert "not on the list of allowed hosts (none; ports none)" in found["none_files"]
    assert not found["public_elsewhere"].startswith("hello"), "a lease never widens what the pool allows"
    assert found["cut"] not in (0, 28), "its connection was cut: it neither ended nor was waited for"
    assert found["beside"] == 0, "the neighbour's went on to its end"
    assert not {"bad", "off"} & found.keys()


def test_agent_and_tests_have_own_networks() -> None:
    found = scenario("task_phases")
    assert found["reward"] == 1.0
    for phase in ("agent", "again"):
        assert "not on the list of allowed hosts (none" in found[phase]
