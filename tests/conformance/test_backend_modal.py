"""The shipped conformance suite on Modal's backend, with a stand-in for Modal whose sandboxes are processes here."""

from __future__ import annotations

import os

import pytest

from atropos.slots import SlotPool
from atropos.testing.fixtures import *  # noqa: F403
from atropos.testing.pool import *  # noqa: F403
from tests.backends import ProcessesHere
from tests.modal_stand_in import Modal, modal

if os.environ.get("ATROPOS_CONFORMANCE") == "all":
    from atropos.testing.conformance import *  # noqa: F403


class ModalHarness(ProcessesHere):
    def __init__(self, stand_in: Modal) -> None:
        super().__init__(backend="modal", image="registry.example/atropos-sandbox:test")
        self._modal = stand_in

    async def kill(self, pool: SlotPool, container: str) -> None:
        self._modal.created[container].process.kill()


@pytest.fixture(scope="module")
def harness():
    with modal() as stand_in:
        yield ModalHarness(stand_in)
