"""`web_search` over SearXNG, Brave or Tavily. A provider that fails is an infrastructure fault, not the model's."""

from __future__ import annotations

from typing import Any, cast

import httpx
from pydantic import BaseModel, ConfigDict

from atropos.api.settings import SearchSettings
from atropos.errors import ToolServerUnavailable
from atropos.tools.base import Tool, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.tool_server.external import WebSearchArguments

_TIMEOUT_S = 20.0
_TEXT = 600
"""Longest description shown of one result, in characters."""


class SearchHit(BaseModel):
    """One result."""

    model_config = ConfigDict(frozen=True)

    title: str
    url: str
    description: str = ""


async def _json(client: httpx.AsyncClient, provider: str, request: httpx.Request) -> dict[str, object]:
    try:
        answer = await client.send(request)
    except httpx.HTTPError as error:
        raise ToolServerUnavailable(f"web_search: {provider} can't be reached: {type(error).__name__}") from None
    if answer.status_code != 200:
        raise ToolServerUnavailable(f"web_search: {provider} answered {answer.status_code}; check its key and limits")
    try:
        body = answer.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise ToolServerUnavailable(f"web_search: {provider} did not answer a JSON object (is its JSON API enabled?)")
    return cast("dict[str, object]", body)


def _hits(items: object, text: str) -> list[SearchHit]:
    hits: list[SearchHit] = []
    for item in cast("list[object]", items) if isinstance(items, list) else []:
        if isinstance(item, dict):
            fields = cast("dict[str, object]", item)
            url = str(fields.get("url") or "")
            if url.startswith(("http://", "https://")):
                description = " ".join(str(fields.get(text) or "").split())
                hits.append(
                    SearchHit(title=str(fields.get("title") or url)[:300], url=url, description=description[:_TEXT])
                )
    return hits


def _url(settings: SearchSettings, public: str, path: str) -> str:
    return f"{(settings.url or public).rstrip('/')}{path}"


def _key(settings: SearchSettings) -> str:
    return settings.api_key.get_secret_value() if settings.api_key else ""


async def searxng(client: httpx.AsyncClient, settings: SearchSettings, query: str, _limit: int) -> list[SearchHit]:
    """GET /search?format=json of a SearXNG instance with its JSON format enabled."""
    request = client.build_request("GET", _url(settings, "", "/search"), params={"q": query, "format": "json"})
    return _hits((await _json(client, "SearXNG", request)).get("results"), "content")


async def brave(client: httpx.AsyncClient, settings: SearchSettings, query: str, limit: int) -> list[SearchHit]:
    """GET /res/v1/web/search of Brave's API, which takes at most 50 words and 400 characters."""
    request = client.build_request(
        "GET",
        _url(settings, "https://api.search.brave.com", "/res/v1/web/search"),
        params={"q": " ".join(query.split()[:50])[:400], "count": limit, "text_decorations": "false"},
        headers={"X-Subscription-Token": _key(settings), "Accept": "application/json"},
    )
    web = (await _json(client, "Brave", request)).get("web")
    return _hits(cast("dict[str, object]", web).get("results") if isinstance(web, dict) else None, "description")


async def tavily(client: httpx.AsyncClient, settings: SearchSettings, query: str, limit: int) -> list[SearchHit]:
    """POST /search of Tavily's API."""
    request = client.build_request(
        "POST",
        _url(settings, "https://api.tavily.com", "/search"),
        json={"query": query[:400], "max_results": limit},
        headers={"Authorization": f"Bearer {_key(settings)}"},
    )
    return _hits((await _json(client, "Tavily", request)).get("results"), "content")


PROVIDERS = {"searxng": searxng, "brave": brave, "tavily": tavily}
"""How each is asked. Raises `ToolServerUnavailable` where it can't be reached, refuses, or sends an invalid answer."""


def search_client() -> httpx.AsyncClient:
    """The client for the provider, which the operator chose: it may be on a private network."""
    return httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False)


class WebSearch(Tool):
    """Search the web through a provider."""

    name = "web_search"
    description = "Search the web. Answers titles, addresses and descriptions of the best results."
    arguments = WebSearchArguments
    toolsets = ("web",)
    sandboxed = False
    read_only = True
    timeout_s = 30.0

    def __init__(self, client: httpx.AsyncClient, settings: SearchSettings) -> None:
        self._client = client
        self._settings = settings

    async def run(self, arguments: Any, scope: ToolScope) -> ToolResult:
        """Ask the provider."""
        del scope
        search = PROVIDERS[self._settings.provider]
        hits = (await search(self._client, self._settings, arguments.query, arguments.limit))[: arguments.limit]
        lines = [f"{number}. {hit.title}\n   {hit.url}\n   {hit.description}" for number, hit in enumerate(hits, 1)]
        return ToolResult(
            success=True,
            output="\n".join(lines) or "no results; try other words",
            data={"results": [hit.model_dump() for hit in hits]},
        )
