"""An env's metrics for Prometheus: the same numbers that wandb gets, with labels, at /metrics while it runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atropos.envs.running.metrics import EnvMetrics, percentile
from atropos.errors import ConfigError
from atropos.slots.stats import PoolStats

_log = logging.getLogger(__name__)


class _Numbers(Collector):
    """One scrape's numbers."""

    def __init__(self, metrics: EnvMetrics, pool: PoolStats | None, env: str) -> None:
        self._metrics, self._pool, self._env = metrics, pool, env

    def collect(self) -> Iterable[Metric]:
        found = self._metrics
        yield self._counter("groups", "complete groups", found.groups)
        yield self._counter(
            "groups_cancelled", "groups cancelled by the trainer's needs or at the end", found.cancelled_groups
        )
        yield self._counter("groups_dropped", "groups dropped whole", found.dropped, "reason")
        yield self._counter("groups_unsent", "complete groups that are left out of batches", found.unsent, "reason")
        yield self._counter(
            "groups_maybe_sent_twice", "groups that the trajectory API may have taken twice", found.maybe_sent_twice
        )
        yield self._counter(
            "verifier_zeros", "trajectories whose verifier gave no reward, scored 0", found.verifier_zeros
        )
        yield self._counter("trajectories", "scored trajectories", found.trajectories)
        yield self._counter(
            "trajectory_retries", "new attempts after an infrastructure failure", found.retries, "reason"
        )
        yield self._counter("trajectory_stops", "scored trajectories by what ended them", found.stop_reasons, "reason")
        yield self._counter("hook_errors", "errors raised by the env's own code", found.hook_errors, "hook")
        yield self._counter("tool_calls", "tool calls", found.calls)
        yield self._counter(
            "tool_errors", "results that were errors, in the conversations of finished agents", found.tool_errors
        )
        yield self._counter("phase_seconds", "seconds of trajectories by phase", found.phases, "phase")
        calls = {"0.5": percentile(found.call_s, 0.5), "0.99": percentile(found.call_s, 0.99)}
        yield self._gauge("env_call_seconds", "latency of recent tool calls", calls, "quantile")
        if found.scores:
            yield self._gauge(
                "env_score_mean", "mean score of recent trajectories", sum(found.scores) / len(found.scores)
            )
        if self._pool is not None:
            yield from self._slots(self._pool)

    def _slots(self, stats: PoolStats) -> Iterable[Metric]:
        slots = {"free": stats.free, "leased": stats.leased, "retired": stats.retired}
        yield self._gauge("pool_containers", "containers", stats.containers)
        yield self._gauge("pool_slots", "slots by state", slots, "state")
        yield self._gauge("pool_waiting", "acquires that wait", stats.waiting)
        for name, seen in (("acquire", stats.acquire), ("reset", stats.reset)):
            values = {"0.5": seen.p50_s, "0.99": seen.p99_s}
            yield self._gauge(f"pool_{name}_seconds", f"recent seconds of a slot's {name}", values, "quantile")

    def _counter(self, name: str, says: str, value: float | Mapping[str, float], label: str | None = None) -> Metric:
        family = CounterMetricFamily(f"atropos_env_{name}", says, labels=["env", *([label] if label else [])])
        return self._filled(family, value)

    def _gauge(self, name: str, says: str, value: float | Mapping[str, float], label: str | None = None) -> Metric:
        family = GaugeMetricFamily(f"atropos_{name}", says, labels=["env", *([label] if label else [])])
        return self._filled(family, value)

    def _filled(self, family: CounterMetricFamily | GaugeMetricFamily, value: float | Mapping[str, float]) -> Metric:
        if isinstance(value, Mapping):
            for label, number in value.items():
                family.add_metric([self._env, label], float(number))
        else:
            family.add_metric([self._env], float(value))
        return family


def metrics_text(metrics: EnvMetrics, pool: PoolStats | None, env: str) -> str:
    """All numbers in Prometheus' text format, version 0.0.4."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Numbers(metrics, pool, env))
    return generate_latest(registry).decode()


class MetricsEndpoint:
    """Serves `metrics_text` at one address until it is closed.

    Args:
        address: host and port, as 127.0.0.1:9400 or [::1]:9400; port 0 takes a free one; None: nowhere.
        text: gives what to serve.
    """

    def __init__(self, address: str | None, text: Callable[[], str]) -> None:
        self._address = address
        self.host, self.port = ("", 0) if address is None else split_address(address)
        self._text = text
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen; does nothing when it does, or where there is no address.

        Raises:
            ConfigError: the address can't be had.
        """
        if self._address is None or self._runner is not None:
            return
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"env.metrics_address: {self.host}:{self.port}: {os.strerror(error.errno) if error.errno else error}; choose another"
            ) from error
        self._runner = runner
        self.port = int(runner.addresses[0][1])
        _log.info("metrics at http://%s:%d/metrics", self.host, self.port)

    async def _answer(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._text().encode(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()


def split_address(address: str) -> tuple[str, int]:
    """Host and port.

    Raises:
        ValueError: it is no address; says what one looks like.
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"{address!r} is no host:port; write 127.0.0.1:9400")
    return host, int(port)
