from __future__ import annotations

import contextlib

import pytest

from examples.policy.truth import Truth
from tests.e2e import hermes_support


class RunningPolicy:
    """The policy server in this loop, over real HTTP, with a log of every token it sampled."""

    def __init__(self, url, log):
        self.url = url
        self.truth = Truth(log)


@contextlib.asynccontextmanager
async def running_policy(folder, **settings):
    async with hermes_support.running_policy(folder, mistakes=0.4, **settings) as (url, log):
        yield RunningPolicy(url, log)


@pytest.fixture
async def policy(tmp_path):
    async with running_policy(tmp_path) as running:
        yield running


@pytest.fixture
def faulty_policy(tmp_path):
    """A context manager: the policy with a fault, `faulty_policy(fault="503", fault_rate=0.3)`."""
    return lambda **settings: running_policy(tmp_path, **settings)
