"""What `monitoring/` holds, read and run by Prometheus itself; only where it is installed (Debian: prometheus)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml

from atropos.agent import seed_for
from atropos.envs.reporting.prometheus import MetricsEndpoint, metrics_text
from atropos.envs.running.metrics import EnvMetrics
from atropos.metrics import exposition
from atropos.slots import SlotPool
from atropos.slots.containers.counters import Counters
from atropos.tools import ToolCall, ToolExecutor, build_tool_registry
from tests.backends import Engine
from tests.waiting import SLOWNESS, until

FOLDER = Path(__file__).parents[2] / "monitoring"
BOARD = json.loads((FOLDER / "grafana/dashboards/atropos.json").read_text())
PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMETHEUS is None or PROMTOOL is None, reason="prometheus is not installed")


def expressions() -> dict[str, str]:
    """The dashboard's queries by panel and reference, with its variables filled in."""
    found: dict[str, str] = {}
    for panel in BOARD["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"].replace("$__rate_interval", "10s").replace("$job", ".*").replace("$instance", ".*")
            found[f"{panel['id']} {panel['title']} {target['refId']}"] = text
    return found


def test_configuration_is_valid():
    for kind, name in (("config", "prometheus.yml"), ("rules", "alerts.yml")):
        done = subprocess.run([PROMTOOL, "check", kind, FOLDER / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_come_when_due(tmp_path):
    labels = 'job="j",instance="i",env="e"'
    late = {"AtroposNoTrajectories": "40m", "AtroposAcquireTimeouts": "7m", "AtroposNoContainers": "10m"}
    series = {
        f"atropos_env_trajectories_total{{{labels}}}": "0x200",
        f"atropos_env_in_flight{{{labels}}}": "0x2 4x200",
        f'atropos_pool_containers{{{labels},state="ready"}}': "0x200",
        f"atropos_pool_containers_wanted{{{labels}}}": "0x20 1x200",
        **dict.fromkeys(first_faults(labels), "0x20 5x200"),
    }
    checks = [{"eval_time": time, "alertname": name, "exp_alerts": []} for name in late for time in ("1m", "4m")]
    rules = {"AtroposAcquireTimeouts": {"code": "acquire_timeout"}}
    written = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    for rule in written:
        if (name := rule["alert"]) in late:
            shown = {**rule["labels"], "job": "j", "instance": "i", "env": "e", **rules.get(name, {})}
            alert = {"exp_labels": shown, "exp_annotations": rule["annotations"]}
            checks.append({"eval_time": late[name], "alertname": name, "exp_alerts": [alert]})
    given = [{"series": name, "values": values} for name, values in series.items()]
    tests = [{"interval": "15s", "input_series": given, "alert_rule_test": checks}]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(FOLDER / "alerts.yml")], "tests": tests}))
    done = subprocess.run([PROMTOOL, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def first_faults(labels: str) -> list[str]:
    """The series of acquire timeouts that a pool without faults exports."""
    text = exposition(Counters().families())
    return [
        f'{line[: line.index("{")]}{{{labels},code="acquire_timeout"}}'
        for line in text.splitlines()
        if 'code="acquire_timeout"' in line
    ]


@contextlib.asynccontextmanager
async def prometheus(folder: Path, targets: list[dict[str, object]]):
    """A Prometheus with the folder's alerts that scrapes these jobs each half second; gives its address."""
    settings = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": [str(FOLDER / "alerts.yml")],
        "scrape_configs": targets,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            PROMETHEUS, *arguments, "--web.listen-address=127.0.0.1:0", stdout=log, stderr=log
        )

    def listens() -> re.Match[str] | None:
        return re.search(r'msg="Listening on" address=(\S+)', (folder / "log").read_text())

    try:
        await until(listens, "Prometheus' port", 60)
        address = f"http://{listens()[1]}"
        async with asyncio.timeout(60 * SLOWNESS), httpx.AsyncClient(base_url=address) as client:
            while not await ready(client):  # noqa: ASYNC110 - it can only be asked
                await asyncio.sleep(0.1)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), 60 * SLOWNESS)


async def ready(client: httpx.AsyncClient) -> bool:
    """Whether Prometheus takes queries; before, it answers 503 with plain text."""
    with contextlib.suppress(httpx.TransportError):
        return (await client.get("/-/ready")).is_success
    return False


async def query(client: httpx.AsyncClient, text: str) -> list[dict[str, object]]:
    answer = (await client.get("/api/v1/query", params={"query": text})).json()
    assert answer["status"] == "success", (text, answer)
    return answer["data"]["result"]


async def work(executor: ToolExecutor, pool: SlotPool, found: EnvMetrics) -> None:
    """A little of everything that the dashboard shows, forever."""
    number = 0
    while True:
        number += 1
        name = f"t{number}"
        await executor.execute(name, ToolCall(name="terminal", arguments={"command": "true"}))
        await executor.release_trajectory(name)
        slot = await pool.acquire(f"fork{number}")
        async with await slot.snapshot() as snapshot, pool.lease(f"forked{number}", snapshot=snapshot):
            await slot.release()
        found.groups += 1
        found.trajectories += 1
        found.scores.append(seed_for(1, name, 0) % 2)
        found.phases["model"] += 1
        found.verify.observe(0.1, "ok")
        found.trajectory_seconds.observe(2.0)
        for counted in (found.dropped, found.retries):
            counted["slot_lost"] += 1
        counters = next(iter(pool.links.values())).state.counters
        counters.prepare.observe(1, "ok")  # no image is pulled here
        counters.faults["slot_lost"] += 1
        await asyncio.sleep(0.05)


@pytest.mark.timeout(180)
async def test_panels_show_something(tmp_path):
    found = EnvMetrics()
    async with (
        SlotPool(Engine("local").config(slots_per_container=4, max_containers=1)) as pool,
        ToolExecutor(pool=pool, tools=build_tool_registry(["terminal"])) as executor,
    ):
        endpoint = MetricsEndpoint(
            "127.0.0.1:0", lambda: metrics_text(found, [*pool.metrics(), *executor.metrics()], "tried")
        )
        await endpoint.start()
        [server] = pool.backend.containers()
        assert server.url is not None
        jobs: list[dict[str, object]] = [
            {"job_name": "atropos-env", "static_configs": [{"targets": [f"127.0.0.1:{endpoint.port}"]}]},
            {
                "job_name": "atropos-server",
                "authorization": {"credentials": server.token},
                "static_configs": [{"targets": [server.url.removeprefix("http://")]}],
            },
        ]
        running = asyncio.create_task(work(executor, pool, found))
        async with prometheus(tmp_path, jobs) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
            named = re.findall(r"atropos_[a-z_]+", (FOLDER / "alerts.yml").read_text())
            # each is to be seen once: a scrape that takes longer than the half second leaves a gap
            empty = expressions() | {name: name for name in named}
            empty |= {job["job_name"]: f'up{{job="{job["job_name"]}"}} == 1' for job in jobs}
            rules: list[dict[str, object]] = []
            for _ in range(300):
                assert not running.done(), running.exception()
                empty = {name: text for name, text in empty.items() if not await query(client, text)}
                rules = (await client.get("/api/v1/rules")).json()["data"]["groups"][0]["rules"]
                if not empty and not any(rule["health"] == "unknown" for rule in rules):
                    break
                await asyncio.sleep(0.3)
            assert not empty
            assert {rule["health"] for rule in rules} == {"ok"}, rules
        running.cancel()
        await asyncio.wait([running])
        await endpoint.close()
