"""Warnings about what a run waits for: a trainer that fetches nothing, inference servers that are down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Generator, Mapping

from atropos.agent.model import EXACT
from atropos.envs.adapter import APIServer, ServerManager
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.inference.server import InferenceServer
from atropos.envs.servers import inference_of, servers_of
from atropos.errors import ConfigError

WAITED_S = 60.0
"""Time without a fetch from a full queue after which the log says that the env waits for the trainer."""
TRAINER_S = 5.0
"""Time without a registered trainer after which the log says that the env waits for one."""
HEALTH_S = 1.0
"""Interval between checks of the inference servers' state, about that of atroposlib's own health checks."""
SILENT_S = 10.0
"""Time without an answer to any pending model call after which it is logged."""

_log = logging.getLogger(__name__)


class TrainerWatch:
    """Refuses settings with which a trainer never gets a group, and reports, once each, why an env is idle."""

    def __init__(self, config: SandboxEnvConfig) -> None:
        self._config = config
        self._full_since: float | None = None
        self._reported: set[str] = set()

    def report(self, key: str, text: str, *values: object) -> None:
        """Log a warning, once for each key."""
        if key not in self._reported:
            self._reported.add(key)
            _log.warning(text, *values)

    def queue(self, status: Mapping[str, int], derived_batch_size: int) -> None:
        """Check the trajectory API's status for a full queue, groups that never fit, and a share of nothing."""
        config = self._config
        self._check_full(status)
        largest = int(status.get("max_group_size") or 1)
        if largest > config.group_size and largest % config.group_size:
            text = (
                "env.group_size: run-api packs groups up to the largest in its queue, another env's %d, which is no "
                "multiple of %d: while such groups come, this env's are in no batch"
            )
            self.report("packing", text, largest, config.group_size)
        if config.min_batch_allocation is None and 0 <= derived_batch_size < config.group_size:
            text = "other envs hold the whole batch (min_batch_allocation): this env starts nothing until they leave"
            self.report("no share", text)

    def check_servable(self, server_type: str) -> None:
        """Check that a trainer can learn from what inference servers of this type sample.

        Raises:
            ConfigError: the tokens would be placeholders, or no group would ever be sent.
        """
        config = self._config
        if server_type not in EXACT and not config.allow_placeholder_tokens:
            raise ConfigError(
                f"openai.server_type: {server_type} doesn't report the tokens it samples, so a trainer would get "
                "placeholders; use vllm or sglang, or set --env.allow_placeholder_tokens true"
            )
        if config.group_size == 1 and config.ensure_scores_are_not_same:
            raise ConfigError(
                "env.group_size: a group of 1 always has equal scores, and such groups are dropped; use 2 or more, or "
                "set --env.ensure_scores_are_not_same false"
            )

    def check_batch(self, batch: int) -> None:
        """Check the size of the trainer's batch.

        Raises:
            ConfigError: it can't be made of whole groups.
        """
        size, share = self._config.group_size, self._config.min_batch_allocation
        if batch > 0 and batch % size:
            raise ConfigError(
                f"env.group_size: the trainer's batch of {batch} is no multiple of {size}, so that run-api would never "
                "make one of whole groups; choose a group size that divides it"
            )
        if batch > 0 and share is not None and int(share * batch) < 1:
            text = "env.min_batch_allocation: %s of a batch of %s is less than one trajectory"
            self.report("share", text, share, batch)

    def _check_full(self, status: Mapping[str, int]) -> None:
        config = self._config
        waiting = int(status["queue_size"]) * config.group_size
        full = 0 < config.max_batches_offpolicy * config.batch_size <= waiting
        if not full:
            if self._full_since is not None and "full" in self._reported:
                _log.info("the trainer fetches batches again")
            self._full_since = None
            self._reported.discard("full")
        elif self._full_since is None:
            self._full_since = time.monotonic()
        elif time.monotonic() - self._full_since > WAITED_S:
            text = (
                "%d trajectories wait at %s and no trainer has fetched a batch for %.0f s; this env starts no more "
                "(max_batches_offpolicy %d), holds no slot, and continues when one does"
            )
            self.report("full", text, waiting, config.rollout_server_url, WAITED_S, config.max_batches_offpolicy)

    @contextlib.contextmanager
    def awaiting_trainer(self) -> Generator[None]:
        """Log a warning when the body has waited for a trainer for some seconds."""
        text = (
            "no trainer has registered at %s yet; this env waits for one (a trainer posts to /register and fetches "
            "/batch once; `process` needs none)"
        )
        url = self._config.rollout_server_url
        timer = asyncio.get_running_loop().call_later(TRAINER_S, lambda: self.report("trainer", text, url))
        try:
            yield
        finally:
            timer.cancel()


async def watch_inference(server: ServerManager, model_timeout_s: float) -> None:
    """Log when inference servers stop answering, and when they are back. Calls wait for them meanwhile."""
    watches = [_ServerWatch(one, model_timeout_s) for one in servers_of(server)]
    while True:
        await asyncio.gather(*(watch.look() for watch in watches))
        await asyncio.sleep(HEALTH_S)


class _ServerWatch:
    """Logs that a server is down, or that it passes its health check and answers no call, as when paused or asleep."""

    def __init__(self, one: APIServer, model_timeout_s: float) -> None:
        self._server = one
        self._url = str(getattr(getattr(one, "config", None), "base_url", one))
        self._model_timeout_s = model_timeout_s
        self._healthy = True
        self._next_s, self._longest_s = SILENT_S, 0.0

    async def look(self) -> None:
        """Look at the server's health, and at its calls while it is healthy."""
        healthy = bool(getattr(self._server, "server_healthy", True))
        if healthy != self._healthy:
            self._healthy = healthy
            if healthy:
                _log.info("the inference server at %s answers again", self._url)
            else:
                text = "the inference server at %s doesn't answer; calls wait for it, each up to model_timeout_s (%g s)"
                _log.warning(text, self._url, self._model_timeout_s)
        if healthy and hasattr(self._server, "inference"):
            await self._look_at_calls(inference_of(self._server))

    async def _look_at_calls(self, own: InferenceServer) -> None:
        """Log silence after `SILENT_S`, with what the server says, then at doubling intervals; and its end."""
        count, seconds = own.pending.silence()
        if own.halted or seconds >= HEALTH_S:
            await own.look(min(seconds, 2 * HEALTH_S))
        if seconds < self._longest_s:
            if self._longest_s >= SILENT_S:
                _log.info("the inference server at %s answers again, after %.0f s", self._url, self._longest_s)
            self._next_s = SILENT_S
        elif seconds >= self._next_s:
            self._next_s *= 2
            _log.warning(
                "the inference server at %s passes its health check, but none of %d calls was answered for %.0f s: it "
                "is %s; each call waits up to model_timeout_s (%g s)",
                self._url,
                count,
                seconds,
                "paused or asleep" if own.halted else "paused or asleep, or its turns take so long",
                self._model_timeout_s,
            )
        self._longest_s = seconds


def report_evaluation(task: asyncio.Task[object]) -> None:
    """Log the error of an evaluation that runs beside training, since it is awaited only at the end."""
    if not task.cancelled() and task.exception() is not None:
        _log.error("evaluate failed; training continues", exc_info=task.exception())
