"""The shipped conformance suite on hosts that are reached by ssh: a real sshd on loopback.

Tools are above the pool, and slots behind the forwarded port are those of a local server: their tests run where
ATROPOS_CONFORMANCE is `all`.
"""

from __future__ import annotations

import os
import secrets
import signal

import pytest

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.testing import BackendHarness
from atropos.testing.fixtures import *  # noqa: F403
from atropos.testing.pool import *  # noqa: F403
from tests.engines import SMALL
from tests.processes import adopt_orphans, descendants, gone_within
from tests.sshd import SSHD, Sshd, sshd

if os.environ.get("ATROPOS_CONFORMANCE") == "all":
    from atropos.testing.conformance import *  # noqa: F403


class SshHarness(BackendHarness):
    def __init__(self, host: Sshd) -> None:
        self._host = host
        self._others: set[int] = set()
        adopt_orphans()

    def config(self, **settings) -> SlotPoolConfig:
        self._others = set(descendants())
        values = {
            **self._host.settings(hosts=2),
            "job_id": f"test-{secrets.token_hex(4)}",
            "slots_per_container": 2,
            "limits": SMALL,
            "acquire_timeout_s": 60.0,
            "start_timeout_s": 120.0,
        }
        return SlotPoolConfig(**(values | settings))

    async def kill(self, pool: SlotPool, container: str) -> None:
        (far_end,) = (pid for pid, line in descendants().items() if "far_end" in line and container in line)
        (server,) = (pid for pid, line in descendants(far_end).items() if "atropos.sandbox" in line)
        os.kill(server, signal.SIGKILL)

    async def residue(self, config: SlotPoolConfig) -> list[str]:
        return [f"process {line}" for line in await gone_within(30, but=self._others)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    if SSHD is None:
        pytest.skip("openssh-server is not installed")
    with sshd(tmp_path_factory.mktemp("sshd")) as host:
        yield SshHarness(host)
