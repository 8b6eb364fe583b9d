"""`AgentEnv`: an env whose trajectories are runs of `AtroposAgent` with sandbox tools."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import cast

from atropos.agent import AgentConfig, AgentResult, AtroposAgent, ExecuteTool
from atropos.envs.adapter import Item
from atropos.envs.config import AgentEnvConfig
from atropos.envs.running import verification
from atropos.envs.running.changes import WorkspaceChanges
from atropos.envs.running.hooks import run_hook
from atropos.envs.running.rollout import HookError, Rollout, TaskFault, checked_score, checked_text
from atropos.envs.sandbox_env import ExecTool, GroupMember, SandboxEnv
from atropos.errors import ConfigError
from atropos.slots import Snapshot
from atropos.tools import ToolRegistry, build_tool_registry


class AgentEnv(SandboxEnv):
    """Implement `build_task`, `get_next_item` and `score_trajectory` or `verify_and_score_trajectory`.

    A trajectory is `setup_trajectory_workspace`, the agent's work, and `verify_and_score_trajectory` in the same
    workspace; then the slot is reset.
    """

    name = "agent_env"
    opens_view = True
    """Whether the view is opened here; False in a subclass that opens it itself."""
    env_config_cls = AgentEnvConfig
    config: AgentEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    # ------------------------------------------------------------------------------------------------------- hooks

    def build_task(self, item: Item) -> str:
        """The user's message for an item."""
        raise NotImplementedError(f"{type(self).__name__} must define build_task(item) -> str")

    async def score_trajectory(self, item: Item, final_response: str) -> float:
        """The score of a final answer, for envs that don't check the workspace."""
        raise NotImplementedError(f"{type(self).__name__} must define score_trajectory(item, final_response) -> float")

    def missing_methods(self) -> list[str]:
        """As `SandboxEnv`'s, with the methods for the task and the score."""
        cls, missing = type(self), super().missing_methods()
        if cls.build_task is AgentEnv.build_task:
            missing.append("build_task(item)")
        scores = (cls.score_trajectory, cls.verify_and_score_trajectory)
        if scores == (AgentEnv.score_trajectory, AgentEnv.verify_and_score_trajectory):
            missing.append("score_trajectory(item, final_response) or verify_and_score_trajectory(...)")
        return missing

    def build_tools(self) -> ToolRegistry:
        """The tools of the configured toolsets."""
        config = self.config
        return build_tool_registry(config.enabled_toolsets, config.disabled_toolsets, config.tool_server_url)

    def build_agent_config(self, item: Item) -> AgentConfig:
        """Bounds and sampling for an item; by default the env's own settings."""
        return AgentConfig(
            max_steps=self.config.agent_max_steps,
            temperature=self.config.agent_temperature,
            max_tokens=self.config.agent_max_tokens,
            tool_delay_s=self.config.agent_tool_delay_s,
            context_tokens=self.context_tokens,
            model_timeout_s=self.config.model_timeout_s,
            model_retries=self.config.model_retries,
            system_prompt=self.config.agent_system_prompt,
            tool_call_parser=self.config.agent_tool_parser,
            max_result_chars=self.config.agent_max_result_chars,
        )

    async def setup_trajectory_workspace(
        self, item: Item, *, trajectory_id: str, exec_tool: ExecTool
    ) -> Mapping[str, object]:
        """Prepare the slot before the agent gets it. The return value is kept with the trajectory."""
        return {}

    async def setup_group_workspace(self, item: Item, *, exec_tool: ExecTool) -> None:
        """Override to prepare a workspace once for a group, whose trajectories start as forks of it."""

    async def verify_and_score_trajectory(
        self, item: Item, final_response: str, *, trajectory_id: str, exec_tool: ExecTool, agent_result: AgentResult
    ) -> tuple[float, Mapping[str, object]]:
        """Score in the agent's workspace, before it is reset. The default calls `score_trajectory`."""
        return await run_hook(lambda: self.score_trajectory(item, final_response)), {}

    # -------------------------------------------------------------------------------------------------- the loop

    async def setup(self) -> None:
        """As `SandboxEnv`'s, after a check of the tokenizer's template."""
        renderer = self.renderer
        try:
            renderer.prompt([{"role": "system", "content": "x"}, {"role": "user", "content": "x"}])
        except Exception as error:  # templates may raise any error
            raise ConfigError(
                f"env.tokenizer_name: the chat template of {self.config.tokenizer_name!r} takes no system message, in "
                f"which tools are described ({error}); name another model's tokenizer, or use HermesAgentBaseEnv"
            ) from error
        await super().setup()

    async def prepare_group(self, item: Item, group: str) -> Snapshot | None:
        """A snapshot of the workspace that `setup_group_workspace` prepared, if it is overridden."""
        if type(self).setup_group_workspace is AgentEnv.setup_group_workspace:
            return None
        tools = self.hook_tools(group, setup=True)
        return await self.frozen_workspace(
            group, "setup_group_workspace", lambda: self.setup_group_workspace(item, exec_tool=tools), tools
        )

    async def run_trajectory(self, item: Item, trajectory_id: str, member: GroupMember) -> Rollout:
        """Set up, act, verify; see `SandboxEnv.run_trajectory`."""
        started = time.perf_counter()
        info = await self._call_workspace_setup(item, trajectory_id)
        task = checked_text(await self.hooks.call("build_task", lambda: self.build_task(item)), "build_task")
        config = await self.hooks.call("build_agent_config", lambda: self.build_agent_config(item))
        set_up = time.perf_counter()
        changes = WorkspaceChanges(self.executor, trajectory_id, wanted=self.config.records_changes)
        agent = self._agent(config, changes.watched(partial(self.execute_tool, trajectory_id)), member.seed)
        with self.hooks.guard("the agent"):
            result = await self.act(agent, item, task, trajectory_id)
        changed = await changes.since_start()
        self.metrics.tool_errors += result.tool_errors
        acted = time.perf_counter()
        score, details = await self._call_verification(item, trajectory_id, task, result)
        info = _plain({**info, **details})
        return Rollout.of(trajectory_id, result, score, (started, set_up, acted), info=info, changes=changed)

    async def _call_workspace_setup(self, item: object, trajectory_id: str) -> Mapping[str, object]:
        preparing = self.hook_tools(trajectory_id, setup=True)
        info = await self.hooks.call(
            "setup_trajectory_workspace",
            lambda: self.setup_trajectory_workspace(item, trajectory_id=trajectory_id, exec_tool=preparing),
            calls=preparing,
            setup=True,
        )
        if info is not None and not isinstance(info, dict):  # pyright: ignore[reportUnnecessaryIsInstance, reportUnnecessaryComparison] - an env's own
            raise TaskFault(f"setup_trajectory_workspace must return a dict, not {info!r:.100}")
        if self.opens_view and type(self).setup_trajectory_workspace is not AgentEnv.setup_trajectory_workspace:
            await verification.settle(self.executor, trajectory_id, self.config)
        return info or {}

    async def _call_verification(
        self, item: object, trajectory_id: str, task: str, result: AgentResult
    ) -> tuple[float, dict[str, object]]:
        texts = None
        if self.opens_view and type(self).verify_and_score_trajectory is not AgentEnv.verify_and_score_trajectory:
            texts = await verification.begin(self.executor, trajectory_id, self.config, task)
        verifying = self.hook_tools(trajectory_id, texts=texts)
        verdict = await self.hooks.call(
            "verify_and_score_trajectory",
            lambda: self.verify_and_score_trajectory(
                item,
                result.final_response,
                trajectory_id=trajectory_id,
                exec_tool=verifying,
                agent_result=result,
            ),
            calls=verifying,
        )
        with self.hooks.guard("verify_and_score_trajectory"):  # a value's own __float__ and __repr__ may raise anything
            return _verdict(verdict)

    async def act(self, agent: AtroposAgent, item: Item, task: str, trajectory_id: str) -> AgentResult:
        """The agent's part of a trajectory."""
        return await agent.run(task)

    def _agent(self, config: AgentConfig, run: ExecuteTool, seed: int | None) -> AtroposAgent:
        if seed is not None and config.seed is None:
            config = replace(config, seed=seed)
        return AtroposAgent(self.server, self.tokenizer, self.executor.tools, config, run, renderer=self.renderer)

    async def run_agent(self, task: str, *, trajectory_id: str | None = None) -> tuple[str, dict[str, object]]:
        """Run the agent on a task, without scoring: for evaluations and experiments.

        Args:
            task: the user's message.
            trajectory_id: a workspace to use, as in a hook, which the caller releases; None: a new one, released here.

        Returns:
            The final answer, and `success`, `error` (the bound that ended it), `tool_calls`.

        Raises:
            SandboxError, InferenceError: the infrastructure failed; this says nothing about the model.
        """
        own = trajectory_id is None
        identity = trajectory_id or f"run-{uuid.uuid4().hex[:12]}"
        exec_tool = partial(self.execute_tool, identity)
        async with self.backend.admission if own else contextlib.nullcontext():
            try:
                result = await self._agent(self.build_agent_config(None), exec_tool, self.config.seed).run(task)
            finally:
                if own:
                    await self.executor.release_trajectory(identity)
        facts: dict[str, object] = {
            "success": result.success,
            "error": result.error,
            "tool_calls": result.total_tool_calls,
        }
        return result.final_response, facts


def _verdict(value: object) -> tuple[float, dict[str, object]]:
    hook = "verify_and_score_trajectory"
    if not isinstance(value, tuple) or len(cast("tuple[object, ...]", value)) != 2:
        raise HookError(f"{hook} must return (score, dict), not {value!r:.100}")
    score, details = cast("tuple[object, object]", value)
    if not isinstance(details, dict):
        raise HookError(f"{hook} must return (score, dict); its second part is {type(details).__name__}")
    return checked_score(score, hook), cast("dict[str, object]", details)


def _plain(info: dict[str, object]) -> dict[str, object]:
    """The JSON form of `info`, as the JSONL has it.

    Raises:
        HookError: it can't be encoded.
    """
    try:
        return cast("dict[str, object]", json.loads(json.dumps(info, default=str)))
    except Exception as error:  # a value's own __str__ may raise anything
        raise HookError(f"verify_and_score_trajectory: what it returned can't be written as JSON: {error}") from error
