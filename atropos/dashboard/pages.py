"""The pages over stored trajectories: the list, each one, groups side by side, and pass rates by item."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlencode

from aiohttp import web

from atropos.dashboard.ordering import Order
from atropos.dashboard.render import aligned, verdicts
from atropos.dashboard.replay import asciicast
from atropos.dashboard.scores import PASSING, RatesTable, ScoreHistory
from atropos.dashboard.store import COLUMNS, Details, Query, StoredTrajectory, TrajectoryStore

PAGE = 50
"""Rows in a page of a list."""
SIBLINGS = 16
"""Columns of a group's page."""
MAX_TEXT = 500
"""Characters of a text that is searched for."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class StoredPages:
    """The pages over a store.

    Args:
        store: the trajectories.
        page: makes an answer of a template's name and values.
        refresh: called in a thread before trajectories are listed, as to read what a file has got meanwhile.
    """

    def __init__(
        self, store: TrajectoryStore, page: Callable[..., web.Response], refresh: Callable[[], None] | None
    ) -> None:
        self._store, self._page, self._refresh = store, page, refresh

    def routes(self) -> dict[str, Handler]:
        """The handlers by path."""
        return {
            "/trajectories": self.list_all,
            "/items": self._items,
            r"/trajectory/{number:\d{1,15}}": self._trajectory,
            r"/trajectory/{number:\d{1,15}}.cast": self._cast,
            r"/group/{number:\d{1,15}}": self._group,
        }

    def scores(self) -> ScoreHistory:
        """How scores went."""
        return ScoreHistory.of(self._store.entries())

    async def list_all(self, request: web.Request) -> web.Response:
        """The list of trajectories."""
        query = Query(
            **{name: request.query.get(name, "").strip()[:MAX_TEXT] for name in ("text", "item", "error", "tool")},
            least=number_asked(request, "least"),
            most=number_asked(request, "most"),
            whole_item="whole_item" in request.query,
        )
        order = Order.asked(request.query.get("sort", ""), COLUMNS)
        page = page_asked(request)
        await self._refreshed()
        find = functools.partial(self._store.find, query, first=(page - 1) * PAGE, limit=PAGE, order=order)
        entries, total = await asyncio.to_thread(find)
        reasons, tools = await asyncio.to_thread(self._store.facets)
        return self._page(
            "list.html",
            entries=entries,
            total=total,
            kept=len(self._store),
            page=page,
            pages=max(1, math.ceil(total / PAGE)),
            query=query,
            order=order,
            reasons=reasons,
            tools=tools,
            forgotten=self._store.forgotten,
            link=functools.partial(link, "/trajectories", request.query),
        )

    async def _items(self, request: web.Request) -> web.Response:
        """Pass rates by item."""
        asked = number_asked(request, "passing")
        passing = PASSING if asked is None else asked
        page = page_asked(request)
        await self._refreshed()
        entries = self._store.entries()
        table = await asyncio.to_thread(RatesTable.of, entries, passing, request.query.get("sort", ""))
        return self._page(
            "items.html",
            table=table,
            rows=table.rows[(page - 1) * PAGE : page * PAGE],
            page=page,
            pages=max(1, math.ceil(len(table.rows) / PAGE)),
            passing=passing,
            scores=ScoreHistory.of(entries),
            forgotten=self._store.forgotten,
            link=functools.partial(link, "/items", request.query),
            list=functools.partial(link, "/trajectories", {"whole_item": "on"}),
        )

    async def _refreshed(self) -> None:
        if self._refresh is not None:
            await asyncio.to_thread(self._refresh)

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


def page_asked(request: web.Request) -> int:
    """The page of a list, from 1."""
    text = request.query.get("page", "1")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else 1


def number_asked(request: web.Request, name: str) -> float | None:
    """A score that an address names; None: it names none.

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


def link(path: str, query: Mapping[str, str], **changed: object) -> str:
    """The address of the same page with other values; a table that is sorted anew begins at its first page."""
    unchanged = {name: value for name, value in query.items() if name != "page"}
    return f"{path}?" + urlencode({**unchanged, **changed}, errors="backslashreplace")
