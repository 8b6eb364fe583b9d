"""Which tests are fast, and in which order tests run.

`fast` is everything in tests/unit that neither needs an engine nor is marked `slow`; `make test-fast` runs it. `alone`
are the tests in `ALONE`: under `-n N --dist loadscope` they run when all others have ended. xdist shares tests out by
their ids alone, so that this can't be a mark beside the test.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Generator
from typing import Any

import pytest

MEASURES = "compares times, which other tests would change"
USES_UP = "uses up what the kernel counts for the slots of all servers together"
COUNTED_TOGETHER = (
    "descriptors_in_flight",
    "socket_buffers_without_end",
    "pipe_buffers_without_end",
    "inotify_without_end",
    "queued_signals_and_timers_without_end",
    "message_queues_without_end",
    "terminals_without_end",
    "watches_of_epoll_without_end",
    "timers_without_end",
    "mapped_and_locked_memory",
)
"""Attack programs that use up what is counted for a user, or for the whole machine, and not in a slot's cgroup."""
ALONE = {
    **{rf"tests/security/test_attack_programs\.py::\w+\[{name}\]": USES_UP for name in COUNTED_TOGETHER},
    r"tests/e2e/test_honest_verdicts\.py::test_a_busy_host_costs_no_reward": MEASURES,
    r"tests/e2e/test_unauthenticated\.py::test_half_open": MEASURES,
    r"tests/limits/test_limits\.py::test_the_kernel_s_side_of_limits\[the_share": MEASURES,
    r"tests/security/test_heaps\.py::test_shared_counters_touch_no_neighbour": USES_UP,
    r"tests/security/test_neighbours_stay_quick\.py": MEASURES,
    r"tests/truths/test_truth_05_across_containers\.py": MEASURES,
    r"tests/truths/test_truth_07_everything_acquired_is_given_back\.py::test_an_ended_trainer": MEASURES,
    r"tests/unit/server/test_unauthenticated\.py::test_half_open": MEASURES,
}
"""Patterns of node ids, each with why its tests can't share the machine. Collection fails on one that no test has."""
RUNS_ALONE = re.compile("|".join(ALONE))

LAST = "alone"
ONE_AT_A_TIME = {
    "a cluster": re.compile(r"tests/e2e/cluster/"),
    "Nomad": re.compile(r"tests/(e2e/test_nomad\w*\.py|(?!unit/).*\[[^\]]*\bnomad\b)"),
}
"""Units of many modules, the longest first: tests in one cluster, and tests that share one Nomad client's memory or
start agents under fixed names."""
SPREAD = (
    "tests/unit/agent/test_agent.py",
    "tests/unit/client/test_client.py",
    "tests/unit/envs/",
    "tests/unit/net/test_relay.py",
    "tests/unit/pool/test_nomad_backend.py",
    "tests/unit/pool/test_pool.py",
    "tests/unit/sandbox/test_scenarios.py",
)
"""Beginnings of units that wait most of the time, which would leave the CPUs idle if they ran at the same time."""
SPREAD_FROM, SPREAD_EVERY = 30, 6
"""Where the first of them comes, and after how many other units the next."""


def unit_of(nodeid: str) -> str:
    """The unit in which xdist runs a test: its module, and in the conformance suite each backend of it."""
    if RUNS_ALONE.match(nodeid):
        return LAST
    for unit, tests in ONE_AT_A_TIME.items():
        if tests.match(nodeid):
            return unit
    backend = re.search(r"\[(local|docker)\b", nodeid)
    return nodeid.partition("::")[0] + (backend[0] if backend else "")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what is imported and made meanwhile is never garbage
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def refuse_stale_patterns(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test that was renamed would run beside others, which then fail at random."""
    if config.args != config.getini("testpaths"):
        return  # a part of the tests was asked for
    if stale := [pattern for pattern in ALONE if not any(re.match(pattern, item.nodeid) for item in items)]:
        raise pytest.UsageError(f"tests/conftest.py: no test has the node id of {', '.join(stale)} in ALONE")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    refuse_stale_patterns(config, items)
    long: list[str] = []
    """The unit of each test that is not fast."""
    fast: list[str] = []
    for item in items:
        if RUNS_ALONE.match(item.nodeid):
            item.add_marker("alone")
        elif item.nodeid.startswith("tests/unit/") and not any(
            item.get_closest_marker(name) for name in ("slow", "docker", "nomad")
        ):
            item.add_marker("fast")
            fast.append(unit_of(item.nodeid))
            continue
        long.append(unit_of(item.nodeid))
    # the longest come first; those of fast tests come last, for workers that wait for the others' ends
    units = dict.fromkeys((*ONE_AT_A_TIME, *long, *fast))
    order = [unit for unit in units if not unit.startswith(SPREAD)]
    for number, unit in enumerate(unit for unit in units if unit.startswith(SPREAD)):
        order.insert(SPREAD_FROM + SPREAD_EVERY * number, unit)
    place = {unit: number for number, unit in enumerate(order)}
    items.sort(key=lambda item: place[unit_of(item.nodeid)])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadscope":
        return None
    from tests.scheduling import AloneLast

    config.option.loadscopereorder = False  # the order is `turn`'s
    return AloneLast(config, log, unit_of, LAST)
