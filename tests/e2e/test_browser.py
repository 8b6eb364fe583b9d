"""The browser tools with a real Chromium on a real site."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from atropos.api.external.browser import BrowserHost, browser_available
from atropos.api.external.browser_tools import browser_tools
from atropos.api.external.guard import Guard
from atropos.api.http import Refusal
from atropos.api.settings import BrowserSettings
from atropos.tools.base import ToolError, ToolScope
from tests.unit.api.conftest import until
from tests.unit.api.site import Site

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
async def world() -> AsyncGenerator[tuple[BrowserHost, Site, Site], None]:
    """A browser, a site it may visit, and a site it may not."""
    allowed, private = Site(), Site()
    await allowed.start()
    await private.start()
    host = BrowserHost(BrowserSettings(max_contexts=6, max_pages=3), Guard([f"127.0.0.1:{allowed.port}"]))
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


async def test_navigate_read_click_and_back(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    assert "page: Home" in home
    article = await ada("click", ref=ref(home, "Read the article"))
    assert "leased, used, reset" in article
    assert "page: Home" in await ada("back")
    with pytest.raises(ToolError, match="no page before"):
        await ada("back")


async def test_references_stay_the_same_between_snapshots(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    renamed = await ada("click", ref=ref(home, "Rename"))
    assert "page: clicked" in renamed
    assert ref(renamed, "Read the article") == ref(home, "Read the article")


async def test_a_form_is_filled_chosen_and_sent(ada: Person, site: Site):
    page = await ada("navigate", url=site.url("/form"))
    page = await ada("type", ref=ref(page, "textbox"), text="Grace <b>")
    page = await ada("type", ref=ref(page, "combobox"), text="blue")
    thanks = await ada("click", ref=ref(page, "Send"))
    assert "Hello Grace" in thanks
    assert "You like blue" in thanks
    page = await ada("navigate", url=site.url("/form"))
    assert "Hello Enter" in await ada("type", ref=ref(page, "textbox"), text="Enter", submit=True)


async def test_a_login_is_kept_in_its_trajectory_and_not_seen_by_another(
    ada: Person, site: Site, world: tuple[BrowserHost, Site, Site]
):
    bob = Person(world[0], "bob")
    await ada("navigate", url=site.url("/login"))
    mine, other = await asyncio.gather(ada("navigate", url=site.url("/who")), bob("navigate", url=site.url("/who")))
    assert "You are ada" in mine
    assert "You are nobody" in other
    await bob.leave()


async def test_a_download_is_refused_with_a_clear_message(ada: Person, site: Site):
    with pytest.raises(ToolError, match="download, which this browser refuses"):
        await ada("navigate", url=site.url("/file.bin"))
    home = await ada("navigate", url=site.url("/"))
    answer = await ada("click", ref=ref(home, "Download a file"))
    answer += await ada("snapshot")
    assert "was refused: this browser keeps no files" in answer


async def test_a_dialog_is_dismissed_and_told(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    assert "'boo'" in await ada("click", ref=ref(home, "Alert"))


async def test_a_new_window_is_shown(ada: Person, site: Site):
    home = await ada("navigate", url=site.url("/"))
    answer = await ada("click", ref=ref(home, "New window"))
    answer += await ada("snapshot")
    assert "A new window" in answer


@pytest.mark.parametrize(
    "bad", ["e99999", "f9e9", "nonsense", "[ref=e99999]", "e1; drop", "'", "aria-ref=e1", "css=body"]
)
async def test_a_bad_reference_says_what_would_be_right(ada: Person, site: Site, bad: str):
    await ada("navigate", url=site.url("/"))
    with pytest.raises(ToolError, match=r"snapshot"):
        await ada("click", ref=bad)


async def test_without_a_page_the_tools_say_what_to_do(ada: Person):
    with pytest.raises(ToolError, match="browser_navigate first"):
        await ada("snapshot")


async def test_a_screenshot_is_a_png(ada: Person, site: Site):
    await ada("navigate", url=site.url("/"))
    tool = ada.tools["screenshot"]
    result = await tool.run(tool.arguments(), ada.scope)
    assert result.data is not None
    assert result.data["base64"].startswith("iVBORw0KGgo")


@pytest.mark.parametrize(
    "address",
    ["file:///etc/passwd", "chrome://version", "javascript:alert(1)", "data:text/html,x", "http://169.254.169.254/"],
)
async def test_local_and_private_addresses_are_refused(ada: Person, address: str):
    with pytest.raises(ToolError, match=r"only http|public address"):
        await ada("navigate", url=address)


async def test_a_page_cannot_lead_the_browser_to_a_private_address(
    ada: Person, site: Site, world: tuple[BrowserHost, Site, Site]
):
    """By redirect, by script, by picture, by a name for loopback: the private site is never asked."""
    private = world[2]
    with pytest.raises(ToolError, match=r"port|public address"):
        await ada("navigate", url=site.url(f"/redirect?to={private.url('/who')}"))
    for host in ("127.0.0.1", "localhost", "[::1]", "127.1", "0.0.0.0"):
        await ada("navigate", url=site.url(f"/reach?target=http://{host}:{private.port}/who"))
    await asyncio.sleep(0.2)
    assert private.seen == []


async def test_a_failing_site_is_the_models_business(ada: Person, site: Site):
    assert "broken" in await ada("navigate", url=site.url("/broken"))
    with pytest.raises(ToolError):
        await ada("navigate", url=site.url("/loop"))
    with pytest.raises(ToolError, match=r"resolve|Name|known"):
        await ada("navigate", url="http://no-such-host.invalid/")


async def test_contexts_are_bounded_and_all_are_closed(site: Site, world: tuple[BrowserHost, Site, Site]):
    host = world[0]
    people = [Person(host, f"p{i}") for i in range(6)]
    await asyncio.gather(*(person("navigate", url=site.url("/")) for person in people))
    with pytest.raises(Refusal, match="browsers are open"):
        await Person(host, "late")("navigate", url=site.url("/"))
    for person in people:
        await person.leave()
    assert host.sessions == 0
    assert host._browser is not None
    assert host._browser.contexts == []


async def test_a_crashed_browser_is_restarted_and_says_so(ada: Person, site: Site):
    await ada("navigate", url=site.url("/login"))
    session = ada.scope.state["browser"]
    os.kill(_chromium(), signal.SIGKILL)
    await until(lambda: not session.alive)
    with pytest.raises(ToolError, match="crashed and was restarted"):
        await ada("snapshot")
    assert "You are nobody" in await ada("navigate", url=site.url("/who"))


def _chromium() -> int:
    """The browser's main process, among this process's descendants."""
    queue = [os.getpid()]
    while queue:
        parent = queue.pop(0)
        for child in _children(parent):
            with contextlib.suppress(OSError):
                line = Path(f"/proc/{child}/cmdline").read_bytes()
                if b"--remote-debugging" in line and b"--type=" not in line:
                    return child
            queue.append(child)
    raise AssertionError("no Chromium is running")


def _children(parent: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{parent}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found
