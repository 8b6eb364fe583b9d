"""One cluster for all tests here; each of them leaves it whole."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.cluster.agents import Cluster
from tests.engines import BACKENDS


@pytest.fixture(scope="package")
def running_cluster() -> Iterator[Cluster]:
    if "nomad" not in BACKENDS:
        pytest.skip("ATROPOS_BACKENDS has no nomad: no agent in this run")
    if os.geteuid() != 0:
        pytest.skip("Nomad's clients need root")
    with Cluster(clients=3) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Iterator[Cluster]:
    yield running_cluster
    running_cluster.heal()
