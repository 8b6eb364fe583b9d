"""A slot with a network has a device, a resolver and a proxy that go by the rules, on every backend; one without has
nothing."""

from __future__ import annotations

import pytest

from atropos.slots import SlotPool
from tests.engines import params, pool_config

LOOK = r"""
import socket
print(*sorted(name for _, name in socket.if_nameindex()))
def tried(what, *arguments):
    try:
        what(*arguments)
        return "done"
    except OSError as error:
        return type(error).__name__
print(tried(socket.getaddrinfo, "elsewhere.example.org", 443))
for port in (443, 22):
    def ask():
        with socket.create_connection(("198.51.100.7", port), timeout=20) as sock:
            sock.sendall(b"x")
            return sock.recv(1)
    print(tried(ask))
"""


@pytest.mark.parametrize("backend", params())
async def test_rules_hold_without_variables(backend: str):
    config = pool_config(backend, allow_network=True, egress_allow=["files.example.org"], max_containers=1)
    async with SlotPool(config) as pool:
        (link,) = pool.links.values()
        features = {feature.name: feature.ok for feature in (await link.client.capabilities()).features}
        assert (features["egress"], features["gateway"]) == (True, True)
        async with pool.lease("on") as slot:
            found = (await slot.exec(["python3", "-"], stdin=LOOK)).output.split("\n")
        assert found == ["eth0 lo", "gaierror", "ConnectionResetError", "ConnectionRefusedError", ""]
        async with pool.lease("off", network=False) as slot:
            found = (await slot.exec(["python3", "-"], stdin=LOOK)).output.split("\n")
        assert found == ["lo", "gaierror", "OSError", "OSError", ""]
