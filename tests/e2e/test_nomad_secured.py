"""Against a Nomad with ACLs, mutual TLS, a region and a namespace: the least token is enough, and what is wrong is
named."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys

import pytest
import pytest_asyncio

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots import SlotPool
from tests.e2e.secured import NAMESPACE, Secured
from tests.engines import BACKENDS, ROOT, containers, pool_config
from tests.waiting import until

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent():
    async with Secured() as agent:
        yield agent


@pytest.fixture
def job(agent, monkeypatch):
    """A job's name that the policy covers, and its token in the environment; nothing else of Nomad's is."""
    for name in [name for name in os.environ if name.startswith("NOMAD_")]:
        monkeypatch.delenv(name)
    for name, value in agent.environment.items():
        monkeypatch.setenv(name, value)
    return f"atropos-{secrets.token_hex(4)}"


def config(job_id: str, **changes):
    return pool_config("nomad", nomad_address=None, job_id=job_id, **changes)


async def test_least_policy_is_enough(agent, job):
    async with SlotPool(config(job, slots_per_container=1, max_containers=2)) as pool:
        a, b = await asyncio.gather(pool.acquire("a"), pool.acquire("b"))
        assert a.container != b.container
        assert (await b.exec("echo ok")).output == "ok\n"
        await asyncio.gather(a.release(), b.release())
        status = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "atropos.cli", "pool", "status", "--job-id", job, "--json"],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert status.returncode == 0, status.stderr
        await pool.backend.retire(pool.links[b.container].container)
        await until(lambda: b.container not in pool.links and pool.stats().ready == 2, "another container", 60)
    namespace = f"-namespace={NAMESPACE}"
    assert await asyncio.to_thread(agent.ask, "job", "inspect", namespace, job) is None
    assert await asyncio.to_thread(agent.ask, "var", "get", namespace, "-out=json", f"nomad/jobs/{job}") is None
    await until(lambda: containers(job) == [], "no container left", 60)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"NOMAD_TOKEN": None}, r"NOMAD_TOKEN is not set.*nomad/policy\.hcl"),
        ({"NOMAD_TOKEN": "mistyped"}, r"NOMAD_TOKEN is no token of the cluster"),
        (
            {"NOMAD_TOKEN": "00000000-0000-0000-0000-000000000000"},
            r"NOMAD_TOKEN is no token of the cluster.*expired.*nomad/policy\.hcl",
        ),
        ({"NOMAD_NAMESPACE": "default"}, r"NOMAD_NAMESPACE=default: the token 'trainer' \(policies: atropos-pool\)"),
        ({"NOMAD_NAMESPACE": "nowhere", "NOMAD_TOKEN": "management"}, "no namespace 'nowhere'.*nomad namespace apply"),
        ({"NOMAD_REGION": "mars"}, r"NOMAD_REGION: .*no region 'mars'"),
        ({"NOMAD_CACERT": None}, r"NOMAD_CACERT: it is not set.*cluster's CA"),
        ({"NOMAD_CACERT": f"{ROOT}/pyproject.toml"}, r"NOMAD_CACERT: .*pyproject\.toml can't be used"),
        ({"NOMAD_CACERT": "another"}, r"NOMAD_CACERT: .* does not vouch for the certificate of https://"),
        ({"NOMAD_CLIENT_CERT": None, "NOMAD_CLIENT_KEY": None}, r"NOMAD_CLIENT_CERT: .*set NOMAD_CLIENT_CERT and"),
        ({"NOMAD_CLIENT_KEY": None}, "NOMAD_CLIENT_CERT and NOMAD_CLIENT_KEY belong together"),
        ({"NOMAD_CLIENT_KEY": "/nowhere.pem"}, r"NOMAD_CLIENT_KEY: /nowhere\.pem can't be read"),
        ({"NOMAD_TLS_SERVER_NAME": "elsewhere"}, r"NOMAD_TLS_SERVER_NAME: .*not valid for 'elsewhere'"),
        ({"NOMAD_ADDR": "http"}, r"NOMAD_ADDR: .*speaks TLS; write https://"),
    ],
)
async def test_wrong_setting_is_one_line(agent, job, monkeypatch, changes, says):
    if changes.get("NOMAD_TOKEN") == "management":
        changes = {**changes, "NOMAD_TOKEN": agent.management}
    if changes.get("NOMAD_CACERT") == "another":
        folder = agent.folder / "other"
        folder.mkdir()
        await asyncio.to_thread(
            subprocess.run, [agent.binary, "tls", "ca", "create"], cwd=folder, check=True, capture_output=True
        )
        changes = {"NOMAD_CACERT": str(folder / "nomad-agent-ca.pem")}
    if "NOMAD_ADDR" in changes:
        changes = {"NOMAD_ADDR": agent.environment["NOMAD_ADDR"].replace("https", "http")}
    for name, value in changes.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name)
    with pytest.raises(ConfigError, match=says) as caught:
        await SlotPool(config(job)).start()
    assert "\n" not in str(caught.value)


async def test_certificate_name_accepted(agent, job, monkeypatch):
    monkeypatch.setenv("NOMAD_TLS_SERVER_NAME", "server.moon.nomad")
    async with SlotPool(config(job)) as pool, pool.lease("t") as slot:
        assert (await slot.exec("echo ok")).output == "ok\n"


async def test_job_outside_is_refused(agent, job):
    with pytest.raises(BackendUnavailable, match=r"may not read the variable there.*nomad/jobs/"):
        await SlotPool(config("other")).start()
    assert await asyncio.to_thread(agent.ask, "job", "inspect", f"-namespace={NAMESPACE}", "other") is None
