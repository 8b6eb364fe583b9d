"""Fixtures that SWE-ReX's own tests ask for, on a slot; tests/adapters/test_swerex.py puts it beside them as
conftest.py."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio
from swerex.runtime.abstract import (
    BashAction,
    CloseBashSessionRequest,
    Command,
    CreateBashSessionRequest,
    WriteFileRequest,
)

from atropos.adapters.swerex import AtroposDeployment

POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def deployment():
    deployment = AtroposDeployment(pool=POOL)
    await deployment.start()
    await deployment.runtime.write_file(WriteFileRequest(path="/root/.bashrc", content="alias python=python3\n"))
    yield deployment
    await deployment.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def remote_runtime(deployment: AtroposDeployment):
    yield deployment.runtime
    await deployment.runtime.close()


@pytest_asyncio.fixture(loop_scope="session")
async def runtime_with_default_session(remote_runtime: Any):
    await remote_runtime.create_session(CreateBashSessionRequest())
    yield remote_runtime
    await remote_runtime.close_session(CloseBashSessionRequest())


@pytest_asyncio.fixture(loop_scope="session", autouse=True)
async def started_pager(request: Any, monkeypatch: Any):
    """SWE-ReX's test gives a pager 0.1 s to start; one that is interrupted before it has is not killed, as the test
    reads."""
    if request.node.name == "test_interrupt_pager":
        monkeypatch.setattr(
            request.module, "A", lambda **given: _Action(**given | ({"timeout": 3} if "timeout" in given else {}))
        )


class _Action(BashAction):
    timeout: float | None = 5


class _Command(Command):
    timeout: float | None = 5
