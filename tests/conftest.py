"""Which tests are fast, which run in one worker, and in which order the workers get them.

`fast` is everything in tests/unit that needs no engine and is neither `slow` nor `alone`; `make test-fast` runs it.
What is marked `alone` runs before all others, one by one (scripts/every_test.py).
"""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest

SPREAD_FROM, SPREAD_EVERY = 30, 6
"""Where the first group that `waits` comes, and after how many others the next: together they would leave CPUs idle."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()  # what is imported and made meanwhile is never garbage
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def group_of(item: pytest.Item) -> str:
    """The group of xdist's that a test is in: its module, of which a Docker engine's part is another.

    All tests on Nomad are in one: they share a client's memory, or start agents under fixed names.
    """
    if (group := item.get_closest_marker("xdist_group")) is not None:
        return group.args[0]
    if item.get_closest_marker("nomad") is not None:
        return "nomad"
    module = item.nodeid.partition("::")[0].removeprefix("tests/")
    return f"{module} on docker" if item.get_closest_marker("docker") is not None else module


def is_fast(item: pytest.Item) -> bool:
    marks = ("slow", "docker", "nomad", "alone")
    return item.nodeid.startswith("tests/unit/") and not any(item.get_closest_marker(name) for name in marks)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups then
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if is_fast(item):
            item.add_marker("fast")
        groups.setdefault(group_of(item), []).append(item)
    for name, members in groups.items():
        for item in members:
            if item.get_closest_marker("xdist_group") is None:
                item.add_marker(pytest.mark.xdist_group(name))
    items[:] = [item for name in in_order(groups) for item in groups[name]]


def in_order(groups: dict[str, list[pytest.Item]]) -> list[str]:
    """The longest come first; fast ones come last, for workers that wait for the others' ends."""
    fast = {name for name, members in groups.items() if all(item.get_closest_marker("fast") for item in members)}
    waiting = [name for name, members in groups.items() if members[0].get_closest_marker("waits") is not None]
    first = [name for name in ("cluster", "nomad") if name in groups]
    order = [*dict.fromkeys((*first, *(name for name in groups if name not in fast), *groups))]
    order = [name for name in order if name not in waiting]
    for number, name in enumerate(waiting):
        order.insert(SPREAD_FROM + SPREAD_EVERY * number, name)
    return order
