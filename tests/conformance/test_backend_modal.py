"""The shipped conformance suite on Modal's backend, with a stand-in for Modal whose sandboxes are processes here."""

from __future__ import annotations

import os
import secrets

import pytest

from atropos.slots import SlotPool, SlotPoolConfig
from atropos.testing import BackendHarness
from atropos.testing.fixtures import *  # noqa: F403
from atropos.testing.pool import *  # noqa: F403
from tests.engines import SMALL
from tests.modal_stand_in import Modal, modal
from tests.processes import adopt_orphans, descendants, gone_within

if os.environ.get("ATROPOS_CONFORMANCE") == "all":
    from atropos.testing.conformance import *  # noqa: F403


class ModalHarness(BackendHarness):
    def __init__(self, stand_in: Modal) -> None:
        self._modal = stand_in
        self._others: set[int] = set()
        adopt_orphans()

    def config(self, **settings) -> SlotPoolConfig:
        self._others = set(descendants())
        values = {
            "backend": "modal",
            "image": "registry.example/atropos-sandbox:test",
            "job_id": f"test-{secrets.token_hex(4)}",
            "slots_per_container": 2,
            "max_containers": 2,
            "limits": SMALL,
            "acquire_timeout_s": 60.0,
            "start_timeout_s": 120.0,
        }
        return SlotPoolConfig(**(values | settings))

    async def kill(self, pool: SlotPool, container: str) -> None:
        self._modal.created[container].process.kill()

    async def residue(self, config: SlotPoolConfig) -> list[str]:
        return [f"process {line}" for line in await gone_within(30, but=self._others)]


@pytest.fixture(scope="module")
def harness():
    with modal() as stand_in:
        yield ModalHarness(stand_in)
