"""A run on wandb: its start, its end, and conversations in a form that people read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from typing import cast

from atropos.agent import Message
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.running.lifecycle import bounded
from atropos.envs.running.rollout import ScoredGroup
from atropos.errors import ConfigError
from atropos.slots.pool.stats import PoolStats


class WandbRun:
    """The wandb run of an env, where `use_wandb` asks for one."""

    def __init__(self, config: SandboxEnvConfig) -> None:
        self._config = config
        self._started = False

    @contextlib.contextmanager
    def starting(self) -> Generator[None]:
        """Around what starts wandb.

        Raises:
            ConfigError: it can't start; one line.
        """
        try:
            yield
        except Exception as error:  # wandb raises its own errors, requests' and the trajectory API's
            raise ConfigError(
                f"env.use_wandb: wandb can't start ({type(error).__name__}: {str(error)[:200]}); log in with `wandb "
                "login`, set WANDB_MODE=offline, or use --env.use_wandb false"
            ) from error
        self._started = self._config.use_wandb

    def start(self, project: str | None, group: str | None) -> None:
        """Start a run without a trainer.

        Raises:
            ConfigError: it can't start.
        """
        if not self._config.use_wandb:
            return
        import wandb

        with self.starting():
            wandb.init(
                project=project or "atropos",
                name=f"{self._config.wandb_name}-{time.strftime('%Y-%m-%d-%H%M%S')}",
                group=group,
                config=json.loads(self._config.model_dump_json()),
            )

    async def finish(self) -> None:
        """End the run, where it was started. Idempotent."""
        if self._started:
            import wandb

            self._started = False
            await bounded("wandb", asyncio.to_thread(wandb.finish), 30)


def pool_gauges(stats: PoolStats) -> dict[str, object]:
    """The pool's state under wandb's names."""
    gauges: dict[str, object] = {
        f"pool/{key}": getattr(stats, key) for key in ("containers", "free", "leased", "retired", "waiting")
    }
    return {**gauges, "pool/acquire_p99_s": stats.acquire.p99_s, "pool/reset_p99_s": stats.reset.p99_s}


def readable_group(group: ScoredGroup, decode: Callable[[list[int]], str]) -> list[tuple[str, float]]:
    """A scored group's conversations for people, each with its score; decoded tokens where it has no messages."""
    messages = group.get("messages")
    texts = [readable(each) for each in messages] if messages else map(decode, group["tokens"])
    return list(zip(texts, group["scores"], strict=True))


def readable(messages: Sequence[Message]) -> str:
    """A conversation for people."""
    parts: list[str] = []
    for message in messages:
        if message.get("reasoning_content"):
            parts.append(f"[thinking]\n{message['reasoning_content']}")
        if message.get("content"):
            parts.append(f"[{message['role']}]\n{message['content']}")
        for call in cast("list[dict[str, dict[str, object]]]", message.get("tool_calls") or []):
            function = call["function"]
            parts.append(f"[call] {function['name']} {function['arguments']}")
    return "\n\n".join(parts)
