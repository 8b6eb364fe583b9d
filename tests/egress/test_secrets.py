"""Secrets of hosts, in a small internet whose hosts send back what they are asked, and a slot that wants them."""

from __future__ import annotations

import base64
import json

import pytest

from tests.egress.apart import MARKS, apart
from tests.egress.secrets_world import CHANGED, KEY, PASSWORD, TOKEN

pytestmark = MARKS
BASIC = base64.b64encode(f"deploy:{PASSWORD}".encode()).decode()
PLAIN_GOT = f"files.example.org:8081 | Bearer {TOKEN} | {KEY}"
TLS_GOT = f"files.example.org:8443 | Basic {BASIC} | None"


@pytest.fixture(scope="module")
def ran() -> tuple[dict, str]:
    """What the slot and its hosts saw, and all that was printed and logged."""
    return apart("secrets_world", timeout_s=500)


def got(found: dict, path: str) -> set[str]:
    return {line.partition(" | ")[2] for line in found["seen"] if line.startswith(path)}


def test_requests_have_secrets(ran: tuple[dict, str]) -> None:
    found, _ = ran
    assert got(found, "/echo") == {PLAIN_GOT, TLS_GOT}
    assert len([line for line in found["seen"] if line.startswith("/echo")]) == 4
    assert got(found, "/python") == {TLS_GOT}


def test_a_slot_finds_no_secrets(ran: tuple[dict, str]) -> None:
    found, logged = ran
    shown = json.dumps({name: each for name, each in found.items() if name != "seen"}) + logged
    for secret in (TOKEN, CHANGED, KEY, PASSWORD, BASIC, TOKEN.encode().hex()):
        assert secret.lower() not in shown.lower()
    assert found["looked"].splitlines()[-1] == "0"  # and no key of an authority


@pytest.mark.parametrize(
    "path", ["/redirected", "/other", "/address", "/sni", "/unknown", "/raw", "/second", "/neighbour"]
)
def test_no_other_has_a_secret(ran: tuple[dict, str], path: str) -> None:
    assert not [each for each in got(ran[0], path) if not each.endswith("None | None")]


def test_slot_trusts_no_more_hosts(ran: tuple[dict, str]) -> None:
    found = ran[0]["printed"]
    for way in ("", " direct"):
        assert "SSL certificate problem" in found[f"unknown authority{way}"]


def test_secrets_end_with_lease(ran: tuple[dict, str]) -> None:
    found, _ = ran
    assert got(found, "/again") == {PLAIN_GOT, TLS_GOT}
    assert len([line for line in found["seen"] if line.startswith("/again")]) == 4
    assert "/again" in found["restarted"]
    assert "/again" in found["frozen"]
    assert got(found, "/fork") == {"files.example.org:8081 | None | None", "files.example.org:8443 | None | None"}


def test_views_have_them_regardless(ran: tuple[dict, str]) -> None:
    found, _ = ran
    assert got(found, "/view") == {PLAIN_GOT, TLS_GOT}, found["view"]
    assert len([line for line in found["seen"] if line.startswith("/view")]) == 3, found["view"]
    assert found["view"].startswith("mine\n")
    assert found["view looked"].splitlines()[-1] == "0"


def test_key_s_secrets_are_its_own(ran: tuple[dict, str]) -> None:
    found, _ = ran
    assert got(found, "/alice") == {f"files.example.org:8081 | Bearer {TOKEN} | None"}
    assert got(found, "/bob") == {"files.example.org:8081 | None | None"}
    assert got(found, "/changed") == got(found, "/kept") == {f"files.example.org:8081 | Bearer {CHANGED} | None"}


def test_events_come_as_sent(ran: tuple[dict, str]) -> None:
    assert ran[0]["event"] == "event\n\n"
