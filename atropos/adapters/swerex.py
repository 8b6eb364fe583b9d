"""Slots as deployments of SWE-ReX: `AtroposDeployment(image=…)` wherever an `AbstractDeployment` is taken."""

from __future__ import annotations

import asyncio
import io
import logging
from typing import Any, Literal

from atropos.adapters.extras import extra

with extra("swerex"):
    from swerex.deployment.abstract import AbstractDeployment

from swerex.deployment.hooks.abstract import CombinedDeploymentHook, DeploymentHook
from swerex.exceptions import (
    CommandTimeoutError,
    DeploymentNotStartedError,
    DeploymentStartupError,
    NonZeroExitCodeError,
    SessionDoesNotExistError,
    SessionExistsError,
    SwerexException,
)
from swerex.runtime.abstract import (
    AbstractRuntime,
    Action,
    BashInterruptAction,
    CloseBashSessionResponse,
    CloseResponse,
    CloseSessionRequest,
    CloseSessionResponse,
    Command,
    CommandResponse,
    CreateBashSessionResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    IsAliveResponse,
    Observation,
    ReadFileRequest,
    ReadFileResponse,
    UploadRequest,
    UploadResponse,
    WriteFileRequest,
    WriteFileResponse,
)
from swerex.utils.log import get_logger
from typing_extensions import override

from atropos.adapters.process_slots import lease_until_exit, release_and_wait
from atropos.adapters.sharing import (
    CANNOT_EXECUTE,
    HeldSlot,
    SlotRequest,
    infrastructure,
    time_limit,
)
from atropos.adapters.swerex_session import BashSession
from atropos.errors import SandboxError
from atropos.event_loop import in_event_loop, release
from atropos.slots import ExecResult


class DeploymentGoneError(SwerexException):
    """The infrastructure failed: nothing is known about the command, and nothing may be concluded about the model."""


class AtroposDeploymentConfig(SlotRequest):
    """What a deployment's slot is, and the pool that it comes from."""

    type: Literal["atropos"] = "atropos"

    def get_deployment(self) -> AtroposDeployment:
        """A deployment, not started."""
        return AtroposDeployment.from_config(self)


class AtroposRuntime(AbstractRuntime):
    """One slot. Every method raises `DeploymentGoneError` when it is gone."""

    def __init__(self, held: HeldSlot, *, logger: logging.Logger | None = None) -> None:
        self.logger = logger or get_logger("rex-runtime")
        self.held = held
        self._sessions: dict[str, BashSession] = {}
        self._starting: set[str] = set()

    @override
    @in_event_loop
    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        try:
            async with asyncio.timeout(timeout):
                await self.held.slot.processes()
        except (SandboxError, TimeoutError) as error:
            return IsAliveResponse(is_alive=False, message=f"{type(error).__name__}: {error}")
        return IsAliveResponse(is_alive=True)

    @override
    @in_event_loop
    async def create_session(self, request: CreateSessionRequest) -> CreateSessionResponse:
        name = request.session
        if name in self._sessions or name in self._starting:
            raise SessionExistsError(f"session {name!r} already exists")
        self._starting.add(name)
        try:
            with infrastructure(DeploymentGoneError):
                self._sessions[name], output = await BashSession.start(self.held, request)
        finally:
            self._starting.discard(name)
        return CreateBashSessionResponse(output=output)

    @override
    @in_event_loop
    async def run_in_session(self, action: Action) -> Observation:
        session = self._session(action.session)
        with infrastructure(DeploymentGoneError):
            if isinstance(action, BashInterruptAction):
                return await session.interrupt(action)
            return await session.run(action)

    @override
    @in_event_loop
    async def close_session(self, request: CloseSessionRequest) -> CloseSessionResponse:
        session = self._session(request.session)
        del self._sessions[request.session]
        with infrastructure(DeploymentGoneError):
            await session.close()
        return CloseBashSessionResponse()

    def _session(self, name: str) -> BashSession:
        if name not in self._sessions:
            raise SessionDoesNotExistError(f"session {name!r} does not exist")
        return self._sessions[name]

    @override
    @in_event_loop
    async def execute(self, command: Command) -> CommandResponse:
        """Run a program, or a line for /bin/sh, as `subprocess.run` does.

        Raises:
            CommandTimeoutError: it took longer than `timeout`.
            NonZeroExitCodeError: it failed, and `check` was asked for.
            OSError: it can't be started.
        """
        argv = [command.command] if isinstance(command.command, str) else command.command
        with infrastructure(DeploymentGoneError):
            result = await self.held.slot.exec(
                ["/bin/sh", "-c", *argv] if command.shell else argv,
                timeout_s=command.timeout,
                workdir=self.held.path(command.cwd or "."),
                env=command.env,
                clean_env=command.env is not None,
                user=self.held.user,
                split=True,
                concurrent=True,
            )
        response = response_of(result, command)
        if command.check and response.exit_code != 0:
            reason = f"{command.command!r} ended with exit code {response.exit_code}; {response!r}"
            raise NonZeroExitCodeError(f"{command.error_msg}: {reason}" if command.error_msg else reason)
        return response

    @override
    @in_event_loop
    async def read_file(self, request: ReadFileRequest) -> ReadFileResponse:
        with infrastructure(DeploymentGoneError):
            data = await self.held.slot.read_file(self.held.path(request.path), user=self.held.user)
        reader = io.TextIOWrapper(io.BytesIO(data), encoding=request.encoding or "utf-8", errors=request.errors)
        return ReadFileResponse(content=reader.read())

    @override
    @in_event_loop
    async def write_file(self, request: WriteFileRequest) -> WriteFileResponse:
        with infrastructure(DeploymentGoneError):
            await self.held.slot.write_file(self.held.path(request.path), request.content, user=self.held.user)
        return WriteFileResponse()

    @override
    @in_event_loop
    async def upload(self, request: UploadRequest) -> UploadResponse:
        target = self.held.path(request.target_path)
        with infrastructure(DeploymentGoneError):
            await self.held.slot.upload(request.source_path, target)
            if self.held.user is not None:
                await self.held.slot.exec(["chown", "-R", self.held.user, target], user="0:0")
        return UploadResponse()

    @override
    @in_event_loop
    async def close(self) -> CloseResponse:
        """End all sessions; the slot is the deployment's."""
        sessions, self._sessions = self._sessions, {}
        with infrastructure(DeploymentGoneError):
            for session in sessions.values():
                await session.close()
        return CloseResponse()


def response_of(result: ExecResult, command: Command) -> CommandResponse:
    """How a command ended, as SWE-ReX wants it.

    Raises:
        CommandTimeoutError: it took too long.
        OSError: it never ran.
    """
    if result.timed_out:
        raise CommandTimeoutError(f"Timeout ({time_limit(result, command.timeout)}) exceeded while running command")
    if result.error is not None:
        code, _, message = result.error.partition(": ")
        raise {"not_found": FileNotFoundError, "permission": PermissionError}.get(code, OSError)(message)
    code = CANNOT_EXECUTE if result.exit_code is None else result.exit_code
    if command.merge_output_streams:
        return CommandResponse(stdout=result.output, exit_code=code)
    return CommandResponse(stdout=result.stdout or "", stderr=result.stderr or "", exit_code=code)


class AtroposDeployment(AbstractDeployment):
    """A slot from `start` to `stop`; deployments of a process with the same settings share a pool.

    The pool has an event loop of its own: SWE-agent, like most hosts of SWE-ReX, starts one for each call.
    """

    _runtime: AtroposRuntime | None = None

    def __init__(self, *, logger: logging.Logger | None = None, **kwargs: Any) -> None:
        """Args are those of `AtroposDeploymentConfig`."""
        self.logger = logger or get_logger("rex-deploy")
        self._config = AtroposDeploymentConfig(**kwargs)
        self._hooks = CombinedDeploymentHook()

    @classmethod
    def from_config(cls, config: AtroposDeploymentConfig) -> AtroposDeployment:
        """A deployment with these settings."""
        return cls(**config.model_dump())

    @override
    def add_hook(self, hook: DeploymentHook) -> None:
        self._hooks.add_hook(hook)

    @override
    async def is_alive(self, *, timeout: float | None = None) -> IsAliveResponse:
        return await self.runtime.is_alive(timeout=timeout)

    @override
    async def start(self) -> None:
        """Lease a slot.

        Raises:
            DeploymentStartupError: there is none; nothing is known about the task.
        """
        if self._runtime is not None:
            raise DeploymentStartupError("the deployment was started already")
        self._hooks.on_custom_step("Leasing a slot")
        with infrastructure(DeploymentStartupError):
            await self._lease()

    @in_event_loop
    async def _lease(self) -> None:
        held = await lease_until_exit(self._config, "swerex")
        self._runtime = AtroposRuntime(held, logger=self.logger)

    @override
    async def stop(self) -> None:
        """Give the slot back, with all that runs in it; a cancellation stops the wait for it. Idempotent."""
        runtime, self._runtime = self._runtime, None
        if runtime is not None:
            await release_and_wait(runtime.held)

    @override
    def __del__(self) -> None:
        if self._runtime is not None:
            release(self._runtime.held)

    @property
    @override
    def runtime(self) -> AtroposRuntime:
        """The runtime.

        Raises:
            DeploymentNotStartedError: the deployment is not running.
        """
        if self._runtime is None:
            raise DeploymentNotStartedError
        return self._runtime
