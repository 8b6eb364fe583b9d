"""The shipped conformance suite on Singularity's backend: in a real image where ATROPOS_SIF names one, else a stand-in's."""

from __future__ import annotations

import os
import secrets
import signal

import pytest

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.testing import BackendHarness
from atropos.testing.fixtures import *  # noqa: F403
from atropos.testing.pool import *  # noqa: F403
from tests.apptainer import apptainer
from tests.engines import SMALL
from tests.processes import adopt_orphans, descendants, gone_within

if os.environ.get("ATROPOS_CONFORMANCE") == "all":
    from atropos.testing.conformance import *  # noqa: F403


class SingularityHarness(BackendHarness):
    def __init__(self, image: str) -> None:
        self._image = image
        self._others: set[int] = set()
        adopt_orphans()

    def config(self, **settings) -> SlotPoolConfig:
        self._others = set(descendants())
        values = {
            "backend": "singularity",
            "image": self._image,
            "job_id": f"test-{secrets.token_hex(4)}",
            "slots_per_container": 2,
            "max_containers": 2,
            "limits": SMALL,
            "acquire_timeout_s": 60.0,
            "start_timeout_s": 120.0,
        }
        return SlotPoolConfig(**(values | settings))

    async def kill(self, pool: SlotPool, container: str) -> None:
        os.kill(int(container.partition("-")[0]), signal.SIGKILL)

    async def residue(self, config: SlotPoolConfig) -> list[str]:
        return [f"process {line}" for line in await gone_within(30, but=self._others)]


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    with apptainer(tmp_path_factory.mktemp("apptainer")) as image:
        yield SingularityHarness(image)
