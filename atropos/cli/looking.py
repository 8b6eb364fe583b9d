"""One look at what runs: an env by its dashboard, a sandbox or executor server, or a whole pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import NoReturn
from urllib.parse import parse_qs, urlsplit

import httpx
from pydantic import TypeAdapter, ValidationError

from atropos.api.executor.models import Opened, ServerStatus, UsageReport
from atropos.dashboard.live import ContainerSlots, InFlight, LiveSample, LiveView
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots import QuotaUse, Usage
from atropos.slots.backends.survey import Survey
from atropos.wire import Status

LOOK_S = 2.0
SAMPLES = 1800
"""Of a server's charts: an hour."""


@dataclass(frozen=True)
class Look:
    """What was seen, and of what."""

    title: str
    view: LiveView


_LOOK = TypeAdapter(Look)


def client_of(url: str, token: str | None, option: str, variable: str) -> httpx.AsyncClient:
    """A client of what is at a URL. `option`, `variable`: where its token is, unless the URL carries it.

    Raises:
        ConfigError: it is no http(s) URL, or there is no token.
    """
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        valid = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid, parts = False, urlsplit("")
    secret = token or next(iter(parse_qs(parts.query).get("token", [])), "")
    if not valid:
        raise ConfigError(f"{url!r} is no http URL; write http://127.0.0.1:7580")
    if not secret or not secret.isascii():  # as the … of an example is not
        raise ConfigError(f"token: missing; give {option}, {variable}, or the URL as an env printed it")
    return httpx.AsyncClient(
        base_url=f"{parts.scheme}://{parts.netloc}",
        headers={"Authorization": f"Bearer {secret}"},
        timeout=10,
        trust_env=False,
    )


async def remote(client: httpx.AsyncClient) -> Look:
    """An env's dashboard, or a server.

    Raises:
        BackendUnavailable: there is no answer.
        ConfigError: the token is wrong, or it is neither.
    """
    with _read(client):
        answer = await client.get("/live.json")
        if answer.status_code == 200:
            return _LOOK.validate_json(answer.content)
    return await server(client)


async def server(client: httpx.AsyncClient) -> Look:
    """What a sandbox server or executor server says of itself.

    Raises:
        BackendUnavailable: there is no answer.
        ConfigError: the token is wrong, or it is neither.
    """
    url = str(client.base_url)
    with _read(client):
        answer = await client.get("/v1/status")
        if answer.status_code == 200:
            return _sandbox_server(url, Status.model_validate_json(answer.content))
        if answer.status_code == 404:
            answer = await client.get("/status")
        if answer.status_code == 200:
            status = ServerStatus.model_validate_json(answer.content)
            answer = await client.get("/usage")
            answered = answer.status_code == 200
            return _executor_server(
                url, status, UsageReport.model_validate_json(answer.content) if answered else UsageReport(usage=())
            )
    if answer.status_code in {401, 429, 503}:
        refuse(url, answer)
    if answer.status_code == 403:
        raise ConfigError(f"{url} shows itself to admin keys alone")
    raise ConfigError(
        f"{url} is no sandbox or executor server ({answer.status_code}), and of a running env its own dashboard alone "
        "says what it does"
    )


def refuse(url: str, answer: httpx.Response) -> NoReturn:
    """Raise what an executor server says that did not do what it was asked for.

    Raises:
        BackendUnavailable: it may do it later.
        ConfigError: it refuses, or the answer is no executor server's.
    """
    if answer.status_code == 401:
        raise ConfigError(f"{url} refuses the token")
    try:
        why = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        why = ""
    if why in {"", HTTPStatus.NOT_FOUND.phrase}:  # another server, which has no such path
        raise ConfigError(f"{url} is no executor server ({answer.status_code})")
    raise BackendUnavailable(why) if answer.status_code in {429, 503} else ConfigError(why)


@contextlib.contextmanager
def _read(client: httpx.AsyncClient) -> Generator[None]:
    """Around a request and the reading of its answer."""
    try:
        yield
    except httpx.TransportError as error:
        raise BackendUnavailable(f"{client.base_url} does not answer: {error or type(error).__name__}") from None
    except ValidationError as error:
        raise ConfigError(f"{client.base_url}: {error.errors()[0]['msg']}; is it of another version?") from None


def _sandbox_server(name: str, status: Status) -> Look:
    return Look(
        name, LiveView(uptime_s=status.uptime_s, containers=[_container("server", status)], in_flight=_leases(status))
    )


def _executor_server(name: str, status: ServerStatus, report: UsageReport) -> Look:
    numbers = {
        "open": f"{len(status.opened):,}",
        "keys": f"{len({each.key for each in status.opened}):,}",
        "slots leased": f"{status.leased:,} of {status.slots:,}",
        "waiting for a slot": f"{status.waiting:,}",
    }
    view = LiveView(
        numbers=numbers,
        containers=status.occupancy,
        in_flight=[_opened(each) for each in status.opened],
        waiting=status.waiting,
        trouble=status.trouble,
        usage=[
            (row.key, row.image, Usage(row.leases, row.slot_s, row.cpu_s, row.egress_bytes)) for row in report.usage
        ],
        quotas=[(row.key, QuotaUse(row.quota, row.used, row.most)) for row in report.quotas],
    )
    return Look(name, view)


def _opened(each: Opened) -> InFlight:
    return InFlight(
        each.id,
        "",
        each.age_s,
        each.latest,
        each.latest_s,
        each.calls,
        key=each.key,
        image=each.image or "",
        container=each.container,
        state=each.state,
    )


async def pool(survey: Survey, job_id: str) -> Look:
    """The containers of a pool and their leases.

    Raises:
        BackendUnavailable: the engine does not answer.
    """
    seen, trouble = await survey.look()
    containers: list[ContainerSlots] = []
    in_flight: list[InFlight] = []
    for each in seen:
        name = each.container.name
        if each.status is None:
            containers.append(ContainerSlots(name, 0, 0, 0, 0, ready=False))
        else:
            containers.append(_container(name, each.status))
            in_flight += _leases(each.status)
    return Look(job_id, LiveView(containers=containers, in_flight=in_flight, trouble=trouble))


def _container(name: str, status: Status) -> ContainerSlots:
    others = max(0, status.slots - status.leased - status.free - status.retired)
    return ContainerSlots(name, status.leased, status.free, status.retired, others, ready=not status.draining)


def _leases(status: Status) -> list[InFlight]:
    return [
        InFlight(each.trajectory_id, each.slot, each.age_s, "", 0.0, each.calls, state=each.state)
        for each in status.leases
    ]


class ServerWatch:
    """Looks at a server every two seconds, for its pages."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self._seen: Look | None = None
        self._history: deque[LiveSample] = deque(maxlen=SAMPLES)
        self._trouble = ""

    @property
    def title(self) -> str:
        """The server's address."""
        return str(self._client.base_url)

    async def look(self) -> None:
        """Look once.

        Raises:
            BackendUnavailable, ConfigError: see `server`.
        """
        self._seen = await server(self._client)
        leased = sum(each.leased for each in self._seen.view.containers)
        self._history.append(LiveSample(leased=leased, waiting=self._seen.view.waiting))

    async def follow(self) -> None:
        """Look until cancelled. While the server doesn't answer, the pages have the last numbers, and say so."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
                self._trouble = ""
            except (BackendUnavailable, ConfigError) as error:
                self._trouble = f"{error}; these are the last numbers"

    def view(self) -> LiveView:
        """The latest look."""
        view = LiveView() if self._seen is None else self._seen.view
        return replace(view, history=tuple(self._history), every_s=LOOK_S, trouble=self._trouble or view.trouble)
