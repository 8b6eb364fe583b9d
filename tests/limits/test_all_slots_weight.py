"""The weight of all slots together, beside the server and others of its machine or container."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.limits.test_no_cgroup_is_left import ROOT, Place

CLAIM = """
import os
from atropos.sandbox.linux import cgroups
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # as in a container with a set of CPUs of its own
found = cgroups.claim("/proc/no-folder", 0)
(path,) = (tree.path for tree in found.trees if "cpu" in tree.controllers)
print(open(f"{os.path.dirname(path)}/cpu.shares").read(), end="")
cgroups.release(found)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who has a cgroup wherever there are any")
def test_it_is_a_quarter_of_a_program_on_each_cpu_that_the_server_may_use():
    place = Place()
    try:
        if place.version != 1:
            pytest.skip("cgroup v2 weighs slots against the server, not against programs")
        done = subprocess.run(place.enter(CLAIM), cwd=ROOT, check=True, capture_output=True, text=True)
        assert done.stdout == "256\n"
    finally:
        place.end()
