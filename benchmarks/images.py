"""Leases on images and built tasks beside plain ones, and builds beside `docker build`, taken in turn."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from atropos.config import ImageStoreSettings
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks.folder import load_task
from atropos.tasks.prepare import TaskImages

from .context import Context
from .stats import Row, row

MANY = 100
PAUSE_S = 0.05
"""Between leases: the server starts the next sandbox ahead meanwhile."""


async def images(ctx: Context) -> AsyncIterator[Row]:
    """Leases of each kind in turn; the second build of twelve steps, and the first."""
    with tempfile.TemporaryDirectory(prefix="atropos-bench-images-") as folder:
        work = Path(folder)
        store = ImageStoreSettings(folder=str(work / "store"))
        config = SlotPoolConfig(backend="local", slots_per_container=8, max_containers=1, image_store=store)
        async with SlotPool(config) as pool:
            async for made in _leases(ctx, pool, work):
                yield made
            async for made in _builds(ctx, pool, work):
                yield made


async def _leases(ctx: Context, pool: SlotPool, work: Path) -> AsyncIterator[Row]:
    names = [_root(work / f"image-{number}", number) for number in range(MANY)]
    for number, name in enumerate(names):
        ctx.say(f"preparing image {number + 1} of {MANY}")
        await pool.prepare(name)
    built = await pool.prepare(load_task(_dockerfile(work / "built", "debian")))
    assert built is not None
    kinds: dict[str, list[str | None]] = {
        "plain": [None],
        "an image": [names[0]],
        f"{MANY} images in turn": [*names],
        "a task of 12 steps": [built.source],
    }
    samples: dict[str, list[float]] = {kind: [] for kind in kinds}
    for index in range(ctx.n(200)):
        ctx.say(f"leases, round {index + 1}")
        for kind, sources in kinds.items():
            await asyncio.sleep(PAUSE_S)
            start = time.perf_counter()
            slot = await pool.acquire("bench", image=sources[index % len(sources)])
            samples[kind].append(time.perf_counter() - start)
            await slot.release()
    plain = statistics.median(samples["plain"])
    for kind, taken in samples.items():
        ratio = statistics.median(taken) / plain
        note = "" if kind == "plain" else f"p50 {ratio:.2f}x of plain"
        yield row(f"lease, {kind}", "atropos", taken, base=True, note=note)


async def _builds(ctx: Context, pool: SlotPool, work: Path) -> AsyncIterator[Row]:
    task = load_task(work / "built/Dockerfile")
    again: list[float] = []
    for _ in range(ctx.n(100)):
        start = time.perf_counter()
        await TaskImages(pool).prepare(task)
        again.append(time.perf_counter() - start)
    yield row("second build of 12 steps", "atropos", again, base=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        return
    root = work / "busybox"
    root.joinpath("bin").mkdir(parents=True)
    shutil.copy(busybox, root / "bin")
    for name in ("sh", "echo", "true"):
        root.joinpath("bin", name).symlink_to("busybox")
    await pool.prepare(f"dir:{root}")
    tag = None if ctx.skip_peers else _imported(root)
    ours: list[float] = []
    docker: list[float] = []
    try:
        for index in range(ctx.n(10, least=3)):
            ctx.say(f"first builds, round {index + 1}")
            task = load_task(_dockerfile(work / f"ours-{index}", f"dir:{root}"))
            start = time.perf_counter()
            await TaskImages(pool, ()).prepare(task)
            ours.append(time.perf_counter() - start)
            if tag is not None:
                context = _dockerfile(work / f"docker-{index}", tag).parent
                start = time.perf_counter()
                await asyncio.to_thread(_docker, "build", "--no-cache", "-q", str(context))
                docker.append(time.perf_counter() - start)
    finally:
        if tag is not None:
            _docker("image", "rm", "-f", tag)
    yield row("first build of 12 steps", "atropos", ours, base=True)
    if docker:
        yield row("first build of 12 steps", "docker build", docker)


def _root(at: Path, number: int) -> str:
    at.mkdir(parents=True)
    (at / "number").write_text(str(number))
    return f"dir:{at}"


def _dockerfile(at: Path, base: str) -> Path:
    """Twelve steps that nobody has built before."""
    at.mkdir()
    (at / "given.txt").write_text("given")
    own = f"WORKDIR /app/{secrets.token_hex(8)}"  # the first step: none of those that follow is there already
    lines = [f"FROM {base}", own, *(f"RUN echo {number} >> log" for number in range(10)), "COPY given.txt .\n"]
    (at / "Dockerfile").write_text("\n".join(lines))
    return at / "Dockerfile"


def _imported(root: Path) -> str | None:
    """The folder as an image of a Docker engine; None where there is none."""
    tag = f"atropos-bench:{secrets.token_hex(4)}"
    try:
        tar = subprocess.run(["tar", "-c", "-C", str(root), "."], check=True, capture_output=True).stdout
        subprocess.run(["docker", "import", "-", tag], input=tar, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return tag


def _docker(*arguments: str) -> None:
    classic = os.environ | {"DOCKER_BUILDKIT": "0"}  # needs no plug-in
    subprocess.run(["docker", *arguments], check=True, capture_output=True, env=classic)
