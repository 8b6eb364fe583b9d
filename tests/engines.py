"""The backends that tests run on: which there are, and how to make a small pool on each.

`scripts/engines.py` starts what is needed and says in ATROPOS_BACKENDS what there is; plain `pytest` means local alone.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from atropos.slots import SlotPoolConfig
from atropos.wire import SlotLimits
from tests.waiting import SLOWNESS, until

ROOT = Path(__file__).resolve().parent.parent
ALL = ("local", "docker", "nomad")
BACKENDS = tuple(name for name in os.environ.get("ATROPOS_BACKENDS", "local").replace(" ", ",").split(",") if name)
NOMAD = os.environ.get("NOMAD_ADDR", "http://127.0.0.1:4646")
SMALL = SlotLimits(memory_mib=192, pids=64, disk_mib=64, inodes=20_000)


def params(*names: str) -> list[Any]:
    """The backends as parameters of a fixture, marked; those that this run doesn't have are left out."""
    marks = {"local": (), "docker": (pytest.mark.docker,), "nomad": (pytest.mark.nomad,)}
    return [pytest.param(name, marks=marks[name], id=name) for name in names or ALL if name in BACKENDS]


def pool_config(backend: str, **changes: Any) -> SlotPoolConfig:
    """A small pool on a backend, under a name of its own; `changes` are fields of SlotPoolConfig."""
    values: dict[str, Any] = {
        "backend": backend,
        "job_id": f"test-{secrets.token_hex(4)}",
        "slots_per_container": 2,
        "min_containers": 1,
        "max_containers": 2,
        "limits": SMALL,
        "acquire_timeout_s": 60 * SLOWNESS,
        "start_timeout_s": 120 * SLOWNESS,
    }
    if backend == "nomad":
        values["nomad_address"] = NOMAD
    return SlotPoolConfig(**(values | changes))


def containers(job_id: str, *filters: str) -> list[str]:
    """Ids of a job's containers in the Docker engine, those of Nomad's allocations included, ended ones too."""
    found: set[str] = set()
    for label in (f"atropos.pool={job_id}", f"com.hashicorp.nomad.job_id={job_id}"):
        chosen = [part for each in (f"label={label}", *filters) for part in ("--filter", each)]
        found |= set(_docker("ps", "--all", "--quiet", "--no-trunc", *chosen).split())
    return sorted(found)


def allocations(job_id: str) -> list[dict[str, Any]]:
    """What Nomad lists of a job's allocations."""
    query = urllib.parse.urlencode({"filter": f'JobID == "{job_id}"'})
    return nomad("GET", f"/v1/allocations?{query}") or []


def nomad(method: str, path: str, body: bytes | None = None) -> Any:
    """Ask the agent directly; None for 404."""
    import json

    request = urllib.request.Request(f"{NOMAD}{path}", method=method, data=body)
    try:
        with urllib.request.urlopen(request, timeout=15) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise


def leftovers(backend: str, job_id: str) -> list[str]:
    """What is still there of a pool that was purged: containers, jobs, variables."""
    if backend == "local":
        return []
    left = [f"container {one[:12]}" for one in containers(job_id)]
    if backend == "nomad":
        if (job := nomad("GET", f"/v1/job/{job_id}")) is not None:
            left.append(f"job {job_id} ({job['Status']})")
        if nomad("GET", f"/v1/var/nomad/jobs/{job_id}") is not None:
            left.append(f"variable nomad/jobs/{job_id}")
    return left


async def nothing_left(backend: str, job_id: str) -> None:
    """Wait until nothing is: an engine forgets a container a moment after its end, on a busy machine much later."""

    def what() -> str:
        return f"nothing left of {job_id} ({leftovers(backend, job_id)})"

    await until(lambda: leftovers(backend, job_id) == [], what, 60)


def containers_of_allocation(allocation: str) -> list[str]:
    """Ids of the Docker containers of one Nomad allocation: its id ends their names."""
    return _docker("ps", "--quiet", "--no-trunc", "--filter", f"name={allocation}").split()


def printed_in(container_id: str, command: str) -> str:
    """What a shell command prints in a container."""
    return _docker("exec", container_id, "sh", "-c", command)


def kill_container(container_id: str) -> None:
    """`docker kill`, as an operator or an accident would."""
    _docker("kill", container_id)


def remove_container(container_id: str) -> None:
    """What becomes of a container whose machine is gone; somebody else may remove it at the same moment."""
    subprocess.run(["docker", "rm", "--force", container_id], capture_output=True, timeout=60, check=False)
    ends = time.monotonic() + 60
    while _docker("ps", "--all", "--quiet", "--no-trunc", "--filter", f"id={container_id}").strip():
        if time.monotonic() > ends:
            raise TimeoutError(f"container {container_id} is still there")
        time.sleep(0.1)


def address_for_containers() -> str:
    """This machine's, on the bridge of the Docker engine's containers, those of Nomad included."""
    subnet = _docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Subnet}}").strip()
    return str(ipaddress.ip_network(subnet)[1])


def _docker(*arguments: str) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout
