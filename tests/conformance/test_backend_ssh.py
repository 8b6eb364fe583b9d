"""The shipped conformance suite on hosts that are reached by ssh: a real sshd on loopback.

Tools are above the pool, and slots behind the forwarded port are those of a local server: their tests run where
ATROPOS_CONFORMANCE is `all`.
"""

from __future__ import annotations

import os
import signal

import pytest

from atropos.slots import SlotPool
from atropos.testing.fixtures import *  # noqa: F403
from atropos.testing.pool import *  # noqa: F403
from tests.backends import ProcessesHere
from tests.processes import descendants
from tests.sshd import SSHD, sshd

if os.environ.get("ATROPOS_CONFORMANCE") == "all":
    from atropos.testing.conformance import *  # noqa: F403


class SshHarness(ProcessesHere):
    async def kill(self, pool: SlotPool, container: str) -> None:
        (far_end,) = (pid for pid, line in descendants().items() if "far_end" in line and container in line)
        (server,) = (pid for pid, line in descendants(far_end).items() if "atropos.sandbox" in line)
        os.kill(server, signal.SIGKILL)


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    if SSHD is None:
        pytest.skip("openssh-server is not installed")
    with sshd(tmp_path_factory.mktemp("sshd")) as host:
        yield SshHarness(**host.settings(hosts=2))
