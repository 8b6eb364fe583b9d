"""The browser tools with a real Chromium on a real site."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import pytest_asyncio

from atropos.api.external.browser import ANSWER_MS, BrowserHost, browser_available
from atropos.api.external.browser_tools import BrowserTool, browser_tools
from atropos.api.external.guard import Guard
from atropos.api.http import Refusal
from atropos.api.settings import BrowserSettings, ToolServerSettings
from atropos.api.tool_server import create_app
from atropos.tools.base import ToolError, ToolScope
from tests.chromium import without_popups
from tests.processes import descendants, parent_of
from tests.unit.api.conftest import call
from tests.unit.api.site import Site
from tests.waiting import until

MISSING = browser_available(BrowserSettings())
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"no browser: {MISSING}"),
    pytest.mark.asyncio(loop_scope="module"),
]


class Person:
    """One trajectory at the browser."""

    def __init__(self, host: BrowserHost, name: str) -> None:
        self.scope = ToolScope(trajectory_id=name, call_id="c")
        self.tools = {tool.name.removeprefix("browser_"): tool for tool in browser_tools(host)}

    async def __call__(self, action: str, **arguments: Any) -> str:
        tool = self.tools[action]
        return (await tool.run(tool.arguments(**arguments), self.scope)).output

    async def leave(self) -> None:
        if session := self.scope.state.pop("browser", None):
            await session.aclose()


def ref(page: str, what: str) -> str:
    """The reference of the first element whose line has `what`."""
    for line in page.splitlines():
        if what in line and (found := re.search(r"\[ref=(\w+)\]", line)):
            return found[1]
    raise AssertionError(f"no {what!r} on the page:\n{page}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[tuple[BrowserHost, Site, Site], None]:
    """A browser, a site it may visit, and a site it may not."""
    allowed, private = Site(), Site()
    await allowed.start()
    await private.start()
    chromium = without_popups(tmp_path_factory.mktemp("chromium"))
    settings = BrowserSettings(executable=chromium, max_contexts=6, max_pages=3)
    host = BrowserHost(settings, Guard([f"127.0.0.1:{allowed.port}"]))
    yield host, allowed, private
    await host.aclose()
    await allowed.stop()
    await private.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def ada(world: tuple[BrowserHost, Site, Site]) -> AsyncGenerator[Person, None]:
    person = Person(world[0], "ada")
    yield person
    await person.leave()


@pytest.fixture
def site(world: tuple[BrowserHost, Site, Site]) -> Site:
    return world[1]


async def test_navigate_read_click_back(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    assert "page: Home" in home
    article = await ada("click", ref=ref(home, "Read the article"))
    assert "leased, used, reset" in article
    assert "page: Home" in await ada("back")
    with pytest.raises(ToolError, match="no page before"):
        await ada("back")


async def test_references_stay_the_same(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    renamed = await ada("click", ref=ref(home, "Rename"))
    assert "page: clicked" in renamed
    assert ref(renamed, "Read the article") == ref(home, "Read the article")


async def test_form_is_filled_and_sent(ada: Person, site: Site):
    page = await ada("navigate", url=site.url("/form"))
    page = await ada("type", ref=ref(page, "textbox"), text="Grace <b>")
    page = await ada("type", ref=ref(page, "combobox"), text="blue")
    thanks = await ada("click", ref=ref(page, "Send"))
    assert "Hello Grace" in thanks
    assert "You like blue" in thanks
    page = await ada("navigate", url=site.url("/form"))
    assert "Hello Enter" in await ada("type", ref=ref(page, "textbox"), text="Enter", submit=True)


async def test_logins_stay_apart(ada: Person, site: Site, world: tuple[BrowserHost, Site, Site]):
    bob = Person(world[0], "bob")
    await ada("navigate", url=site.url("/login"))
    mine, other = await asyncio.gather(ada("navigate", url=site.url("/who")), bob("navigate", url=site.url("/who")))
    assert "You are ada" in mine
    assert "You are nobody" in other
    await bob.leave()


async def test_downloads_are_refused(ada: Person, site: Site):
    with pytest.raises(ToolError, match="download, which this browser refuses"):
        await ada("navigate", url=site.url("/file.bin"))
    home = await ada("navigate", url=site.url("/"))
    answer = await ada("click", ref=ref(home, "Download a file"))
    answer += await ada("snapshot")
    assert "was refused: this browser keeps no files" in answer


async def test_dialog_dismissed_and_told(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    assert "'boo'" in await ada("click", ref=ref(home, "Alert"))


async def test_a_new_window_is_shown(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    answer = await ada("click", ref=ref(home, "New window"))
    async with asyncio.timeout(20):
        while "A new window" not in answer:
            answer = await ada("snapshot")


async def test_bad_reference_explained(ada: Person, site: Site):
    await ada("navigate", url=site.url("/"))
    for bad in ("e99999", "f9e9", "nonsense", "[ref=e99999]", "e1; drop", "'", "aria-ref=e1", "css=body"):
        with pytest.raises(ToolError, match=r"snapshot"):
            await ada("click", ref=bad)
            pytest.fail(f"{bad!r} was taken")


async def test_tools_say_what_lacks(ada: Person):
    with pytest.raises(ToolError, match="browser_navigate first"):
        await ada("snapshot")


async def test_a_screenshot_is_a_png(ada: Person, site: Site):
    await ada("navigate", url=site.url("/"))
    tool = ada.tools["screenshot"]
    result = await tool.run(tool.arguments(), ada.scope)
    assert result.data is not None
    assert result.data["base64"].startswith("iVBORw0KGgo")


REFUSED = (
    *("file:///etc/passwd", "chrome://version", "javascript:alert(1)", "data:text/html,x", "about:blank"),
    *("view-source:http://127.0.0.1/", "view-source:file:///etc/passwd", "blob:http://127.0.0.1/x", "ftp://127.0.0.1/"),
    *("http://169.254.169.254/", "http://0x7f000001/", "http://127.1/", "http://2130706433/", "http://0177.0.0.1/"),
    *("http://[::ffff:127.0.0.1]/", "http://[::1]/", "localhost:80", "127.0.0.1"),
)


async def test_private_are_refused(ada: Person):
    for address in REFUSED:
        with pytest.raises(ToolError, match=r"only http|public address|not on the list"):
            await ada("navigate", url=address)
            pytest.fail(f"{address} was opened")


async def test_no_page_leads_to_a_private_address(ada: Person, site: Site, world: tuple[BrowserHost, Site, Site]):
    """By redirect, by script, by picture, by a name for loopback: the private site is never asked."""
    private = world[2]
    with pytest.raises(ToolError, match=r"port|public address"):
        await ada("navigate", url=site.url(f"/redirect?to={private.url('/who')}"))
    spellings = ("127.0.0.1", "localhost", "localhost.", "[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "127.1")
    for host in (*spellings, "0.0.0.0", "0x7f000001", "0x7f.1", "2130706433", "0177.0.0.1", "[::127.0.0.1]"):
        await ada("navigate", url=site.url(f"/reach?target=http://{host}:{private.port}/who"))
    await asyncio.sleep(0.2)
    assert private.seen == []


async def test_no_trick_gets_out(ada: Person, site: Site):
    """Sub-resources, frames, workers, service workers, WebSockets, WebRTC, forms, windows: not one connection is made."""
    met: list[str] = []

    async def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append("tcp")
        writer.close()

    class Datagrams(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, addr: Any) -> None:
            met.append("udp")

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    loop = asyncio.get_running_loop()
    datagrams, _ = await loop.create_datagram_endpoint(Datagrams, local_addr=("127.0.0.1", port))
    try:
        seen = len(site.seen)
        await ada("navigate", url=site.url(f"/attack?target=127.0.0.1:{port}"))
        session = ada.scope.state["browser"]
        page = session.page.context.pages[0]
        await page.wait_for_function("document.getElementById('out').textContent.startsWith('over')", timeout=30_000)
        reached = set(re.findall(r"\w+", (await page.text_content("#out") or "").partition("[")[2]))
        assert reached <= {"fetch", "post", "redirect"}  # the proxy's own refusal, which a page can't read
        frames = [await frame.content() for frame in page.frames if frame.url.startswith(("file:", "chrome-error:"))]
        assert Path("/etc/hostname").read_text().strip() not in "".join(frames)
        assert "/attack" in site.seen[seen:]
        assert met == []
    finally:
        listening.close()
        datagrams.close()


@pytest.mark.parametrize("how", ["meta", "script", "click", "frame", "form", "header"])
async def test_no_navigation_shows_private_pages(
    ada: Person, site: Site, world: tuple[BrowserHost, Site, Site], how: str
):
    private = world[2].url("/who")
    within = f'data:text/html,<meta http-equiv="refresh" content="0;url={private}">'
    refused = ("file:///etc/hostname", f"view-source:{private}", "view-source:file:///etc/hostname")
    targets = {"form": (private,), "frame": (private, within)}  # Chromium leaves those hanging that it refuses itself
    for target in targets.get(how, (private, within, *refused)):
        with contextlib.suppress(ToolError):
            await ada("navigate", url=site.url(f"/go?{urlencode({'how': how, 'to': target})}"))
        shown = await ada("snapshot")
        assert Path("/etc/hostname").read_text().strip() not in shown
        assert "You are" not in shown
    assert world[2].seen == []


async def test_failing_site_is_a_result(ada: Person, site: Site):
    assert "broken" in await ada("navigate", url=site.url("/broken"))
    with pytest.raises(ToolError):
        await ada("navigate", url=site.url("/loop"))
    with pytest.raises(ToolError, match=r"resolve|Name|known"):
        await ada("navigate", url="http://no-such-host.invalid/")


async def test_contexts_are_bounded(site: Site, world: tuple[BrowserHost, Site, Site]):
    host = world[0]
    people = [Person(host, f"p{i}") for i in range(6)]
    await asyncio.gather(*(person("navigate", url=site.url("/")) for person in people))
    with pytest.raises(Refusal, match="browsers are open"):
        await Person(host, "late")("navigate", url=site.url("/"))
    browser = people[0].scope.state["browser"].page.context.browser
    for person in people:
        await person.leave()
    assert repr(host) == "<BrowserHost up contexts=0>"
    assert browser.contexts == []


async def test_calls_share_a_context(world: tuple[BrowserHost, Site, Site], ada: Person):
    host, state = world[0], ada.scope.state
    first, second = await asyncio.gather(*(host.session(state, opening=True) for _ in range(2)))
    assert first is second is state["browser"]
    contexts = first.page.context.browser.contexts
    assert (repr(host), contexts) == ("<BrowserHost up contexts=1>", [first.page.context])
    first.alive = False
    third, fourth = await asyncio.gather(*(host.session(state, opening=True) for _ in range(2)))
    assert third is fourth is state["browser"]
    contexts = third.page.context.browser.contexts
    assert (repr(host), contexts) == ("<BrowserHost up contexts=1>", [third.page.context])


def processes(word: str, but: str = "\0") -> list[int]:
    return [pid for pid, line in descendants().items() if word in line and but not in line]


def browsers() -> list[int]:
    """Chromium's main process; what it has just forked has its command line too, until it runs a program."""
    found = processes("--remote-debugging", but="--type=")
    return [pid for pid in found if parent_of(pid) not in found]


async def test_nothing_is_left(site: Site, world: tuple[BrowserHost, Site, Site], ada: Person):
    """ATROPOS_BROWSERS says how many trajectories (4 in CI, hundreds by hand)."""
    host = world[0]
    await ada("navigate", url=site.url("/"))  # Chromium runs now
    browser = ada.scope.state["browser"].page.context.browser

    async def one(number: int) -> None:
        person = Person(host, f"p{number}")
        home = await person("navigate", url=site.url("/login"))
        await person("click", ref=ref(home, "Who am I"))
        await person.leave()

    async def some(count: int) -> None:
        for start in range(0, count, 4):
            await asyncio.gather(*(one(number) for number in range(start, min(start + 4, count))))

    def census() -> dict[str, int]:
        descriptors = [os.path.realpath(one) for one in Path("/proc/self/fd").iterdir()]
        return {
            "contexts": len(browser.contexts),
            "renderers": len(processes("--type=renderer")),
            "connections": sum("socket:" in one for one in descriptors),
            "tasks": len(asyncio.all_tasks()),
            "descriptors": len(descriptors),
        }

    await some(1)
    before = census()
    await some(int(os.environ.get("ATROPOS_BROWSERS", "4")))
    await until(lambda: all(now <= before[name] + 3 for name, now in census().items()))
    assert census()["contexts"] == before["contexts"]
    assert repr(host) == "<BrowserHost up contexts=1>"
    print(before, census())


async def test_crashed_is_restarted(ada: Person, site: Site, world: tuple[BrowserHost, Site, Site]):
    bob = Person(world[0], "bob")
    await ada("navigate", url=site.url("/login"))
    await bob("navigate", url=site.url("/"))
    session = ada.scope.state["browser"]
    waiting = asyncio.create_task(bob("navigate", url=site.url("/hang")))  # in the middle of something
    await until(lambda: "/hang" in site.seen)
    for pid in browsers():
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="crashed and was restarted"):
        await waiting
    await until(lambda: not session.alive)
    with pytest.raises(ToolError, match="crashed and was restarted"):
        await ada("snapshot")
    mine, other = await asyncio.gather(ada("navigate", url=site.url("/who")), bob("navigate", url=site.url("/")))
    assert "You are nobody" in mine
    assert "page: Home" in other
    await bob.leave()


async def test_crashed_page_keeps_logins(ada: Person, site: Site):
    await ada("navigate", url=site.url("/login"))
    async with ada.scope.state["browser"].page.expect_event("crash", timeout=30_000):
        for pid in processes("--type=renderer"):
            with contextlib.suppress(ProcessLookupError):  # Chromium ends those that it keeps for later pages itself
                os.kill(pid, signal.SIGKILL)
    try:
        said = await ada("snapshot")
    except ToolError as error:  # the new page was given a process that was killed as well
        said = str(error)
    assert re.search(r"the page (crashed|stopped answering and was closed); open an address again", said)
    assert "You are ada" in await ada("navigate", url=site.url("/who"))


async def test_unopened_page_is_given_up(ada: Person, site: Site, monkeypatch: pytest.MonkeyPatch):
    """As when its process dies at the wrong moment: Playwright waits forever."""
    await ada("navigate", url=site.url("/login"))
    session = ada.scope.state["browser"]
    await session.page.close()

    with monkeypatch.context() as hung:
        hung.setattr("atropos.api.external.browser.OPEN_S", 0.5)
        hung.setattr(session.page.context, "new_page", asyncio.Event().wait)
        with pytest.raises(ToolError, match="open an address again"):
            await asyncio.wait_for(ada("snapshot"), 30)
    assert "You are ada" in await ada("navigate", url=site.url("/who"))


async def test_a_hanging_start_is_no_tool_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[BrowserTool.__module__], "SESSION_S", 1.0)
    monkeypatch.setattr(BrowserTool, "timeout_s", 3.0)
    chromium = tmp_path / "chromium"
    chromium.write_text("#!/bin/sh\nexec sleep 3600\n")
    chromium.chmod(0o755)
    app = create_app(ToolServerSettings(browser=BrowserSettings(executable=str(chromium)), max_timeout_s=3))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", timeout=60) as client,
    ):
        bodies = [call("browser_navigate", name, url="https://example.org") for name in ("t", "u")]
        answers = await asyncio.gather(*(client.post("/execute", json=body) for body in bodies))
        assert [(one.status_code, one.json().get("code")) for one in answers] == [(503, "tool_server_unavailable")] * 2


async def test_silent_page_is_replaced(ada: Person, site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.api.external.browser.CLOSE_S", 1.0)
    await ada("navigate", url=site.url("/login"))
    context = ada.scope.state["browser"].page.context
    context.set_default_timeout(800)
    with pytest.raises(ToolError, match="stopped answering"):
        await ada("navigate", url=site.url("/spin"))
        await asyncio.sleep(0.5)
        await ada("snapshot")
    context.set_default_timeout(ANSWER_MS)  # of the page that took its place
    assert "You are ada" in await ada("navigate", url=site.url("/who"))


async def test_hanging_page_is_replaced(ada: Person, site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.api.external.browser.CLOSE_S", 1.0)
    await ada("navigate", url=site.url("/login"))
    page = ada.scope.state["browser"].page
    snapshot = page.aria_snapshot

    async def spin_after(**options: Any) -> str:
        tree = await snapshot(**options)
        await page.evaluate("() => { setTimeout(() => { for (;;); }, 0) }")
        return tree

    monkeypatch.setattr(page, "aria_snapshot", spin_after)
    async with asyncio.timeout(60):
        with monkeypatch.context() as soon, pytest.raises(ToolError, match="stopped answering"):
            soon.setattr(sys.modules[BrowserTool.__module__], "ANSWER_S", 1.0)
            await ada("snapshot")
        assert "You are ada" in await ada("navigate", url=site.url("/who"))


async def test_silent_is_restarted(ada: Person, site: Site, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atropos.api.external.browser.PROBE_S", 1.0)
    monkeypatch.setattr("atropos.api.external.browser.CLOSE_S", 1.0)
    await ada("navigate", url=site.url("/"))
    ada.scope.state["browser"].page.context.set_default_timeout(800)
    stopped = browsers()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    with pytest.raises(ToolError, match="crashed and was restarted"):
        await ada("snapshot")
    assert "page: Home" in await ada("navigate", url=site.url("/"))
    await until(lambda: not set(stopped) & set(descendants()))
    for pid in processes("playwright/driver"):
        with contextlib.suppress(ProcessLookupError):  # the one before it, which was told to end
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(ToolError, match="crashed and was restarted"):
        await ada("snapshot")
    assert "page: Home" in await ada("navigate", url=site.url("/"))


async def test_stops_fail_no_call(
    ada: Person, site: Site, world: tuple[BrowserHost, Site, Site], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("atropos.api.external.browser.PROBE_S", 3.0)
    monkeypatch.setattr("atropos.api.external.browser.CLOSE_S", 3.0)
    monkeypatch.setattr(sys.modules[BrowserTool.__module__], "ANSWER_S", 3.0)
    home = await ada("navigate", url=site.url("/login"))
    before, session = browsers(), ada.scope.state["browser"]
    page = session.page
    found = re.search(r"\[ref=(\w+)\]", home)
    assert found
    tool = ada.tools["click"]
    assert isinstance(tool, BrowserTool)
    for check in (world[0].probe, session.responds, lambda: tool.element(session.page, found[1])):
        checking = asyncio.create_task(check())
        await asyncio.sleep(0)
        time.sleep(3.5)  # noqa: ASYNC251 (the event loop is blocked, or the process stopped, during the check)
        await checking
    assert browsers() == before
    assert "You are ada" in await ada("navigate", url=site.url("/who"))
    assert session.page is page
