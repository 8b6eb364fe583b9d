"""Each limit of a slot: named in the result when it is hit, felt in that slot alone, and the slot is usable afterwards."""

from __future__ import annotations

import asyncio
import os

import pytest
import pytest_asyncio

from atropos import wire
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.wire import SlotLimits
from tests import privileges
from tests.backends import Engine
from tests.limits import scenarios
from tests.settings import shows
from tests.unit.sandbox.conftest import Driver, tiny_base
from tests.waiting import SLOWNESS

needs_cgroups = privileges.cgroups
in_one_loop = pytest.mark.asyncio(loop_scope="module")
MARKS = {scenarios.the_share_of_the_cpu_follows_the_weight: pytest.mark.alone("compares times")}
LIMITS = {
    "memory_mib": 128,
    "pids": 40,
    "disk_mib": 32,
    "inodes": 1500,
    "open_files": 128,
    "wall_s": 8 * SLOWNESS**0.5,
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
LEFT_RUNNING = {
    "a shell's": "bomb() { bomb | bomb & }; bomb",
    "in sessions of its own": "setsid bash -c 'bomb() { bomb | bomb & }; bomb'; sleep 0.3",
    "each in a session of its own": "for i in $(seq 60); do setsid sleep 1000 & done 2>/dev/null",
}
CLEAR = {"disk": "rm -f f", "inodes": "rm -f f*"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool():
    engine = Engine("local")
    # its leases outlive tests with an event loop of their own, while which this one stands still
    config = engine.config(slots_per_container=2, max_containers=1, limits=LIMITS, lease_ttl_s=3600)
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


@needs_cgroups
@pytest.mark.parametrize("name", HIT)
@in_one_loop
async def test_felt_in_its_slot_alone(slots, name):
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


@shows("slot_open_files")
@in_one_loop
async def test_open_files_are_bounded(slots):
    """No counter of the kernel's tells of this one: the call that is refused says so to the program."""
    slot, neighbour = slots
    result = await slot.exec(f'python3 -c "{MANY_FILES}"')
    assert result.exit_code == 1 and "Too many open files" in result.output, result
    assert (await slot.exec("ulimit -n; ulimit -Hn; ulimit -n 1000 || echo refused")).output.splitlines()[
        -1
    ] == "refused"
    assert (await neighbour.exec("python3 -c 'import os; [os.dup(0) for _ in range(100)]; print(1)'")).output == "1\n"


SOCKETS = """
import os, socket, struct, time
ask = struct.pack("IHHII", 32, 18, 1, 1, 0) + struct.pack("BxHiII", 0, 0, 1, 0, 0)  # for a network device
def fill():
    kept = []
    for _ in range(124):
        kept.append(socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0))
        kept[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
        for _ in range(150):
            kept[-1].send(ask)  # nobody reads the answer
    print(max(s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) for s in kept), flush=True)
    time.sleep(1000)
for _ in range(8):
    if os.fork() == 0:
        fill()
os.wait()
"""


@in_one_loop
async def test_sockets_bound_memory(slots):
    slot, neighbour = slots
    for left_running in (False, True, True):
        behind = '(setsid python3 -c "$CODE" &); until grep -qsx python3 /proc/[0-9]*/comm; do sleep 0.05; done'
        command = behind if left_running else 'exec python3 -c "$CODE"'
        result = await slot.exec(command, env={"CODE": SOCKETS}, timeout_s=60 * SLOWNESS)
        if left_running:
            await until_over(slot)
        else:
            assert (result.limit, result.exit_code) == ("files", -9), result
            assert all(int(line) <= 425_984 for line in result.output.split()), result
        again = await slot.exec("echo usable")
        assert (again.exit_code, again.output, again.limit) == (0, "usable\n", None), again
    assert (await neighbour.exec("kill -0 $(cat pid) && echo lives")).output == "lives\n"


async def until_over(slot) -> None:
    """Until what was left running has been ended, with no call open most of the time."""
    async with asyncio.timeout(60 * SLOWNESS):
        while "python3" in (await slot.exec("cat /proc/[0-9]*/comm")).output:  # noqa: ASYNC110
            await asyncio.sleep(1)


async def test_most_output_arrives_split():
    most = 16_000_000
    limits = SlotLimits(output_bytes=most, memory_mib=256)
    config = SlotPoolConfig(
        backend="local", slots_per_container=1, max_containers=1, limits=limits, start_timeout_s=60 * SLOWNESS
    )
    async with SlotPool(config) as pool, pool.lease("t") as slot:
        result = await slot.exec("head -c 40m /dev/zero; head -c 40m /dev/zero >&2", split=True)
    assert result.limit == "output"
    assert result.stdout is not None
    assert result.stderr is not None
    assert min(len(result.stdout), len(result.stderr), len(result.output)) >= most


@in_one_loop
async def test_calls_may_lower_limits(slots):
    slot, _ = slots
    assert (await slot.exec("sleep 1000", timeout_s=0.2)).limit == "time"
    assert (await slot.exec("sleep 1000", timeout_s=100_000)).limit == "time"
    result = await slot.exec("seq 100000", max_output_bytes=1000)
    assert result.limit == "output" and len(result.output_bytes) < 2000


@needs_cgroups
@pytest.mark.parametrize("bomb", LEFT_RUNNING.values(), ids=LEFT_RUNNING)
@in_one_loop
async def test_a_fork_bomb_is_ended(slots, bomb):
    """A bomb outlives the command that set it off. What was started as a background process is nobody's leftover."""
    slot, neighbour = slots
    server = await slot.run(wire.ProcStart(command="sleep 1000"))
    first = await slot.exec(bomb)
    # a bomb may go off only after its command has ended: then the next one makes room for itself
    second = await slot.exec("echo usable")
    third = await slot.exec("for i in 1 2 3 4 5 6 7 8; do cat < /dev/null & done; wait; echo usable | cat")
    seen = {first.limit, second.limit, third.limit}
    async with asyncio.timeout(60 * SLOWNESS):
        while not seen & {"pids", "time"}:  # on a busy machine it takes longer to go off; a shell that can't fork waits
            seen.add((await slot.exec("for i in 1 2 3 4 5 6 7 8; do cat < /dev/null & done; wait")).limit)
    assert (second.exit_code, second.output) == (0, "usable\n"), second
    fourth = await slot.exec("echo usable | cat")
    assert (fourth.exit_code, fourth.output, fourth.limit) == (0, "usable\n", None), (first, second, third, fourth)
    assert (await slot.run(wire.ProcRead(id=server.id))).running
    assert (await neighbour.exec("kill -0 $(cat pid) && echo lives")).output == "lives\n"
    await slot.quiesce()


@privileges.cgroups
@in_one_loop
async def test_old_limit_not_named_again(slots):
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


@pytest.mark.parametrize("name", [pytest.param(each.__name__, marks=MARKS.get(each, ())) for each in scenarios.ALL])
def test_the_kernel_s_side_of_limits(driver, name):
    driver.run(scenarios.__name__, name)
