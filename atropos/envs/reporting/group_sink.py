"""Where finished groups go: the JSONL with its page, and the trajectory API. Every lost group is logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TextIO

import aiohttp

from atropos.dashboard.render import write_page
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.reporting.run_api import GroupInDoubt, GroupRefused, TrajectoryApi, json_of
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import ScoredGroup, drop_reason

_log = logging.getLogger(__name__)


def _append(file: int, line: bytes) -> None:
    """Write a line at a file's end, whole or not at all."""
    end = os.fstat(file).st_size
    rest = memoryview(line)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # a device or pipe can't be truncated
            os.ftruncate(file, end)
            os.lseek(file, end, os.SEEK_SET)
        raise


class GroupSink:
    """Takes finished groups. `jsonl`: the file for them, which a page is written beside; None: there are neither."""

    def __init__(self, config: SandboxEnvConfig, metrics: EnvMetrics, title: str, jsonl: TextIO | None) -> None:
        self._config = config
        self._metrics = metrics
        self._title = title
        self._jsonl = jsonl
        self._api = TrajectoryApi(config.rollout_server_url)
        self._until: float | None = None
        self._limits: set[asyncio.Timeout] = set()

    def admits(self, group: ScoredGroup, name: str, *, max_token_len: int) -> bool:
        """Complete a group as atroposlib does, and decide whether it is sent; one that isn't is counted and logged.

        `name` is its item's; `max_token_len` is the trainer's limit, 0: none.
        """
        group.setdefault("ref_logprobs", None)
        group.setdefault("overrides", [{} for _ in group["tokens"]])
        group.setdefault("distill_token_ids", None)
        group.setdefault("distill_logprobs", None)
        group["group_overrides"] = group.get("group_overrides") or {}
        reason = drop_reason(
            group,
            group_size=self._config.group_size,
            same_scores_dropped=self._config.ensure_scores_are_not_same,
            max_token_len=max_token_len,
        )
        if reason is not None:
            self._metrics.unsent[reason] += 1
            _log.warning("group %s is not sent: %s", name, reason)
        return reason is None

    async def deliver(self, groups: list[ScoredGroup], *, sent: bool, env_id: int | None, listed: bool) -> None:
        """Write groups that were admitted, then send them if they are to be `sent`; see `write` and `send`.

        Raises:
            OSError: one can't be written, and goes nowhere else.
        """
        for group in groups:
            await self.write(group, sent=sent)
        if groups and sent:
            await self.send(groups, env_id=env_id, listed=listed)

    async def write(self, group: ScoredGroup, *, sent: bool) -> None:
        """Append a group to the JSONL; its JSON is made in a thread.

        Args:
            group: as `admits` completed it.
            sent: it goes to a trainer too: that the file has no room for it is logged.

        Raises:
            OSError: it can't be written, and goes nowhere else.
        """
        jsonl = self._jsonl
        if jsonl is None:
            return
        line = await asyncio.to_thread(json_of, group)
        if jsonl.closed:
            return
        try:
            _append(jsonl.fileno(), f"{line}\n".encode())
        except OSError as error:
            path = self._config.data_path_to_save_groups
            if not sent:
                raise OSError(error.errno, error.strerror, path) from error
            _log.error("%s lacks a group, which is sent: %s", path, error.strerror)

    def end_within(self, seconds: float) -> None:
        """Bound the time that all sends together take from now on, those under way included; the rest is lost."""
        self._until = asyncio.get_running_loop().time() + seconds
        for limit in self._limits:
            limit.reschedule(self._until)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None]:
        async with asyncio.timeout_at(self._until) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    async def send(self, groups: list[ScoredGroup], *, env_id: int | None, listed: bool) -> None:
        """Send groups to the trajectory API; count those that can't be sent or may have arrived twice."""
        plain: list[dict[str, object]] = [
            {**{k: v for k, v in group.items() if k != "atropos"}, "env_id": env_id} for group in groups
        ]
        try:
            async with self._in_time():
                doubtful = await self._api.send(plain, listed=listed)
        except (GroupRefused, GroupInDoubt, aiohttp.ClientError, TimeoutError) as error:
            self._metrics.unsent["refused" if isinstance(error, GroupRefused) else "send_failed"] += len(groups)
            how = "did not take them"
            if isinstance(error, GroupInDoubt):
                self._metrics.maybe_sent_twice += len(groups) * (error.tries > 1)
                how = f"answered none of {error.tries} tries and may have them"
            elif isinstance(error, TimeoutError):
                how = "had not answered when the run ended, and may have them"
            text = f"{type(error).__name__}: {error}"
            url = self._config.rollout_server_url
            _log.error("%d group(s) lost: the trajectory API at %s %s (%s)", len(groups), url, how, text)
            return
        if doubtful:
            self._metrics.maybe_sent_twice += len(groups)
            _log.warning(
                "%d group(s) may have reached the trajectory API twice: an earlier request was not answered",
                len(groups),
            )

    def close(self) -> None:
        """Close the JSONL and write its page; a file without a group is removed. Idempotent."""
        jsonl, self._jsonl = self._jsonl, None
        path = self._config.data_path_to_save_groups
        if jsonl is None or path is None:
            return
        with contextlib.suppress(OSError):
            jsonl.close()
        written = Path(path)
        try:
            if written.exists() and written.stat().st_size == 0:
                written.unlink()
            elif written.exists():
                write_page(written, title=self._title)
        except OSError as error:
            _log.warning("the page beside %s could not be written: %s", path, error)
