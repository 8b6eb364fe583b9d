"""Docker as a peer, by its command line, where an engine answers (DOCKER_HOST or the default socket)."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

from .context import Context

IMAGE = "atropos-sandbox:local"
"""What containers are made of: the image that scripts/engines.py puts into the engine."""


async def run(*words: str, stdout: int | None = None) -> str:
    """What `docker WORDS` prints.

    Raises:
        RuntimeError: it failed; the message ends with its own words.
    """
    process = await asyncio.create_subprocess_exec(
        *("docker", *words),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE if stdout is None else stdout,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    if process.returncode != 0:
        raise RuntimeError(f"docker {' '.join(words)}: {errors.decode(errors='replace').strip()[-300:]}")
    return (output or b"").decode().strip()


async def save(source: str, target: Path) -> None:
    """`docker cp SOURCE -` into a file."""
    with target.open("wb") as file:
        await run("cp", source, "-", stdout=file.fileno())


async def answers() -> bool:
    """Whether there is an engine that has the image."""
    if shutil.which("docker") is None:
        return False
    try:
        await asyncio.wait_for(run("image", "inspect", IMAGE), 10)
    except (RuntimeError, TimeoutError):
        return False
    return True


async def has_compose() -> bool:
    """Whether the command line has its compose plugin."""
    try:
        await run("compose", "version")
    except RuntimeError:
        return False
    return True


@contextlib.asynccontextmanager
async def container(ctx: Context) -> AsyncIterator[str | None]:
    """An idle container, or None where no engine answers or peers are left out."""
    if ctx.skip_peers or not await answers():
        yield None
        return
    made = await run("run", "-d", "--init", "--network", "none", "--entrypoint", "sleep", IMAGE, "infinity")
    try:
        yield made
    finally:
        await run("rm", "-f", made)
