from __future__ import annotations

import pytest

from tests.e2e.hermes_support import running_policy


@pytest.fixture
async def policy(tmp_path):
    async with running_policy(tmp_path) as running:
        yield running
