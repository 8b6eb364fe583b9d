"""Metrics of a real pool and its servers: right after containers die, as Prometheus' own tools read them.

ATROPOS_TEST_METRICS_SLOTS=1000 runs the same with that many slots in ten containers (a minute).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from atropos.errors import SandboxError
from atropos.metrics import CONTENT_TYPE, Histogram, build_info, counter, exposition, installed_version, percentiles
from atropos.slots import SlotPool
from atropos.testing.waiting import until
from tests.backends import Engine
from tests.processes import running

SLOTS = int(os.environ.get("ATROPOS_TEST_METRICS_SLOTS", "8"))
CONTAINERS = 2 if SLOTS < 100 else 10
PROMTOOL = shutil.which("promtool")


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a page by name and labels; each family has help, and no sample stands twice."""
    found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        assert family.type != "unknown", family.name
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    wanted = set(labels.items())
    return sum(number for (each, has), number in samples(text).items() if each == name and wanted <= has)


def page(pool: SlotPool) -> str:
    return exposition([build_info(), *pool.metrics()])


async def server_pages(pool: SlotPool) -> list[str]:
    """The servers' own pages, as a scraper gets them."""
    pages: list[str] = []
    async with aiohttp.ClientSession() as session:
        for container in pool.backend.containers():
            headers = {"Authorization": f"Bearer {container.token}"}
            async with session.get(f"{container.url}/metrics", headers=headers) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, CONTENT_TYPE)
                pages.append(await answer.text())
    return pages


def never_less(before: str, after: str) -> None:
    """No counter of a page went backwards or vanished."""
    later = samples(after)
    for family in text_string_to_metric_families(before):
        if family.type in {"counter", "histogram"}:
            for sample in family.samples:
                if not sample.name.endswith("_created"):
                    assert later[sample.name, frozenset(sample.labels.items())] >= sample.value, sample


def check_with_promtool(text: str) -> None:
    if PROMTOOL is not None:
        done = subprocess.run([PROMTOOL, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
async def pool():
    engine = Engine("local")
    settings = {
        "min_containers": CONTAINERS,
        "max_containers": CONTAINERS,
        "start_timeout_s": 300,
        "acquire_timeout_s": 300,
    }
    async with SlotPool(engine.config(slots_per_container=SLOTS // CONTAINERS, **settings)) as running:
        yield running


@pytest.mark.timeout(1200 if SLOTS > 100 else 120)
async def test_counts_never_go_backwards(pool):
    slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(SLOTS)))
    results = await asyncio.gather(*(slot.exec("true") for slot in slots))
    assert all(result.exit_code == 0 for result in results)
    await slots[0].exec("exit 3")
    await slots[0].exec("sleep 9", timeout_s=0.2)
    with pytest.raises(FileNotFoundError):
        await slots[0].read_file("nothing-here")
    with pytest.raises(FileNotFoundError):
        await slots[0].download("nothing-here")
    with pytest.raises(OSError, match="directory"):
        await slots[0].write_file("/tmp", bytes(1 << 20))
    snapshot = await slots[0].snapshot()
    await slots[1].release()
    async with pool.lease("fork", snapshot=snapshot) as fork:
        assert (await fork.exec("true")).exit_code == 0

    first = page(pool)
    assert value(first, "atropos_build_info", version=installed_version()) == 1
    assert value(first, "atropos_pool_containers", state="ready") == CONTAINERS
    assert value(first, "atropos_pool_slots", state="leased") == SLOTS - 1
    assert value(first, "atropos_pool_slots", state="free") == 1
    assert value(first, "atropos_pool_acquire_seconds_count", result="ok") == SLOTS
    assert value(first, "atropos_pool_fork_seconds_count", result="ok") == 1
    assert value(first, "atropos_pool_reset_seconds_count", result="ok") == 2
    of = "atropos_pool_operation_seconds_count"
    assert value(first, of, operation="exec", result="ok") == SLOTS + 1
    assert value(first, of, operation="exec", result="failed") == 1
    assert value(first, of, operation="exec", result="timeout") == 1
    assert value(first, of, operation="read_file", result="error") == 1
    assert value(first, of, operation="read_stream", result="error") == 1
    assert value(first, of, operation="write_stream", result="error") == 1
    took = value(first, "atropos_pool_operation_seconds_sum", operation="exec", result="timeout")
    assert 0.2 <= took < 100, "in seconds"
    assert value(first, "atropos_pool_faults_total") == 0

    pages = await server_pages(pool)
    assert sum(value(text, "atropos_acquire_seconds_count", result="ok") for text in pages) == SLOTS
    assert sum(value(text, "atropos_fork_seconds_count", result="ok") for text in pages) == 1
    assert sum(value(text, "atropos_snapshot_seconds_count", result="ok") for text in pages) == 1
    assert sum(value(text, "atropos_reset_seconds_count", result="ok") for text in pages) == 2
    assert sum(value(text, "atropos_operation_seconds_count", operation="exec") for text in pages) == SLOTS + 3
    assert sum(value(text, "atropos_leases_ended_total", reason="released") for text in pages) == 2
    for text in (first, *pages):
        check_with_promtool(text)

    victim = slots[-1].container
    lost = [slot for slot in (slots[0], *slots[2:]) if slot.container == victim]
    call = asyncio.create_task(lost[0].exec("sleep 600"))
    await until(lambda: running("sleep 600"), "the call's program")
    await Engine("local").kill(pool, victim)
    with pytest.raises(SandboxError) as failure:
        await call
    await until(
        lambda: victim not in pool.links and pool.stats().ready == CONTAINERS, "the container was replaced", 120
    )
    second = page(pool)
    never_less(first, second)
    assert value(second, "atropos_pool_faults_total", code=failure.value.code) == 1
    assert value(second, of, operation="exec", result=failure.value.code) == 1
    assert value(second, "atropos_pool_leases_lost_total") == len(lost)
    assert value(second, "atropos_pool_containers_lost_total") == 1
    assert value(second, "atropos_pool_containers", state="ready") == CONTAINERS
    assert value(second, "atropos_pool_leases_total") == SLOTS + 1
    async with pool.lease("again") as slot:
        assert (await slot.exec("true")).exit_code == 0
    never_less(second, page(pool))


async def test_a_waiting_acquire_is_cold():
    async with SlotPool(Engine("local").config(slots_per_container=1, max_containers=1)) as pool:
        slot = await pool.acquire("t")
        with pytest.raises(SandboxError):
            await pool.acquire("late", timeout_s=0.2)
        waiting = asyncio.create_task(pool.acquire("next"))
        await until(lambda: pool.stats().waiting == 1, "an acquire that waits")
        await slot.release()
        await (await waiting).release()
        text = page(pool)
    name = "atropos_pool_acquire_seconds_count"
    assert value(text, name, start="cold", result="ok") == 1
    assert value(text, name, start="cold", result="acquire_timeout") == 1
    assert value(text, "atropos_pool_faults_total", code="acquire_timeout") == 1


def test_percentiles_nearest_rank():
    assert percentiles([50, 15, 40, 35, 20], 0.05, 0.3, 0.4, 0.5, 1.0) == [15, 20, 20, 35, 50]
    assert percentiles(range(1, 101), 0.5, 0.95, 0.99, 1.0) == [50, 95, 99, 100]
    assert percentiles([], 0.5, 1.0) == [0, 0]


def test_text_holds_the_observed():
    seconds = Histogram("x_seconds", "A\nline\\.", "kind")
    for took in (0.0005, 0.001, 0.3, 9999):
        seconds.observe(took, 'quote " slash \\ line\n')
    text = exposition([seconds.family(), counter("y_total", "Y.", 2), counter("z_total", "Z.", {})], env="e")
    found = {(name, dict(labels).get("le")): number for (name, labels), number in samples(text).items()}
    assert (found["x_seconds_count", None], found["x_seconds_bucket", "+Inf"]) == (4, 4)
    assert (found["x_seconds_bucket", "0.001"], found["x_seconds_bucket", "0.5"]) == (2, 3)
    assert found["x_seconds_sum", None] == pytest.approx(9999.3015)
    assert all(("env", "e") in labels for _, labels in samples(text))
    assert ("kind", 'quote " slash \\ line\n') in next(
        labels for name, labels in samples(text) if name == "x_seconds_sum"
    )
    assert found["y_total", None] == 2
    check_with_promtool(text.replace("A\\nline", "A line"))
