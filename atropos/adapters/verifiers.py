"""Slots as runtimes of verifiers: `AtroposRuntime`, for `Agent.run(runtime=…)`, and an env that uses it."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

from atropos.adapters.extras import extra

with extra("verifiers"):
    from verifiers.v1 import AgentConfig, Agents, Env, EnvConfig, Task

from pydantic import Field
from typing_extensions import override
from verifiers.v1.configs.runtime import parse_network_rule
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import DockerConfig, ProgramResult, Runtime, RuntimeProcess
from verifiers.v1.runtimes.base import parse_gpu
from verifiers.v1.runtimes.docker import DockerRuntimeInfo
from verifiers.v1.utils.compile import resolve_runtime_config

from atropos.adapters.sharing import (
    HeldSlot,
    SlotRequest,
    infrastructure,
    not_started,
    shell_code,
    time_limit,
)
from atropos.net.egress_policy import parse
from atropos.slots import Process

__all__ = ["AtroposEnv"]  # what verifiers loads by this module's name

MIB_PER_GB = 1024
BASE = "base"
"""`image` in a trace of a slot on the pool's base."""


class SlotProcess(RuntimeProcess):
    """A background process of a slot."""

    def __init__(self, process: Process) -> None:
        assert process.errors is not None
        self._process = process
        self.stdout = _output(process)
        self.stderr = _output(process.errors)

    @override
    async def write(self, data: bytes) -> None:
        with infrastructure(SandboxError):
            await self._process.write(data)

    @override
    async def wait(self) -> int:
        with infrastructure(SandboxError):
            code = await self._process.wait()
        assert code is not None
        return shell_code(code)

    @override
    async def poll(self) -> int | None:
        with infrastructure(SandboxError):
            code = await self._process.poll()
        return None if code is None else shell_code(code)

    @override
    async def terminate(self) -> None:
        with infrastructure(SandboxError):
            await self._process.kill("TERM")

    @override
    async def kill(self) -> None:
        with infrastructure(SandboxError):
            await self._process.kill()


async def _output(process: Process) -> AsyncIterator[bytes]:
    with infrastructure(SandboxError):
        async for data in process.output():
            yield data


class AtroposRuntime(Runtime):
    """One slot, from the first use until `stop`. Every method raises verifiers' `SandboxError` when it is gone.

    Programs of the slot reach verifiers' own endpoints (the model, tool servers) through the lease, so that a slot
    needs no network for them.

    Args:
        task: whose image, folder, environment and network policy the slot gets; None: none of them.
        settings: fields of `SlotRequest`; a task's image comes before its `image`.

    Raises:
        ValueError: the task asks for what a slot can't have.
    """

    supports_user: ClassVar[bool] = True

    def __init__(self, task: Task[Any, Any, Any] | None = None, **settings: Any) -> None:
        super().__init__()
        request = SlotRequest(**settings)
        config = DockerConfig(image=request.image or BASE)
        if task is not None:
            config = resolve_runtime_config(config, task)
            self.env = dict(task.runtime_env())
        assert isinstance(config, DockerConfig)
        kind, gpus = parse_gpu(config.gpu)
        request = request.with_gpus(gpus, [] if kind is None else [kind])
        if (refused := request.refusal(_mib(config.memory), _mib(config.disk))) is not None:
            raise ValueError(refused)
        if config.block and config.allow:
            raise ValueError(
                "network_block: slots have lists of what they reach (network_allow), none of what they don't"
            )
        self._hosts = (
            [reachable(rule) for rule in config.allow] if config.network_restricted and request.network else []
        )
        if config.image != BASE:
            request = request.model_copy(update={"image": config.image})
        self.config = config
        self.info = self._info = DockerRuntimeInfo(**config.model_dump())  # types on a trace are a closed set
        self._request = request
        self._held: HeldSlot | None = None
        self._starting = asyncio.Lock()
        self._folder = ""
        self._wanted_ports: set[int] = set()

    @override
    async def start(self) -> None:
        """Lease a slot, unless there is one."""
        with infrastructure(SandboxError):
            async with self._starting:
                if self._held is not None:
                    return
                held = self._held = await HeldSlot.lease(self._request, f"verifiers {self.name}")
                self._folder = held.path(self.config.workdir or ".")
                self.config = self.config.model_copy(update={"workdir": self._folder})
                self._info.id, self._info.workdir = held.slot.lease.lease_id, self._folder
                if (refused := await held.make_folder(self._folder)) is not None:
                    raise SandboxError(f"workdir {self._folder}: {refused}")

    @override
    async def teardown(self) -> None:
        """Give the slot back, with all that runs in it. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            await held.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def _slot(self) -> HeldSlot:
        """The slot, with the ports that `host_url` was asked for."""
        held = self._held
        if held is None:
            raise SandboxError(f"runtime {self.name} was not started, or stopped")
        for port in [*self._wanted_ports]:
            try:
                await held.reach(port)
            except OSError as error:
                self._wanted_ports.discard(port)
                raise SandboxError(f"port {port} of this machine in the slot: {error}") from error
        return held

    @override
    async def run(self, argv: list[str], env: dict[str, str]) -> ProgramResult:
        with infrastructure(SandboxError):
            held = await self._slot()
            result = await held.slot.exec(
                argv,
                workdir=self._folder,
                env=self.process_env(env),
                user=self.user or held.user,
                split=True,
                concurrent=True,
            )
        if result.timed_out:
            raise SandboxError(f"{argv[0]} took longer than {time_limit(result, None)}")
        if result.exit_code is None:
            code, error = not_started(result)
            return ProgramResult(code, "", error)
        return ProgramResult(shell_code(result.exit_code), result.stdout or "", result.stderr or "")

    @override
    async def open_process(self, argv: list[str], env: dict[str, str]) -> RuntimeProcess:
        return SlotProcess(await self._open(argv, env, live=True))

    @override
    async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
        await self._open(["sh", "-c", 'log=$1; shift; exec "$@" >"$log" 2>&1 </dev/null', "sh", log, *argv], env)

    async def _open(self, argv: list[str], env: dict[str, str], *, live: bool = False) -> Process:
        with infrastructure(SandboxError):
            held = await self._slot()
            try:
                return await held.slot.start(
                    argv,
                    workdir=self._folder,
                    env=self.process_env(env),
                    user=self.user or held.user,
                    split=live,
                    hold=live,
                )
            except OSError as error:
                raise SandboxError(f"{argv[0]} can't be started: {error}") from error

    @override
    async def _read(self, path: str, max_bytes: int | None = None) -> bytes:
        with infrastructure(SandboxError):
            held = await self._slot()
            limit = {} if max_bytes is None else {"max_bytes": max_bytes}
            try:
                return await held.slot.read_file(self._path(path), user=self.user or held.user, **limit)
            except OSError as error:
                if error.errno == errno.EFBIG and max_bytes is not None:
                    raise SandboxError(f"read {path!r}: over the {max_bytes - 1} byte limit") from error
                raise SandboxError(f"read {path!r}: {error}") from error

    @override
    async def write(self, path: str, data: bytes) -> None:
        with infrastructure(SandboxError):
            held = await self._slot()
            try:
                await held.slot.write_file(self._path(path), data, user=self.user or held.user)
            except OSError as error:
                raise SandboxError(f"write {path!r}: {error}") from error

    def _path(self, path: str) -> str:
        return path if path.startswith("/") else f"{self._folder}/{path}"

    @override
    def host_url(self, url: str) -> str:
        """The same URL: a port of this machine's loopback has that number in the slot, from the next command on."""
        parsed = urlsplit(url)
        if parsed.hostname in {"127.0.0.1", "localhost"} and parsed.port is not None:
            self._wanted_ports.add(parsed.port)
        return url

    @override
    async def expose(self, port: int) -> str:
        with infrastructure(SandboxError):
            return f"http://127.0.0.1:{await (await self._slot()).expose(port)}"

    @override
    async def prepare_setup(self) -> None:
        await self.start()  # here, so that having no slot is the rollout's error
        await super().prepare_setup()

    @override
    async def prepare_execution(self, routes: list[str] | None) -> None:
        """Hold the slot to the policy's hosts; `routes` are reached all the same, through the lease."""
        if self.network_restricted and self._request.network:
            with infrastructure(SandboxError):
                held = await self._slot()
                await held.slot.set_network(None if routes is None else self._hosts)


def reachable(rule: str) -> str:
    """What a rule of `network_allow` allows, as `Slot.set_network` has it; of a URL it is the host with its port.

    Raises:
        ConfigError: it is nothing that slots can be held to.
    """
    host, port = rule, None
    if "://" in rule:
        _, host, port = parse_network_rule(rule)
        host = f"[{host}]" if ":" in host else host
    host = host if port is None else f"{host}:{port}"
    parse(host, field="network_allow")
    return host


def _mib(gb: float | None) -> float | None:
    return None if gb is None else gb * MIB_PER_GB


class AtroposEnvConfig(EnvConfig):
    """verifiers' single-agent env on slots."""

    agent: AgentConfig = AgentConfig(runtime=DockerConfig())
    """The one seat. Its `runtime` is not used: each rollout gets a slot."""
    slots: SlotRequest = Field(default_factory=SlotRequest)
    """The slot of each rollout, and the pool that it comes from."""


class AtroposEnv(Env[AtroposEnvConfig]):
    """The single-agent env, each rollout in a slot of its own. A taskset that exports it runs on slots."""

    @override
    async def run(self, task: Task[Any, Any, Any], agents: Agents) -> None:
        async with AtroposRuntime(task, **self.config.slots.model_dump()) as runtime:
            await agents.agent.run(task, runtime=runtime)
