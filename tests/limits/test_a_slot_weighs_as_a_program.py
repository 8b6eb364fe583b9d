"""Where slots are in the tree of the CPU controller: beside the server and other programs, with the weight of one each."""

from __future__ import annotations

import os
import subprocess

import pytest

from tests.limits.test_no_cgroup_is_left import ROOT, Place

CORES = 64
CODE = f"""
import os, sys
from atropos.wire import SlotLimits
from atropos.sandbox.linux import cgroups, slot_cgroup

os.sched_getaffinity = lambda _pid: set(range({CORES}))
(own,) = (line.split(":", 2)[2].strip() for line in open("/proc/self/cgroup") if "cpu" in line.split(":")[1].split(","))
found = cgroups.claim("/proc/no-folder", 0, slots=1)
ready = [path for tree in found.trees for path in tree.ready]
first = slot_cgroup.SlotCgroup(found, "slot1", SlotLimits(cpu_quota=0.5), 0.5, ready, sys.argv[1] + "1")
(cpu,) = (path for path in first.paths if os.path.exists(path + "/cpu.shares"))
assert os.path.dirname(cpu).endswith(own), (cpu, own)
read = lambda name: open(cpu + "/" + name).read().strip()
print(read("cpu.shares"), read("cpu.cfs_quota_us"))
first.change(SlotLimits(cpu_weight=1, cpu_quota=0.25), 0.25)
first.remove()
again = slot_cgroup.SlotCgroup(found, "slot2", SlotLimits(), None, ready, sys.argv[1] + "2")
assert cpu in again.paths
print(read("cpu.shares"), read("cpu.cfs_quota_us"))
more = [slot_cgroup.SlotCgroup(found, f"slot{{n}}", SlotLimits(), None, ready, f"{{sys.argv[1]}}{{n}}") for n in range(3, 8)]
assert not ready and all(one.remove() for one in [again, *more])
cgroups.release(found)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who has a cgroup wherever there are any")
def test_on_any_number_of_cores(tmp_path):
    place = Place()
    try:
        if place.version != 1:
            pytest.skip("cgroup v2 weighs slots against their server")
        done = subprocess.run(
            [*place.enter(CODE), f"{tmp_path}/max"], cwd=ROOT, check=False, capture_output=True, text=True
        )
        assert done.stdout == "1024 5000\n1024 -1\n", done.stderr
        assert {path.name for path in place.below()} <= {"atropos"}
    finally:
        place.end()
