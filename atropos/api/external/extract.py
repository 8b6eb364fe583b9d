"""`web_extract`: pages and PDF files as text, parsed in worker processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Mapping

import httpx

from atropos.api.external.fetch import FetchError, Page, fetch
from atropos.api.external.guard import Guard
from atropos.tools.base import Tool, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.tool_server.external import WebExtractArguments

PARSE_S = 20.0
"""Timeout of parsing one page; its worker is then killed."""
PAGE_S = 45.0
"""Timeout of fetching and reading one page; the other pages of the call are answered without it."""
_ANSWER_BYTES = 64 * 1024 * 1024
_JOBS = 200
"""Pages after which a worker is replaced, which bounds leaks of the parsers."""


class Extractor:
    """A few worker processes, started when needed, killed when they hang."""

    def __init__(self, workers: int = 2) -> None:
        self._free: asyncio.Queue[asyncio.subprocess.Process | None] = asyncio.Queue()
        for _ in range(workers):
            self._free.put_nowait(None)
        self._alive: dict[asyncio.subprocess.Process, int] = {}

    async def extract(self, page: Page) -> dict[str, str]:
        """Title and text of a page.

        Raises:
            FetchError: it can't be read.
        """
        worker = await self._free.get()
        keep: asyncio.subprocess.Process | None = None
        try:
            if worker is not None and worker.returncode is not None:
                self._kill(worker)
                worker = None
            worker = worker or await self._start()
            async with asyncio.timeout(PARSE_S):
                answer = await self._ask(worker, page)
            if self._alive[worker] < _JOBS:
                keep = worker
        except TimeoutError:
            raise FetchError(f"reading it took longer than {PARSE_S:g} s") from None
        except (OSError, ValueError, asyncio.IncompleteReadError):
            raise FetchError("the page crashed its reader") from None
        finally:
            if keep is None and worker is not None:
                self._kill(worker)
            self._free.put_nowait(keep)
        if "error" in answer:
            raise FetchError(answer["error"])
        return answer

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "atropos.api.external.extract_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C.UTF-8", "PYTHONPATH": os.pathsep.join(sys.path)},
            limit=_ANSWER_BYTES,
        )
        self._alive[worker] = 0
        return worker

    async def _ask(self, worker: asyncio.subprocess.Process, page: Page) -> dict[str, str]:
        assert worker.stdin is not None
        assert worker.stdout is not None
        self._alive[worker] += 1
        order = {"kind": page.content_type, "charset": page.charset, "url": page.url, "bytes": len(page.content)}
        worker.stdin.write(json.dumps(order).encode() + b"\n" + page.content)
        await worker.stdin.drain()
        return json.loads(await worker.stdout.readuntil(b"\n"))

    def _kill(self, worker: asyncio.subprocess.Process) -> None:
        self._alive.pop(worker, None)
        with contextlib.suppress(ProcessLookupError):
            worker.kill()

    async def aclose(self) -> None:
        """End the workers."""
        workers = list(self._alive)
        for worker in workers:
            self._kill(worker)
        for worker in workers:
            await worker.wait()


class WebExtract(Tool):
    """Read pages; one that fails does not spoil the others."""

    name = "web_extract"
    description = "Read web pages or PDF files as text."
    arguments = WebExtractArguments
    toolsets = ("web",)
    sandboxed = False
    read_only = True
    timeout_s = 60.0

    def __init__(self, client: httpx.AsyncClient, guard: Guard, extractor: Extractor, *, max_bytes: int) -> None:
        self._client = client
        self._guard = guard
        self._extractor = extractor
        self._max_bytes = max_bytes

    async def _one(self, url: str) -> dict[str, object]:
        try:
            async with asyncio.timeout(PAGE_S):
                return await self._read(url)
        except FetchError as error:
            return {"url": url, "error": str(error)}
        except TimeoutError:
            return {"url": url, "error": f"it was not fetched and read within {PAGE_S:g} s"}

    async def _read(self, url: str) -> dict[str, object]:
        page = await fetch(self._client, self._guard, url, max_bytes=self._max_bytes)
        if page.truncated and page.content[:5] == b"%PDF-":
            raise FetchError(f"the PDF is longer than {self._max_bytes:,} bytes")
        answer = await self._extractor.extract(page)
        result: dict[str, object] = {"url": url, "title": answer["title"], "content": answer["text"]}
        if page.url != url:
            result["final_url"] = page.url
        if page.truncated:
            result["truncated"] = True
        return result

    async def run(self, arguments: WebExtractArguments, scope: ToolScope) -> ToolResult:
        """Fetch and read all pages at once."""
        del scope
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(url)) for url in arguments.urls]
        pages = [task.result() for task in tasks]
        failed = [page for page in pages if "error" in page]
        output = "\n\n".join(_shown(page) for page in pages)
        if len(failed) == len(pages):
            error = "; ".join(f"{str(page['url'])[:300]}: {page['error']}" for page in pages)
            return ToolResult.failure(error, data={"pages": pages})
        return ToolResult(success=True, output=output, data={"pages": pages})


def _shown(page: Mapping[str, object]) -> str:
    if "error" in page:
        return f"# {page['url']}\nerror: {page['error']}"
    title = f"{page['title']}\n" if page["title"] else ""
    rest = "\n[... the page is longer than what was read ...]" if page.get("truncated") else ""
    return f"# {title}{page.get('final_url', page['url'])}\n\n{page['content'] or '(the page has no text)'}{rest}"
