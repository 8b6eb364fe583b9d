"""Transfers of one large file and of a folder of 10,000 small ones, beside `docker cp` and SWE-ReX's upload.

`docker cp` is measured where an engine answers: `python scripts/engines.py docker python -m benchmarks --only files`.
SWE-ReX has no download but that of a text file as JSON. Downloads are tar streams written to a local file, with
`docker cp C:PATH -` as with `Slot.download_to`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from . import docker_peer, ours, swe_rex
from .context import Context
from .stats import Row, row

if TYPE_CHECKING:
    from atropos.slots import Slot


LARGE_MB = 100
FILES, FILE_BYTES = 10_000, 1000

Timed = Callable[[], Awaitable[float]]


def make_sources(folder: Path, scale: float) -> dict[str, Path]:
    """The file and the folder, by what a row says of them; content that no compression shortens."""
    megabytes, count = max(1, int(LARGE_MB * scale)), max(100, int(FILES * scale))
    large, small = folder / "large", folder / "small"
    with large.open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1_000_000))
    for number in range(count):
        path = small / f"d{number % 100}" / f"f{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    return {f"{megabytes} MB in one file": large, f"{count:,} files of {FILE_BYTES / 1000:g} kB": small}


async def _timed(work: Awaitable[object]) -> float:
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def check(slot: Slot, source: Path, target: str) -> None:
    """Compare what arrived in a slot by its size."""
    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    wanted = f"{len(files)} {sum(path.stat().st_size for path in files)}"
    seen = await slot.exec(f"find {target} -type f -printf '%s\\n' | awk '{{n++; s+=$1}} END {{print n, s}}'")
    if seen.output.strip() != wanted:
        raise RuntimeError(f"uploaded {source.name}: {seen.output!r}, not {wanted!r}")


def uploads(
    slot: Slot, rex: swe_rex.SweRex | None, container: str | None, source: Path, scratch: Path
) -> dict[str, Timed]:
    """By subject: copy `source` to a fresh place, the last one's removal outside of the time."""

    async def mine() -> float:
        await slot.exec("rm -rf /workspace/up")
        seconds = await _timed(slot.upload(source, "/workspace/up"))
        await check(slot, source, "/workspace/up")
        return seconds

    async def docker() -> float:
        await docker_peer.run("exec", str(container), "rm", "-rf", "/root/up")
        return await _timed(docker_peer.run("cp", "-q", str(source), f"{container}:/root/up"))

    async def swe_rex_upload() -> float:
        assert rex is not None
        target = scratch / "swe-rex"
        if target.is_dir():
            await asyncio.to_thread(shutil.rmtree, target)
        target.unlink(missing_ok=True)
        return await rex.upload(source, target)

    found: dict[str, Timed] = {"atropos": mine}
    if rex is not None:
        found["swe-rex, its own client"] = swe_rex_upload
    return found | ({"docker cp": docker} if container else {})


def downloads(slot: Slot, container: str | None, scratch: Path) -> dict[str, Timed]:
    """By subject: what the last upload left there as a tar archive in a local file."""

    async def mine() -> float:
        return await _timed(slot.download_to("/workspace/up", scratch / "mine.tar"))

    async def docker() -> float:
        return await _timed(docker_peer.save(f"{container}:/root/up", scratch / "docker.tar"))

    return {"atropos": mine} | ({"docker cp": docker} if container else {})


async def files(ctx: Context) -> AsyncIterator[Row]:
    """Subjects take turns in each round."""
    rounds = ctx.n(7, least=3)
    with tempfile.TemporaryDirectory(prefix="atropos-bench-files-") as folder:
        scratch = Path(folder)
        sources = await asyncio.to_thread(make_sources, scratch, ctx.scale)
        async with (
            ours.pool(1) as pool,
            pool.lease("files") as slot,
            swe_rex.running(ctx) as rex,
            docker_peer.container(ctx) as container,
        ):
            no_docker = (
                "" if container or ctx.skip_peers else "docker cp left out: no engine with the sandbox image answers"
            )
            for what, source in sources.items():
                steps = {
                    f"upload, {what}": uploads(slot, rex, container, source, scratch),
                    f"download, {what}": downloads(slot, container, scratch),
                }
                taken: dict[str, dict[str, list[float]]] = {case: {} for case in steps}
                for number in range(rounds):
                    for case, subjects in steps.items():
                        for subject, measure in subjects.items():
                            ctx.say(f"{case}: {subject}, round {number + 1} of {rounds}")
                            taken[case].setdefault(subject, []).append(await measure())
                for case, by_subject in taken.items():
                    for subject, samples in by_subject.items():
                        own = subject == "atropos"
                        yield row(case, subject, samples, base=own, note=no_docker if own else "")
