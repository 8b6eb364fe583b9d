"""A pool that ends leaves no cgroup: not the servers' own, and not the folder that they share."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atropos import cgroup_paths
from tests import cgroups
from tests.waiting import SLOWNESS, until

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who has a cgroup wherever there are any")
ROOT = Path(__file__).parents[2]

DEADLINE_S = 60 * SLOWNESS
POOL = f"""
import asyncio, os, signal, sys
from atropos.slots import SlotPool, SlotPoolConfig

CONFIG = dict(start_timeout_s={DEADLINE_S}, acquire_timeout_s={DEADLINE_S})
async def main():
    async with SlotPool(SlotPoolConfig(slots_per_container=2, min_containers=1, max_containers=1, **CONFIG)) as pool:
        for ending in sys.stdin:
            async with pool.lease("t") as slot:
                assert (await slot.exec("echo here")).output == "here\\n"
                server = int(slot.container.partition("-")[0])
                await slot.exec("(setsid sleep 1000 >/dev/null 2>&1 &)")
                if ending == "killed\\n":
                    os.kill(server, signal.SIGKILL)
            print("ready", server, flush=True)

asyncio.run(main())
"""
CLAIMS = """
import os, signal
from atropos import cgroup_paths
from atropos.sandbox.linux import cgroups

places, pids, parent = cgroup_paths.own_places(), [], os.getpid()
for _ in range(2):
    pids.append(os.fork())
    if pids[-1] == 0:
        while os.getppid() == parent:
            cgroup_paths.remove_server(places, "0-0")
        os._exit(0)
wanted = cgroups.claim("/proc/no-folder", 4321)
cgroups.release(wanted)
for _ in range(150):
    found = cgroups.claim("/proc/no-folder", 4321)
    assert found == wanted, (found, wanted)
    for tree in found.trees:
        assert os.stat(os.path.dirname(tree.path)).st_uid == 4321, tree
    cgroups.release(found)
for pid in pids:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
print(len(wanted.trees))
"""


class Place:
    """A folder of a test's own in each hierarchy: who enters it is in one below, so that `atropos` may be beside it."""

    def __init__(self) -> None:
        found = [(one, cgroup_paths.mount_point(one)) for one in cgroup_paths.of_this_process()]
        self.version = min((one.version for one, mount in found if mount), default=0)
        self.folders = [
            Path(f"{mount}/{one.path}/place-{os.getpid()}")
            for one, mount in found
            if mount and one.version == self.version
        ]
        for folder in self.folders:
            cgroups.make(folder)
            cgroups.make(folder / "inner")

    def enter_shell(self) -> list[str]:
        """What a command is started with, to run in it."""
        moves = "".join(f"echo $$ > '{folder}/inner/cgroup.procs'; " for folder in self.folders)
        return ["sh", "-c", f'{moves}exec "$@"', "sh"]

    def enter(self, code: str) -> list[str]:
        """A command that runs Python code in it."""
        return [*self.enter_shell(), sys.executable, "-c", code]

    def below(self) -> list[Path]:
        # walked, not globbed: what ends meanwhile is no error
        found = (Path(at, name) for folder in self.folders for at, names, _ in os.walk(folder) for name in names)
        return [path for path in found if path.name != "inner"]

    def of(self, server: int) -> list[Path]:
        return [path for path in self.below() if path.name.startswith(f"{cgroup_paths.PREFIX}{server}-")]

    def end(self) -> None:
        deadline = time.monotonic() + 10 * SLOWNESS
        for folder in self.folders:
            while folder.exists():
                assert time.monotonic() < deadline, folder
                cgroup_paths.remove_tree(folder)
                time.sleep(0.01)


@pytest.fixture
def place():
    place = Place()
    if not place.folders:
        pytest.skip("no cgroup hierarchy is mounted here")
    yield place
    place.end()


async def pool_in(place: Place) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*place.enter(POOL), stdin=pipe, stdout=pipe, cwd=ROOT)


async def ask(pool: asyncio.subprocess.Process, ending: str) -> int:
    """Use the pool, and then let its server go on or be killed. Returns that server's pid."""
    assert pool.stdin is not None and pool.stdout is not None
    pool.stdin.write(f"{ending}\n".encode())
    said, server = (await asyncio.wait_for(pool.stdout.readline(), DEADLINE_S)).split()
    assert said == b"ready"
    return int(server)


async def end(pool: asyncio.subprocess.Process) -> None:
    assert pool.stdin is not None
    pool.stdin.close()
    assert await asyncio.wait_for(pool.wait(), DEADLINE_S) == 0


async def test_none_after_a_kill(place):
    pool = await pool_in(place)
    server = await ask(pool, "goes on")
    limited = place.of(server)
    assert limited or place.version == 2, "where root has a hierarchy of cgroup v1, slots are limited"
    await ask(pool, "killed")
    await until(lambda: not place.of(server), "the end of the killed server's")
    await ask(pool, "goes on")
    await end(pool)
    assert place.below() == []


async def test_the_shared_folder_stays(place):
    pools = await asyncio.gather(pool_in(place), pool_in(place))
    first, second = await asyncio.gather(*(ask(pool, "goes on") for pool in pools))
    groups = len(place.of(second))
    await end(pools[0])
    assert place.of(first) == [] and len(place.of(second)) == groups
    await ask(pools[1], "goes on")
    await end(pools[1])
    assert place.below() == []


def test_a_start_beside_removals_has_limits(place):
    done = subprocess.run(
        place.enter(CLAIMS), capture_output=True, text=True, check=False, cwd=ROOT, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(place.folders) or place.version == 2


def test_other_pid_namespaces_are_not_dead() -> None:
    here = cgroup_paths.server_name(os.getpid())
    assert cgroup_paths.may_live(here)
    process, started, namespace = here.split("-")
    assert not cgroup_paths.may_live(f"{process}-{int(started) + 1}-{namespace}")
    assert cgroup_paths.may_live(f"{process}-{int(started) + 1}-{int(namespace) + 1}")
    assert cgroup_paths.may_live("4194304-1-1")
