"""A new image under load, by the commands of docs/cluster.md: container after container, and no trajectory notices."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys

import pytest

from tests.e2e.cluster.programs import env_program
from tests.e2e.cluster.test_nodes import nothing_left
from tests.e2e.hermes_support import running_policy
from tests.engines import ROOT
from tests.waiting import until

pytestmark = [pytest.mark.nomad, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(1800)]
BASE = "atropos-sandbox:local"


async def command(*words: str) -> str:
    done = await asyncio.to_thread(subprocess.run, words, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def image():
    """A tag of one's own."""
    tag = f"atropos-upgrade-{secrets.token_hex(3)}:local"
    subprocess.run(["docker", "tag", BASE, tag], check=True)
    yield tag
    subprocess.run(["docker", "rmi", "--force", tag], check=True, capture_output=True)


async def newer(tag: str) -> str:
    """Point the tag at another image, as a push of a new build does; answers the image's id."""
    (made,) = (await command("docker", "create", BASE)).split()
    try:
        await command("docker", "commit", "--change", "LABEL atropos.test=newer", made, tag)
    finally:
        await command("docker", "rm", made)
    return (await command("docker", "image", "inspect", tag, "--format", "{{.Id}}")).strip()


def images(job_id: str) -> list[str]:
    """Ids of the images that the job's running containers were made from."""
    label = f"label=com.hashicorp.nomad.job_id={job_id}"
    listed = subprocess.run(["docker", "ps", "-q", "--filter", label], capture_output=True, text=True, check=True)
    inspect = ["docker", "inspect", "--format", "{{.Image}}", *listed.stdout.split()]
    found = subprocess.run(inspect, capture_output=True, text=True, check=False)  # one may end meanwhile
    return found.stdout.split()


async def test_image_upgrade_by_draining(cluster, image, tmp_path):
    job_id = f"test-{secrets.token_hex(4)}"
    old = (await command("docker", "image", "inspect", BASE, "--format", "{{.Id}}")).strip()
    flags = {"sandbox_image": image, "trajectory_retries": "0"}
    async with (
        running_policy(tmp_path) as (policy, _),
        env_program(cluster, job_id, policy, tmp_path / "a.jsonl", **flags) as env,
    ):
        await env.until_groups(1)
        assert images(job_id) == [old, old]
        new = await newer(image)
        pool = [sys.executable, "-m", "atropos.cli", "pool"]
        where = ["--job-id", job_id, "--address", cluster.url]
        assert "2 containers drained" in await command(*pool, "drain", "--all", *where)
        await until(lambda: images(job_id) == [new, new], "two containers of the new image", 60)
        await env.ends_well()
    await nothing_left(cluster, job_id)


async def test_changed_job_is_replaced(cluster, image, tmp_path):
    job_id = f"test-{secrets.token_hex(4)}"
    flags = {"sandbox_image": image}
    async with (
        running_policy(tmp_path) as (policy, _),
        env_program(cluster, job_id, policy, tmp_path / "a.jsonl", **flags) as env,
    ):
        await env.until_groups(1)
        image_2 = f"{image}-2"
        new = await newer(image_2)
        try:
            await asyncio.to_thread(change_job, cluster, job_id, parallel=1, image=image_2)
            await until(
                lambda: (
                    {each["Status"] for each in cluster.ask("GET", f"/v1/job/{job_id}/deployments")} == {"successful"}
                ),
                f"the deployment of {image_2}",
                120,
            )
            await asyncio.to_thread(change_job, cluster, job_id, parallel=0, image=image_2)
            await until(lambda: images(job_id) == [new, new], "two containers of the new image", 60)
            await env.ends_well()
            await nothing_left(cluster, job_id)
        finally:
            await command("docker", "rmi", "--force", image_2)


def change_job(cluster, job_id: str, *, parallel: int, image: str) -> None:
    """`nomad job inspect | jq | nomad job run -json -`, as docs/cluster.md has it."""
    job = cluster.ask("GET", f"/v1/job/{job_id}")
    (group,) = job["TaskGroups"]
    group["Update"]["MaxParallel"] = parallel
    # in nanoseconds; the job's own 5 s are an operator's caution, and no part of this
    group["Update"]["MinHealthyTime"] = 1_000_000_000
    group["Tasks"][0]["Config"]["image"] = image
    cluster.ask("POST", "/v1/jobs", {"Job": job})
