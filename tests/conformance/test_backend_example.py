"""The backend of docs/backends.md passes the shipped conformance suite, found as an entry point."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from atropos.errors import ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.testing import BackendHarness
from atropos.testing.conformance import *  # noqa: F403
from tests.engines import pool_config


class ProcessHarness(BackendHarness):
    def config(self, **settings) -> SlotPoolConfig:
        return pool_config("processes", **settings)

    async def kill(self, pool: SlotPool, container: str) -> None:
        os.kill(int(container.partition("-")[0]), signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """As `pip install` leaves a package with this entry point."""
    site: Path = tmp_path_factory.mktemp("site")
    info = site / "atropos_processes-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atropos-processes\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[atropos.backends]\nprocesses = examples.backends.processes:ProcessBackend\nlost = nowhere:Backend\n"
        "odd = builtins:repr\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(site), *sys.path])
        yield


@pytest.fixture(scope="module")
def harness(installed) -> BackendHarness:
    return ProcessHarness()


async def test_unknown_backend_is_named():
    with pytest.raises(
        ConfigError,
        match=r"backend: .*'lost', 'odd', 'processes', 'local', 'docker', 'ssh', 'modal', 'singularity' or 'nomad'.*k8s",
    ):
        SlotPoolConfig(backend="k8s")
    with pytest.raises(ConfigError, match=r"'lost' \(nowhere:Backend\) can't be loaded: No module named 'nowhere'"):
        SlotPool(SlotPoolConfig(backend="lost"))
    with pytest.raises(ConfigError, match=r"'odd' .*makes a str, not a Backend"):
        SlotPool(SlotPoolConfig(backend="odd"))
