"""Where finished groups go: the trajectory API, the JSONL and its page, wandb. Nothing is lost without a word."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any, cast

import aiohttp

from atropos.agent.transcript import MASKED
from atropos.aio import outlive
from atropos.envs.adapter import BaseEnv
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.prometheus import MetricsEndpoint, metrics_text
from atropos.envs.running.replay import write_page
from atropos.envs.running.rollout import drop_reason
from atropos.envs.running.run_api import GroupRefused, json_of, send_groups
from atropos.errors import ConfigError
from atropos.slots import SlotPool

_log = logging.getLogger(__name__)


class Reporting(BaseEnv):
    """The part of `SandboxEnv` that hands on what was collected."""

    config: Any
    metrics: EnvMetrics
    pool: SlotPool | None
    jsonl_writer: Any
    _wandb_started: bool
    _endpoint: MetricsEndpoint | None

    def item_name(self, item: Any) -> str:
        """A short name of an item; `Groups` knows."""
        raise NotImplementedError

    async def handle_send_to_api(
        self,
        scored_data: Any,
        item: Any = None,
        do_send_to_api: bool = True,
        abort_on_any_max_length_exceeded: bool = True,
    ) -> None:
        """As atroposlib's, with nothing lost without a word, the file whole after each group, and the loop left free.

        atroposlib writes and sends a group's JSON on the event loop: a third of a second for eight long trajectories.
        """
        several = isinstance(scored_data, list)
        kept: list[dict[str, Any]] = []
        for group in cast("list[dict[str, Any] | None]", scored_data if several else [scored_data]):
            if group is None:
                continue
            for key in ("ref_logprobs", "overrides", "distill_token_ids", "distill_logprobs"):
                group.setdefault(key, None)
            group["group_overrides"] = group.get("group_overrides") or {}
            reason = drop_reason(
                group,
                group_size=self.config.group_size,
                same_scores_dropped=self.config.ensure_scores_are_not_same,
                max_token_len=self.max_token_len if abort_on_any_max_length_exceeded else 0,
            )
            if reason is not None:
                self.metrics.unsent[reason] += 1
                _log.warning("group %s is not sent: %s", self.item_name(item), reason)
                continue
            if self.config.include_messages and group.get("messages") is None:
                group["messages"] = [[{"role": "user", "content": self.tokenizer.decode(t)}] for t in group["tokens"]]
            self.completion_lengths.extend(len(mask) - mask.count(MASKED) for mask in group["masks"])
            await self.add_rollouts_for_wandb(group, item)
            if not self.config.include_messages:
                group["messages"] = None
            await outlive(self._write(group))
            kept.append(group)
        if kept and do_send_to_api:
            self.items_sent_this_step += len(kept)
            await self._send_scored_data_to_api(kept if several else kept[0])

    async def _write(self, group: dict[str, Any]) -> None:
        """One line of the JSONL, made in a thread."""
        writer = getattr(self.jsonl_writer, "_fp", None)
        if writer is None:
            return
        line = await asyncio.to_thread(json_of, group)
        if not writer.closed:
            writer.write(line + "\n")
            writer.flush()

    async def _send_scored_data_to_api(self, scored_data: Any) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Send what the trainer takes, whole even when this worker is cancelled meanwhile; what can't be sent is counted."""
        several = isinstance(scored_data, list)
        groups = cast("list[dict[str, Any]]", scored_data if several else [scored_data])
        env_id = getattr(self, "env_id", None)
        plain = [{k: v for k, v in group.items() if k != "atropos"} | {"env_id": env_id} for group in groups]
        await outlive(self._hand_over(plain, listed=several))

    async def _hand_over(self, groups: list[dict[str, Any]], *, listed: bool) -> None:
        url = self.config.rollout_server_url
        try:
            await send_groups(url, groups, listed=listed)
        except (GroupRefused, aiohttp.ClientError, TimeoutError) as error:
            reason = "refused" if isinstance(error, GroupRefused) else "send_failed"
            self.metrics.unsent[reason] += len(groups)
            text = f"{type(error).__name__}: {error}"
            _log.error("%d group(s) lost: the trajectory API at %s did not take them (%s)", len(groups), url, text)

    # -------------------------------------------------------------------------------------------------------- wandb

    async def add_rollouts_for_wandb(self, scored_data: Any, item: Any = None) -> None:
        """Readable conversations instead of decoded tokens: what was thought, said, called and answered."""
        if not self.config.use_wandb:
            return
        scores = scored_data["scores"]
        keep = self.config.num_rollouts_per_group_for_logging
        messages = scored_data.get("messages")
        self.rollouts_for_wandb.append(
            [
                (readable(messages[at]) if messages else self.tokenizer.decode(scored_data["tokens"][at]), scores[at])
                for at in range(len(scores) if keep == -1 else min(keep, len(scores)))
            ]
        )
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

    def metrics_text(self) -> str:
        """What wandb gets, and the pool's state, in Prometheus' text format."""
        stats = None if self.pool is None else self.pool.stats()
        return metrics_text(self.metrics, stats, self.config.wandb_name)

    async def start_metrics(self) -> None:
        """Serve `metrics_text` where `metrics_address` says; does nothing when that runs, or isn't set.

        Raises:
            ConfigError: the address can't be had.
        """
        if self.config.metrics_address is None or self._endpoint is not None:
            return
        endpoint = MetricsEndpoint(self.config.metrics_address, self.metrics_text)
        await endpoint.start()
        self._endpoint = endpoint
        _log.info("metrics at http://%s:%d/metrics", endpoint.host, endpoint.port)

    async def close_metrics(self) -> None:
        """Stop serving metrics. Idempotent."""
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()

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


def readable(messages: list[dict[str, Any]]) -> str:
    """A conversation for people."""
    parts: list[str] = []
    for message in messages:
        if message.get("reasoning_content"):
            parts.append(f"[thinking]\n{message['reasoning_content']}")
        if message.get("content"):
            parts.append(f"[{message['role']}]\n{message['content']}")
        for call in message.get("tool_calls") or []:
            function = call["function"]
            parts.append(f"[call] {function['name']} {function['arguments']}")
    return "\n\n".join(parts)


def _wandb_error(error: Exception) -> ConfigError:
    return ConfigError(
        f"env.use_wandb: wandb can't start ({type(error).__name__}: {str(error)[:200]}); log in with `wandb login`, set "
        "WANDB_MODE=offline, or use --env.use_wandb false"
    )
