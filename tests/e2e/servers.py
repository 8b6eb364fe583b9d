"""The services in processes of their own, as an operator starts them, and what can be counted of them from outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from tests.waiting import SLOWNESS

TOKEN = "e2e-token"
OWN = ("--only", "own", "--tool", "tests.e2e.own_tools:TOOLS")


class Server:
    """A running service."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url
        self.log = ""
        self._reader = asyncio.create_task(self._drain())  # a log that nobody reads would stop the server

    async def _drain(self) -> None:
        assert self.process.stderr is not None
        while data := await self.process.stderr.read(65_536):
            self.log = (self.log + data.decode("utf-8", "replace"))[-100_000:]

    async def read_out(self) -> None:
        """Until all that an ended server said is in the log."""
        await self._reader

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def _status(self, name: str) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(rf"{name}:\s+(\d+)", text)[1])  # type: ignore[index]

    def rss_mb(self) -> float:
        return self._status("VmRSS") / 1024

    def peak_mb(self) -> float:
        return self._status("VmHWM") / 1024

    def threads(self) -> int:
        return self._status("Threads")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))


async def start(command: str, *arguments: str, port: int = 0, within: Sequence[str] = ()) -> Server:
    process = await asyncio.create_subprocess_exec(
        *within,
        *(sys.executable, "-m", "atropos.cli", command, "--port", str(port), *arguments),
        env={**os.environ, "ATROPOS_TOOL_SERVER_TOKEN": TOKEN, "ATROPOS_EXECUTOR_TOKEN": TOKEN},
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    seen = ""
    try:
        async with asyncio.timeout(60 * SLOWNESS):
            while line := (await process.stderr.readline()).decode():
                seen += line
                if found := re.search(r" on (http://\S+)", line):
                    return Server(process, found[1])
    except TimeoutError:
        process.kill()
        await process.wait()
    raise AssertionError(f"atropos {command} did not start: {seen}")


@contextlib.asynccontextmanager
async def running(
    command: str = "tool-server", *arguments: str, port: int = 0, within: Sequence[str] = ()
) -> AsyncGenerator[Server, None]:
    """`atropos COMMAND` until the end of the context; told to end, and killed where it does not.

    `within`: a command line in front of it that becomes it, such as `unshare -m`.
    """
    server = await start(command, *arguments, port=port, within=within)
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.process.terminate()
            try:
                await asyncio.wait_for(server.process.wait(), 20)
            except TimeoutError:
                server.process.kill()
        await server.process.wait()
