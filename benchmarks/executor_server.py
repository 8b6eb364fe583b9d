"""An executor server as a process of its own, of this checkout or another one, with a client over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from atropos.aio import Tasks

from .against import HERE
from .ours import children, cpu_s
from .peers import COMMAND


class ExecutorServer:
    """A running one."""

    def __init__(self, pid: int, client: aiohttp.ClientSession) -> None:
        self._pid = pid
        self._client = client

    def tree(self) -> list[int]:
        """Its process, and all that it started."""
        return [self._pid, *children(self._pid)]

    def cpu_s(self) -> float:
        """Seconds of CPU that these have used, those that have ended among them."""
        return cpu_s(self.tree())

    async def _asked(self, method: str, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        try:
            async with self._client.request(method, path, json=body) as answer:
                if answer.ok:
                    return await answer.json()
                raise RuntimeError(f"{path}: {answer.status}: {await answer.text()}")
        except aiohttp.ClientError as error:
            raise RuntimeError(f"{path}: {error!r}") from error

    async def open(self) -> str:
        """A trajectory with a slot."""
        return (await self._asked("POST", "/trajectories", {}))["trajectory_id"]

    async def call(self, trajectory: str) -> None:
        """A command of a model, its answer checked."""
        call = {"name": "terminal", "arguments": {"command": COMMAND}}
        answer = await self._asked("POST", f"/trajectories/{trajectory}/calls", call)
        if answer["result"]["output"] != "hi\n":
            raise RuntimeError(f"a call was answered {answer!r}")

    async def end(self, trajectory: str) -> None:
        """Give its slot back."""
        await self._asked("DELETE", f"/trajectories/{trajectory}")

    async def prepare(self, image: str) -> None:
        """Have an image pulled."""
        while (state := await self._asked("POST", "/prepare", {"image": image, "wait_s": 20}))["phase"] != "ready":
            if state["phase"] == "failed":
                raise RuntimeError(state["error"])


@contextlib.asynccontextmanager
async def executor_server(slots: int, checkout: Path = HERE, **pool: object) -> AsyncIterator[ExecutorServer]:
    """One with `slots` slots on this machine, of the code in `checkout`; `pool`: more of its settings."""
    token = secrets.token_hex(16)
    flags = ("--port", "0", "--backend", "local", "--slots-per-container", str(slots), "--max-containers", "1")
    with tempfile.NamedTemporaryFile("w", prefix="atropos-bench-", suffix=".json") as settings:
        json.dump({"pool": pool, "acquire_s": 60}, settings)
        settings.flush()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atropos.cli", "executor-server", "--config", settings.name, *flags),
            stderr=asyncio.subprocess.PIPE,
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "ATROPOS_EXECUTOR_TOKEN": token},
        )
        assert process.stderr is not None
        try:
            async with Tasks("executor server") as tasks:
                url = await _address(process.stderr)
                tasks.spawn(_discard(process.stderr), "log")
                headers = {"Authorization": f"Bearer {token}"}
                connector = aiohttp.TCPConnector(limit=0)
                async with aiohttp.ClientSession(url, headers=headers, connector=connector) as client:
                    yield ExecutorServer(process.pid, client)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.communicate()


async def _address(log: asyncio.StreamReader) -> str:
    said = b""
    while line := await log.readline():
        if found := re.search(rb"http://\S+", line):
            return found[0].decode()
        said += line
    raise RuntimeError(f"the executor server ended: {said.decode(errors='replace').strip()[-400:]}")


async def _discard(log: asyncio.StreamReader) -> None:
    while await log.read(65_536):
        pass
