"""An env's live pages: samples its numbers, keeps finished trajectories, and serves both if `dashboard_port` is set."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from itertools import islice

from atropos.aio import Tasks
from atropos.dashboard.live import InFlight, LiveSample, LiveView
from atropos.dashboard.server import DashboardServer
from atropos.dashboard.store import TrajectoryStore
from atropos.dashboard.text import duration
from atropos.envs.config import SandboxEnvConfig
from atropos.envs.running.activity import MODEL
from atropos.envs.running.backend import ToolBackend
from atropos.envs.running.groups import Event
from atropos.envs.running.metrics import EnvMetrics
from atropos.envs.running.rollout import Rollout, messages_of
from atropos.metrics import percentiles
from atropos.slots.pool.stats import Percentiles, PoolStats, container_name, occupancy

SAMPLE_S = 5.0
SAMPLES = 720
RECENT = 50
"""Faults that are listed with their text, the latest."""
QUEUED = 64
"""Groups that may wait to be stored for the pages; further ones are left out."""

_log = logging.getLogger(__name__)


class EnvDashboard:
    """Does nothing where `dashboard_port` is None; then it has no `server`."""

    def __init__(self, config: SandboxEnvConfig, title: str, metrics: EnvMetrics, backend: ToolBackend) -> None:
        self._metrics, self._backend = metrics, backend
        self._store = TrajectoryStore()
        self._history: deque[LiveSample] = deque(maxlen=SAMPLES)
        self._recent: deque[tuple[float, str, str]] = deque(maxlen=RECENT)
        self._finished: asyncio.Queue[tuple[str, tuple[Rollout, ...]]] = asyncio.Queue(QUEUED)
        self._tasks = Tasks("dashboard")
        self._started = time.monotonic()
        token = config.dashboard_token.get_secret_value() if config.dashboard_token else None
        self.server = (
            None
            if config.dashboard_port is None
            else DashboardServer(
                title,
                self._store,
                host=config.dashboard_host,
                port=config.dashboard_port,
                setting="env.dashboard_port",
                token=token,
                live=self.view,
            )
        )

    async def start(self) -> None:
        """Listen, and print the URL, unless it does already.

        Raises:
            ConfigError: the address can't be listened on.
        """
        if self.server is None or self._tasks:
            return
        await self.server.start()
        self._started = time.monotonic()
        self._tasks.spawn(self._sample(), "samples")
        self._tasks.spawn(self._keep(), "groups")
        print(f"dashboard: {self.server.url}", flush=True)  # not logged: the token is for the user who started the env

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        await self._tasks.cancel()
        if self.server is not None:
            await self.server.close()

    def observe(self, event: Event) -> None:
        """Record an event for the pages."""
        if self.server is None:
            return
        if event.kind in {"dropped", "left_out", "retry"}:
            self._recent.appendleft((time.time(), event.kind, f"{event.item}: {event.detail}"[:2000]))
        elif event.kind == "group":
            try:
                self._finished.put_nowait((event.item, event.rollouts))
            except asyncio.QueueFull:
                _log.warning("group %s is not shown on the dashboard: its queue is full", event.item)

    async def _keep(self) -> None:
        while True:
            item, rollouts = await self._finished.get()
            group = {
                "scores": [rollout.score for rollout in rollouts],
                "messages": [messages_of(rollout.transcript) for rollout in rollouts],
                "atropos": {"item": item, "trajectories": [rollout.summary() for rollout in rollouts]},
            }
            try:
                await asyncio.to_thread(self._store.add, group)
            except Exception:
                _log.exception("the dashboard could not store group %s", item)

    async def _sample(self) -> None:
        metrics = self._metrics
        calls, trajectories, at = metrics.calls, metrics.trajectories, time.monotonic()
        while True:
            await asyncio.sleep(SAMPLE_S)
            now = time.monotonic()
            took, new = now - at, metrics.calls - calls
            call_p50_s, call_p99_s = percentiles([*islice(reversed(metrics.call_s), new)], 0.5, 0.99)
            stats = self._stats()
            self._history.append(
                LiveSample(
                    trajectories_per_min=60 * (metrics.trajectories - trajectories) / took,
                    calls_per_s=new / took,
                    call_p50_s=call_p50_s,
                    call_p99_s=call_p99_s,
                    leased=stats.leased,
                    waiting=stats.waiting,
                )
            )
            calls, trajectories, at = metrics.calls, metrics.trajectories, now

    def _stats(self) -> PoolStats:
        pool = self._backend.pool
        return PoolStats() if pool is None else pool.stats()

    def view(self) -> LiveView:
        """The env's current state."""
        metrics, pool, stats = self._metrics, self._backend.pool, self._stats()
        uptime = time.monotonic() - self._started
        numbers = {
            "up": duration(uptime),
            "groups": f"{metrics.groups:,}",
            "trajectories": f"{metrics.trajectories:,}",
            "mean score": "-" if (mean := metrics.mean_score) is None else f"{mean:.3f}",
            "in flight": str(len(metrics.activity.running)),
            "tool calls": f"{metrics.calls:,}",
            "tool errors": f"{metrics.tool_errors:,}",
            "slots leased": f"{stats.leased} of {stats.slots}",
            "acquire p50 / p99": _milliseconds(stats.acquire),
            "reset p50 / p99": _milliseconds(stats.reset),
            "containers lost": str(stats.lost),
        }
        return LiveView(
            uptime_s=uptime,
            numbers=numbers,
            containers=[] if pool is None else occupancy(pool.links.values()),
            in_flight=self._in_flight(),
            waiting=stats.waiting,
            faults=self._faults(),
            recent=list(self._recent),
            history=list(self._history),
            every_s=SAMPLE_S,
            trouble=stats.trouble,
        )

    def _in_flight(self) -> list[InFlight]:
        now = time.monotonic()
        rows: list[InFlight] = []
        for trajectory_id, running in self._metrics.activity.running.items():
            call = running.call
            doing = MODEL if call is None else call.line()
            rows.append(
                InFlight(
                    trajectory_id,
                    running.item,
                    now - running.since,
                    doing,
                    now - running.doing_since,
                    running.calls,
                    container=self._container(trajectory_id),
                )
            )
        return rows

    def _container(self, trajectory_id: str) -> str:
        """Where a trajectory's slot is; empty: it has none."""
        pool = self._backend.pool
        if pool is None or not self._backend.running:
            return ""
        return container_name(pool.links, self._backend.executor.held_slot(trajectory_id))

    def _faults(self) -> list[tuple[str, str, int]]:
        metrics = self._metrics
        counted: dict[str, Counter[str]] = {
            "group dropped": metrics.dropped,
            "group not sent": metrics.unsent,
            "retry": metrics.retries,
            "hook error": metrics.hook_errors,
        }
        return [(kind, code, count) for kind, codes in counted.items() for code, count in codes.most_common(50)]


def _milliseconds(times: Percentiles) -> str:
    return f"{times.p50_s * 1e3:.0f} / {times.p99_s * 1e3:.0f} ms" if times.n else "-"
