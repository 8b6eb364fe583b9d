"""The cases of docs/benchmarks.md: each measures one thing, and its peers beside it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from . import against, env_load, harbor, images, ours, peers, pull, swe_rex, transfers
from .backends import backends
from .context import Case, Context
from .stats import Row, row


async def sequential(ctx: Context) -> AsyncIterator[Row]:
    """One call after the other. Subjects take turns, so that a slow minute of the machine hits them all."""
    n, rounds = ctx.n(400), 3
    samples: dict[str, list[float]] = {}

    def add(subject: str, new: list[float]) -> None:
        samples.setdefault(subject, []).extend(new)

    async with ours.executor(1) as runner, swe_rex.running(ctx) as rex:
        slot = await runner.slot("bench")

        async def direct(_: int) -> None:
            result = await slot.exec(peers.COMMAND)
            if result.output != "hi\n":
                raise RuntimeError(f"slot.exec answered {result!r}")

        async def through_tools(_: int) -> None:
            await ours.execute(runner, "bench")

        await ours.closed_loop(through_tools, 1, 30)
        if rex is not None:
            await ours.closed_loop(rex.call, 1, 30)
            await rex.own_client(1, 30)
        for number in range(rounds):
            ctx.say(f"sequential calls, round {number + 1} of {rounds}")
            add("atropos executor", (await ours.closed_loop(through_tools, 1, n))[0])
            if rex is None:
                continue
            add("swe-rex, kept connection", (await ours.closed_loop(rex.call, 1, n))[0])
            add("swe-rex, its own client", (await rex.own_client(1, n))[0])
            add("swe-rex, its own client, bash", (await rex.own_client(1, n, bash=True))[0])
            add("atropos slot.exec", (await ours.closed_loop(direct, 1, n))[0])
            add("fork+exec bash", peers.timed(peers.fork_exec, n))
            add("fork+exec sh", peers.timed(peers.fork_exec_sh, n))
            if peers.bwrap_works():
                add("a fresh bwrap a call", peers.timed(peers.fresh_bwrap, n // 2))
        await runner.release_trajectory("bench", reset_workspace=True)
    made = {subject: row("sequential call", subject, values) for subject, values in samples.items()}
    mine, *others = made
    yield dataclasses.replace(made[mine], base=True, note=_share_that_is_ours(made) if others else "")
    for subject in others:
        yield made[subject]


def _share_that_is_ours(made: dict[str, Row]) -> str:
    """What a call takes beyond the start of its shell, beside SWE-ReX's call beyond the start of its own."""
    ours_ms = made["atropos executor"].p50 - made["fork+exec bash"].p50
    theirs_ms = made["swe-rex, kept connection"].p50 - made["fork+exec sh"].p50
    return f"{ours_ms:.2f} ms above bash, swe-rex {theirs_ms:.2f} above sh: {ours_ms / theirs_ms:.2f}"


async def throughput(ctx: Context) -> AsyncIterator[Row]:
    """Closed loops of 1, 8 and 32 trajectories, a call in flight each."""
    rounds = 3
    async with ours.executor(32) as runner, swe_rex.running(ctx) as rex:
        mine = functools.partial(ours.execute_at, runner)
        await ours.closed_loop(mine, 32, 320)
        if rex is not None:
            await ours.closed_loop(rex.call, 32, 64)
        for parallel in (1, 8, 32):
            n = ctx.n(1600 if parallel > 1 else 800, least=parallel * 4)
            subjects: dict[str, Callable[[], Awaitable[tuple[list[float], float]]]] = {
                "atropos executor": lambda n=n, p=parallel: ours.closed_loop(mine, p, n),
            }
            if rex is not None:
                subjects |= {
                    "swe-rex, kept connection": lambda n=n, p=parallel: ours.closed_loop(rex.call, p, n // 2),
                    "swe-rex, its own client": lambda n=n, p=parallel: rex.own_client(p, n // 2),
                    "swe-rex, its own client, bash": lambda n=n, p=parallel: rex.own_client(p, n // 2, bash=True),
                }
            taken: dict[str, tuple[list[float], float]] = {}
            for number in range(rounds):
                for subject, measure in subjects.items():
                    ctx.say(f"throughput of {parallel}: {subject}, round {number + 1} of {rounds}")
                    new, seconds = await measure()
                    old, before = taken.get(subject, ([], 0.0))
                    taken[subject] = (old + new, before + seconds)
            for subject, (values, seconds) in taken.items():
                yield row(
                    f"throughput, {parallel} trajector{'y' if parallel == 1 else 'ies'}",
                    subject,
                    values,
                    throughput=len(values) / seconds,
                    base=subject == "atropos executor",
                )


async def tails(ctx: Context) -> AsyncIterator[Row]:
    """The same 32 over one, two and four containers, by turns: how long the slowest calls take."""
    taken: dict[int, list[float]] = {1: [], 2: [], 4: []}
    spent_s = dict.fromkeys(taken, 0.0)
    async with contextlib.AsyncExitStack() as stack:
        runners = {n: await stack.enter_async_context(ours.executor(32, n)) for n in taken}
        calls = {n: functools.partial(ours.execute_at, runner) for n, runner in runners.items()}
        for call in calls.values():
            await ours.closed_loop(call, 32, 320)
        for number in range(rounds := 3):
            for containers, call in calls.items():
                ctx.say(f"32 trajectories over {containers}, round {number + 1} of {rounds}")
                new, seconds = await ours.closed_loop(call, 32, ctx.n(1600, least=320))
                taken[containers] += new
                spent_s[containers] += seconds
    for containers, samples in taken.items():
        case = f"32 trajectories over {containers} container{'s' if containers > 1 else ''}"
        made = row(case, "atropos executor", samples, throughput=len(samples) / spent_s[containers], base=True)
        yield dataclasses.replace(made, note=f"p99 {made.p99 / made.p50:.2f}x p50")


async def cpu(ctx: Context) -> AsyncIterator[Row]:
    """CPU of a call by kind of process, which a busy machine changes less than it changes times."""
    for made in await against.measure(
        {"atropos executor": against.HERE}, parallel=8, n=ctx.n(1600), rounds=ctx.n(5, least=2), say=ctx.say
    ):
        if made.throughput is None:  # its times are the case `throughput`'s, beside peers
            yield made


async def acquire(ctx: Context) -> AsyncIterator[Row]:
    """Leases on a warm pool, given back in between; and forks of a prepared workspace, likewise and without a pause."""
    samples: list[float] = []
    forks: dict[str, list[float]] = {"fork of a prepared workspace": [], "forks without a pause": []}
    async with ours.pool(8) as pool:
        for index in range(ctx.n(200)):
            start = time.perf_counter()
            slot = await pool.acquire(f"acquire-{index}")
            samples.append(time.perf_counter() - start)
            await slot.release()
            await asyncio.sleep(0.05)  # an acquire on a *warm* pool: let it start the next sandbox ahead
        yield row("acquire, warm pool", "atropos", samples, base=True)
        try:
            async with pool.lease("fork-origin") as slot:
                await slot.exec("seq 1000 | xargs touch")
                snapshot = await slot.snapshot()
            for (name, taken), pause_s in zip(forks.items(), (0.05, 0.0), strict=True):
                for index in range(ctx.n(60)):
                    await asyncio.sleep(pause_s)
                    start = time.perf_counter()
                    slot = await pool.acquire(f"{name}-{index}", snapshot=snapshot)
                    taken.append(time.perf_counter() - start)
                    seen = await slot.exec("ls | wc -l")
                    await slot.release()
                    if seen.output.strip() != "1000":
                        raise RuntimeError(f"a fork saw {seen.output!r} files instead of 1000")
        except Exception as error:
            ctx.problems.append(f"fork: {type(error).__name__}: {error}")
    for name, taken in forks.items():
        if taken:
            yield row(name, "atropos", taken, base=True)


async def forks(ctx: Context) -> AsyncIterator[Row]:
    """First answers of forks that are leased at once, of a workspace with 20,000 files; and of as many plain shells."""
    made = "mkdir files && cd files && seq 20000 | split -l 1 -a 5 -d - file_"
    async with ours.pool(34) as pool, pool.lease("origin") as origin:
        await origin.exec(made)
        snapshot = await origin.snapshot()

        async def first_answer(name: str, start: float, finished: asyncio.Barrier) -> float:
            async with pool.lease(name, snapshot=snapshot) as slot:
                seen = await slot.exec("cat files/file_19999")
                took = time.perf_counter() - start
                await finished.wait()  # what a release sets off is measured by other cases
            if seen.output != "20000\n":
                raise RuntimeError(f"a fork answered {seen!r}")
            return took

        for count in (8, 32):
            samples: dict[str, list[float]] = {"atropos": [], "bash alone": []}
            for index in range(ctx.n(10, least=3)):
                ctx.say(f"{count} forks together, {index + 1}")
                await asyncio.sleep(3)  # until sandboxes are ready again
                start, finished = time.perf_counter(), asyncio.Barrier(count)
                samples["atropos"] += await asyncio.gather(
                    *(first_answer(f"fork-{index}-{number}", start, finished) for number in range(count))
                )
                await asyncio.sleep(3)
                samples["bash alone"] += await peers.shells_together(count)
            for subject, taken in samples.items():
                yield row(f"{count} forks together", subject, taken, base=subject == "atropos")


async def reset(ctx: Context) -> AsyncIterator[Row]:
    """From release to the next lease of the *only* slot, whatever the last trajectory left behind."""
    for files in (1, 10_000, 100_000):
        times = ctx.n({1: 60, 10_000: 20, 100_000: 6}[files], least=3)
        samples: list[float] = []
        async with ours.pool(1) as pool:
            slot = await pool.acquire("reset-first")
            for index in range(times):
                ctx.say(f"release with {files:,} files, {index + 1} of {times}")
                made = await slot.exec(
                    f"mkdir -p d && cd d && seq {files} | xargs -n 5000 touch && ls -U | wc -l", timeout_s=120
                )
                if made.output.strip() != str(files):
                    raise RuntimeError(f"could not make {files} files: {made.output!r}")
                start = time.perf_counter()
                await slot.release()
                slot = await pool.acquire(f"reset-{index}")
                samples.append(time.perf_counter() - start)
                left = await slot.exec("ls -A | wc -l")
                if left.output.strip() != "0":
                    raise RuntimeError(f"a released slot still had {left.output!r} files")
            await slot.release()
        yield row(f"release to lease, {files:,} files", "atropos", samples, base=True)


NOISE = {
    "sleep": "sleep 5",
    "output flood": "timeout 5 cat /dev/zero",
    "fork storm": "for i in $(seq 20); do (timeout 5 bash -c 'while :; do /bin/true; done') & done; wait",
    "busy loop": "timeout 5 bash -c 'while :; do :; done'",
}


async def neighbour(ctx: Context) -> AsyncIterator[Row]:
    """Four trajectories with a call every 10 ms: alone, and beside one that misbehaves in the same container."""
    n = ctx.n(400)
    async with ours.executor(8) as runner:

        async def paced(index: int) -> list[float]:
            samples: list[float] = []
            for _ in range(n // 4):
                start = time.perf_counter()
                await ours.execute(runner, f"quiet-{index}")
                samples.append(time.perf_counter() - start)
                await asyncio.sleep(0.01)
            return samples

        async def victims() -> list[float]:
            return [s for taken in await asyncio.gather(*(paced(i) for i in range(4))) for s in taken]

        await victims()
        quiet = row("neighbour: quiet", "atropos", await victims(), base=True)
        yield quiet
        for name, command in NOISE.items():
            ctx.say(f"neighbour: {name}")
            slot = await runner.slot(f"noisy-{name}")
            task = asyncio.create_task(slot.exec(command, timeout_s=10))
            await asyncio.sleep(0.1)
            samples = await victims()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await runner.release_trajectory(f"noisy-{name}", reset_workspace=True)
            loud = row(f"neighbour: {name}", "atropos", samples, base=True)
            yield dataclasses.replace(loud, note=f"p99 {loud.p99 / quiet.p99:.2f}x of quiet")


async def memory(ctx: Context) -> AsyncIterator[Row]:
    """PSS of everything the pool started: the difference between many slots and few, a slot."""
    few, many = 2, 34
    totals: dict[int, int] = {}
    details: dict[str, int] = {}
    for slots in (few, many):
        ctx.say(f"memory of {slots} idle slots")
        async with ours.pool(slots) as pool:
            leases = [await pool.acquire(f"memory-{i}") for i in range(slots)]
            for slot in leases:
                await slot.exec("true")
            await asyncio.sleep(0.5)
            found = {pid: ours.pss_bytes(pid) for pid in ours.our_processes()}
            totals[slots] = sum(found.values())
            details[f"processes_{slots}"] = len(found)
            for slot in leases:
                await slot.release()
    slot_mb = (totals[many] - totals[few]) / (many - few) / 1e6
    server_mb = totals[few] / 1e6 - few * slot_mb
    extra = {"server_mb": server_mb, "total_bytes": totals, **details}
    note = f"the server besides: {server_mb:.1f} MB"
    made = row("memory of an idle slot (PSS)", "atropos", [slot_mb], "MB", base=True)
    yield dataclasses.replace(made, note=note, extra=extra)


async def cold(ctx: Context) -> AsyncIterator[Row]:
    """From nothing to 32 leased slots, each having answered a call."""
    samples: list[float] = []
    for index in range(ctx.n(5, least=2)):
        ctx.say(f"32 slots from nothing, {index + 1}")
        start = time.perf_counter()
        async with ours.pool(32) as pool:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(pool.acquire(f"cold-{i}")) for i in range(32)]
            slots = [task.result() for task in tasks]
            await asyncio.gather(*(slot.exec("true") for slot in slots))
            samples.append(time.perf_counter() - start)
            await asyncio.gather(*(slot.release() for slot in slots))
    yield row("32 slots ready from nothing", "atropos", samples, unit="s", base=True)


async def env(ctx: Context) -> AsyncIterator[Row]:
    """Many trajectories in one env process."""
    count = 256 if ctx.scale >= 1 else 32
    ctx.say(f"an env with {count} trajectories at once")
    async for made in env_load.rows(count):
        yield made


async def dashboard(ctx: Context) -> AsyncIterator[Row]:
    """What the live page costs the env's loop."""
    async for made in env_load.dashboard_rows(ctx.n(env_load.TRAJECTORIES, 16) // 4 * 4, 3):
        yield made


CASES: dict[str, Case] = {
    "sequential": sequential,
    "throughput": throughput,
    "tails": tails,
    "cpu": cpu,
    "acquire": acquire,
    "forks": forks,
    "reset": reset,
    "neighbour": neighbour,
    "memory": memory,
    "cold": cold,
    "backends": backends,
    "env": env,
    "dashboard": dashboard,
    "files": transfers.files,
    "harbor": harbor.harbor,
    "images": images.images,
    "pull": pull.pull,
}
NEEDS_ENGINES = frozenset({"backends", "harbor"})
"""Left out of a whole run that has no engine but local."""
