"""What the limits of a slot do, each a function of a host; see `tests.unit.sandbox.scenarios`, whose helpers these use."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from atropos.errors import OutcomeUnknown, SlotLost
from atropos.wire import ProcKill, ProcList, ProcRead, ProcStart, Quiesce, SlotLimits, WriteFile
from tests.unit.sandbox.driver import LIMITS
from tests.unit.sandbox.scenarios import do, freed, memory_limit_is_named_and_the_slot_goes_on, out, sh, slot
from tests.waiting import SLOWNESS, until

__all__ = ["memory_limit_is_named_and_the_slot_goes_on"]


def tree(host, controller):
    """The hierarchy that limits with a controller."""
    return next(tree for tree in host.state.entered.cgroups.trees if controller in tree.controllers)


def groups(host):
    """Every directory of ours that a slot has, in any hierarchy."""
    trees = host.state.entered.cgroups.trees
    made = [f"{at.path}/{name}" for at in trees for name in os.listdir(at.path) if "slot" in name]
    taken = [path for at in trees for path in at.ready if path not in host.state.ready_cgroups]
    return made + taken


async def processes_are_counted_by_the_cgroup(host):
    """The kernel's own count names it, whatever a program's exit code is."""
    bomb = (
        "import os,time\nwhile True:\n  try:\n    if os.fork()==0: time.sleep(60); os._exit(0)\n  except OSError: break"
    )
    async with slot(host) as s, slot(host) as neighbour:
        result = await sh(s, f'python3 -c "{bomb}"; exit 0', timeout_s=30 * SLOWNESS)
        assert result.limit == "pids", result
        assert await out(neighbour, "for i in 1 2 3 4; do /bin/true & done; wait; echo untouched") == "untouched\n"
        await do(s, Quiesce())
        again = await sh(s, "echo usable")
        assert (again.output, again.limit) == (b"usable\n", None)


async def a_kill_for_want_of_the_container_s_memory_is_no_result(host):
    """Run where all slots together have less memory than each may use alone times their number."""
    held = f"x = b'x' * ({LIMITS.memory_mib * 3 // 4} << 20)"
    within = f"exec python3 -c \"{held}; import os, time\nwhile not os.path.exists('over'): time.sleep(0.02)\""
    beyond = f"exec python3 -c \"x = b'x' * ({LIMITS.memory_mib * 2} << 20)\""
    async with slot(host) as a:
        assert (await sh(a, beyond)).limit == "memory", "its own limit is still blamed for what it did"
    async with slot(host) as a, slot(host) as b, slot(host) as c, slot(host) as d:
        found = await until_one_is_lost((a, b, c, d), lambda s: sh(s, within))
        lost = [one for one in found if isinstance(one, SlotLost)]
        assert lost and all("out of memory" in str(one) for one in lost), found
        assert all(one.limit is None and one.exit_code == 0 for one in found if one not in lost), found
    async with slot(host) as a:
        assert await out(a, "echo usable") == "usable\n"
        beside = [await host.start(f"beside-{number}") for number in range(3)]

        async def in_the_background(s):
            return await do(s, ProcRead(id=(await do(s, ProcStart(command=within))).id, wait_s=20 * SLOWNESS))

        states = await until_one_is_lost((a, *beside), in_the_background)
        lost = [one for one in states if isinstance(one, SlotLost)]
        assert lost, states
        assert all((one.limit, one.exit_code) == (None, 0) for one in states if one not in lost), states
        for s in beside:
            assert (await s.stop()).clean


async def until_one_is_lost(slots, fill):
    """Fill these slots until one of them is lost, and then end what the others hold; what became of each."""
    tasks = [asyncio.create_task(fill(s)) for s in slots]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for s in slots:
        with contextlib.suppress(SlotLost, OutcomeUnknown):
            await do(s, WriteFile(path="over", data=b""))
    return await asyncio.gather(*tasks, return_exceptions=True)


async def a_volume_leaves_room_in_memory_for_the_command_that_clears_it(host):
    """The volume's pages are the slot's memory, and nothing but a command frees them: they never take all of it."""
    limits = SlotLimits(memory_mib=64, pids=48)  # and by default a volume of many times that
    async with slot(host, limits=limits) as s, slot(host, limits=limits) as neighbour:
        await out(neighbour, "head -c 20000000 /dev/zero > kept")
        for place in ("/workspace", "/dev/shm", "/tmp"):
            result = await sh(s, f"exec head -c 300000000 /dev/zero > {place}/f", timeout_s=30 * SLOWNESS)
            assert result.exit_code == 1 and result.limit == "disk", (place, result)
            assert await out(s, f"rm {place}/f; echo usable") == "usable\n"
        many = "import os\nfor n in range(10**6): os.close(os.open(f'{n}', os.O_CREAT))"
        result = await sh(s, f'mkdir many; cd many; python3 -c "{many}"', timeout_s=30 * SLOWNESS)
        assert result.exit_code == 1 and result.limit == "inodes", result
        assert await out(s, "rm -r many; echo usable", timeout_s=30 * SLOWNESS) == "usable\n"
        assert await out(neighbour, "stat -c %s kept") == "20000000\n"


async def a_background_process_that_is_killed_does_not_end_the_slot(host):
    async with slot(host) as s:
        path = next(
            p
            for t, p in zip(host.state.entered.cgroups.trees, s.cgroup.paths, strict=True)
            if "memory" in t.controllers
        )
        file = Path(path, "memory.events" if tree(host, "memory").version == 2 else "memory.oom_control")
        await sh(s, "setsid python3 -c 'x = bytearray(300 << 20)' >/dev/null 2>&1 & echo")
        # until the bomb has gone off
        await until(lambda: "oom_kill 0" not in file.read_text(), "the kill", 30)
        assert await out(s, "echo usable") == "usable\n"


async def a_background_process_tells_of_the_memory_that_ended_it(host):
    async with slot(host) as s:
        for command, code in (("exec {}", -9), ("{}; exit $?", 137)):
            started = await do(s, ProcStart(command=command.format("python3 -c 'x = bytearray(300 << 20)'")))
            ended = await do(s, ProcRead(id=started.id, wait_s=20 * SLOWNESS))
            assert (ended.running, ended.exit_code, ended.limit) == (False, code, "memory"), ended
        killed = await do(s, ProcStart(command="sleep 1000"))
        await do(s, ProcKill(id=killed.id, signal="KILL"))
        await sh(s, "python3 -c 'x = bytearray(300 << 20)'")  # another's end is not its own
        listed = {each.id: each.limit for each in (await do(s, ProcList())).processes}
        assert listed[killed.id] is None
        assert [limit for key, limit in listed.items() if key != killed.id] == ["memory", "memory"], listed


async def what_outlives_its_program_leaves_memory_to_others(host):
    """System V memory, queues and semaphores stay until the end of the slot, and nothing but their owner removes them."""
    async with slot(host, limits=LIMITS.model_copy(update={"memory_mib": 128})) as s:
        for kind in ("shm", "msg", "sem"):
            had = (await out(s, f"python3 -c '{SYSTEM_V}' {kind}", timeout_s=30 * SLOWNESS)).split()
            assert int(had[0]) > 1, (kind, had)
            assert len((await out(s, f"cat /proc/sysvipc/{kind}")).splitlines()) > 2, "they are there still"
        assert await out(s, "python3 -c 'print(len(bytearray(64 << 20)))'") == f"{64 << 20}\n"


SYSTEM_V = """
import ctypes, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
libc.shmat.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int]
text = ctypes.create_string_buffer(8192)
text[0] = 1
def one():
    if sys.argv[1] == "shm":
        found = libc.shmget(0, 8 << 20, 0o1600)
        if found >= 0:
            ctypes.memset(libc.shmat(found, None, 0), 1, 8 << 20)
    elif sys.argv[1] == "msg":
        found = libc.msgget(0, 0o1600)
        while found >= 0 and libc.msgsnd(found, text, 8000, 0o4000) == 0:
            pass
    else:
        found = libc.semget(0, 1000, 0o1600)
    return found >= 0
print(next(made for made in range(40_000) if not one()))
"""


async def spinning(s, loops=1):
    """Start loops without end in a slot; their pids as seen from here. They have used some time already."""
    await out(s, f"for i in $(seq {loops}); do setsid sh -c 'while :; do :; done' >/dev/null 2>&1 & done")
    found = []

    def begun():
        pids = Path(s.cgroup.paths[0], "cgroup.procs").read_text().split()
        found[:] = [pid for pid in pids if comm(pid) == "sh"]
        return len(found) == loops and cpu_s(found) > 0.05

    await until(begun, "a loop in the slot", 30)
    return found


def comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def cpu_s(pids):
    """CPU seconds that processes have used together."""
    used = 0.0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        used += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return used


async def spent(pids):
    """CPU seconds that processes use in about two, and how many those are at most."""
    began = time.monotonic()
    used = cpu_s(pids)
    await asyncio.sleep(2)
    return cpu_s(pids) - used, time.monotonic() - began


async def the_share_of_the_cpu_follows_the_weight(host):
    # a ceiling that is higher than the machine: the slots are held by nothing but their weight
    light, heavy = (LIMITS.model_copy(update={"cpu_weight": weight, "cpu_quota": 1000}) for weight in (20, 500))
    async with slot(host, limits=light) as a, slot(host, limits=heavy) as b:
        # counted from when both run: the light one's start takes as long as its weight says
        cores = len(os.sched_getaffinity(0))  # no program of a slot can choose its core: each slot fills all of them
        pids = [await spinning(a, cores), await spinning(b, cores)]
        before = [cpu_s(each) for each in pids]
        await until(lambda: sum(map(cpu_s, pids)) > sum(before) + cores, "a second of CPU time", 60)
        used = [cpu_s(each) - start for each, start in zip(pids, before, strict=True)]
        assert used[1] > 4 * used[0], f"25 times the weight gave {used}"


async def a_quota_is_a_ceiling(host):
    quota = 0.05 if SLOWNESS < 2 else 0.3  # emulated, a twentieth is too little to start a slot in time
    limits = LIMITS.model_copy(update={"cpu_quota": quota})
    async with slot(host, limits=limits) as s:
        used, wall = await spent(await spinning(s))
        assert used < quota * wall + 0.05, f"{used} s of {wall} s under a quota of {quota}"
        path = next(
            p for t, p in zip(host.state.entered.cgroups.trees, s.cgroup.paths, strict=True) if "cpu" in t.controllers
        )
        stat = Path(path, "cpu.stat").read_text()
        assert int(stat.partition("nr_throttled")[2].split()[0]) > 0, stat


async def half_of_the_cores_are_a_slots_ceiling_unless_asked(host):
    cores = len(os.sched_getaffinity(0))
    async with slot(host) as s:
        used, wall = await spent(await spinning(s, cores))
        assert used < max(1, cores / 2) * wall + 0.1, f"{used} s of {wall} s on {cores} cores"


async def memory_returns_and_the_directories_go(host):
    def used():
        file = "memory.current" if tree(host, "memory").version == 2 else "memory.usage_in_bytes"
        return int(Path(tree(host, "memory").path, file).read_text())

    await freed(host)
    assert groups(host) == []
    async with slot(host) as s:
        await out(s, "true")
    await freed(host)
    before = used()
    for _ in range(4):
        async with slot(host) as s:
            await out(s, "head -c 20000000 /dev/zero > /workspace/f; setsid python3 -c 'x=bytearray(30<<20); import time; time.sleep(99)' >/dev/null 2>&1 & sleep 0.3")  # fmt: skip
            await until(lambda: used() > before + (30 << 20), "the memory in use", 20)
            assert len(groups(host)) == len(host.state.entered.cgroups.trees)
        await freed(host)
        assert groups(host) == []
    await until(lambda: used() < before + (20 << 20), "the memory back", 20)


async def everything_in_the_cgroup_is_killed_at_once(host):
    """What the server falls back on when a slot's PID 1 does not end."""
    sandbox = await host.start("killed")
    await sh(sandbox, "for i in 1 2 3 4 5 6 7 8; do setsid sleep 1000 & done; disown -a")
    files = [f"{path}/cgroup.procs" for path in sandbox.cgroup.paths]
    assert all(len(Path(file).read_text().split()) >= 9 for file in files)
    sandbox.cgroup.kill()
    await until(lambda: not any(Path(file).read_text().split() for file in files), "the end of all", 10)
    assert (await sandbox.stop()).clean
    assert groups(host) == []


async def settings_are_the_kernel_s(host):
    """What was asked for is what the kernel says it enforces."""
    limits = SlotLimits(memory_mib=100, pids=50, cpu_weight=300, cpu_quota=0.75)
    async with slot(host, limits=limits) as s:
        found = {}
        for one, path in zip(host.state.entered.cgroups.trees, s.cgroup.paths, strict=True):
            for name in os.listdir(path):
                if name.startswith(("memory.", "pids.", "cpu.")):
                    try:
                        found[name] = Path(path, name).read_text().strip()
                    except OSError:  # some can't be read
                        continue
            version = one.version
        wanted = (
            {"memory.max": str(100 << 20), "memory.oom.group": "0", "pids.max": "51", "cpu.weight": "300",
             "cpu.max": "7500 10000"}
            if version == 2
            else {"memory.limit_in_bytes": str(100 << 20), "pids.max": "51", "cpu.shares": "3072",
                  "cpu.cfs_quota_us": "7500", "cpu.cfs_period_us": "10000"}
        )  # fmt: skip
        if "memory.swap.max" in found:
            wanted["memory.swap.max"] = "0"
        assert {name: found.get(name) for name in wanted} == wanted


async def programs_are_told_how_many_threads_to_use(host):
    """The limits of one slot of eight: no program starts a thread for each core that it sees."""
    async with slot(host) as s:
        named = await out(s, "env | grep -c _NUM_THREADS=; echo $OMP_NUM_THREADS $GOMAXPROCS; nproc")
        many, omp, gomaxprocs, nproc = named.split()
        assert int(many) >= 6 and omp == gomaxprocs and int(nproc) == int(omp), named
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # as in a container with a set of CPUs of its own
    try:
        assert set(host.state.threads(LIMITS.model_copy(update={"cpu_quota": 1000.0})).values()) == {"1"}
    finally:
        os.sched_setaffinity(0, cores)


ALL = [
    processes_are_counted_by_the_cgroup,
    memory_limit_is_named_and_the_slot_goes_on,
    a_volume_leaves_room_in_memory_for_the_command_that_clears_it,
    a_background_process_that_is_killed_does_not_end_the_slot,
    a_background_process_tells_of_the_memory_that_ended_it,
    what_outlives_its_program_leaves_memory_to_others,
    the_share_of_the_cpu_follows_the_weight,
    a_quota_is_a_ceiling,
    half_of_the_cores_are_a_slots_ceiling_unless_asked,
    memory_returns_and_the_directories_go,
    everything_in_the_cgroup_is_killed_at_once,
    settings_are_the_kernel_s,
    programs_are_told_how_many_threads_to_use,
]
