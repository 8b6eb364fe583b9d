"""Before Linux 6.6 a tmpfs has no user xattrs, which an overlay needs: start refuses, or volumes are on disk.

Run by `make test-cgroup2 PYTEST_ARGS="--kernel old"`, on Linux 6.1.
"""

from __future__ import annotations

import os
import re

import pytest

from atropos.errors import IsolationUnavailable
from atropos.slots import SlotPool
from tests.backends import Engine

RELEASE = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
pytestmark = pytest.mark.skipif(RELEASE >= (6, 6), reason=f"Linux {os.uname().release} has user xattrs in tmpfs")


async def test_memory_volumes_are_refused():
    engine = Engine("local")
    pool = SlotPool(engine.config(max_containers=1))
    with pytest.raises(IsolationUnavailable, match=r"overlay \(.*fix: Linux 6\.6 or later.*volume='disk'"):
        await pool.start()
    assert await engine.residue(pool.config) == []


async def test_volumes_on_disk_are_whole():
    engine = Engine("local")
    config = engine.config(max_containers=1, volume="disk", limits={"memory_mib": 192, "pids": 64})
    async with SlotPool(config) as pool:
        async with pool.lease("origin") as slot:
            found = await slot.exec(
                "rm -r /media /var/log /srv && mkdir /var/log /srv && touch /srv/new && mv /opt /moved"
            )
            assert found.exit_code == 0, found
            async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
                seen = await fork.exec(
                    "ls -A /srv /var/log; ls -d /media /opt /moved 2>/dev/null; rm -r /moved /srv; echo fine"
                )
                assert seen.output == "/srv:\nnew\n\n/var/log:\n/moved\nfine\n", seen
            assert (await slot.exec("exec python3 -c 'x = bytearray(500 << 20)'")).limit == "memory"
            assert (await slot.exec("echo usable")).output == "usable\n"
        async with pool.lease("next") as slot:
            assert (await slot.exec("ls -d /media /opt /srv/new 2>/dev/null")).output == "/media\n/opt\n"
    assert await engine.residue(config) == []
