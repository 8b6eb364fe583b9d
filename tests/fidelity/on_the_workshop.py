"""What developers do runs in slots, and their tools see there what they see in `docker run`: `make test-fidelity`.

No part of `make test`: the workshop is made once, from a gigabyte of packages, and each run unpacks its 4 GB twice.
"""

from __future__ import annotations

import json
import socket
import subprocess
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from tests import engines
from tests.fidelity.probes import INTERPRETER, program
from tests.fidelity.test_fidelity import LIMITS, compare, in_docker, needs_docker
from tests.fidelity.tools import TOOLS
from tests.fidelity.workflows import WAIT, WORKFLOWS
from tests.fidelity.workshop import NAME, archive
from tests.waiting import SLOWNESS

pytestmark = pytest.mark.timeout(3600 * SLOWNESS)
RUN_S = 600.0 * SLOWNESS
ROOMY = {"memory_mib": 4096, "disk_mib": 3500, "inodes": 400_000, "pids": 1024, "open_files": 65536, "wall_s": RUN_S}

PATIENT = {
    "start_timeout_s": RUN_S,
    "prepare_timeout_s": RUN_S,
    "image_store": {"pull_timeout_s": RUN_S, "unpack_timeout_s": RUN_S},
}
"""The image has 4 GB."""


def registries() -> list[str]:
    """What slots may reach: public addresses, and where this machine has its packages from, which may be a private one."""
    listed = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Origin: Debian"]
    uri = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()[0]
    return ["public", socket.gethostbyname(urlsplit(uri).hostname or "")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    """Slots with room, on the workshop."""
    config = engines.pool_config(
        "local", slots_per_container=1, max_containers=1, limits=ROOMY, allow_network=True, egress_allow=registries(),
        egress_mib=4096, slot_image=f"docker-archive:{archive()}", **PATIENT,
    )  # fmt: skip
    async with SlotPool(config) as pool:
        yield pool


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", WORKFLOWS)
async def test_a_workflow_runs(pool, name):
    async with pool.lease(name) as slot:
        result = await slot.exec(f"set -eu\n{WAIT}\n{WORKFLOWS[name]}", workdir="/workspace", timeout_s=RUN_S)
    assert result.exit_code == 0, result


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    subprocess.run(["docker", "load", "--quiet", "--input", archive()], check=True, capture_output=True)
    return in_docker(NAME, "none", program(TOOLS, RUN_S / 4))


@pytest.mark.parametrize("backend", ["local", "docker"])
class TestTools:
    pytestmark = needs_docker

    async def test_programs_see_the_same(self, backend, expected):
        limits = {**LIMITS, "wall_s": RUN_S}
        config = engines.pool_config(backend, limits=limits, max_containers=1, **PATIENT)
        async with SlotPool(config) as pool, pool.lease("probed", image=f"docker-archive:{archive()}") as slot:
            result = await slot.exec(INTERPRETER, stdin=program(TOOLS, RUN_S / 4), timeout_s=RUN_S)
        compare(json.loads(result.output), expected)
