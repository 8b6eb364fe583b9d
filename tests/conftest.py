"""Which tests are fast, and which must run alone: the one place that says so, for every folder of tests.

`fast` is everything in tests/unit that neither needs an engine nor stands in `SLOW`; `make test-fast` runs it. `alone`
are the tests in `ALONE`: under `-n N --dist loadscope` they run when all others have ended.
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
BOMBS = "tests/security/test_attack_programs.py::test_no_bomb_harms_more_than_its_own_slot"
RELEASES = "tests/security/test_attack_programs.py::test_a_slot_released_in_the_middle_of_it_is_whole_for_the_next"
ALONE = {
    **{f"{test}[{name}]": USES_UP for test in (BOMBS, RELEASES) for name in COUNTED_TOGETHER},
    "tests/e2e/test_unauthenticated.py::test_half_open": MEASURES,
    "tests/limits/test_limits.py::test_the_kernel_s_side_of_limits[the_share": MEASURES,
    "tests/security/test_heaps.py::test_counters_that_no_namespace": USES_UP,
    "tests/security/test_neighbours_stay_quick.py": MEASURES,
    "tests/truths/test_truth_07_everything_acquired_is_given_back.py::test_a_trainer_that_is_ended": MEASURES,
    "tests/unit/server/test_unauthenticated.py::test_half_open": MEASURES,
}
"""Beginnings of node ids, each with why its tests can't share the machine."""

SERVERS = "starts sandbox servers, slots or other programs"
LARGE = "works through an input of many megabytes, or very many inputs"
ANEW = "starts Python anew, with the whole of atropos or of atroposlib"
SLOW = {
    "tests/unit/api/test_e2b_sandboxes.py::test_a_step": SERVERS,
    "tests/unit/api/test_mcp.py::test_a_check_that": SERVERS,
    "tests/unit/api/test_mcp.py::test_a_dead_mcp_server": SERVERS,
    "tests/unit/api/test_mcp.py::test_an_mcp_server_that": SERVERS,
    "tests/unit/api/test_mcp.py::test_calls_that_wait": SERVERS,
    "tests/unit/api/test_mcp.py::test_streamable_http": SERVERS,
    "tests/unit/api/test_tool_server.py::test_a_request_of_a_million_mistakes": LARGE,
    "tests/unit/api/test_tool_server.py::test_trajectories_and_journal_stay_bounded": LARGE,
    "tests/unit/api/test_web_tools.py::test_a_hanging_parser": SERVERS,
    "tests/unit/api/test_web_tools.py::test_a_killed_worker": SERVERS,
    "tests/unit/api/test_web_tools.py::test_junk": LARGE,
    "tests/unit/cli/test_cli.py::test_a_full_disk": SERVERS,
    "tests/unit/cli/test_cli.py::test_a_slot_for": SERVERS,
    "tests/unit/cli/test_cli.py::test_ctrl_c": ANEW,
    "tests/unit/cli/test_cli.py::test_images_are": SERVERS,
    "tests/unit/cli/test_cli.py::test_doctor": SERVERS,
    "tests/unit/cli/test_cli.py::test_exec": SERVERS,
    "tests/unit/cli/test_cli.py::test_help_and_version": ANEW,
    "tests/unit/cli/test_top.py": ANEW,
    "tests/unit/client/test_client.py::test_a_call_too_large": LARGE,
    "tests/unit/dashboard/test_server.py::test_a_name_of_any_length": SERVERS,
    "tests/unit/dashboard/test_server.py::test_a_replay_plays": SERVERS,
    "tests/unit/dashboard/test_server.py::test_an_answer_that_was_on_its_way": SERVERS,
    "tests/unit/dashboard/test_server.py::test_no_page_is_wider": SERVERS,
    "tests/unit/dashboard/test_server.py::test_nothing_hostile": SERVERS,
    "tests/unit/dashboard/test_server.py::test_the_live_page_follows": SERVERS,
    "tests/unit/envs/test_process.py::test_a_flaky_server": SERVERS,
    "tests/unit/pool/test_decisions.py::test_an_acquire_costs_the_same": LARGE,
    "tests/unit/pool/test_decisions.py::test_the_fleet_does_as_the_naive_model": LARGE,
    "tests/unit/project/test_benchmarks.py": ANEW,
    "tests/unit/project/test_dependencies.py::test_pool_tools": ANEW,
    "tests/unit/project/test_project.py::test_the_site_builds": ANEW,
    "tests/unit/project/test_scheduling.py": ANEW,
    "tests/unit/sandbox/test_scenarios.py": SERVERS,
    "tests/unit/server/test_machine.py::TestMachine": LARGE,
    "tests/unit/server/test_serve.py": SERVERS,
    "tests/unit/server/test_transport.py::test_an_archive_without_end": LARGE,
    "tests/unit/server/test_transport.py::test_folders_nested": LARGE,
    "tests/unit/tools/test_diffs.py::test_no_diff_takes_long": LARGE,
    "tests/unit/tools/test_screen.py::test_floods": LARGE,
}
"""Beginnings of node ids in tests/unit, each with what makes its tests slow."""

LAST = "alone"
ONE_AT_A_TIME = {
    "a cluster": re.compile(r"tests/e2e/cluster/"),
    "Nomad": re.compile(r"tests/(e2e/test_nomad\w*\.py|(?!unit/).*\[[^\]]*\bnomad\b)"),
}
"""Units of many modules, the longest first: tests in one cluster, and tests that share one Nomad client's memory or start
agents under fixed names."""
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
    if nodeid.startswith(tuple(ALONE)):
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    long: list[str] = []
    """The unit of each test that is not fast."""
    fast: list[str] = []
    for item in items:
        if item.nodeid.startswith(tuple(ALONE)):
            item.add_marker("alone")
        elif (
            item.nodeid.startswith("tests/unit/")
            and not item.nodeid.startswith(tuple(SLOW))
            and not any(item.get_closest_marker(name) for name in ("docker", "nomad"))
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
