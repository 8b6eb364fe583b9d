"""The memory of a container that is less than its slots may use together: what is killed for that is never a result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.limits import scenarios
from tests.limits.test_no_cgroup_is_left import Place
from tests.unit.sandbox.conftest import Driver, tiny_base

ROOM_MIB = 150
"""What all slots have together: two of `driver.LIMITS` have more."""


@pytest.fixture
def place():
    place = Place()
    if place.version != 1:
        place.end()
        pytest.skip("needs root's hierarchies of cgroup v1; test_cgroup_v2.py has the same for the other version")
    yield place
    place.end()


@pytest.mark.skipif(os.geteuid() != 0, reason="limits of memory need cgroups: root, or delegation")
def test_container_oom_is_no_result(place, tmp_path):
    driver = Driver(tiny_base(tmp_path, 0), as_user=False, before=place.enter_shell())
    try:
        limit_memory(place.folders)
        driver.run(scenarios.__name__, scenarios.a_kill_for_want_of_the_container_s_memory_is_no_result.__name__)
    finally:
        driver.close()


def limit_memory(folders: list[Path]) -> None:
    (folder,) = (each for each in folders if (each / "memory.limit_in_bytes").exists())
    used = int((folder / "memory.usage_in_bytes").read_text())
    (folder / "memory.limit_in_bytes").write_text(str(used + (ROOM_MIB << 20)))
