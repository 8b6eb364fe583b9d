"""The `browser_*` tools: a page as an accessibility tree, and what can be done to its elements."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from atropos.aio import Allowance
from atropos.api.external.browser import CRASHED, PAGE_CRASHED, PAGE_HANGS, BrowserHost, Session
from atropos.errors import ToolServerUnavailable
from atropos.net.egress_policy import EgressRefused
from atropos.net.exchange import REFUSED_HEADER
from atropos.tools.base import Tool, ToolError, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.tool_server.external import (
    ClickArguments,
    NavigateArguments,
    NoArguments,
    SnapshotArguments,
    TypeArguments,
)

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

Arguments = TypeVar("Arguments")

_REF = re.compile(r"\[?(?:ref=)?((?:f\d+)?e\d+)\]?\Z")
_ACTION_MS = 8000
_SETTLE_MS = 3000
SESSION_S = 50.0
"""Longest wait for a context: less than a call has, since a browser that does not start is no failure of the tool."""
ANSWER_S = 5.0
"""Timeout of calls for which Playwright has none: a page whose script never ends would hang them."""
_AFTER_CLICK_MS = 150
"""Wait for a navigation to begin after a click; a later one shows in the next snapshot."""


class BrowserTool(Tool, Generic[Arguments]):
    """What all of them share. `Arguments`: those of the tool."""

    toolsets = ("browser",)
    sandboxed = False
    timeout_s = 60.0
    opens = False

    def __init__(self, host: BrowserHost) -> None:
        self._host = host

    async def run(self, arguments: Any, scope: ToolScope) -> ToolResult:
        """Act on the trajectory's page and show it."""
        from playwright.async_api import Error
        from playwright.async_api import TimeoutError as Late

        try:
            async with asyncio.timeout(SESSION_S):
                session = await self._host.session(scope.state, opening=self.opens)
        except TimeoutError:
            raise ToolServerUnavailable(f"the browser did not start within {SESSION_S:g} s") from None
        try:
            return await self.act(session, arguments)
        except (Error, TimeoutError) as error:
            late = isinstance(error, (Late, TimeoutError))
            if late or "has been closed" in str(error):
                await self._host.probe()
            if not session.alive:
                raise ToolError(CRASHED) from None
            if late and not await session.responds():
                raise ToolError(PAGE_HANGS) from None
            raise ToolError(_explain(error)) from None

    async def act(self, session: Session, arguments: Arguments) -> ToolResult:
        """Do what the tool is for."""
        raise NotImplementedError

    async def show(self, session: Session, *, full: bool = False) -> ToolResult:
        """The page as text, with notes on what happened since the last answer."""
        page = await session.open_page()
        tree = await page.aria_snapshot(mode="ai")
        async with Allowance(ANSWER_S).once():
            title, url = await page.title(), page.url
        most = self._host.settings.snapshot_chars * (4 if full else 1)
        truncated = len(tree) > most
        if truncated:
            shown = tree[:most].rpartition("\n")[0]
            tree = f"{shown}\n[... {len(tree) - len(shown):,} characters more; browser_snapshot with full=true ...]"
        notes = "".join(f"note: {note}\n" for note in session.take_notes())
        output = f"{notes}page: {title}\naddress: {url}\n\n{tree or '(the page is empty)'}"
        return ToolResult(success=True, output=output, truncated=truncated, data={"url": url, "title": title})

    async def settled(self, session: Session) -> ToolResult:
        """The page that is open after an action, once it has loaded, within bounds: some pages never finish loading."""
        from playwright.async_api import Error

        page = await session.open_page()
        with contextlib.suppress(Error):
            await page.wait_for_load_state("domcontentloaded", timeout=_ACTION_MS)
            await page.wait_for_load_state("load", timeout=_SETTLE_MS)
        return await self.show(session)

    async def element(self, page: Page, ref: str) -> Locator:
        """The element of a reference of the last snapshot.

        Raises:
            ToolError: it is no reference, or no longer there.
        """
        from playwright.async_api import Error

        match = _REF.match(ref.strip())
        if match is None:
            raise ToolError(f"{ref[:60]!r} is not a reference; take one from the snapshot, such as e12")
        locator = page.locator(f"aria-ref={match[1]}")
        try:
            async with Allowance(ANSWER_S).once():
                there = await locator.count()
        except Error:
            there = 0
        if there != 1:
            raise ToolError(f"there is no element {match[1]} on the page now; browser_snapshot lists its elements")
        return locator


class BrowserNavigate(BrowserTool[NavigateArguments]):
    """Open an address."""

    name = "browser_navigate"
    description = "Open an address in the browser and see the page."
    arguments = NavigateArguments
    opens = True

    async def act(self, session: Session, arguments: NavigateArguments) -> ToolResult:
        """Go there."""
        from playwright.async_api import Error

        url = arguments.url.strip()
        if "://" not in url and not url.startswith(("about:", "data:", "javascript:", "file:")):
            url = f"https://{url}"
        try:
            host, port = self._host.guard.check_url(url)
            await self._host.guard.addresses(host, port)
        except EgressRefused as error:
            raise ToolError(str(error)) from None
        except OSError as error:
            raise ToolError(f"{url[:200]}: {error.strerror or error}") from None
        page = await session.open_page()
        try:
            answer = await page.goto(
                url, wait_until="domcontentloaded", timeout=self._host.settings.navigation_timeout_s * 1000
            )
        except Error as error:
            if "Download is starting" in str(error) or "net::ERR_ABORTED" in str(error):
                await page.wait_for_timeout(_AFTER_CLICK_MS)  # the download's own note says the same
                session.take_notes()
                raise ToolError(
                    f"{url[:200]} is a download, which this browser refuses; web_extract reads pages and PDF files"
                ) from None
            raise
        if answer is not None and (refused := answer.headers.get(REFUSED_HEADER)):
            raise ToolError(refused)
        return await self.settled(session)


class BrowserSnapshot(BrowserTool[SnapshotArguments]):
    """See the page."""

    name = "browser_snapshot"
    description = "See the page as a tree of elements; the references in it are what the other browser tools take."
    arguments = SnapshotArguments
    read_only = True

    async def act(self, session: Session, arguments: SnapshotArguments) -> ToolResult:
        """Show it."""
        return await self.show(session, full=arguments.full)


class BrowserClick(BrowserTool[ClickArguments]):
    """Click an element."""

    name = "browser_click"
    description = "Click an element of the page and see what came of it."
    arguments = ClickArguments

    async def act(self, session: Session, arguments: ClickArguments) -> ToolResult:
        """Click it."""
        page = await session.open_page()
        element = await self.element(page, arguments.ref)
        await element.click(timeout=_ACTION_MS)
        await page.wait_for_timeout(_AFTER_CLICK_MS)
        return await self.settled(session)


class BrowserType(BrowserTool[TypeArguments]):
    """Type into a field."""

    name = "browser_type"
    description = "Type into a field of the page (or choose from a list) and see what came of it."
    arguments = TypeArguments

    async def act(self, session: Session, arguments: TypeArguments) -> ToolResult:
        """Fill it."""
        page = await session.open_page()
        element = await self.element(page, arguments.ref)
        if await element.evaluate("e => e.tagName", timeout=_ACTION_MS) == "SELECT":
            await element.select_option(label=arguments.text, timeout=_ACTION_MS)
        else:
            await element.fill(arguments.text, timeout=_ACTION_MS)
        if arguments.submit:
            await element.press("Enter", timeout=_ACTION_MS)
            await page.wait_for_timeout(_AFTER_CLICK_MS)
        return await self.settled(session)


class BrowserBack(BrowserTool[NoArguments]):
    """Go back."""

    name = "browser_back"
    description = "Go back to the page before."
    arguments = NoArguments

    async def act(self, session: Session, arguments: NoArguments) -> ToolResult:
        """Go back."""
        del arguments
        page = await session.open_page()
        before = page.url
        await page.go_back(wait_until="domcontentloaded", timeout=self._host.settings.navigation_timeout_s * 1000)
        if page.url == "about:blank":
            if before != "about:blank":
                await page.go_forward(wait_until="domcontentloaded")
            raise ToolError("there is no page before this one")
        return await self.settled(session)


class BrowserScreenshot(BrowserTool[NoArguments]):
    """Take a picture."""

    name = "browser_screenshot"
    description = "Take a picture of the page."
    arguments = NoArguments
    read_only = True

    async def act(self, session: Session, arguments: NoArguments) -> ToolResult:
        """Take it."""
        del arguments
        page = await session.open_page()
        png = await page.screenshot(timeout=_ACTION_MS)
        size = page.viewport_size or {"width": 0, "height": 0}
        return ToolResult(
            success=True,
            output=f"a picture of {page.url}, {size['width']}x{size['height']} pixels, {len(png):,} bytes of PNG",
            data={"url": page.url, "media_type": "image/png", "base64": base64.b64encode(png).decode()},
        )


def browser_tools(host: BrowserHost) -> list[Tool]:
    """All of them, over one browser."""
    kinds = (BrowserNavigate, BrowserSnapshot, BrowserClick, BrowserType, BrowserBack, BrowserScreenshot)
    return [kind(host) for kind in kinds]


def _explain(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if re.search(r"(?:Page|Target) crashed", str(error)):
        return PAGE_CRASHED
    text = re.sub(r"^(Page|Locator|Frame)\.\w+: ", "", lines[0] if lines else "the page did not answer in time")
    if "ERR_TUNNEL_CONNECTION_FAILED" in text:
        text += " (the server can't be reached, or the address leads where this browser may not go)"
    if "intercepts pointer events" in str(error):
        blocker = next((line for line in lines if "intercepts pointer events" in line), "")
        text += f" (another element covers it: {blocker[:200]})"
    return text[:500]
