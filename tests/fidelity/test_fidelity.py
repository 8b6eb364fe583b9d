"""A slot is the machine that programs expect: what they find in `docker run` of an image, they find in a slot on it."""

from __future__ import annotations

import json
import secrets
import subprocess
from collections.abc import Iterator

import pytest

from tests import engines, privileges
from tests.fidelity.differences import ALWAYS, DIFFERENCES, KNOWN, PAGE, page
from tests.fidelity.probes import INTERPRETER, PROBES, WITH_A_NETWORK, program
from tests.fidelity.tools import TOOLS
from tests.waiting import SLOWNESS

MEMORY_MIB, PIDS, FILES = 1024, 256, 4096
LIMITS = {"memory_mib": MEMORY_MIB, "pids": PIDS, "open_files": FILES, "wall_s": 600}
needs_docker = [
    pytest.mark.docker,
    pytest.mark.skipif("docker" not in engines.BACKENDS, reason="needs a Docker engine"),
    privileges.owners,
]


def docker(*arguments: str, stdin: str = "") -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """Debian with Python: the sandbox image without the root file system in it, whose owners no slot has."""
    name = f"atropos-fidelity:{secrets.token_hex(4)}"
    made = docker("create", "atropos-sandbox:local")
    try:
        without = f"docker export {made} | tar --delete -f - rootfs | docker import --change 'CMD [\"bash\"]' - {name}"
        subprocess.run(["bash", "-o", "pipefail", "-c", without], check=True, capture_output=True)
    finally:
        docker("rm", "-f", made)
    yield name
    docker("image", "rm", "-f", name)


def in_docker(image: str, network: str, probes: str) -> dict[str, str]:
    """What a program of probes finds in a container with the limits of a slot: PID 1 of a slot is one process more."""
    limits = [
        "--memory",
        f"{MEMORY_MIB}m",
        "--memory-swap",
        f"{MEMORY_MIB}m",
        "--pids-limit",
        str(PIDS + 1),
        "--cpus",
        "1",
    ]
    limits += ["--ulimit", f"nofile={FILES}:{FILES}", "--ulimit", f"nproc={2 * PIDS + 64}"]
    machine = ["--network", network, "--hostname", "atropos", "--workdir", "/workspace"]
    return json.loads(docker("run", "--rm", "-i", *limits, *machine, image, *INTERPRETER, stdin=probes))


def compare(found: dict[str, str], expected: dict[str, str]) -> None:
    """What a slot and a container say differs where the table says so, and nowhere else."""
    assert found.keys() == expected.keys()
    unlike = {name: (expected[name], found[name]) for name in found if found[name] != expected[name]}
    new = {name: both for name, both in unlike.items() if name not in KNOWN}
    assert not new, json.dumps(new, indent=1)
    gone = (ALWAYS & found.keys()) - unlike.keys()
    assert not gone, "these differ no more: take them out of the table"


@pytest.fixture(scope="module")
def expected(image) -> dict[str, str]:
    return in_docker(image, "none", program())


@pytest.fixture(scope="module")
def expected_with_a_network(image) -> dict[str, str]:
    return in_docker(image, "bridge", program(WITH_A_NETWORK))


@pytest.mark.parametrize("backend", ["local", "docker"], ids=["local", "docker"])
class TestSlots:
    pytestmark = needs_docker

    async def test_programs_find_the_same(self, backend, image, expected):
        from atropos.slots import SlotPool

        config = engines.pool_config(backend, limits=LIMITS, max_containers=1, start_timeout_s=120 * SLOWNESS)
        async with SlotPool(config) as pool, pool.lease("probed", image=f"docker-daemon:{image}") as slot:
            result = await slot.exec(INTERPRETER, stdin=program(), timeout_s=500)
        assert expected.keys() == PROBES.keys()
        compare(json.loads(result.output), expected)


@pytest.mark.parametrize("backend", ["local", "docker"], ids=["local", "docker"])
class TestNetworks:
    pytestmark = needs_docker

    async def test_network_is_docker_run_s(self, backend, image, expected_with_a_network):
        from atropos.slots import SlotPool

        limits = {**LIMITS, "wall_s": 300}
        config = engines.pool_config(backend, limits=limits, max_containers=1, allow_network=True)
        async with SlotPool(config) as pool, pool.lease("probed", image=f"docker-daemon:{image}") as slot:
            result = await slot.exec(INTERPRETER, stdin=program(WITH_A_NETWORK), timeout_s=200)
        assert json.loads(result.output) == expected_with_a_network


def test_docs_list_what_differs():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.fidelity.differences"
    assert len(DIFFERENCES) <= 12
    assert PROBES.keys() | TOOLS.keys() >= KNOWN
