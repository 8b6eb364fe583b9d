"""The frame of every env on sandbox slots: groups, faults, admission, `process`, `serve`, `evaluate`, and their ends.

A subclass says what one trajectory is (`run_trajectory`). The frame runs groups of them, tries a trajectory again after
an infrastructure failure, and drops a group whole when one of its members can't be completed (truth 4).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from atropos.agent import PromptTooLong, TurnRenderer, seed_for
from atropos.agent.model import EXACT
from atropos.envs import cli as command_line
from atropos.envs.adapter import (
    APIServerConfig,
    BaseEnv,
    ServerBaseline,
    check_run_api,
    check_tokenizer,
    leave_run_api,
    prepare_server_configs,
    prepare_servers,
    probe_servers,
    quiet_logging,
    server_types,
    stop_servers,
)
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.lifecycle import Lifetime, bounded, cancel_and_wait
from atropos.envs.metrics import EnvMetrics
from atropos.envs.replay import write_page
from atropos.envs.rollout import GroupDropped, GroupsDropped, HookError, Rollout, drop_reason, scored_group
from atropos.errors import ConfigError, InferenceError, IsolationUnavailable, NotSupported, SandboxError
from atropos.slots import SlotPool
from atropos.tools import ToolCall, ToolExecutor, ToolRegistry, ToolResult

ExecTool = Callable[[ToolCall], Awaitable[ToolResult]]
"""Runs one tool call in the trajectory's slot."""
NOT_RETRIED = (IsolationUnavailable, NotSupported)
"""Another slot would not help."""

DROPPED_IN_A_ROW = 20
"""Groups dropped one after the other, none completed between, that end a run; from half of it on it slows down."""
HOPELESS_IN_A_ROW = 3
"""The same for what another slot can't cure."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Event:
    """Something that happened, for a progress display. `kind`: trajectory, group, dropped, retry."""

    kind: str
    item: str
    rollout: Rollout | None = None
    rollouts: tuple[Rollout, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class Member:
    """One place in a group.

    Attributes:
        group: unique name of the group in this process.
        index: place in the group, from 0.
        seed: for the model's requests; None: none is sent.
        snapshot: what the slot starts from; None: an empty workspace.
    """

    group: str
    index: int
    seed: int | None = None
    snapshot: Any = None


class SandboxEnv(BaseEnv):
    """See the module. Not used by itself: `AgentEnv` and `HermesAgentBaseEnv` extend it."""

    name: str | None = None
    env_config_cls: Any = SandboxEnvConfig
    config: Any

    def __init__(
        self,
        config: SandboxEnvConfig,
        server_configs: ServerBaseline | APIServerConfig | Sequence[APIServerConfig],
        slurm: bool = False,
        testing: bool = False,
    ) -> None:
        quiet_logging()
        check_tokenizer(config.tokenizer_name, field="env.tokenizer_name")
        if config.wandb_name is None:
            config.wandb_name = self.name or type(self).__name__
        servers = [] if testing else prepare_server_configs(server_configs, config.tokenizer_name)
        for server in servers:
            if server.server_type in EXACT and server.tokenizer_name != config.tokenizer_name:
                check_tokenizer(server.tokenizer_name, field="openai.tokenizer_name")
            if server.server_type == "trl":
                check_tokenizer(server.model_name, field="openai.model_name")
        self.jsonl_writer: Any = None
        try:
            super().__init__(config, cast("Any", server_configs if testing else servers), slurm=slurm, testing=testing)
        except OSError as error:
            raise ConfigError(f"env.tokenizer_name: {config.tokenizer_name!r} can't be loaded: {error}") from error
        prepare_servers(self.server)
        self.metrics = EnvMetrics()
        self.observers: list[Callable[[Event], None]] = []
        self.pool: SlotPool | None = None
        self._executor: ToolExecutor | None = None
        self._renderer: TurnRenderer | None = None
        self._admission = asyncio.Semaphore(config.capacity)
        self.lifetime = Lifetime()
        self._groups_begun = 0
        self._collecting: set[asyncio.Task[Any]] = set()
        self._wandb_started = False
        self._dropped_in_a_row = 0
        self._traced: set[tuple[str, type[Exception]]] = set()

    # --------------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    async def run_trajectory(self, item: Any, trajectory_id: str, member: Member) -> Rollout:
        """Run, verify and score one trajectory; its slot is released afterwards by the frame.

        Raises:
            SandboxError, InferenceError: the infrastructure failed; it is tried again.
            HookError: an env's own code failed; the group is dropped.
        """

    @abstractmethod
    def build_tools(self) -> ToolRegistry:
        """The tools that trajectories are offered.

        Raises:
            ConfigError: an unknown toolset.
        """

    async def setup_agent_env(self) -> None:
        """Load data and the like, once, before the first item. Inference and sandboxes are there already."""

    async def prepare_group(self, item: Any, group: str) -> Any:
        """What a group's trajectories start from: a snapshot, or None for an empty workspace."""
        return None

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing by default."""

    async def get_next_item(self) -> Any:
        """The next item, or None when there is none left."""
        raise NotImplementedError(f"{type(self).__name__} must define get_next_item()")

    def item_name(self, item: Any) -> str:
        """A short name of an item for people, file names and seeds."""
        if isinstance(item, dict):
            for key in ("name", "id", "task_id", "task"):
                value = cast("dict[str, Any]", item).get(key)
                if isinstance(value, str | int):
                    return str(value)[:80]
        named = getattr(item, "name", None)
        return named[:80] if isinstance(named, str) else str(item)[:40]

    @classmethod
    def config_init(cls) -> tuple[SandboxEnvConfig, list[APIServerConfig]]:
        """Default settings: atroposlib's first local port."""
        return cls.env_config_cls(), [APIServerConfig(base_url="http://localhost:9004/v1", api_key="x")]

    @classmethod
    def cli(cls) -> NoReturn:
        """The command line: serve, process, evaluate."""
        command_line.main(cls)

    # ------------------------------------------------------------------------------------------------ the backend

    @property
    def executor(self) -> ToolExecutor:
        """The tool executor; there from `setup` to shutdown."""
        if self._executor is None:
            raise RuntimeError("the tool backend is not running; call start_tool_backend() first")
        return self._executor

    @property
    def renderer(self) -> TurnRenderer:
        """The tokenizer's chat template, turn by turn."""
        if self._renderer is None:
            self._renderer = TurnRenderer(self.tokenizer)
        return self._renderer

    @property
    def exact_tokens(self) -> bool:
        """Whether the inference servers tell the tokens they sample."""
        return server_types(self.server) <= EXACT

    @property
    def context_tokens(self) -> int:
        """Most tokens of a trajectory: the env's bound, and less than what the trainer throws away."""
        if self.max_token_len > 0:
            return min(self.config.max_token_length, self.max_token_len - 1)
        return self.config.max_token_length

    async def setup(self) -> None:
        """Probe inference, then start the tool backend, then the env's own set-up."""
        tools = self.build_tools()
        _ = self.renderer
        await probe_servers(self.server, self.tokenizer, self.config.model_timeout_s)
        await self.start_tool_backend(tools)
        with self.hook("setup_agent_env"):
            await self.setup_agent_env()

    async def start_tool_backend(self, tools: ToolRegistry | None = None) -> None:
        """Start pool and executor; does nothing when they run."""
        if self._executor is not None:
            return
        registry = tools if tools is not None else self.build_tools()
        config = self.config.executor_config()
        app = None
        if config.tool_server_url == "inprocess":
            from importlib import import_module

            app = import_module("atropos.api.tool_server").create_app
        self.pool = SlotPool(self.config.pool_config())
        await self.pool.start()
        if config.allow_network:
            config = config.model_copy(update={"allow_network": await self._network(self.pool)})
        executor = ToolExecutor(pool=self.pool, tools=registry, config=config, tool_server_app=app)
        await executor.start()
        self._executor = executor

    async def _network(self, pool: SlotPool) -> bool:
        """Whether slots get egress. Where the backend has none, only an explicit wish for it is refused.

        Raises:
            ConfigError: `allow_network` was set and can't be had.
        """
        try:
            async with pool.lease("network-probe", network=True):
                return True
        except NotSupported as error:
            if "allow_network" in self.config.model_fields_set:
                raise ConfigError(f"env.allow_network: {error}; set --env.allow_network false") from error
            _log.warning("programs in slots have no network: %s", error)
            return False

    async def shutdown_tool_backend(self) -> None:
        """Release every trajectory and stop the containers. Idempotent."""
        executor, self._executor = self._executor, None
        pool, self.pool = self.pool, None
        if executor is not None:
            await bounded("the tool executor", executor.close(), 20)
        if pool is not None:
            await bounded("the slot pool", pool.stop(purge_job=self.config.purge_job_on_shutdown), 60)

    async def execute_tool(self, trajectory_id: str, call: ToolCall) -> ToolResult:
        """Run one call and measure it."""
        started = time.perf_counter()
        result = await self.executor.execute(trajectory_id, call)
        self.metrics.call_s.append(time.perf_counter() - started)
        self.metrics.calls += 1
        self.metrics.tool_errors += result.error is not None
        return result

    @contextlib.contextmanager
    def hook(self, name: str) -> Generator[None]:
        """Around an env's own code: what it raises is reported, counted and becomes a `HookError`, never a score."""
        try:
            yield
        except (SandboxError, InferenceError, ConfigError, HookError, PromptTooLong):
            raise
        except Exception as error:
            self.metrics.hook_errors[name] += 1
            if (name, type(error)) not in self._traced:  # the traceback once, the rest in a line each
                self._traced.add((name, type(error)))
                _log.exception("%s of %s failed", name, type(self).__name__)
            raise HookError(f"{name} raised {type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------------------------------------------ groups

    async def collect_trajectories(self, item: Any) -> tuple[Any, list[Any]]:
        """One whole group, or None when it can't be completed; see `SandboxEnv`."""
        task = asyncio.current_task()
        assert task is not None
        self._collecting.add(task)
        try:
            return await self._collect(item), []
        except asyncio.CancelledError:
            self.metrics.cancelled_groups += 1
            raise
        except ConfigError as error:
            self.lifetime.abort(error)
            raise
        finally:
            self._collecting.discard(task)

    async def _collect(self, item: Any) -> dict[str, Any] | None:
        name = self.item_name(item)
        try:
            rollouts = await self._members(item, name, self.config.group_size)
        except GroupDropped as dropped:
            self.metrics.dropped[dropped.code] += 1
            _log.warning("group %s dropped: %s", name, dropped)
            self.tell(Event("dropped", name, detail=str(dropped)))
            await self._after_drop(dropped)
            return None
        self.metrics.groups += 1
        self._dropped_in_a_row = 0
        _log.info("group %s: scores %s", name, " ".join(f"{rollout.score:.2f}" for rollout in rollouts))
        self.tell(Event("group", name, rollouts=tuple(rollouts)))
        return scored_group(rollouts, name=name, include_messages=self.config.include_messages)

    async def _after_drop(self, dropped: GroupDropped) -> None:
        """Slow down while nothing works, and end the run when it looks as if nothing ever will."""
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= (HOPELESS_IN_A_ROW if dropped.hopeless else DROPPED_IN_A_ROW):
            self.lifetime.abort(
                GroupsDropped(f"{self._dropped_in_a_row} groups in a row were dropped; the last one: {dropped}")
            )
        over = self._dropped_in_a_row - DROPPED_IN_A_ROW // 2
        if over > 0:
            await asyncio.sleep(min(30.0, 0.25 * 2**over))

    async def collect_trajectory(self, item: Any) -> tuple[Any, list[Any]]:
        """One trajectory by itself, as atroposlib's `ScoredDataItem`.

        Raises:
            GroupDropped: it could not be completed.
        """
        [rollout] = await self._members(item, self.item_name(item), 1)
        group = scored_group([rollout], name=self.item_name(item), include_messages=True)
        single = {key: group[key][0] for key in ("tokens", "masks", "scores", "messages", "inference_logprobs")}
        return {**single, "group_overrides": group["group_overrides"], "overrides": None}, []

    async def _members(self, item: Any, name: str, size: int) -> list[Rollout]:
        """All trajectories of a group at once; the first that can't be completed ends the others."""
        self._groups_begun += 1
        group = f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)[:60]}-{self._groups_begun}"
        try:
            async with self._prepared(item, group) as snapshot, asyncio.TaskGroup() as tasks:
                members = [
                    tasks.create_task(self._member(item, name, Member(group, i, self._seed(name, i), snapshot)))
                    for i in range(size)
                ]
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return [task.result() for task in members]

    def _seed(self, name: str, index: int) -> int | None:
        return None if self.config.seed is None else seed_for(self.config.seed, name, index)

    @contextlib.asynccontextmanager
    async def _prepared(self, item: Any, group: str) -> AsyncGenerator[Any]:
        """The group's snapshot, dropped when the group is over."""
        snapshot = await self._persist(group, lambda attempt: self.prepare_group(item, f"{group}-setup{attempt}"))
        try:
            yield snapshot
        finally:
            if snapshot is not None:
                with contextlib.suppress(SandboxError):
                    await snapshot.drop()

    async def _member(self, item: Any, name: str, member: Member) -> Rollout:
        attempts = 0

        async def once(attempt: str) -> Rollout:
            nonlocal attempts
            attempts += 1
            return await self._attempt(item, f"{member.group}-{member.index}{attempt}", member)

        rollout = await self._persist(f"{member.group}-{member.index}", once)
        rollout.attempts = attempts
        self._count(rollout)
        self.tell(Event("trajectory", name, rollout=rollout))
        return rollout

    async def _attempt(self, item: Any, trajectory_id: str, member: Member) -> Rollout:
        """One attempt, admitted when the env's own slots allow it, released in every ending."""
        async with self._admission:
            started = time.perf_counter()
            try:
                if member.snapshot is not None:
                    await self.executor.start_from(trajectory_id, member.snapshot)
                rollout = await self.run_trajectory(item, trajectory_id, member)
                rollout.seconds = time.perf_counter() - started
                return rollout
            finally:
                if self._executor is not None:
                    await self._executor.release_trajectory(trajectory_id, reset_workspace=True)

    async def _persist(self, what: str, once: Callable[[str], Awaitable[Any]]) -> Any:
        """Try again after infrastructure failures, in a fresh slot each time, then give the group up.

        Raises:
            GroupDropped: it can't be completed.
        """
        for attempt in range(1 + self.config.trajectory_retries):
            try:
                return await once(f"-r{attempt}" if attempt else "")
            except (HookError, PromptTooLong) as error:
                raise GroupDropped(f"{what}: {error}", code=error.code) from error
            except (SandboxError, InferenceError) as error:
                hopeless = isinstance(error, NOT_RETRIED) or (isinstance(error, InferenceError) and not error.retryable)
                if hopeless or attempt == self.config.trajectory_retries:
                    text = f"{what}: {type(error).__name__}: {error}"
                    raise GroupDropped(text, code=error.code, hopeless=isinstance(error, NOT_RETRIED)) from error
                self.metrics.retries[error.code] += 1
                _log.warning("%s is tried again after %s: %s", what, type(error).__name__, error)
                self.tell(Event("retry", what, detail=str(error)))
                await asyncio.sleep(min(2.0, 0.1 * 2**attempt))
        raise AssertionError("unreachable")

    def _count(self, rollout: Rollout) -> None:
        self.metrics.trajectories += 1
        self.metrics.scores.append(rollout.score)
        self.metrics.stop_reasons[rollout.stop_reason] += 1
        for phase, seconds in rollout.phases.items():
            self.metrics.phases[phase] += seconds  # type: ignore[assignment]

    def tell(self, event: Event) -> None:
        """Tell the observers; a display's own error is no reason to lose a trajectory."""
        for observer in self.observers:
            try:
                observer(event)
            except Exception:
                _log.exception("an observer failed")

    async def handle_send_to_api(self, scored_data: Any, item: Any = None, *args: Any, **kwargs: Any) -> None:
        """As atroposlib's, with nothing lost without a word; the file is whole after each group."""
        checks_length = kwargs.get("abort_on_any_max_length_exceeded", args[1] if len(args) > 1 else True)
        for group in scored_data if isinstance(scored_data, list) else [scored_data]:
            if group is None:
                continue
            group["group_overrides"] = group.get("group_overrides") or {}
            reason = drop_reason(
                group,
                group_size=self.config.group_size,
                same_scores_dropped=self.config.ensure_scores_are_not_same,
                max_token_len=self.max_token_len if checks_length else 0,
            )
            if reason is not None:
                self.metrics.unsent[reason] += 1
                _log.warning("group %s is not sent: %s", self.item_name(item), reason)
        await super().handle_send_to_api(scored_data, item, *args, **kwargs)
        writer = getattr(self.jsonl_writer, "_fp", None)
        if writer is not None and not writer.closed:
            writer.flush()

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Without what is for people and files."""
        several = isinstance(scored_data, list)
        groups = cast("list[dict[str, Any]]", scored_data if several else [scored_data])
        plain = [{key: value for key, value in group.items() if key != "atropos"} for group in groups]
        await super()._send_scored_data_to_api(plain if several else plain[0])

    # -------------------------------------------------------------------------------------------------------- wandb

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Readable conversations instead of decoded tokens."""
        if not self.config.use_wandb:
            return
        keep = self.config.num_rollouts_per_group_for_logging
        keep = len(scored_data["scores"]) if keep == -1 else min(keep, len(scored_data["scores"]))
        texts: list[tuple[str, float]] = []
        for index in range(keep):
            messages = (scored_data.get("messages") or [None] * keep)[index]
            text = (
                "\n\n".join(f"[{m['role']}]\n{m['content']}" for m in messages)
                if messages
                else self.tokenizer.decode(scored_data["tokens"][index])
            )
            texts.append((text, scored_data["scores"][index]))
        self.rollouts_for_wandb.append(texts)
        del self.rollouts_for_wandb[: -self.config.num_rollouts_to_keep]

    async def wandb_log(self, wandb_metrics: dict[str, Any] | None = None) -> None:
        """Add faults, phases and the pool's gauges."""
        found = {**self.metrics.as_dict(), **(wandb_metrics or {})}
        if self.pool is not None:
            stats = self.pool.stats()
            found.update(
                {f"pool/{key}": getattr(stats, key) for key in ("containers", "free", "leased", "retired", "waiting")}
            )
            found.update({"pool/acquire_p99_s": stats.acquire.p99_s, "pool/reset_p99_s": stats.reset.p99_s})
        await super().wandb_log(found)

    async def setup_wandb(self) -> None:
        """As atroposlib's; a wandb that can't start is one clear line."""
        try:
            await super().setup_wandb()
        except Exception as error:
            raise _wandb_error(error) from error
        self._wandb_started = self.config.use_wandb

    def _start_wandb(self) -> None:
        if not self.config.use_wandb:
            return
        import wandb

        try:
            wandb.init(
                project=self.wandb_project or "atropos",
                name=f"{self.config.wandb_name}-{time.strftime('%Y-%m-%d-%H%M%S')}",
                group=self.wandb_group,
                config=json.loads(self.config.model_dump_json()),
            )
        except Exception as error:
            raise _wandb_error(error) from error
        self._wandb_started = True

    # ------------------------------------------------------------------------------------------------- the commands

    async def process_manager(self) -> None:
        """Run `total_steps` groups, or as many as there are items, and write the JSONL and the page.

        Raises:
            GroupsDropped: at the end, when groups could not be completed; the files hold the others.
            ConfigError, InferenceError, SandboxError: it could not start.
        """
        async with self.lifetime.running(self._close):
            self.config.group_size = int(getattr(self, "group_size_to_process", self.config.group_size))
            await self.setup()
            self._start_wandb()
            await self._process(int(getattr(self, "n_groups_to_process", self.config.total_steps)))
        dropped = sum(self.metrics.dropped.values())
        if dropped:
            reasons = ", ".join(f"{count} x {code}" for code, count in self.metrics.dropped.items())
            raise GroupsDropped(f"{dropped} of {dropped + self.metrics.groups} groups were dropped ({reasons})")

    async def _process(self, total: int) -> None:
        self.curr_step = 0
        fill = math.ceil(self.config.capacity / self.config.group_size)
        free = asyncio.Semaphore(self.config.process_concurrency or fill)
        begun = 0
        try:
            async with asyncio.TaskGroup() as tasks:
                while total < 0 or begun < total:
                    await free.acquire()
                    item = await self.get_next_item()
                    if item is None:
                        break
                    begun += 1
                    task = tasks.create_task(self._process_group(item))
                    task.add_done_callback(lambda _: free.release())
        except BaseExceptionGroup as errors:
            raise _first(errors) from None

    async def _process_group(self, item: Any) -> None:
        group, _ = await self.collect_trajectories(item)
        if group is None:
            return
        processed = await self.postprocess_histories(group)
        await self.handle_send_to_api(processed, item, do_send_to_api=False, abort_on_any_max_length_exceeded=False)
        await self.wandb_log()
        self.curr_step += 1

    async def env_manager(self) -> None:
        """Serve groups to a trainer until its steps are done.

        Raises:
            ConfigError: the tokens would be placeholders, or there is no trajectory API.
        """
        if not self.exact_tokens and not self.config.allow_placeholder_tokens:
            kinds = ", ".join(sorted(server_types(self.server)))
            raise ConfigError(
                f"openai.server_type: {kinds} doesn't tell the tokens it samples, so a trainer would get placeholders; "
                "use vllm or sglang, or set --env.allow_placeholder_tokens true"
            )
        async with self.lifetime.running(self._close):
            await check_run_api(self.config.rollout_server_url)
            try:
                await super().env_manager()
            finally:
                await leave_run_api(self.config.rollout_server_url, getattr(self, "env_id", None))

    async def _run_evaluate(self) -> None:
        async with self.lifetime.running(self._close):
            await self.setup()
            self._start_wandb()
            await self.evaluate()

    async def _close(self) -> None:
        """Workers first, then executor and pool, then files."""
        await cancel_and_wait({*self.workers, *self.eval_workers, *self._collecting, self.eval_runner})
        await asyncio.gather(
            bounded("the tool backend", self.shutdown_tool_backend(), 90),
            bounded("the inference clients", stop_servers(self.server), 5),
        )
        self.close_files()
        if self._wandb_started:
            import wandb

            await bounded("wandb", asyncio.to_thread(wandb.finish), 30)
            self._wandb_started = False

    def close_files(self) -> None:
        """Close the JSONL and write its page; a file without a group is removed."""
        writer, self.jsonl_writer = self.jsonl_writer, None
        path = self.config.data_path_to_save_groups
        if writer is None or path is None:
            return
        with contextlib.suppress(OSError):
            writer.close()
        jsonl = Path(path)
        try:
            if jsonl.exists() and jsonl.stat().st_size == 0:
                jsonl.unlink()
            elif jsonl.exists():
                write_page(jsonl, title=self.name or type(self).__name__)
        except OSError as error:
            _log.warning("the page beside %s could not be written: %s", path, error)


def _first(errors: BaseExceptionGroup) -> BaseException:
    """The error to report of several: a fatal one before a dropped group."""
    flat = list(_flatten(errors))
    return next((error for error in flat if not isinstance(error, GroupDropped)), flat[0])


def _flatten(errors: BaseExceptionGroup) -> Iterator[BaseException]:
    for error in errors.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _flatten(error)
        else:
            yield error


def _wandb_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"env.use_wandb: wandb can't start ({type(error).__name__}: {str(error)[:200]}); log in with `wandb login`, set "
        "WANDB_MODE=offline, or use --env.use_wandb false"
    )
