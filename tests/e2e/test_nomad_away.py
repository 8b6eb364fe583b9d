"""An env whose Nomad goes away: it waits for what can come back, ends by itself after `outage_s`, and on a signal at
once."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.hermes_support import running_policy, script_env
from tests.e2e.nomad_proxy import NomadProxy
from tests.engines import BACKENDS, NOMAD, ROOT, containers, nomad, nothing_left, remove_container
from tests.settings import shows
from tests.waiting import SLOWNESS

pytestmark = [
    pytest.mark.nomad,
    pytest.mark.skipif("nomad" not in BACKENDS, reason="ATROPOS_BACKENDS has no nomad: no agent in this run"),
]


class Running:
    """One `process` of the script env on a job of its own."""

    def __init__(self, process: asyncio.subprocess.Process, groups: Path, said: Path) -> None:
        self.process, self._groups, self._said = process, groups, said

    @property
    def said(self) -> str:
        return self._said.read_text()

    def groups(self) -> int:
        return self._groups.read_text().count("\n") if self._groups.exists() else 0

    async def more_groups(self) -> None:
        aim = self.groups() + 2
        async with asyncio.timeout(120 * SLOWNESS):
            while self.groups() < aim:
                assert self.process.returncode is None, self.said
                await asyncio.sleep(0.05)

    async def says(self, words: str) -> None:
        async with asyncio.timeout(60 * SLOWNESS):
            while words not in self.said:
                assert self.process.returncode is None, self.said
                await asyncio.sleep(0.05)

    async def ends(self) -> int:
        async with asyncio.timeout(45 * SLOWNESS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def env_program(tmp_path, nomad: str, job_id: str, policy: str, **more):
    own = {
        "nomad_address": nomad,
        "sandbox_job_id": job_id,
        "allow_network": "false",
        "acquire_timeout_s": 1,
        "trajectory_retries": 0,
        "total_steps": -1,
        "data_path_to_save_groups": tmp_path / "groups.jsonl",
    }
    command = script_env(policy, **{**own, **more})
    said = tmp_path / "said"
    with said.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=file, stderr=file)
    try:
        yield Running(process, tmp_path / "groups.jsonl", said)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        purge = ["pool", "purge", "--force", "--job-id", job_id, "--address", NOMAD]
        purge = [sys.executable, "-m", "atropos.cli", *purge]
        await asyncio.to_thread(subprocess.run, purge, cwd=ROOT, check=False, capture_output=True)


async def lose_all(job_id: str) -> None:
    """The job with all that ran: as long as a client is there, it would start what it lost again."""
    await asyncio.to_thread(nomad, "DELETE", f"/v1/job/{job_id}?purge=true")
    for one in await asyncio.to_thread(containers, job_id):
        await asyncio.to_thread(remove_container, one)


@contextlib.asynccontextmanager
async def env_and_its_nomad(tmp_path, **settings):
    """An env that has written groups, and the way to Nomad that is about to break; nothing is left of it at the end."""
    tmp_path.mkdir()
    job_id = f"test-{secrets.token_hex(4)}"
    async with (
        NomadProxy() as proxy,
        running_policy(tmp_path) as (policy, _),
        env_program(tmp_path, proxy.url, job_id, policy, **settings) as env,
    ):
        await env.more_groups()
        yield env, proxy, job_id
    # by the command that its message names, after which Nomad still ends the containers
    await nothing_left("nomad", job_id)


def names_what_may_be_left(env: Running, proxy: NomadProxy, job_id: str) -> None:
    assert f"Nomad does not answer at {proxy.url}" in env.said
    assert f"job {job_id} and its variable nomad/jobs/{job_id} may be left" in env.said
    assert f"`atropos pool purge --job-id {job_id} --address {proxy.url}` removes them" in env.said
    assert "Traceback" not in env.said


async def gone_for_good_ends_the_run(tmp_path) -> None:
    async with env_and_its_nomad(tmp_path, outage_s=2) as (env, proxy, job_id):
        proxy.fail("gone")
        await lose_all(job_id)
        assert await env.ends() == 1
        assert "longer than outage_s (2 s): restart the engine, or raise outage_s" in env.said.splitlines()[-1]
        names_what_may_be_left(env, proxy, job_id)


async def a_signal_ends_the_run_though_nomad_hangs(tmp_path) -> None:
    async with env_and_its_nomad(tmp_path) as (env, proxy, job_id):
        proxy.fail("silent")
        env.process.send_signal(signal.SIGTERM)
        assert await env.ends() == 128 + signal.SIGTERM
        names_what_may_be_left(env, proxy, job_id)


async def what_comes_back_costs_no_group(tmp_path) -> None:
    settings = {"outage_s": 600, "acquire_timeout_s": 3, "trajectory_retries": 99}
    async with env_and_its_nomad(tmp_path, **settings) as (env, proxy, job_id):
        proxy.fail("gone")
        await lose_all(job_id)
        await env.says(" waits for the engine to answer: Nomad does not answer at ")
        await asyncio.sleep(1)
        proxy.mode = "pass"
        await env.more_groups()
        assert "the engine answers again" in env.said
        env.process.send_signal(signal.SIGINT)
        assert await env.ends() == 128 + signal.SIGINT
        assert "dropped" not in env.said
        assert "may be left" not in env.said
        await nothing_left("nomad", job_id)


@shows("outage_s")
async def test_outage_wait_is_bounded(tmp_path):
    await asyncio.gather(  # most of it is waiting
        gone_for_good_ends_the_run(tmp_path / "gone"),
        a_signal_ends_the_run_though_nomad_hangs(tmp_path / "hangs"),
        what_comes_back_costs_no_group(tmp_path / "back"),
    )
