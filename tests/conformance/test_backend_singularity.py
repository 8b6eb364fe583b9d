"""The shipped conformance suite on Singularity's backend: in a real image where ATROPOS_SIF names one, else a
stand-in's."""

from __future__ import annotations

import os
import signal

import pytest

from atropos.slots import SlotPool
from atropos.testing.fixtures import *  # noqa: F403
from atropos.testing.pool import *  # noqa: F403
from tests.apptainer import apptainer
from tests.backends import ProcessesHere

if os.environ.get("ATROPOS_CONFORMANCE") == "all":
    from atropos.testing.conformance import *  # noqa: F403


class SingularityHarness(ProcessesHere):
    async def kill(self, pool: SlotPool, container: str) -> None:
        os.kill(int(container.partition("-")[0]), signal.SIGKILL)


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    with apptainer(tmp_path_factory.mktemp("apptainer")) as image:
        yield SingularityHarness(backend="singularity", image=image)
