"""The shipped conformance suite over every backend of this run."""

from __future__ import annotations

import pytest

from atropos.testing.fixtures import *  # noqa: F403
from tests.backends import Engine
from tests.engines import params


@pytest.fixture(scope="module", params=params())
def harness(request) -> Engine:
    return Engine(request.param)
