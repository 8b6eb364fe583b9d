"""Runs calls of one checkout in a process of its own and says what they took. Started by `against.py` and `cases.cpu`.

Usage: PYTHONPATH=CHECKOUT python -P driver.py SLOTS CONTAINERS < one JSON order a line > one JSON answer a line

An order: {"parallel": N, "n": N}. The answer: the samples and seconds of all calls, and the CPU seconds that they took
in each kind of process, as the kernel counts them. Or {"leases": N}: a pool of SLOTS slots from nothing, then N leases
with a call each, one after the other; the answer has the seconds, and those of CPU, of the start and of each lease, and
the bytes that a slot takes. It uses nothing of the `benchmarks` package, since the checkout that it measures may have
another one, or none.
"""

import asyncio
import contextlib
import json
import os
import sys
import time
from pathlib import Path

COMMAND = "echo hi"


def children(pid):
    """All descendants of a process, as /proc tells."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, queue = [], [pid]
    while queue:
        new = parents.get(queue.pop(), [])
        found += new
        queue += new
    return found


def kind_of(pid):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # ended since it was listed
        return None
    name = os.path.basename(words[0])
    if name == b"bwrap":  # with the next line's second half: of revisions whose slots have a Python of their own
        return None
    return "runner" if name == b"atropos-runner" or words[-2:-1] == [b"/.atropos/runner.pyc"] else "server"


def own_s(pid):
    """Seconds of CPU that a process's threads have used, to the nanosecond (`/proc/PID/task/*/schedstat`)."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def reaped_s(pid):
    """Seconds of CPU of the children that a process has waited for, to 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")


def spent(processes):
    total = {"client": own_s(os.getpid()), "server": 0.0, "runner": 0.0, "command": 0.0}
    for pid, kind in processes.items():
        total[kind] += own_s(pid)
        if kind == "runner":
            total["command"] += reaped_s(pid)
    return total


def summed(amount_of, processes):
    """What `amount_of` finds of all these processes, less those that have ended meanwhile."""
    total = 0
    for pid in processes:
        with contextlib.suppress(OSError):
            total += amount_of(pid)
    return total


def all_s():
    """Seconds of CPU of this process and its descendants, those that have ended included."""
    return summed(lambda pid: own_s(pid) + reaped_s(pid), [os.getpid(), *children(os.getpid())])


def pss_bytes(pid):
    """Memory of a process: its pages, each divided by the number of those that have it."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


async def lives(slots, leases):
    from atropos.slots import SlotPool, SlotPoolConfig

    samples = []
    config = SlotPoolConfig(backend="local", slots_per_container=slots, min_containers=1, max_containers=1)
    before, others, cpu = time.perf_counter(), summed(pss_bytes, children(os.getpid())), all_s()
    async with SlotPool(config) as pool:
        held = [await pool.acquire(f"start-{index}") for index in range(slots)]
        for slot in held:
            await slot.exec(COMMAND)
        start, start_cpu = time.perf_counter() - before, all_s() - cpu
        memory = summed(pss_bytes, children(os.getpid())) - others
        for slot in held:
            await slot.release()
        await asyncio.sleep(1)
        cpu = all_s()
        for index in range(leases):
            begun = time.perf_counter()
            slot = await pool.acquire(f"lease-{index}")
            await slot.exec(COMMAND)
            await slot.release()
            samples.append(time.perf_counter() - begun)
            await asyncio.sleep(0.05)  # the next sandbox is started ahead
        lease_cpu = all_s() - cpu
    return {
        "start": start,
        "start_cpu": start_cpu,
        "memory": memory / slots,
        "leases": samples,
        "lease_cpu": lease_cpu / leases,
    }


async def main():
    from atropos.slots import SlotPool, SlotPoolConfig
    from atropos.tools import ToolCall, ToolExecutor, ToolExecutorConfig, build_tool_registry

    slots, containers = map(int, sys.argv[1:])
    config = SlotPoolConfig(
        backend="local",
        slots_per_container=slots // containers,
        min_containers=containers,
        max_containers=containers,
    )
    tools = build_tool_registry(["default"])
    async with SlotPool(config) as pool, ToolExecutor(pool=pool, tools=tools, config=ToolExecutorConfig()) as executor:

        async def worker(index, count, samples):
            for _ in range(count):
                start = time.perf_counter()
                result = await executor.execute(
                    f"bench-{index}", ToolCall(name="terminal", arguments={"command": COMMAND})
                )
                samples.append(time.perf_counter() - start)
                if not result.success or result.output != "hi\n":
                    raise RuntimeError(f"atropos answered {result!r}")

        async def closed_loop(parallel, n):
            samples = []
            began = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for index in range(parallel):
                    group.create_task(worker(index, n // parallel, samples))
            return samples, time.perf_counter() - began

        await closed_loop(slots, slots * 10)
        kinds = {pid: kind_of(pid) for pid in children(os.getpid())}
        processes = {pid: kind for pid, kind in kinds.items() if kind is not None}
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            order = json.loads(line)
            if "leases" in order:
                print(json.dumps(await lives(slots, order["leases"])), flush=True)
                continue
            before = spent(processes)
            samples, seconds = await closed_loop(order["parallel"], order["n"])
            after = spent(processes)
            cpu = {kind: after[kind] - before[kind] for kind in after}
            print(json.dumps({"samples": samples, "seconds": seconds, "cpu": cpu}), flush=True)


asyncio.run(main())
