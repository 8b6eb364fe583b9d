"""web_search and web_extract against a real site on loopback."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio
from pydantic import SecretStr

from atropos.api.external.extract import Extractor, WebExtract
from atropos.api.external.fetch import FetchError, Page
from atropos.api.external.guard import Guard, guarded_client
from atropos.api.external.search import WebSearch, search_client
from atropos.api.settings import SearchSettings
from atropos.errors import ToolServerUnavailable
from atropos.tools.arguments import BadArguments, check
from atropos.tools.base import ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.tool_server.external import WebExtractArguments, WebSearchArguments
from tests.processes import descendants
from tests.waiting import until

from .site import Site, pdf

SCOPE = ToolScope(trajectory_id="t", call_id="c")
in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def extractor() -> AsyncGenerator[Extractor, None]:
    """One worker for all tests; one that a test ended is replaced."""
    made = Extractor(workers=1)
    yield made
    await made.aclose()


def worker() -> int:
    (pid,) = (pid for pid, line in descendants().items() if "extract_worker" in line)
    return pid


def reapers() -> set[threading.Thread]:
    """The threads in which asyncio waits for processes (before Python 3.12); each ends once it has told the event loop."""
    return {thread for thread in threading.enumerate() if "waitpid" in thread.name}


async def extract(site: Site, *paths: str, allow: bool = True) -> ToolResult:
    guard = Guard(["127.0.0.1"] if allow else [])
    extractor = Extractor(workers=1)
    try:
        async with guarded_client(guard) as client:
            made = WebExtract(client, guard, extractor, max_bytes=1_000_000)
            return await made.run(WebExtractArguments(urls=[site.url(path) for path in paths]), SCOPE)
    finally:
        await extractor.aclose()


async def test_a_failing_page_spoils_no_other(site: Site):
    result = await extract(site, "/article", "/paper.pdf", "/data.json", "/broken", "/file.bin")
    assert result.success
    pages: list[Any] = result.data["pages"]
    assert "leased, used, reset" in pages[0]["content"]
    assert "Buy things" not in pages[0]["content"]
    assert pages[0]["title"] == "On Slots"
    assert pages[1]["content"] == "Slots in a PDF"
    assert '"answer": 42' in pages[2]["content"]
    assert "500" in pages[3]["error"]
    assert "neither a page, text nor PDF" in pages[4]["error"]
    assert "error:" in result.output


async def test_endless_page_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.api.external.extract.PAGE_S", 0.5)
    result = await extract(site, "/drip")
    assert "within 0.5 s" in (result.error or "")


async def test_private_pages_are_not_requested(site: Site):
    result = await extract(site, "/article", allow=False)
    assert not result.success
    assert "is not on the list of allowed hosts" in result.error
    assert site.seen == []


@pytest.mark.slow("starts servers")
@in_one_loop
async def test_a_hanging_parser_is_killed(extractor: Extractor, monkeypatch: pytest.MonkeyPatch):
    page = Page("http://x/", "application/pdf", None, pdf("fine"), truncated=False)
    assert (await extractor.extract(page))["text"] == "fine"
    monkeypatch.setattr("atropos.api.external.extract.PARSE_S", 0.0)
    with pytest.raises(FetchError, match="took longer"):
        await extractor.extract(page)
    monkeypatch.undo()
    assert (await extractor.extract(page))["text"] == "fine"


@pytest.mark.slow("starts servers")
@in_one_loop
async def test_a_killed_worker_is_replaced(extractor: Extractor):
    page = Page("http://x/", "text/plain", None, b"plain", truncated=False)
    assert (await extractor.extract(page))["text"] == "plain"
    killed, before = worker(), reapers()
    os.kill(killed, signal.SIGKILL)
    await until(lambda: not os.path.exists(f"/proc/{killed}") and (not before or before - reapers()), "its end")
    await asyncio.sleep(0.1)  # the thread has told the event loop, which takes some turns to say so
    assert (await extractor.extract(page))["text"] == "plain"
    os.kill(worker(), signal.SIGSTOP)
    reading = asyncio.create_task(extractor.extract(page))
    await asyncio.sleep(0)  # its first step gives the worker the page
    os.kill(worker(), signal.SIGKILL)
    with pytest.raises(FetchError, match="crashed"):
        await reading
    assert (await extractor.extract(page))["text"] == "plain"


@in_one_loop
async def test_a_title_leaves_room_for_text(extractor: Extractor):
    page = Page("http://x/", "text/html", None, b"<title>%b</title><p>text" % (b"x" * 100_000), truncated=False)
    assert (await extractor.extract(page))["title"] == "x" * 300


@in_one_loop
async def test_unknown_charset_is_read(extractor: Extractor):
    for charset in ("binary", "idna"):
        page = Page("http://x/", "text/plain", charset, "naïve".encode(), truncated=False)
        assert (await extractor.extract(page))["text"] == "naïve"


@pytest.mark.slow("large input")
@in_one_loop
@pytest.mark.parametrize("junk", [b"%PDF-1.7 junk", b"", b"<" * 10_000, b"\0" * 1000, b"<html>" + b"<div>" * 20_000])
async def test_junk_is_never_a_crash(extractor: Extractor, junk: bytes):
    page = Page("http://x/", "text/html", "no-such-charset", junk, truncated=False)
    try:
        await extractor.extract(page)
    except FetchError as error:
        assert "crashed" not in str(error)


@pytest.mark.parametrize(
    ("provider", "key", "title"),
    [("searxng", None, "Hit 0"), ("brave", "brave-key", "B"), ("tavily", "tavily-key", "T")],
)
async def test_providers_answer_alike(site: Site, provider: Any, key: str | None, title: str):
    settings = SearchSettings(provider=provider, url=site.url(""), api_key=SecretStr(key) if key else None)
    async with search_client() as client:
        made = WebSearch(client, settings)
        result = await made.run(WebSearchArguments(query="slots", limit=3), SCOPE)
    assert result.output.startswith(f"1. {title}\n   https://")
    assert 1 <= len(result.data["results"]) <= 3
    assert "javascript" not in result.output


async def test_no_query_is_a_fault(site: Site):
    settings = SearchSettings(provider="brave", url=site.url(""), api_key=SecretStr("brave-key"))
    async with search_client() as client:
        made = WebSearch(client, settings)
        for query in ("word " * 100, "letters" * 100):
            assert (await made.run(WebSearchArguments(query=query), SCOPE)).success
        with pytest.raises(BadArguments, match="'query' is wrong"):
            check("web_search", WebSearchArguments, {"query": " "})


@pytest.mark.parametrize("query", ["fail", "nonsense"])
async def test_a_failing_provider_is_a_fault(site: Site, query: str):
    settings = SearchSettings(url=site.url(""))
    async with search_client() as client:
        made = WebSearch(client, settings)
        with pytest.raises(ToolServerUnavailable, match="SearXNG"):
            await made.run(WebSearchArguments(query=query), SCOPE)


async def test_a_wrong_key_is_a_fault(site: Site):
    async with search_client() as client:
        wrong = SearchSettings(provider="brave", url=site.url(""), api_key=SecretStr("wrong"))
        with pytest.raises(ToolServerUnavailable, match="401"):
            await WebSearch(client, wrong).run(WebSearchArguments(query="x"), SCOPE)
        dead = SearchSettings(url="http://127.0.0.1:9")
        with pytest.raises(ToolServerUnavailable, match="can't be reached"):
            await WebSearch(client, dead).run(WebSearchArguments(query="x"), SCOPE)
