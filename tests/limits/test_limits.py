"""Each limit of a slot: named in the result when it is hit, felt in that slot alone, and the slot is usable afterwards."""

from __future__ import annotations

import asyncio
import os

import pytest
import pytest_asyncio

from atropos.slots import SlotPool
from tests.backends import Engine
from tests.limits import scenarios
from tests.unit.sandbox.conftest import Driver, tiny_base
from tests.waiting import SLOWNESS

in_one_loop = pytest.mark.asyncio(loop_scope="module")
LIMITS = {
    "memory_mib": 128,
    "pids": 40,
    "disk_mib": 32,
    "inodes": 1500,
    "open_files": 128,
    "wall_s": 4.0 * SLOWNESS**0.5,
}

MANY_FILES = "import os\nkept = []\nwhile True: kept.append(os.open('/dev/null', os.O_RDONLY))"
BOMB = "import os,time\nwhile True:\n  if os.fork()==0: time.sleep(1000); os._exit(0)"
HIT = {
    "memory": "exec python3 -c 'x = bytearray(500 << 20)'",
    "pids": f'python3 -c "{BOMB}"',
    "disk": "head -c 100000000 /dev/zero > f",
    "inodes": "for i in $(seq 3000); do : > f$i || exit 1; done 2>/dev/null",
    "output": "head -c 20000000 /dev/zero | tr '\\0' x",
    "time": "sleep 1000",
}
CLEAR = {"disk": "rm -f f", "inodes": "rm -f f*"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    engine = Engine("local")
    config = engine.config(slots_per_container=2, max_containers=1, limits=LIMITS)
    async with SlotPool(config) as pool:
        yield pool
        assert pool.stats().retired == 0, repr(pool)
    assert await engine.residue(config) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slots(pool):
    """The same two slots for all tests: what one test leaves behind is a failure of the next."""
    async with pool.lease("limited") as slot, pool.lease("neighbour") as neighbour:
        await neighbour.exec("echo mine > f; sleep 100000 >/dev/null 2>&1 & echo $! > pid")
        yield slot, neighbour


@pytest.mark.skipif(os.geteuid() != 0, reason="limits of memory and processes need cgroups: root, or delegation")
@pytest.mark.parametrize("name", HIT)
@in_one_loop
async def test_a_limit_is_named_in_the_result_and_felt_in_that_slot_alone(slots, name):
    slot, neighbour = slots
    hit = asyncio.create_task(slot.exec(HIT[name]))
    # meanwhile, what the slot may not have is there for its neighbour
    beside = await neighbour.exec(
        "head -c 20000000 /dev/zero > g && rm g && for i in 1 2 3; do true & done; wait; cat f"
    )
    result = await hit
    assert result.limit == name, result
    assert (result.timed_out, result.truncated) == (name == "time", name == "output"), result
    assert (beside.exit_code, beside.output, beside.limit) == (0, "mine\n", None), beside
    assert (await neighbour.exec("kill -0 $(cat pid) && echo lives")).output == "lives\n"
    await slot.quiesce()
    assert (await slot.exec(CLEAR.get(name, "true"))).exit_code == 0
    again = await slot.exec("echo x > new && python3 -c 'bytearray(30 << 20)' && cat new")
    assert (again.exit_code, again.output, again.limit) == (0, "x\n", None), again


@in_one_loop
async def test_open_files_are_bounded_and_the_program_is_told(slots):
    """No counter of the kernel's tells of this one: the call that is refused says so to the program."""
    slot, neighbour = slots
    result = await slot.exec(f'python3 -c "{MANY_FILES}"')
    assert result.exit_code == 1 and "Too many open files" in result.output, result
    assert (await slot.exec("ulimit -n; ulimit -Hn; ulimit -n 1000 || echo refused")).output.splitlines()[
        -1
    ] == "refused"
    assert (await neighbour.exec("python3 -c 'import os; [os.dup(0) for _ in range(100)]; print(1)'")).output == "1\n"


@in_one_loop
async def test_a_shorter_deadline_and_a_smaller_output_can_be_asked_for_but_no_larger(slots):
    slot, _ = slots
    assert (await slot.exec("sleep 1000", timeout_s=0.2)).limit == "time"
    assert (await slot.exec("sleep 1000", timeout_s=100_000)).limit == "time"
    result = await slot.exec("seq 100000", max_output_bytes=1000)
    assert result.limit == "output" and len(result.output_bytes) < 2000


@in_one_loop
async def test_what_a_command_hit_before_is_not_said_of_the_next(slots):
    slot, _ = slots
    assert (await slot.exec("python3 -c 'x = bytearray(500 << 20)'; exit 0")).limit == "memory"
    for command in ("true", "exit 3", "kill -9 $$"):
        assert (await slot.exec(command)).limit is None, command


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("limits of memory, processes and CPU need cgroups: root, or delegation")
    driver = Driver(tiny_base(tmp_path_factory.mktemp("base"), 0), as_user=False)
    yield driver
    driver.close()


@pytest.mark.parametrize("name", [scenario.__name__ for scenario in scenarios.ALL])
def test_the_kernel_s_side_of_limits(driver, name):
    driver.run(scenarios.__name__, name)
