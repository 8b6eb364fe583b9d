"""Slots as sandboxes of Tinker's cookbook: `AtroposDatasetBuilder` is its `HarborDatasetBuilder` on slots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos.adapters.extras import extra

with extra("tinker-cookbook"):
    import chz
    from tinker_cookbook.recipes.harbor_rl.harbor_env import HarborDatasetBuilder, HarborEnvGroupBuilder
    from tinker_cookbook.renderers.base import Message
    from tinker_cookbook.rl.message_env import EnvFromMessageEnv
    from tinker_cookbook.rl.types import Env
    from tinker_cookbook.sandbox import SandboxInterface, SandboxResult, SandboxTerminatedError
    from tinker_cookbook.tool_use.agent_tool_message_env import AgentToolMessageEnv, RewardFn

from typing_extensions import override

from atropos.adapters.process_slots import lease_until_exit, release_and_wait
from atropos.adapters.sharing import CANNOT_EXECUTE, HeldSlot, SlotRequest, infrastructure, shell_code, time_limit
from atropos.event_loop import in_event_loop
from atropos.tasks.folder import load_task

OUTPUT_BYTES = 128 * 1024
"""Most of each stream of a command, where a call names no other number; as the cookbook's own sandbox."""
TIMED_OUT = -1
"""Exit code of what took too long, as the cookbook's own sandbox has it."""


class TinkerSandbox(SandboxInterface):
    """One slot, from its factory until `cleanup`. A lost one raises `SandboxTerminatedError`, whatever it is asked."""

    def __init__(self, held: HeldSlot) -> None:
        self._held = held

    @property
    @override
    def sandbox_id(self) -> str:
        """The lease's id."""
        return self._held.slot.lease.lease_id

    @override
    @in_event_loop
    async def send_heartbeat(self, timeout: int = 30) -> None:
        """See whether the slot is there; it needs nothing to stay."""
        with infrastructure(SandboxTerminatedError):
            await self._held.slot.check_alive()

    @override
    @in_event_loop
    async def run_command(
        self, command: str, workdir: str | None = None, timeout: int = 60, max_output_bytes: int | None = None
    ) -> SandboxResult:
        """Run a command line for bash."""
        held, most = self._held, OUTPUT_BYTES if max_output_bytes is None else max_output_bytes
        with infrastructure(SandboxTerminatedError):
            result = await held.slot.exec(
                ["bash", "-lc", command],
                timeout_s=timeout,
                workdir=workdir or held.folder,
                user=held.user,
                split=True,
                concurrent=True,
            )
        stdout, stderr = (
            stream[:most].decode(errors="replace")
            for stream in (result.stdout_bytes or b"", result.stderr_bytes or b"")
        )
        if result.timed_out:
            late = f"{stderr}took longer than {time_limit(result, timeout)}\n"
            return SandboxResult(stdout=stdout, stderr=late, exit_code=TIMED_OUT)
        if result.exit_code is None:
            return SandboxResult(stdout="", stderr=result.error or "", exit_code=CANNOT_EXECUTE)
        return SandboxResult(stdout=stdout, stderr=stderr, exit_code=shell_code(result.exit_code))

    @override
    @in_event_loop
    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        """A file's content, as what a command that prints it would give."""
        held = self._held
        try:
            with infrastructure(SandboxTerminatedError):
                data = await held.slot.read_file(held.path(path), user=held.user)
        except OSError as error:
            return SandboxResult(stdout="", stderr=f"{error.strerror or error}\n", exit_code=1)
        return SandboxResult(stdout=data[:max_bytes].decode(errors="replace"), stderr="", exit_code=0)

    @override
    @in_event_loop
    async def write_file(
        self, path: str, content: str | bytes, executable: bool = False, timeout: int = 60
    ) -> SandboxResult:
        """Write a file, making its parents."""
        held = self._held
        try:
            with infrastructure(SandboxTerminatedError):
                await held.slot.write_file(held.path(path), content, 0o755 if executable else 0o644, user=held.user)
        except OSError as error:
            return SandboxResult(stdout="", stderr=f"{error.strerror or error}\n", exit_code=1)
        return SandboxResult(stdout="", stderr="", exit_code=0)

    @override
    async def cleanup(self) -> None:
        """Give the slot back, with all that runs in it."""
        await release_and_wait(self._held)


class AtroposSandboxes:
    """A `sandbox_factory`: each sandbox is a slot on the image of its task.

    Args:
        settings: fields of `SlotRequest`, but for `image`.
    """

    def __init__(self, **settings: Any) -> None:
        self._request = SlotRequest(**settings)

    @in_event_loop
    async def __call__(self, env_dir: Path, timeout: int) -> TinkerSandbox:  # noqa: ARG002
        """Build a task's image, unless that is done, and lease a slot on it; how long it lives is its holder's.

        Raises:
            SandboxTerminatedError: there is none.
            ConfigError, TaskBroken: the task is wrong.
        """
        shared = self._request.shared()
        with infrastructure(SandboxTerminatedError):
            pool = await shared.enter()
            try:
                task = load_task(env_dir.parent, architecture=pool.architecture)
                image = await pool.prepare(task)
                assert image is not None
                wants = task.config.environment
                request = self._request.model_copy(update={"image": image.source})
                request = request.with_gpus(wants.wanted_gpus, wants.gpu_types)
                return TinkerSandbox(await lease_until_exit(request, "tinker-cookbook"))
            finally:
                await shared.leave()


class _Graded:
    """A reward that is one only where the sandbox still is: the cookbook's grader gives 0 for one that is lost."""

    def __init__(self, grade: RewardFn, sandbox: TinkerSandbox) -> None:
        self._grade = grade
        self._sandbox = sandbox

    async def __call__(self, history: list[Message]) -> tuple[float, dict[str, float]]:
        graded = await self._grade(history)
        await self._sandbox.send_heartbeat()
        return graded


class AtroposEnvGroupBuilder(HarborEnvGroupBuilder):
    """The cookbook's, whose trajectories have an error in the place of a reward where a sandbox was lost."""

    @override
    async def make_envs(self) -> Sequence[Env]:
        try:
            envs = await super().make_envs()
        except BaseException:
            await self.cleanup()
            raise
        for env, sandbox in zip(envs, self._sandboxes, strict=True):
            assert isinstance(env, EnvFromMessageEnv)
            assert isinstance(env.message_env, AgentToolMessageEnv)
            assert isinstance(sandbox, TinkerSandbox)
            env.message_env.reward_fn = _Graded(env.message_env.reward_fn, sandbox)
        return envs


@chz.chz
class AtroposDatasetBuilder(HarborDatasetBuilder):
    """The cookbook's `HarborDatasetBuilder`; `sandbox_factory` is an `AtroposSandboxes`."""

    def _make_env_group_builders(self, group_size: int) -> list[HarborEnvGroupBuilder]:
        builders = super()._make_env_group_builders(group_size)
        for builder in builders:
            builder.__class__ = AtroposEnvGroupBuilder
        return builders
