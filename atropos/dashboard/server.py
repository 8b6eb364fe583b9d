"""The pages over HTTP: read-only, behind a token, on loopback unless another host is named."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlencode

import h11
from aiohttp import web

from atropos.dashboard.live import LiveView
from atropos.dashboard.render import PLAYER, SCRIPT, STYLE, aligned, render, verdicts
from atropos.dashboard.replay import asciicast
from atropos.dashboard.store import Details, Query, StoredTrajectory, TrajectoryStore
from atropos.net.admission import Admission, BearerToken
from atropos.net.site import Site
from atropos.net.sockets import listen

PAGE = 50
"""Trajectories in a page of the list."""
SIBLINGS = 16
"""Columns of a group's page."""
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

    def authorizes(self, request: h11.Request) -> bool:
        """Whether a head carries the token in any of the ways that pages take it."""
        return self.shown(request.target.decode("ascii"), request.headers)  # h11 admits nothing else

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
        store: the trajectories.
        host, port: where to listen; port 0 takes a free one.
        setting: the setting that an error about the address names.
        token: what a reader must show; None: a new one.
        live: one look at a running env; None: there is none, and no live page.
        refresh: called in a thread before trajectories are listed, as to read what a file has got meanwhile.
    """

    def __init__(
        self,
        title: str,
        store: TrajectoryStore,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        setting: str = "host, port",
        token: str | None = None,
        live: Callable[[], LiveView] | None = None,
        refresh: Callable[[], None] | None = None,
    ) -> None:
        self.host, self.port, self._setting = host, port, setting
        self._title, self._store = title, store
        self._token = token or secrets.token_urlsafe(24)
        self._live, self._refresh = live, refresh
        self._fragment, self._fragment_at = "", -math.inf
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
            "/trajectories": self._list,
            r"/trajectory/{number:\d{1,15}}": self._trajectory,
            r"/trajectory/{number:\d{1,15}}.cast": self._cast,
            r"/group/{number:\d{1,15}}": self._group,
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

    def _page(self, template: str, code: int = 200, **values: object) -> web.Response:
        return _html(render(template, title=self._title, live=self._live is not None, **values), code)

    async def _home(self, request: web.Request) -> web.Response:
        if self._live is None:
            return await self._list(request)
        return self._page("live.html", view=self._live(), charts=CHARTS)

    async def _live_fragment(self, _request: web.Request) -> web.Response:
        if self._live is None:
            raise web.HTTPNotFound(reason="no env runs here")
        if time.monotonic() - self._fragment_at > FRESH_S:
            self._fragment = render("live_fragment.html", view=self._live(), charts=CHARTS)
            self._fragment_at = time.monotonic()
        return _html(self._fragment)

    async def _live_json(self, _request: web.Request) -> web.Response:
        """The same look as data, for `atropos top`."""
        if self._live is None:
            raise web.HTTPNotFound(reason="no env runs here")
        return web.json_response({"title": self._title, "view": dataclasses.asdict(self._live())})

    async def _list(self, request: web.Request) -> web.Response:
        if self._refresh is not None:
            await asyncio.to_thread(self._refresh)
        filters = {name: request.query.get(name, "").strip()[:500] for name in ("text", "item", "error", "tool")}
        query = Query(**filters, least=_bound(request, "least"), most=_bound(request, "most"))
        asked = request.query.get("page", "1")
        page = max(1, int(asked)) if asked.isascii() and asked.isdigit() and len(asked) < 10 else 1
        find = functools.partial(self._store.find, query, first=(page - 1) * PAGE, limit=PAGE)
        entries, total = await asyncio.to_thread(find)
        reasons, tools = await asyncio.to_thread(self._store.facets)
        parameters = {name: value for name, value in request.query.items() if name != "page"}
        return self._page(
            "list.html",
            entries=entries,
            total=total,
            kept=len(self._store),
            page=page,
            pages=max(1, math.ceil(total / PAGE)),
            query=query,
            reasons=reasons,
            tools=tools,
            forgotten=self._store.forgotten,
            link=functools.partial(_link, parameters),
        )

    async def _trajectory(self, request: web.Request) -> web.Response:
        entry, details = await self._found(request)
        return await asyncio.to_thread(self._page, "trajectory.html", entry=entry, details=details)

    async def _cast(self, request: web.Request) -> web.Response:
        entry, details = await self._found(request)
        body = (await asyncio.to_thread(asciicast, entry, details)).encode()
        name = f'attachment; filename="trajectory-{entry.number}.cast"'
        return web.Response(body=body, content_type="application/x-asciicast", headers={"Content-Disposition": name})

    async def _found(self, request: web.Request) -> tuple[StoredTrajectory, Details]:
        stored = await asyncio.to_thread(self._store.get, int(request.match_info["number"]))
        if stored is None:
            raise web.HTTPNotFound(reason="This trajectory is not kept.")
        return stored

    async def _group(self, request: web.Request) -> web.Response:
        siblings = await asyncio.to_thread(self._store.group, int(request.match_info["number"]))
        if not siblings:
            raise web.HTTPNotFound(reason="This group is not kept.")
        return await asyncio.to_thread(self._group_page, siblings[:SIBLINGS], len(siblings[SIBLINGS:]))

    def _group_page(self, siblings: list[tuple[StoredTrajectory, Details]], more: int) -> web.Response:
        rows, outcomes = aligned(siblings), verdicts(siblings)
        return self._page("group.html", siblings=siblings, more=more, rows=rows, verdicts=outcomes)


def _html(text: str, code: int = 200) -> web.Response:
    body = text.encode(errors="backslashreplace")
    return web.Response(body=body, status=code, content_type="text/html", charset="utf-8")


async def _static(text: str, kind: str, _request: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)


def _link(query: dict[str, str], page: int) -> str:
    """The address of a page of the same list."""
    return "/trajectories?" + urlencode({**query, "page": page}, errors="backslashreplace")


def _bound(request: web.Request, name: str) -> float | None:
    """A bound of the score; None: there is none.

    Raises:
        web.HTTPBadRequest: it is no number.
    """
    text = request.query.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise web.HTTPBadRequest(reason=f"{name} is a score: it must be a number.")
    return value
