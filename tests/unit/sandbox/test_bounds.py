"""How much a volume in memory may hold."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atropos.sandbox.host.files.volumes import bounds
from atropos.sandbox.linux.disks import OWN_INODES
from atropos.wire import SlotLimits

INODE_BYTES = 1880
"""As measured: see `atropos.sandbox.host.files.volumes`."""


@given(st.integers(32, 100_000), st.integers(8, 100_000), st.integers(1000, 10_000_000))
def test_full_volumes_leave_room(memory, disk, inodes):
    size, files = bounds(SlotLimits(memory_mib=memory, disk_mib=disk, inodes=inodes))
    mib, files = int(size.removesuffix("m")), files - OWN_INODES
    assert (mib << 20) + files * INODE_BYTES <= memory - 15 << 20
    assert mib <= disk
    assert files <= inodes
    assert mib >= min(disk, (memory - 16) * 3 // 4)
    assert files >= min(inodes, 1000)


def test_what_fits_is_given():
    for limits in (SlotLimits(), SlotLimits(memory_mib=192, disk_mib=64, inodes=20_000)):
        assert bounds(limits) == (f"{limits.disk_mib}m", limits.inodes + OWN_INODES)
