"""The browser of the `browser_*` tools: one Chromium, one context (cookies, storage, pages) a trajectory."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import shutil
from collections import deque
from collections.abc import Awaitable
from typing import TYPE_CHECKING, cast

from atropos.aio import Allowance
from atropos.api.external.guard import Guard
from atropos.api.external.proxy import GuardedProxy
from atropos.api.http import Refusal
from atropos.api.settings import BrowserSettings
from atropos.errors import ToolServerUnavailable
from atropos.tools.base import ToolError

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Dialog, Download, Page, Playwright

_log = logging.getLogger(__name__)
_LAUNCH_S = 60.0
CLOSE_S = 5.0
"""Timeout of closing what may be gone already, and of a page's answer to whether it hangs."""
_CONTEXT_S = 30.0
"""Timeout of a new context; a browser that takes longer hangs, and is restarted."""
OPEN_S = 10.0
"""Timeout of a new page."""
PROBE_S = 5.0
"""Timeout of Chromium's answer to whether it hangs."""
ANSWER_MS = 5000
"""Timeout of Playwright's calls; a frame that Chromium refused to load never answers, and stays empty."""
PAGE_CRASHED = "the page crashed; open an address again with browser_navigate"
PAGE_HANGS = "the page stopped answering and was closed; open an address again with browser_navigate"
CRASHED = "the browser crashed and was restarted; its page and logins are gone: open an address with browser_navigate"
_ARGUMENTS = (
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    # WebRTC's datagrams know no proxy; the switch lost its "force" in later versions of Chromium
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-pings",
    "--mute-audio",
)


def find_chromium(settings: BrowserSettings) -> str | None:
    """The browser's path; None: there is none."""
    if settings.executable:
        return settings.executable
    for name in ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    return None


def browser_available(settings: BrowserSettings) -> str:
    """Why there can be no browser; empty when there can."""
    if importlib.util.find_spec("playwright") is None:
        return "the package playwright is not installed (pip install 'atropos[web]')"
    path = find_chromium(settings)
    if path is None:
        return "no Chromium found (apt-get install chromium), or set browser.executable"
    return "" if os.access(path, os.X_OK) else f"browser.executable: {path} is not a program"


class Session:
    """One trajectory's browser.

    Attributes:
        page: the page that the tools act on: the one opened last.
        alive: whether its browser runs.
    """

    def __init__(self, owner: BrowserHost, context: BrowserContext, page: Page) -> None:
        self._owner = owner
        self._context = context
        self.alive = True
        self._notes: deque[str] = deque(maxlen=10)
        self._watched: set[Page] = set()
        self._crashed: set[Page] = set()
        self.page = page
        context.on("page", self._opened)
        context.on("close", self._closed)
        self._watch(page)

    def note(self, text: str) -> None:
        """Add a note on a page event to the next answer."""
        self._notes.append(text)

    def take_notes(self) -> list[str]:
        """The notes since the last answer."""
        notes = list(self._notes)
        self._notes.clear()
        return notes

    def _closed(self, _: object = None) -> None:
        self.alive = False

    def _watch(self, page: Page) -> None:
        if page in self._watched:
            return
        self._watched.add(page)
        page.on("dialog", self._dialog)
        page.on("download", self._download)
        page.on("crash", self._page_crashed)
        page.on("close", self._page_closed)

    async def _dialog(self, dialog: Dialog) -> None:
        self.note(f"a dialog ({dialog.type}) was dismissed: {dialog.message[:300]!r}")
        await _close(dialog.dismiss())

    async def _download(self, download: Download) -> None:
        self.note(f"the download of {download.suggested_filename[:200]!r} was refused: this browser keeps no files")
        await _close(download.cancel())

    async def _opened(self, page: Page) -> None:
        if page is self.page:
            return
        if len(self._context.pages) > self._owner.settings.max_pages:
            self.note(f"a new page was closed: at most {self._owner.settings.max_pages} may be open")
            await _close(page.close())
            return
        self._watch(page)
        self.page = page
        self.note("a new page opened and is shown now")

    def _page_crashed(self, page: Page) -> None:
        self._crashed.add(page)
        self.note(PAGE_CRASHED)

    def _page_closed(self, page: Page) -> None:
        self._watched.discard(page)
        self._crashed.discard(page)
        if page is self.page and self.alive:
            others = [one for one in self._context.pages if one is not page and not one.is_closed()]
            if others:
                self.page = others[-1]
                self.note("the page closed itself; the one before it is shown")

    async def responds(self) -> bool:
        """Whether the page answers. The next call replaces one that doesn't, as with a script that never ends."""
        page = self.page
        try:
            async with Allowance(CLOSE_S).once():
                await page.evaluate("1")
        except Exception:
            self._crashed.add(page)
            return False
        return True

    async def open_page(self) -> Page:
        """The page; a new one if it was closed or crashed.

        Raises:
            TimeoutError: the new page did not open, as when its process died at once: Playwright would wait forever.
        """
        before = self.page
        if before.is_closed() or before in self._crashed:
            async with Allowance(OPEN_S).once():
                self.page = await self._context.new_page()
            self._watch(self.page)
            if not before.is_closed():
                await _close(before.close())
        return self.page

    async def aclose(self) -> None:
        """Close the context with all it holds."""
        self.alive = False
        self._owner.forget(self)
        error = await _close(self._context.close())
        if error is not None and self._owner.connected:  # otherwise it went with its browser
            _log.warning("a browser context did not close: %s", _line(error))


class BrowserHost:
    """Starts Chromium when it is first needed, and again when it has crashed."""

    def __init__(self, settings: BrowserSettings, guard: Guard) -> None:
        self.settings = settings
        self.guard = guard
        self._proxy: GuardedProxy | None = None
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None
        self._starting = asyncio.Lock()
        self._sessions: set[Session] = set()
        self._opening = 0

    def __repr__(self) -> str:
        return f"<BrowserHost {'up' if self.connected else 'down'} contexts={len(self._sessions)}>"

    @property
    def connected(self) -> bool:
        """Whether Chromium runs."""
        return self._browser is not None and self._browser.is_connected()

    def forget(self, session: Session) -> None:
        """Remove a closed session."""
        self._sessions.discard(session)

    async def session(self, state: dict[str, object], *, opening: bool) -> Session:
        """The trajectory's session.

        Args:
            state: what is kept for the trajectory.
            opening: whether a new session may be started, as the call opens a page.

        Raises:
            ToolError: there is no page yet, or it was lost.
            ToolServerUnavailable: Chromium does not start.
            Refusal: 429, too many trajectories have a browser open.
        """
        earlier = cast("Session | None", state.get("browser"))
        if earlier is not None and earlier.alive:
            return earlier
        if earlier is not None:
            del state["browser"]
            await earlier.aclose()
        if not opening:
            raise ToolError(CRASHED if earlier is not None else "no page is open yet: use browser_navigate first")
        opened = await self._new()
        session = cast("Session", state.setdefault("browser", opened))
        if session is not opened:  # a call that ran beside this one was quicker
            await opened.aclose()
        elif earlier is not None:
            opened.note("the browser had crashed and was restarted: earlier logins are gone")
        return session

    async def _new(self) -> Session:
        if len(self._sessions) + self._opening >= self.settings.max_contexts:
            raise Refusal(429, "busy", f"{self.settings.max_contexts} browsers are open; retry later", retry_after_s=10)
        self._opening += 1
        try:
            try:
                return await self._open_context()
            except ToolServerUnavailable:
                raise
            except Exception as error:
                _log.warning("Chromium does not work and is restarted: %s", _line(error))
                await self.aclose()
                return await self._open_context()
        except ToolServerUnavailable:
            raise
        except Exception as error:
            raise ToolServerUnavailable(f"the browser does not work: {_line(error)}") from error
        finally:
            self._opening -= 1

    async def _open_context(self) -> Session:
        browser = await self._started()
        async with Allowance(_CONTEXT_S).once():
            context = await browser.new_context(
                accept_downloads=False, viewport={"width": 1280, "height": 900}, service_workers="block", locale="en-US"
            )
            try:
                context.set_default_timeout(ANSWER_MS)
                page = await context.new_page()
            except BaseException:
                await _close(context.close())
                raise
        session = Session(self, context, page)
        self._sessions.add(session)
        return session

    async def _started(self) -> Browser:
        async with self._starting:
            if self._browser is not None and self._browser.is_connected():
                return self._browser
            await self._stop()
            if problem := browser_available(self.settings):
                raise ToolServerUnavailable(f"browser: {problem}")
            from playwright.async_api import async_playwright

            self._proxy = GuardedProxy(self.guard)
            await self._proxy.start()
            try:
                async with asyncio.timeout(_LAUNCH_S):
                    self._playwright = await async_playwright().start()
                    self._browser = await self._playwright.chromium.launch(
                        executable_path=find_chromium(self.settings),
                        headless=True,
                        # Chromium's own sandbox does not start for root
                        chromium_sandbox=os.getuid() != 0,
                        args=list(_ARGUMENTS),
                        proxy={
                            "server": self._proxy.url,
                            "username": self._proxy.username,
                            "password": self._proxy.password,
                        },
                        handle_sigint=False,
                        handle_sigterm=False,
                        handle_sighup=False,
                    )
            except Exception as error:
                await self._stop()
                raise ToolServerUnavailable(f"browser: Chromium does not start: {_line(error)}") from error
            self._browser.on("disconnected", self._lost)
            return self._browser

    async def aclose(self) -> None:
        """Stop Chromium; the next use starts it again."""
        async with self._starting:
            await self._stop()

    async def probe(self) -> None:
        """Check that Chromium answers, and stop it if it doesn't: a page may hang, the browser must not."""
        browser = self._browser
        if browser is None:
            return
        try:
            async with Allowance(PROBE_S).once():
                session = await browser.new_browser_cdp_session()
                await session.send("Browser.getVersion")
                await session.detach()
        except Exception as error:
            if browser is self._browser:
                _log.warning("Chromium hangs and is restarted: %s", _line(error))
                await self.aclose()

    def _lost(self, _: object) -> None:
        for session in list(self._sessions):
            session.alive = False
        self._sessions.clear()

    async def _stop(self) -> None:
        self._lost(None)
        browser, playwright, proxy = self._browser, self._playwright, self._proxy
        self._browser = self._playwright = self._proxy = None
        if browser is not None:
            await _close(browser.close())
        if playwright is not None:
            await _close(playwright.stop())
        if proxy is not None:
            await _close(proxy.aclose())


async def _close(closing: Awaitable[object]) -> Exception | None:
    """Await the end of something that may be gone already, within `CLOSE_S`; returns the failure.

    Playwright raises plain `Exception` where its driver has ended.
    """
    try:
        async with Allowance(CLOSE_S).once():
            await closing
    except Exception as error:
        _log.debug("the browser: %s", _line(error))
        return error
    return None


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return (text[0] if text else type(error).__name__)[:300]
