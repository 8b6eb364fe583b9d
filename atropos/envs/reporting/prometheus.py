"""An env's metrics for Prometheus: the same numbers that wandb gets, with labels, at /metrics while it runs."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping

from aiohttp import web
from pydantic import SecretStr

from atropos.envs.config import split_address
from atropos.envs.running.metrics import EnvMetrics
from atropos.metrics import CONTENT_TYPE, Family, build_info, counter, exposition, gauge
from atropos.net.admission import Admission, BearerToken
from atropos.net.site import Site
from atropos.net.sockets import listen

_log = logging.getLogger(__name__)


def metrics_text(metrics: EnvMetrics, others: Iterable[Family], env: str) -> str:
    """An env's numbers in Prometheus' text format, labelled with its name; called in its event loop.

    `others` are its executor's and its pool's.
    """
    return exposition([build_info(), *_families(metrics), *others], env=env)


def _families(found: EnvMetrics) -> list[Family]:
    rows: list[tuple[str, str, float | Mapping[str, float], str]] = [
        ("groups", "Complete groups.", found.groups, ""),
        ("groups_cancelled", "Groups cancelled by the trainer's needs or at the end.", found.cancelled_groups, ""),
        ("groups_dropped", "Groups dropped whole.", found.dropped, "reason"),
        ("groups_unsent", "Complete groups that are left out of batches.", found.unsent, "reason"),
        ("groups_maybe_sent_twice", "Groups that the trajectory API may have taken twice.", found.maybe_sent_twice, ""),
        ("verifier_zeros", "Trajectories whose verifier gave no reward, scored 0.", found.verifier_zeros, ""),
        ("items_left_out", "Items on which no trajectory could score here.", found.items_left_out, ""),
        ("trajectories", "Scored trajectories.", found.trajectories, ""),
        ("trajectory_retries", "New attempts after an infrastructure failure.", found.retries, "reason"),
        ("trajectory_stops", "Scored trajectories by what ended them.", found.stop_reasons, "reason"),
        ("hook_errors", "Errors raised by the env's own code.", found.hook_errors, "hook"),
        ("tool_calls", "Tool calls.", found.calls, ""),
        ("tool_errors", "Results that were errors, in the conversations of finished agents.", found.tool_errors, ""),
        ("phase_seconds", "Seconds of trajectories by phase.", found.phases, "phase"),
    ]
    families = [counter(f"atropos_env_{name}_total", says, value, label) for name, says, value, label in rows]
    families.append(
        counter(
            "atropos_env_loop_cpu_seconds_total",
            "CPU of the event loop's thread: where it grows by nearly a second a second, the loop is the limit.",
            time.thread_time(),
        )
    )
    families.append(gauge("atropos_env_in_flight", "Trajectories in flight.", len(found.activity.running)))
    if (mean := found.mean_score) is not None:
        families.append(gauge("atropos_env_score_mean", "Mean score of recent groups' trajectories.", mean))
    return [*families, found.verify.family(), found.trajectory_seconds.family()]


class MetricsEndpoint:
    """Serves `metrics_text` at one address until it is closed.

    Args:
        address: host and port, as 127.0.0.1:9400 or [::1]:9400; port 0 takes a free one; None: nowhere.
        text: gives what to serve.
        token: the bearer token that opens it; None: every GET does.
    """

    def __init__(self, address: str | None, text: Callable[[], str], token: SecretStr | None = None) -> None:
        self._address = address
        self.host, self.port = ("", 0) if address is None else split_address(address)
        self._text = text
        self._token = token
        self._site: Site | None = None

    async def start(self) -> None:
        """Listen, unless it does already or there is no address.

        Raises:
            ConfigError: the address can't be listened on.
        """
        if self._address is None or self._site is not None:
            return
        listening = listen(self.host, self.port, setting="env.metrics_address")
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        if self._token is None:  # no token is needed: each GET is a request of its own, without a body
            refused = Admission(BearerToken(secrets.token_hex()), None, b'{"code":"bad_request","message":"only GET"}')
        else:
            refusal = b'{"code":"unauthorized","message":"the bearer token of env.metrics_token is missing or wrong"}'
            refused = Admission(BearerToken(self._token.get_secret_value()), (), refusal)
        self._site = Site(app, refused, close_s=0.5)
        await self._site.start(listening)
        self.port = int(listening.getsockname()[1])
        _log.info("metrics at http://%s:%d/metrics", self.host, self.port)

    async def _answer(self, _request: web.Request) -> web.Response:
        return web.Response(body=self._text().encode(), headers={"Content-Type": CONTENT_TYPE})

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        site, self._site = self._site, None
        if site is not None:
            await site.close()
