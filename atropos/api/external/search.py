"""`web_search` over SearXNG, Brave or Tavily. A provider that fails is an infrastructure fault, not the model's."""

from __future__ import annotations

from typing import Any, Protocol, cast

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


class SearchProvider(Protocol):
    """Finds pages."""

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        """The best hits, best first.

        Raises:
            ToolServerUnavailable: the provider can't be reached, refuses, or sends an invalid answer.
        """
        ...


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
    found: list[SearchHit] = []
    for item in cast("list[object]", items) if isinstance(items, list) else []:
        if isinstance(item, dict):
            fields = cast("dict[str, object]", item)
            url = str(fields.get("url") or "")
            if url.startswith(("http://", "https://")):
                description = " ".join(str(fields.get(text) or "").split())
                found.append(
                    SearchHit(title=str(fields.get("title") or url)[:300], url=url, description=description[:_TEXT])
                )
    return found


class SearXng:
    """A SearXNG instance with its JSON format enabled."""

    def __init__(self, client: httpx.AsyncClient, settings: SearchSettings) -> None:
        self._client = client
        self._url = f"{(settings.url or '').rstrip('/')}/search"

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        """GET /search?format=json."""
        request = self._client.build_request("GET", self._url, params={"q": query, "format": "json"})
        return _hits((await _json(self._client, "SearXNG", request)).get("results"), "content")[:limit]


class Brave:
    """Brave's web search API."""

    def __init__(self, client: httpx.AsyncClient, settings: SearchSettings) -> None:
        self._client = client
        self._url = f"{(settings.url or 'https://api.search.brave.com').rstrip('/')}/res/v1/web/search"
        self._key = settings.api_key.get_secret_value() if settings.api_key else ""

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        """GET /res/v1/web/search, which takes at most 50 words and 400 characters."""
        request = self._client.build_request(
            "GET",
            self._url,
            params={"q": " ".join(query.split()[:50])[:400], "count": limit, "text_decorations": "false"},
            headers={"X-Subscription-Token": self._key, "Accept": "application/json"},
        )
        web = (await _json(self._client, "Brave", request)).get("web")
        return _hits(cast("dict[str, object]", web).get("results") if isinstance(web, dict) else None, "description")


class Tavily:
    """Tavily's search API."""

    def __init__(self, client: httpx.AsyncClient, settings: SearchSettings) -> None:
        self._client = client
        self._url = f"{(settings.url or 'https://api.tavily.com').rstrip('/')}/search"
        self._key = settings.api_key.get_secret_value() if settings.api_key else ""

    async def search(self, query: str, limit: int) -> list[SearchHit]:
        """POST /search."""
        request = self._client.build_request(
            "POST",
            self._url,
            json={"query": query[:400], "max_results": limit},
            headers={"Authorization": f"Bearer {self._key}"},
        )
        return _hits((await _json(self._client, "Tavily", request)).get("results"), "content")


PROVIDERS = {"searxng": SearXng, "brave": Brave, "tavily": Tavily}


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

    def __init__(self, provider: SearchProvider) -> None:
        self._provider = provider

    async def run(self, arguments: Any, scope: ToolScope) -> ToolResult:
        """Ask the provider."""
        del scope
        hits = (await self._provider.search(arguments.query, arguments.limit))[: arguments.limit]
        lines = [f"{number}. {hit.title}\n   {hit.url}\n   {hit.description}" for number, hit in enumerate(hits, 1)]
        return ToolResult(
            success=True,
            output="\n".join(lines) or "no results; try other words",
            data={"results": [hit.model_dump() for hit in hits]},
        )
