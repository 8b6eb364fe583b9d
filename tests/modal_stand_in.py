"""In Modal's place: its SDK's calls that the backend makes, with a process of this machine as each sandbox.

It holds no more of Modal than `tests/e2e/test_modal_backend.py` compares with the real package.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from grpclib.exceptions import StreamTerminatedError
from modal import exception

from atropos.slots.backends.modal import server

KILLED = 137


class Aio:
    """A call that the backend awaits by `.aio`, as all of Modal's have it."""

    def __init__(self, call: Any) -> None:
        self.aio = call


class Stdin:
    """Takes the configuration, and gives the server a port that is free on this machine."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._text = b""
        self.drain = Aio(self._drain)

    def write(self, data: bytes) -> None:
        self._text += data

    def write_eof(self) -> None:
        given = json.loads(self._text)
        assert (given["host"], given["port"]) == ("0.0.0.0", self._sandbox.port)
        self._text = json.dumps({**given, "host": "127.0.0.1", "port": 0, "die_with_parent": True}).encode()

    async def _drain(self) -> None:
        stdin = self._sandbox.process.stdin
        assert stdin is not None
        stdin.write(self._text)
        with contextlib.suppress(ConnectionError):
            await stdin.drain()
        stdin.close()


class Sandbox:
    """One process, which has a tunnel once it has said where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, port: int) -> None:
        self.process = process
        self.port = port
        self.listens = 0
        self.unanswered = asyncio.Event()
        """While it is set, Modal doesn't say whether the sandbox has ended."""
        self.asked = 0
        self.termination_s = 0.0
        """How long Modal takes to end the sandbox that it is asked to end."""
        self.stdin = Stdin(self)
        self.stdout = self._lines()
        self.stderr = SimpleNamespace(read=Aio(self._errors))
        self.tunnels = Aio(self._tunnels)
        self.wait = Aio(self._wait)
        self.terminate = Aio(self._terminate)

    @property
    def returncode(self) -> int | None:
        code = self.process.returncode
        return KILLED if code == -signal.SIGKILL else code

    async def _lines(self) -> AsyncIterator[str]:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.listens = json.loads(line)["port"]
            yield line.decode()

    async def _errors(self) -> str:
        assert self.process.stderr is not None
        return (await self.process.stderr.read()).decode()

    async def _tunnels(self) -> dict[int, Any]:
        return {self.port: SimpleNamespace(url=f"http://127.0.0.1:{self.listens}")}

    async def _wait(self, *, raise_on_termination: bool) -> None:
        assert not raise_on_termination
        self.asked += 1
        either = [asyncio.ensure_future(self.process.wait()), asyncio.ensure_future(self.unanswered.wait())]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in either:
                one.cancel()
        if self.unanswered.is_set():
            raise StreamTerminatedError("Connection lost")

    async def _terminate(self, *, wait: bool) -> int | None:
        await asyncio.sleep(self.termination_s)
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        if wait:
            await self.process.wait()
        return self.returncode


class Image:
    """Starts what it is told to once its own entry point is taken away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.starts: list[str] | None = None

    def entrypoint(self, commands: list[str]) -> Image:
        self.starts = commands
        return self


class Modal:
    """What stands in for the package.

    Attributes:
        created: the sandboxes by their tag, and what each was asked for with.
        refusal: raised in the place of a new sandbox.
    """

    exception = exception

    def __init__(self) -> None:
        self.created: dict[str, Sandbox] = {}
        self.asked: list[dict[str, Any]] = []
        self.refusal: Exception | None = None
        self.App = SimpleNamespace(lookup=Aio(self._lookup))
        self.Image = SimpleNamespace(from_registry=Image)
        self.Sandbox = SimpleNamespace(create=Aio(self._create))

    async def _lookup(self, name: str, *, create_if_missing: bool) -> str:
        assert create_if_missing
        return f"app {name}"

    async def _create(self, python: str, *arguments: str, **asked: Any) -> Sandbox:
        if self.refusal is not None:
            raise self.refusal
        assert (python, asked["image"].starts) == ("python3", [])
        self.asked.append(asked)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdin=pipe, stdout=pipe, stderr=pipe)
        made = self.created[asked["tags"]["atropos"]] = Sandbox(process, *asked["encrypted_ports"])
        return made


@contextlib.contextmanager
def modal() -> Iterator[Modal]:
    """The backend's `modal` is this one."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in = Modal()
        patch.setattr(server, "modal", stand_in)
        yield stand_in
