"""SWE-ReX 1.4.0's remote runtime as a peer: its server in a process of its own, in an environment of its own.

It is measured twice, with its own client (which opens a connection a request) and with a client that keeps its
connections: the second is faster, so it is the one to beat.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp

from examples.serve.processes import free_port

from .context import Context
from .peers import COMMAND

VERSION = "1.4.0"
HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "atropos" / "swerex"


def install() -> Path:
    """The environment's bin folder; made on first use, and anew for another interpreter: both sides run on the same.

    Raises:
        RuntimeError: pip could not install it; the message ends with pip's own.
    """
    binaries = HOME / "bin"
    if (binaries / "swerex-remote").exists() and (binaries / "python").samefile(sys.executable):
        return binaries
    HOME.parent.mkdir(parents=True, exist_ok=True)
    wanted = (f"swe-rex=={VERSION}", "aiohttp")  # its client imports aiohttp without requiring it
    if uv := shutil.which("uv"):
        steps = [
            [uv, "venv", "-q", "--clear", "--python", sys.executable, str(HOME)],
            [uv, "pip", "install", "-q", "--python", str(binaries / "python"), *wanted],
        ]
    else:
        steps = [
            [sys.executable, "-m", "venv", str(HOME)],
            [str(binaries / "python"), "-m", "pip", "install", "-q", *wanted],
        ]
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            shutil.rmtree(HOME, ignore_errors=True)
            raise RuntimeError(f"SWE-ReX could not be installed: {done.stderr.strip()[-300:]}")
    return binaries


class SweRex:
    """A running server and both ways to call it."""

    def __init__(self, binaries: Path, port: int, token: str) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self._token = token
        self._driver_command = (
            str(binaries / "python"),
            str(Path(__file__).with_name("swe_rex_driver.py")),
            str(port),
            token,
            COMMAND,
        )
        self._driver: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"X-API-Key": self._token}, connector=aiohttp.TCPConnector(limit=0)
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                async with self._session.get(f"{self._url}/is_alive") as answer:
                    if answer.status == 200:
                        break
            except aiohttp.ClientError:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.05)
        self._driver = await asyncio.create_subprocess_exec(
            *self._driver_command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=64 * 1024 * 1024,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()
        if self._driver is not None and self._driver.stdin is not None:
            self._driver.stdin.close()
            try:
                await asyncio.wait_for(self._driver.wait(), 5)
            except TimeoutError:
                self._driver.kill()
                await self._driver.wait()

    async def call(self, _: int) -> None:
        """One execute over a kept connection, whichever trajectory asks."""
        assert self._session is not None
        body = {"command": COMMAND, "shell": True}
        async with self._session.post(f"{self._url}/execute", json=body) as answer:
            data = await answer.json()
        if data.get("stdout") != "hi\n":
            raise RuntimeError(f"SWE-ReX answered {data}")

    async def own_client(self, parallel: int, n: int, *, bash: bool = False) -> tuple[list[float], float]:
        """Samples and seconds of `n` executes by SWE-ReX's own client in its own process, in sh or in bash."""
        answer = await self._order({"parallel": parallel, "n": n, "bash": bash})
        return answer["samples"], answer["seconds"]

    async def upload(self, source: Path, target: Path) -> float:
        """Seconds that SWE-ReX's own client takes to upload a file or folder."""
        return (await self._order({"upload": str(source), "target": str(target)}))["seconds"]

    async def _order(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._driver is not None
        assert self._driver.stdin is not None
        assert self._driver.stdout is not None
        self._driver.stdin.write(json.dumps(order).encode() + b"\n")
        await self._driver.stdin.drain()
        return json.loads(await asyncio.wait_for(self._driver.stdout.readline(), 300))


@contextlib.asynccontextmanager
async def running(ctx: Context) -> AsyncIterator[SweRex | None]:
    """Start `swerex-remote` on loopback, and end it by its id whatever happens; None where peers are left out."""
    if ctx.skip_peers:
        yield None
        return
    binaries = await asyncio.to_thread(install)
    port, token = free_port(), secrets.token_hex(16)
    process = await asyncio.create_subprocess_exec(
        *(str(binaries / "swerex-remote"), "--host", "127.0.0.1", "--port", str(port), "--auth-token", token),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with SweRex(binaries, port, token) as server:
            yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()
