"""The pages over HTTP: read-only, behind a token, on loopback unless another host is named."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlencode

import h11
from aiohttp import web

from atropos.dashboard.keys import KEYS, key_rows
from atropos.dashboard.live import InFlight, LiveView
from atropos.dashboard.ordering import Columns, Order
from atropos.dashboard.pages import StoredPages, link
from atropos.dashboard.render import PLAYER, SCRIPT, STYLE, render
from atropos.dashboard.store import TrajectoryStore
from atropos.net.admission import Admission, BearerToken
from atropos.net.site import Site
from atropos.net.sockets import listen

FRESH_S = 1.5
"""How long a look at the env serves all who ask."""
CHARTS = (
    ("trajectories a minute", "trajectories_per_min", ""),
    ("calls per second", "calls_per_s", ""),
    ("call latency, p50", "call_p50_s", " s"),
    ("call latency, p99", "call_p99_s", " s"),
    ("slots leased", "leased", ""),
    ("waiting for a slot", "waiting", ""),
)
IN_FLIGHT: Columns[InFlight] = {
    "trajectory": lambda row: row.trajectory_id,
    "key": lambda row: row.key,
    "item": lambda row: row.item,
    "image": lambda row: row.image,
    "container": lambda row: row.container,
    "state": lambda row: row.state,
    "age": lambda row: row.age_s,
    "calls": lambda row: row.calls,
    "now": lambda row: row.doing,
    "for": lambda row: row.doing_s,
}
LIVE_TABLES: Mapping[str, Columns[Any]] = {"sort": IN_FLIGHT, "keys": KEYS}
"""By the parameter of the live page's address that says how they are sorted."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_log = logging.getLogger(__name__)


class Readers(Admission):
    """Admits browsers that send the token in the address or a cookie; others get a 401, and their body is not read."""

    def __init__(self, token: str, cookie: str) -> None:
        self._value, self._cookie = BearerToken(token), cookie
        super().__init__(self._value, None, b'{"code":"unauthorized","message":"open the URL with the token"}')

    def holder(self, request: h11.Request) -> str | None:
        """As `Admission.holder`, by the token in any of the ways that pages take it."""
        return "" if self.shown(request.target.decode("ascii"), request.headers) else None  # h11 admits nothing else

    def shown(self, target: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> bool:
        """Whether an address or one of these headers carries the token."""
        query = parse_qs(target.partition("?")[2])
        values = [value.encode(errors="surrogateescape") for value in query.get("token", [])]
        for name, value in headers:
            if name.lower() == b"cookie":
                values += _cookies(value, self._cookie)
            elif name.lower() == b"authorization":
                values.append(value.removeprefix(b"Bearer "))
        return any(map(self._value.is_token, values))


def _cookies(header: bytes, name: str) -> Iterator[bytes]:
    """The values of one cookie. The others in the header, of whatever listens on this host, may be of any form."""
    for piece in header.decode("latin-1").split(";"):
        if piece.strip().startswith(f"{name}="):
            with contextlib.suppress(CookieError):
                yield from (one.value.encode("latin-1", "replace") for one in SimpleCookie(piece).values())


class DashboardServer:
    """Serves the pages from `start` to `close`.

    Args:
        title: of every page.
        store: the trajectories; None: whatever is looked at keeps none, and there is the live page alone.
        host, port: where to listen; port 0 takes a free one.
        setting: the setting that an error about the address names.
        token: what a reader must show; None: a new one.
        live: one look at a running env; None: there is none, and no live page.
        refresh: called in a thread before trajectories are listed, as to read what a file has got meanwhile.
    """

    def __init__(
        self,
        title: str,
        store: TrajectoryStore | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        setting: str = "host, port",
        token: str | None = None,
        live: Callable[[], LiveView] | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self.host, self.port, self._setting = host, port, setting
        self._title = title
        self._stored = None if store is None else StoredPages(store, self._page, refresh)
        self._token = token or secrets.token_urlsafe(24)
        self._live = live
        self._fragments: dict[tuple[str, ...], str] = {}
        self._fragments_at = -math.inf
        self._readers: Readers  # from `start` on
        self._site: Site | None = None

    @property
    def url(self) -> str:
        """Where it is, with the token that opens it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?{urlencode({'token': self._token})}"

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address can't be listened on.
        """
        listening = listen(self.host, self.port, setting=self._setting)
        app = web.Application(middlewares=[self._guarded])
        for path, handler in {
            "/": self._home,
            "/live": self._live_fragment,
            "/live.json": self._live_json,
            **({} if self._stored is None else self._stored.routes()),
            "/style.css": functools.partial(_static, STYLE, "text/css"),
            "/script.js": functools.partial(_static, SCRIPT, "text/javascript"),
            "/replay.js": functools.partial(_static, PLAYER, "text/javascript"),
        }.items():
            app.router.add_get(path, handler)
        self.port = int(listening.getsockname()[1])
        self._readers = Readers(self._token, self._cookie)
        self._site = Site(app, self._readers, close_s=0.5)
        await self._site.start(listening)

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        site, self._site = self._site, None
        if site is not None:
            await site.close()

    @property
    def _cookie(self) -> str:
        return f"atropos_dashboard_{self.port}"

    # ------------------------------------------------------------------------------------------------------ requests

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """The token before anything else; then the same headers on every answer."""
        answer: web.StreamResponse
        if self._readers.shown(request.raw_path):
            answer = web.HTTPSeeOther("/")
            answer.set_cookie(self._cookie, self._token, httponly=True, samesite="Lax", path="/")
        elif not self._readers.shown(request.raw_path, request.raw_headers):
            text = "401: open the URL that was printed at the start; it carries the token\n"
            answer = web.Response(status=401, text=text, headers={"WWW-Authenticate": "Bearer"})
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = self._page("error.html", status=error.status, text=error.reason, code=error.status)
            except Exception:
                _log.exception("the dashboard failed at %s", request.path)
                answer = self._page("error.html", status=500, text="The page could not be made; see the log.", code=500)
        answer.headers.update(HEADERS)
        return answer

    def _page(self, template: str, /, *, code: int = 200, **values: Any) -> web.Response:
        pages = {"live": self._live is not None, "stored": self._stored is not None}
        return _html(render(template, title=self._title, **pages, **values), code)

    async def _home(self, request: web.Request) -> web.Response:
        if self._live is None:
            assert self._stored is not None
            return await self._stored.list_all(request)
        return self._page("live.html", **self._looked(self._live(), _orders(request)))

    async def _live_fragment(self, request: web.Request) -> web.Response:
        if self._live is None:
            raise web.HTTPNotFound(reason="no env runs here")
        if time.monotonic() - self._fragments_at > FRESH_S:
            self._fragments.clear()
            self._fragments_at = time.monotonic()
        orders = _orders(request)
        asked = tuple(map(str, orders.values()))
        if asked not in self._fragments:
            self._fragments[asked] = render("live_fragment.html", **self._looked(self._live(), orders))
        return _html(self._fragments[asked])

    def _looked(self, view: LiveView, orders: Mapping[str, Order[Any]]) -> dict[str, Any]:
        """What the live page shows of a look."""
        counted = {name: [getattr(sample, name) for sample in view.history] for _, name, _ in CHARTS}
        return {
            "view": view,
            "in_flight": orders["sort"].sorted(view.in_flight),
            "keys": orders["keys"].sorted(key_rows(view)),
            "orders": orders,
            "link": functools.partial(link, "/", {name: str(order) for name, order in orders.items() if order.column}),
            "charts": [(text, counted[name], unit) for text, name, unit in CHARTS if None not in counted[name]],
            "scores": None if self._stored is None else self._stored.scores(),
            "of_server": self._stored is None,
        }

    async def _live_json(self, _request: web.Request) -> web.Response:
        """The same look as data, for `atropos top`."""
        if self._live is None:
            raise web.HTTPNotFound(reason="no env runs here")
        return web.json_response({"title": self._title, "view": dataclasses.asdict(self._live())})


def _orders(request: web.Request) -> dict[str, Order[Any]]:
    """How the live page's tables are sorted."""
    return {name: Order.asked(request.query.get(name, ""), columns) for name, columns in LIVE_TABLES.items()}


def _html(text: str, code: int = 200) -> web.Response:
    body = text.encode(errors="backslashreplace")
    return web.Response(body=body, status=code, content_type="text/html", charset="utf-8")


async def _static(text: str, kind: str, _request: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)
