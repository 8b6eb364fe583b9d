"""A host without kernel: sandboxes that obey a few words, and a server around them in this process.

Words of a command: `echo X`, `sleep S`, `count KEY` (counts how often it really ran), `hang`, `die`, `raise`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import select
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from atropos.config import ServerConfig
from atropos.errors import NotSupported, OutcomeUnknown, SandboxError, SlotLost
from atropos.sandbox.contract import HostBroken, SnapshotLayer, Stopped
from atropos.sandbox.server.serve import Server
from atropos.wire import (
    CommandResult,
    Done,
    EgressSecret,
    Exec,
    Feature,
    Operation,
    OpError,
    OpResult,
    ProcRead,
    ProcState,
    ReadStream,
    SlotLimits,
    ViewFolders,
    ViewInfo,
    WriteFile,
    WriteStream,
)


class FakeSandbox:
    def __init__(self, host: FakeHost, name: str) -> None:
        self.host, self.name = host, name
        self.layers: tuple[SnapshotLayer, ...] = ()
        self.base: str | None = None
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.running: dict[str, asyncio.Future[OpResult]] = {}
        self.tasks: dict[str, asyncio.Task[OpResult]] = {}
        self.files: dict[str, bytes] = {}
        self.network = False
        self.limits: SlotLimits | None = None
        self.hosts: tuple[str, ...] | None = None
        self.secrets: tuple[EgressSecret, ...] = ()
        self.order: list[str] = []
        self.stopped: Stopped | None = None
        self.at_once = 0

    async def add_gpus(self, gpus: Sequence[int]) -> None:
        self.gpus = tuple(gpus)

    async def end_programs(self) -> str:
        self.order.append("programs ended")
        return ""

    async def add_secrets(self, secrets: Sequence[EgressSecret]) -> None:
        self.secrets = tuple(secrets)

    def begin(
        self, call_id: str, operation: Operation, done: Callable[[OpResult | Exception], None], *, stream: int = -1
    ) -> None:
        if self.died.done() or self.stopped is not None:
            raise SlotLost("the sandbox is gone")

        def ended(task: asyncio.Task[OpResult]) -> None:
            self.tasks.pop(call_id, None)
            if not task.cancelled():
                error = task.exception()
                done(task.result() if error is None else error)  # type: ignore[arg-type]

        if isinstance(operation, WriteStream | ReadStream):
            work = asyncio.to_thread(self._stream, operation, os.dup(stream))
        else:
            work = self.run(call_id, operation)
        self.tasks[call_id] = asyncio.create_task(work)
        self.tasks[call_id].add_done_callback(ended)

    def forget(self, call_id: str) -> None:
        if task := self.tasks.get(call_id):
            task.cancel()

    async def run(self, call_id: str, operation: Operation) -> OpResult:
        if self.died.done() or self.stopped is not None:
            raise SlotLost("the sandbox is gone")
        if isinstance(operation, WriteFile):
            self.files[operation.path] = operation.data
            return Done(count=len(operation.data))
        if isinstance(operation, ProcRead):
            await self._wait(call_id, operation.wait_s)
            return ProcState(id=operation.id, command="x", pid=2, running=True)
        assert isinstance(operation, Exec), operation
        self.at_once += 1
        self.host.most_at_once = max(self.host.most_at_once, self.at_once)
        try:
            return await self._exec(call_id, operation.command)
        finally:
            self.at_once -= 1

    def _stream(self, operation: WriteStream | ReadStream, stream: int) -> OpResult:
        """As the runner's child, in a thread."""
        with socket.socket(fileno=stream) as sock, sock.makefile("rwb") as file:
            if operation.path == "stopped":
                hung_up = select.poll()
                hung_up.register(sock, 0)
                hung_up.poll()
                return OpError(error="timeout", message="the operation was cancelled")
            if isinstance(operation, ReadStream):
                data = self.files[operation.path][operation.offset :]
                file.write(data)
                return Done(count=len(data))
            whole = bytearray()
            while size := int.from_bytes(file.read(4) or b"\xff", "little"):
                data = file.read(size) if size != 0xFF else b""  # nothing came any more
                whole += data
                if len(data) < size:
                    return OpError(error="io", message="the stream broke off before its end")
            self.files[operation.path] = bytes(whole)
            return Done(count=len(whole))

    async def _exec(self, call_id: str, command: str) -> OpResult:
        word, _, rest = command.partition(" ")
        self.order.append(command)
        self.host.ran[command] += 1
        if word == "sleep":
            return await self._wait(call_id, float(rest))
        if word == "hang":
            return await self._wait(call_id, 3600)
        if word == "die":
            self.die("told to")
            raise OutcomeUnknown("the sandbox ended while the call ran")
        if word == "raise":
            raise RuntimeError("a bug")
        await asyncio.sleep(0)
        return CommandResult(exit_code=0, output=rest.encode(), duration_s=0)

    async def _wait(self, call_id: str, seconds: float) -> OpResult:
        future: asyncio.Future[OpResult] = asyncio.get_running_loop().create_future()
        self.running[call_id] = future
        handle = asyncio.get_running_loop().call_later(
            seconds, lambda: future.done() or future.set_result(CommandResult(exit_code=0, output=b"", duration_s=0))
        )
        try:
            return await future
        finally:
            handle.cancel()
            del self.running[call_id]

    def cancel(self, call_id: str) -> None:
        future = self.running.get(call_id)
        if future is not None and not future.done():
            future.set_result(CommandResult(exit_code=-9, output=b"", cancelled=True, duration_s=0))

    def die(self, reason: str) -> None:
        if not self.died.done():
            self.died.set_result(reason)
        self._fail(OutcomeUnknown(reason))

    def _fail(self, error: SandboxError) -> None:
        for future in self.running.values():
            if not future.done():
                future.set_exception(error)

    async def set_network(self, hosts: tuple[str, ...] | None) -> None:
        self.hosts = hosts

    def resize(self, limits: SlotLimits) -> None:
        self.limits = limits

    async def move_to_disk(self, beside: object) -> None:
        raise SandboxError("there is no disk")

    async def change_root(self, layers: Sequence[SnapshotLayer], base: str | None = None) -> None:
        await asyncio.sleep(self.host.start_s)
        await self.host.may_start.wait()
        if self.host.start_fails:
            raise SandboxError("no more mounts")
        self.layers, self.base = tuple(layers), base
        for layer in reversed(self.layers):
            self.files.update(self.host.layers[layer])

    async def stop(self) -> Stopped:
        if self.stopped is None:
            self._fail(OutcomeUnknown("stopped"))
            await asyncio.sleep(self.host.stop_s)
            self.host.live.discard(self)
            self.stopped = Stopped(clean=self.name not in self.host.dirty, seconds=self.host.stop_s)
        if self.name in self.host.dirty:
            return self.stopped
        return dataclasses.replace(self.stopped, clean=True)

    async def freeze(self) -> SnapshotLayer:
        self._fail(OutcomeUnknown("frozen"))
        await asyncio.sleep(0)
        self.host.live.discard(self)
        self.stopped = Stopped(clean=True, seconds=0)
        if self.host.freeze_fails:
            raise SandboxError("a writer was left")
        return self.host.add_layer(dict(self.files))


class FakeNetwork:
    """Whose sandboxes know each other, by these names."""

    def __init__(self, may_join: asyncio.Event) -> None:
        self.names: dict[FakeSandbox, tuple[str, ...]] = {}
        self.may_join = may_join
        self.join_fails = False
        self.closed = False

    async def join(self, sandbox: FakeSandbox, names: Sequence[str], _networks: Sequence[str] = ()) -> None:
        await self.may_join.wait()
        await asyncio.sleep(0)
        if self.join_fails:
            raise NotSupported("a root can't hold the names")
        self.names[sandbox] = tuple(names)

    def leave(self, sandbox: FakeSandbox) -> None:
        self.names.pop(sandbox, None)

    def close(self) -> None:
        self.closed = True


class FakeHost:
    max_layers: int | None = None
    disk_mib, no_quota = 0, ""

    def __init__(self) -> None:
        self.live: set[FakeSandbox] = set()
        self.started: list[FakeSandbox] = []
        self.networks: list[FakeNetwork] = []
        self.shared: list[tuple[str, str, bool]] = []
        self.layers: dict[SnapshotLayer, dict[str, bytes]] = {}
        self.layer_numbers = itertools.count(1)
        self.ran: Counter[str] = Counter()
        self.dirty: set[str] = set()
        self.most_at_once = 0
        self.start_s = self.stop_s = 0.0
        self.may_start, self.may_join, self.may_share = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for event in (self.may_start, self.may_join, self.may_share):
            event.set()
        self.start_fails = False
        self.broken = False
        self.failed_starts = 0
        self.freeze_fails = False
        self.closed = False
        self.features: list[Feature] = [Feature(name="userns", ok=True, required=True)]

    async def probe(self) -> Sequence[Feature]:
        return self.features

    async def start(self, name: str, *, network: bool = False) -> FakeSandbox:
        await asyncio.sleep(self.start_s)
        if self.broken:
            raise HostBroken("what starts sandboxes is gone")
        if self.start_fails:
            self.failed_starts += 1
            raise SandboxError("no more namespaces")
        sandbox = FakeSandbox(self, name)
        sandbox.network = network
        self.live.add(sandbox)
        self.started.append(sandbox)
        return sandbox

    async def view(
        self,
        of: FakeSandbox,
        name: str,
        layers: Sequence[SnapshotLayer],
        base: str | None,
        folders: ViewFolders,
        *,
        gpus: Sequence[int] = (),
    ) -> tuple[FakeSandbox, ViewInfo]:
        view = await self.start(name, network=of.network)
        await view.change_root(layers, base)
        await view.add_gpus(gpus)
        return view, ViewInfo()

    def private_network(self) -> FakeNetwork:
        self.networks.append(FakeNetwork(self.may_join))
        return self.networks[-1]

    async def share(
        self, of: FakeSandbox, source: str, sandbox: FakeSandbox, path: str, *, read_only: bool
    ) -> OpError | None:
        await self.may_share.wait()
        sandbox.order.append("mounted")
        if source == "/nothing":
            return OpError(error="not_found", message=f"there is no {source}")
        self.shared.append((f"{of.name}:{source}", f"{sandbox.name}:{path}", read_only))
        return None

    def add_layer(self, files: dict[str, bytes]) -> SnapshotLayer:
        layer = SnapshotLayer(f"/layers/{next(self.layer_numbers)}", sum(map(len, files.values())))
        self.layers[layer] = files
        return layer

    async def import_layer(self, fill: Callable[[str], Awaitable[None]]) -> SnapshotLayer:
        with tempfile.TemporaryDirectory() as folder:
            await fill(folder)
            files = {each.name: each.read_bytes() for each in Path(folder).iterdir()}
        return self.add_layer(files)

    async def drop_layer(self, layer: SnapshotLayer) -> None:
        del self.layers[layer]

    async def aclose(self) -> None:
        assert not self.live, self.live
        self.closed = True


TOKEN = "a-token-for-tests"


def config(**settings: object) -> ServerConfig:
    return ServerConfig.model_validate({"token": TOKEN, "slots": 4, "drain_s": 0.0, "heartbeat_s": 1.0, **settings})


class Running:
    """A server in this process, listening on loopback."""

    def __init__(self, host: FakeHost, server: Server, task: asyncio.Task[int]) -> None:
        self.host, self.server, self.task = host, server, task

    @property
    def core(self):
        assert self.server.core is not None
        return self.server.core

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"


class Ready:
    """A stdout that tells when the ready line was written."""

    def __init__(self) -> None:
        self.line = asyncio.Event()

    def write(self, text: str) -> int:
        self.line.set()
        return len(text)

    def flush(self) -> None:
        pass


@contextlib.asynccontextmanager
async def serving(host: FakeHost | None = None, **settings: object) -> AsyncIterator[Running]:
    host = host or FakeHost()

    out = Ready()
    server = Server(config(**settings), lambda: host, out)  # type: ignore[arg-type]
    task = asyncio.create_task(server.run())
    waiting = asyncio.create_task(out.line.wait())
    await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if task.done():
        task.result()
    try:
        yield Running(host, server, task)
    finally:
        if not task.done():
            server.stop(0)
        await asyncio.wait_for(task, 20)
        assert host.closed
        assert not host.live
