"""`HermesAgentBaseEnv`: OpenAI-style tool use, and reward functions that use the rollout's own slot.

    class MyEnv(HermesAgentBaseEnv):
        name = "my_env"

        async def setup(self):
            self.rows = self.load_rows()

        async def get_next_item(self):
            return next(self.rows, None)

        def format_prompt(self, item):
            return item["prompt"]

        async def compute_reward(self, item, result, ctx):
            return float(ctx.terminal("pytest -q")["exit_code"] == 0)

Groups, retries, admission, `process`, `serve` and `evaluate` are those of `SandboxEnv`, as for `AgentEnv`. It is
stricter than its forerunner: an unknown parser is refused, a reward function that raises drops the group instead of
scoring 0, and an answer without any message is an inference failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import asdict

from atropos.agent import AgentConfig, AtroposAgent, ExecuteTool
from atropos.agent.model import EXACT, server_type
from atropos.aio import Tasks
from atropos.envs.adapter import Item, ServerConfigs
from atropos.envs.hermes.bridge import body as bridge_body
from atropos.envs.hermes.bridge import bridged
from atropos.envs.hermes.config import HermesAgentEnvConfig
from atropos.envs.hermes.data import load_rows
from atropos.envs.hermes.dialect import OpenAIDialect
from atropos.envs.hermes.result import HermesResult
from atropos.envs.hermes.tool_context import ToolContext
from atropos.envs.running import verification
from atropos.envs.running.changes import WorkspaceChanges
from atropos.envs.running.hooks import HOOK_CODE
from atropos.envs.running.rollout import HookError, Rollout, checked_score, checked_text
from atropos.envs.sandbox_env import GroupMember, SandboxEnv
from atropos.errors import ConfigError, LeaseExpired
from atropos.slots import Snapshot
from atropos.tools import ToolCall, ToolRegistry, ToolResult, build_tool_registry
from atropos.tools.registry import toolsets_of
from atropos.tools.toolsets import EXTERNAL, get_distribution

KEPT_ERRORS = 200
"""Tool errors kept for wandb, the latest."""
DIALECTS_KEPT = 64
"""Most sets of tools whose dialect is cached."""

HOOK_CODE.add(bridge_body.__code__)

_log = logging.getLogger(__name__)


class HermesAgentBaseEnv(SandboxEnv):
    """Implement `setup`, `get_next_item`, `format_prompt` and `compute_reward`; see the module."""

    name = "hermes_agent_env"
    env_config_cls = HermesAgentEnvConfig
    config: HermesAgentEnvConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Run a subclass's `setup` after the base's, whether or not it calls `super().setup()`."""
        super().__init_subclass__(**kwargs)
        own = cls.__dict__.get("setup")
        if own is not None:
            cls.setup = _after_base_setup(own)  # pyright: ignore[reportAttributeAccessIssue]

    def __init__(
        self, config: HermesAgentEnvConfig, server_configs: ServerConfigs, slurm: bool = False, testing: bool = False
    ) -> None:
        super().__init__(config, server_configs, slurm, testing)
        if config.extra_body and server_type(self.server) in EXACT:
            raise ConfigError("env.extra_body: only OpenAI-compatible servers take it; remove it for vllm and sglang")
        if config.enabled_toolsets is None and config.distribution is None:
            _log.warning("enabled_toolsets is not set: the model is offered all tools")
        self._draw = secrets.token_hex(8) if config.seed is None else str(config.seed)
        self._calls = asyncio.Semaphore(config.tool_pool_size)
        self._rewards = asyncio.Semaphore(config.tool_pool_size)
        self._base_is_set_up = False
        self._dialects: dict[tuple[str, ...], OpenAIDialect] = {}
        self._tool_errors_count = 0
        self._tool_errors: deque[dict[str, object]] = deque(maxlen=KEPT_ERRORS)

    # ------------------------------------------------------------------------------------------------------- hooks

    async def setup(self) -> None:
        """Load data and the like. Inference, slots and tools are ready."""
        await self._set_up_base()

    def format_prompt(self, item: Item) -> str:
        """The user's message for an item; by default the row's `prompt_field`."""
        name, cure = self.config.prompt_field, "name another, or define format_prompt"
        try:
            value = item[name]
        except (KeyError, TypeError, IndexError):
            raise ConfigError(f"prompt_field: the item has no {name!r}; {cure}") from None
        if not isinstance(value, str | int | float):  # a row without one, or a conversation
            raise HookError(f"prompt_field: {name!r} of the item is {type(value).__name__}, and no text; {cure}")
        return str(value)

    async def compute_reward(self, item: Item, result: HermesResult, ctx: ToolContext) -> float:
        """The rollout's reward. `ctx.terminal(...)` and the other methods work with and without `await`.

        Raises:
            Exception: any exception drops the group; it is never a score.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute_reward(item, result, ctx) -> float")

    async def setup_group(self, item: Item, ctx: ToolContext) -> None:
        """Override to prepare a workspace once for a group, whose rollouts start as forks of it."""

    async def setup_rollout(self, item: Item, ctx: ToolContext) -> None:
        """Override to prepare each rollout's workspace before the model gets it."""

    def missing_methods(self) -> list[str]:
        """As `SandboxEnv`'s, with the reward."""
        undefined = type(self).compute_reward is HermesAgentBaseEnv.compute_reward
        return super().missing_methods() + ["compute_reward(item, result, ctx)"] * undefined

    # -------------------------------------------------------------------------------------------------- the loop

    def item_name(self, item: Item) -> str:
        """As `SandboxEnv`'s; a row without a name is named after the beginning of its prompt."""
        if isinstance(item, dict) and not {"name", "id", "task_id", "task"} & {*item}:
            prompt = item.get(self.config.prompt_field)
            if isinstance(prompt, str):
                return " ".join(prompt.split())[:40]
        return super().item_name(item)

    def load_rows(self) -> Iterator[dict[str, object]]:
        """The rows of `dataset_name`, once through.

        Raises:
            ConfigError: it isn't set, or can't be loaded.
        """
        if self.config.dataset_name is None:
            raise ConfigError("dataset_name: not set; give a file, a folder, a JSON list or a dataset's name")
        return iter(load_rows(self.config.dataset_name, self.config.dataset_split))

    def build_tools(self) -> ToolRegistry:
        """Every tool that a group may get."""
        config = self.config
        enabled = config.enabled_toolsets
        if config.distribution is not None:
            enabled = [name for name, share in get_distribution(config.distribution).probabilities.items() if share > 0]
            if config.tool_server_url is None:
                enabled = self._without_external(enabled)
        return build_tool_registry(
            ["all"] if enabled is None else enabled, config.disabled_toolsets, config.tool_server_url
        )

    def _without_external(self, names: list[str]) -> list[str]:
        own = [name for name in names if name not in EXTERNAL]
        if not own:
            raise ConfigError(
                f"distribution: {self.config.distribution!r} has only external toolsets ({', '.join(names)}); set "
                "tool_server_url to a ToolServer's URL or 'inprocess'"
            )
        if len(own) < len(names):
            dropped = ", ".join(name for name in names if name in EXTERNAL)
            _log.warning(
                "distribution %s: without tool_server_url, these are never drawn: %s", self.config.distribution, dropped
            )
        return own

    def chat_options(self, tools: ToolRegistry) -> dict[str, object]:
        """The tools, and `extra_body`."""
        return self._dialect(tools).chat_options(AgentConfig(), 1)

    def tools_of(self, group: str) -> ToolRegistry:
        """The tools of a group's rollouts: the same for all of them, drawn once for each group."""
        every = self.executor.tools
        if self.config.distribution is None:
            return every
        drawn = {*get_distribution(self.config.distribution).among(every.toolsets).sample(f"{self._draw}/{group}")}
        return ToolRegistry(tool for tool in every if drawn & toolsets_of(tool))

    async def prepare_group(self, item: Item, group: str) -> Snapshot | None:
        """A snapshot of the workspace that `setup_group` prepared, if it is overridden."""
        if type(self).setup_group is HermesAgentBaseEnv.setup_group:
            return None
        ctx = ToolContext(self.executor, group, limit=self._calls, setup=True)
        return await self.frozen_workspace(
            group, "setup_group", lambda: bridged(lambda: self.setup_group(item, ctx)), ctx
        )

    async def run_trajectory(self, item: Item, trajectory_id: str, member: GroupMember) -> Rollout:
        """Set up, act, reward; see `SandboxEnv.run_trajectory`."""
        started = time.perf_counter()
        tools = self.tools_of(member.group)
        if type(self).setup_rollout is not HermesAgentBaseEnv.setup_rollout:
            await self._call_rollout_setup(item, trajectory_id)
            await verification.settle(self.executor, trajectory_id, self.config)
        prompt = checked_text(await self.hooks.call("format_prompt", lambda: self.format_prompt(item)), "format_prompt")
        changes = WorkspaceChanges(self.executor, trajectory_id, wanted=self.config.records_changes)
        async with self._lifetime_of(trajectory_id) as execute:
            agent = AtroposAgent(
                self.server,
                self.tokenizer,
                tools,
                self._agent_config(member),
                self._offered(tools, changes.watched(execute)),
                dialect=self._dialect(tools),
            )
            set_up = time.perf_counter()
            with self.hooks.guard("the agent"):
                result = HermesResult(await agent.run(prompt))
            changed = await changes.since_start()
        acted = time.perf_counter()
        self._record_errors(result)
        texts = await verification.begin(self.executor, trajectory_id, self.config, prompt)
        ctx = ToolContext(self.executor, trajectory_id, limit=self._calls, texts=texts)
        score = await self._call_reward(item, result, ctx)
        info: dict[str, object] = {
            "toolsets": list(tools.names),
            "reasoning": [text is not None for text in result.reasoning_per_turn],
            "tool_errors": [asdict(error) for error in result.tool_errors],
        }
        rollout = Rollout.of(trajectory_id, result.run, score, (started, set_up, acted), info=info, changes=changed)
        rollout.stop_reason = result.stop_reason
        return rollout

    async def _call_rollout_setup(self, item: object, trajectory_id: str) -> None:
        ctx = ToolContext(self.executor, trajectory_id, limit=self._calls, setup=True)
        await self.hooks.call(
            "setup_rollout", lambda: bridged(lambda: self.setup_rollout(item, ctx)), calls=ctx, setup=True
        )

    async def _call_reward(self, item: object, result: HermesResult, ctx: ToolContext) -> float:
        async with self._rewards:
            reward = await self.hooks.call(
                "compute_reward", lambda: bridged(lambda: self.compute_reward(item, result, ctx)), calls=ctx
            )
        with self.hooks.guard("compute_reward"):  # a value's own __float__ and __repr__ may raise anything
            return checked_score(reward, "compute_reward")

    def _dialect(self, tools: ToolRegistry) -> OpenAIDialect:
        """The dialect for these tools, made once for each set of tools."""
        key = tuple(tools.names)
        if key not in self._dialects:
            if len(self._dialects) >= DIALECTS_KEPT:
                self._dialects.clear()
            config = self.config
            self._dialects[key] = OpenAIDialect(
                self.tokenizer, tools.schemas(), config.tool_call_parser, extra_body=config.extra_body
            )
        return self._dialects[key]

    def _offered(self, tools: ToolRegistry, execute: ExecuteTool) -> ExecuteTool:
        """`execute`, which refuses tools that this group doesn't have."""

        async def run(call: ToolCall) -> ToolResult:
            if call.name in tools:
                return await execute(call)
            self.metrics.calls += 1
            return ToolResult.failure(tools.unknown(call.name))

        return run

    def _agent_config(self, member: GroupMember) -> AgentConfig:
        config = self.config
        return AgentConfig(
            max_steps=config.max_agent_turns,
            temperature=config.agent_temperature,
            context_tokens=self.context_tokens,
            system_prompt=config.system_prompt,
            tool_call_parser=config.tool_call_parser,
            model_timeout_s=config.model_timeout_s,
            model_retries=config.model_retries,
            seed=member.seed,
        )

    @contextlib.asynccontextmanager
    async def _lifetime_of(self, trajectory_id: str) -> AsyncGenerator[ExecuteTool]:
        """A function that runs calls; a slot that is idle for longer than `terminal_lifetime` is released."""
        idle_s = self.config.terminal_lifetime
        timer: asyncio.TimerHandle | None = None
        release: asyncio.Task[None] | None = None
        tasks = Tasks(trajectory_id)
        loop = asyncio.get_running_loop()

        def expire() -> None:
            nonlocal release
            release = tasks.spawn(self.executor.release_trajectory(trajectory_id), "release")

        async def execute(call: ToolCall) -> ToolResult:
            nonlocal timer
            if timer is not None:
                timer.cancel()
            if release is not None:
                raise LeaseExpired(
                    f"{trajectory_id}: its slot was idle for more than terminal_lifetime ({idle_s:g} s) and is gone"
                )
            async with self._calls:
                result = await self.execute_tool(trajectory_id, call)
            timer = loop.call_later(idle_s, expire)
            return result

        try:
            yield execute
            if release is not None:
                raise LeaseExpired(f"{trajectory_id}: its slot was idle for more than {idle_s:g} s and is gone")
        finally:
            if timer is not None:
                timer.cancel()
            await tasks.settle(None)

    async def _set_up_base(self) -> None:
        """Set up inference and the tool backend, once."""
        if not self._base_is_set_up:
            self._base_is_set_up = True
            await super().setup()

    # -------------------------------------------------------------------------------------------------------- wandb

    def _record_errors(self, result: HermesResult) -> None:
        self.metrics.tool_errors += result.tool_errors_count
        self._tool_errors_count += result.tool_errors_count
        self._tool_errors.extend(asdict(error) for error in result.tool_errors)

    async def wandb_log(self, wandb_metrics: Mapping[str, object] | None = None) -> None:
        """As `SandboxEnv`'s, with the tool errors since the last call."""
        metrics = dict(wandb_metrics or {})
        metrics["train/tool_errors_count"] = self._tool_errors_count
        if self._tool_errors:
            metrics["train/tool_error_details"] = json.dumps(list(self._tool_errors), ensure_ascii=False)
        self._tool_errors_count = 0
        self._tool_errors.clear()
        await super().wandb_log(metrics)


def _after_base_setup(
    own: Callable[[HermesAgentBaseEnv], Awaitable[None] | None],
) -> Callable[[HermesAgentBaseEnv], Coroutine[object, object, None]]:
    @functools.wraps(own)
    async def setup(self: HermesAgentBaseEnv) -> None:
        await self._set_up_base()  # pyright: ignore[reportPrivateUsage]
        await self.hooks.call("setup", lambda: own(self))

    return setup
