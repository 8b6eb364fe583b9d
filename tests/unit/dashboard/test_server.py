"""The pages in a real Chromium: what is there, how it is found, and that nothing hostile in it comes to life."""

from __future__ import annotations

import asyncio
import contextlib
import html
import itertools
import json
import re
import time
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio
from playwright.async_api import Browser, async_playwright
from pydantic import SecretStr

from atropos.api.external.browser import browser_available
from atropos.api.settings import BrowserSettings
from atropos.dashboard.live import ContainerSlots, InFlight, LiveSample, LiveView
from atropos.dashboard.render import write_page
from atropos.dashboard.server import DashboardServer
from atropos.dashboard.store import GroupFile, Query, TrajectoryStore
from atropos.dashboard.text import duration
from atropos.envs.reporting.prometheus import MetricsEndpoint
from atropos.errors import ConfigError
from atropos.net.admission import MAX_UNAUTHENTICATED
from atropos.slots import QuotaUse, Usage
from tests.chromium import without_popups
from tests.settings import shows
from tests.unit.dashboard.support import EVIL, group, hostile, ordinary, trajectory

MISSING = browser_available(BrowserSettings())
in_the_browser_s_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_chromium(tmp_path_factory) -> AsyncIterator[Browser]:
    if MISSING:
        pytest.skip(MISSING)
    async with async_playwright() as playwright:
        running = await playwright.chromium.launch(
            executable_path=without_popups(tmp_path_factory.mktemp("chromium")), args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            yield running
        finally:
            await running.close()


@pytest_asyncio.fixture(loop_scope="module")
async def browser(running_chromium: Browser) -> AsyncIterator[Browser]:
    """One process for all tests; each of their pages has a context of its own, which ends with the test."""
    yield running_chromium
    for context in running_chromium.contexts:
        await context.close()


def view() -> LiveView:
    return LiveView(
        numbers={"groups": "7"},
        containers=[ContainerSlots(EVIL, leased=3, free=2, retired=1, others=0, ready=True)],
        in_flight=[InFlight(EVIL, EVIL, 3.0, f"terminal {EVIL}", 1.0, 2)],
        waiting=4,
        faults=[("group dropped", EVIL, 2)],
        recent=[(0.0, "dropped", EVIL)],
        history=[LiveSample(at, at * 2, 0.1, 0.4, at % 5, 0) for at in range(50)],
        trouble=EVIL,
    )


def open_there(name: str, **more) -> InFlight:
    return InFlight(name, "", more.pop("age_s", 1.0), more.pop("doing", "sleep 1"), 1.0, 1, **more)


def view_of_server() -> LiveView:
    row = open_there(EVIL, doing=EVIL, key="alice", image=EVIL, container=EVIL, state="running")
    usage = [("alice", EVIL, Usage(1, 2.0)), (EVIL, "(base)", Usage(1, 2.0))]
    return LiveView(numbers={"open": "1"}, in_flight=[row], history=[LiveSample(leased=1)], trouble=EVIL, usage=usage)


@contextlib.asynccontextmanager
async def serving(groups, *, live=None, **more) -> AsyncIterator[DashboardServer]:
    store = None if groups is None else TrajectoryStore()
    for one in groups or ():
        store.add(one)
    server = DashboardServer("squares", store, live=live, **more)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def client(server, **headers) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", headers=headers, timeout=60)


PATHS = [
    "/",
    "/live",
    "/trajectories",
    "/items",
    "/trajectory/0",
    "/trajectory/0.cast",
    "/group/0",
    "/style.css",
    "/script.js",
    "/replay.js",
    "/nosuch",
]


@pytest.mark.parametrize("path", PATHS)
async def test_no_path_answers_without_the_token(path):
    async with serving(ordinary(), live=view, token="right") as server:
        async with client(server) as bare:
            assert (await bare.get(path)).status_code == 401
            assert (await bare.get(path, params={"token": "wrong"})).status_code == 401
            assert (await bare.get(path, headers={"Authorization": "Bearer righ"})).status_code == 401
        async with client(server, Authorization="Bearer right") as known:
            answer = await known.get(path)
            assert answer.status_code == (404 if path == "/nosuch" else 200)
            assert "script-src 'self'" in answer.headers["content-security-policy"]
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "right" not in answer.text.replace("right:", "").replace("right;", "")
            assert (await known.post(path)).status_code in {404, 405}


async def test_the_address_keeps_no_token():
    async with serving(ordinary()) as server, httpx.AsyncClient(follow_redirects=True) as reader:
        assert server.host == "127.0.0.1"
        answer = await reader.get(server.url)
        assert answer.status_code == 200
        assert "token" not in str(answer.url)
        assert "HttpOnly" in answer.history[0].headers["set-cookie"]


@pytest.mark.parametrize(("path", "said"), [("/trajectory/99", "This trajectory"), ("/group/99", "This group")])
async def test_forgotten_pages_lead_to_the_list(path, said):
    async with serving(ordinary(), token="right") as server, client(server, Authorization="Bearer right") as known:
        answer = await known.get(path)
        assert answer.status_code == 404
        assert f"{said} is not kept." in answer.text
        assert '<a href="/trajectories">All trajectories</a>' in answer.text


@pytest.mark.parametrize("text", ["caf%C3%A9", "%FF"])
async def test_a_search_may_come_first(text):
    async with serving(ordinary(), token="right") as server:
        async with client(server, Authorization="Bearer right") as known:
            assert (await known.get(f"/trajectories?text={text}")).status_code == 200
        async with client(server) as bare:
            assert (await bare.get(f"/trajectories?token={text}")).status_code == 401


async def test_old_faults_have_their_date():
    recent = [(0.0, "dropped", "long ago"), (time.time(), "retry", "just now")]
    live = LiveView(faults=[("retry", "slot_lost", 2)], recent=recent)
    async with (
        serving([], live=lambda: live, token="right") as server,
        client(server, Authorization="Bearer right") as c,
    ):
        text = (await c.get("/live")).text
    assert re.search(r">19(70|69)-\d\d-\d\d \d\d:\d\d:\d\d dropped</span> long ago", text)
    assert re.search(
        r">(20\d\d-\d\d-\d\d )?\d\d:\d\d:\d\d retry</span> just now", text
    )  # midnight may have come between
    assert duration(277 * 3600) == "11 d 13 h"
    assert (duration(7500), duration(47 * 3600)) == ("2 h 5 min", "47 h 0 min")


async def test_one_page_has_no_pager():
    async with serving([], token="right") as server, client(server, Authorization="Bearer right") as known:
        answer = await known.get("/trajectories")
        assert "No trajectory has been finished yet." in answer.text
        assert "Pages of the list" not in answer.text


async def half_open(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /style.css HTTP/1.1\r\n")
    return reader, writer


async def keeps_few_half_open_connections(port: int) -> None:
    opened = [await half_open(port) for _ in range(MAX_UNAUTHENTICATED + 10)]
    try:
        async with asyncio.timeout(30):
            for reader, _ in opened[:10]:  # the oldest gave way
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
    finally:
        for _, writer in opened:
            writer.close()


async def test_half_open_connections_are_bounded():
    async with serving(ordinary(), token="right") as server, client(server, Authorization="Bearer right") as known:
        await keeps_few_half_open_connections(server.port)
        assert (await known.get("/trajectories")).status_code == 200


async def test_so_are_those_of_the_metrics():
    endpoint = MetricsEndpoint("127.0.0.1:0", lambda: "atropos_x 1\n")
    await endpoint.start()
    try:
        await keeps_few_half_open_connections(endpoint.port)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}") as reader:
            assert (await reader.get("/metrics")).text == "atropos_x 1\n"
            assert (await reader.get("/")).status_code == 404
            assert (await reader.post("/metrics", content=b"x" * 9999)).status_code == 401
    finally:
        await endpoint.close()


@shows("metrics_token")
async def test_metrics_may_ask_for_a_token():
    endpoint = MetricsEndpoint("127.0.0.1:0", lambda: "atropos_x 1\n", SecretStr("right"))
    await endpoint.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{endpoint.port}") as reader:
            for given in ({}, {"Authorization": "Bearer wrong"}):
                refused = await reader.get("/metrics", headers=given)
                assert (refused.status_code, "atropos_x" in refused.text) == (401, False)
            assert (await reader.get("/metrics", headers={"Authorization": "Bearer right"})).text == "atropos_x 1\n"
    finally:
        await endpoint.close()


async def test_no_token_no_body():
    """An HTTP server would read it, or unpack it: 0.2 MB are 200."""
    async with serving(ordinary(), token="right") as server:
        for method in ("GET", "POST"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"{method} / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n".encode())
            async with asyncio.timeout(30):  # the answer ends the connection: no body is waited for
                assert (await reader.read()).startswith(b"HTTP/1.1 401 ")
            writer.close()


async def test_a_cookie_opens_a_connection():
    async with serving(ordinary()) as server, httpx.AsyncClient() as first, httpx.AsyncClient() as other:
        cookie = (await first.get(server.url)).headers["set-cookie"].partition(";")[0]
        url = f"http://127.0.0.1:{server.port}/trajectories"
        assert (await other.get(url, headers={"Cookie": cookie})).headers.get("connection") != "close"
        assert (await other.get(url, headers={"Cookie": "x=1; " + cookie})).status_code == 200
        assert (await other.get(url, headers={"Cookie": cookie + "x"})).status_code == 401


@pytest.mark.parametrize("other", [b'prefs={"a": 1}', b"name=a b", b"a@b=1", "name=é".encode(), b'name="', b"flag"])
async def test_other_cookies_are_ignored(other):
    """Browsers send the cookies of all ports of a host to each of them."""
    async with serving(ordinary(), token='r;i"ght') as server, client(server) as first:
        cookie = (await first.get(server.url)).headers["set-cookie"].rpartition("; HttpOnly")[0].encode()
        for cookies in (other + b"; " + cookie, cookie + b"; " + other):
            async with client(server) as reader:
                for _ in range(2):  # the first on its connection is let in by another part of the server than the rest
                    assert (await reader.get("/trajectories", headers={b"Cookie": cookies})).status_code == 200


async def test_a_port_in_use_is_refused_by_name():
    async with serving([]) as server:
        with pytest.raises(
            ConfigError, match=rf"^host, port: can't listen on 127\.0\.0\.1:{server.port}: it is in use"
        ):
            await DashboardServer("second", TrajectoryStore(), port=server.port).start()


async def test_lists_are_filtered_and_paged():
    async with serving(ordinary()) as server, client(server, Authorization=server.url.split("=")[1]) as reader:

        async def found(**query):
            page = (await reader.get("/trajectories", params=query)).text
            return int(re.search(r'Trajectories <span class="n">([\d,]+)', page)[1]), page

        assert (await found())[0] == 60
        assert "page 1 of 2" in (await found())[1]
        assert "square-0-0" in (await found(page=2))[1]
        assert (await found(item="SQUARE-7"))[0] == 3
        assert (await found(least="0.4", most="0.6"))[0] == 20
        assert (await found(error="max_steps"))[0] == 20
        assert (await found(error="tools"))[0] == 20
        assert (await found(tool="terminal"))[0] == 60
        assert (await found(tool="nosuch"))[0] == 0
        assert (await found(text="done: 361"))[0] == 1
        assert (await found(least="", page="x" * 99))[0] == 60
        for least in ("x", "nan", "1\r\nSet-Cookie: a=b"):
            answer = await reader.get("/trajectories", params={"least": least})
            assert answer.status_code == 400
            assert "least is a score: it must be a number." in answer.text


def test_the_store_forgets_the_oldest():
    store = TrajectoryStore(max_trajectories=1_000)
    for at in range(510):
        store.add(group(f"item-{at}", trajectory(f"a{at}", 1.0), trajectory(f"b{at}", 0.0)))
    assert len(store) == 1_000
    assert store.forgotten == 20
    assert store.get(0) is None
    assert store.get(20)[0].trajectory_id == "a10"
    entries, total = store.find(Query(item="item-509"))
    assert total == 2
    assert [entry.trajectory_id for entry, _ in store.group(entries[0].group)] == ["a509", "b509"]
    small = TrajectoryStore(max_bytes=2_000)
    for one in ordinary():
        small.add(one)
    assert 0 < len(small) < 60


def test_a_file_is_followed_line_by_line(tmp_path):
    path, store = tmp_path / "g.jsonl", TrajectoryStore()
    lines = [json.dumps(one) + "\n" for one in ordinary()]
    path.write_text(lines[0] + lines[1][:40])
    file = GroupFile(path, store)
    file.refresh()
    assert len(store) == 3
    path.write_text("".join(lines[:2]) + "no json\n")
    file.refresh()
    file.refresh()
    assert len(store) == 6


def test_a_missing_file_stays_shown(tmp_path):
    path, store = tmp_path / "g.jsonl", TrajectoryStore()
    path.write_text(json.dumps(ordinary()[0]) + "\n")
    file = GroupFile(path, store)
    file.refresh()
    path.unlink()
    file.refresh()
    assert len(store) == 3


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rewritten_file_is_read_anew(in_place, tmp_path):
    path, store = tmp_path / "g.jsonl", TrajectoryStore()

    def shown():
        return [entry.trajectory_id for entry in store.find(Query())[0]]

    def lines(run, count):
        return "".join(json.dumps(group("one", trajectory(f"{run}-{at}", 1.0))) + "\n" for at in range(count))

    path.write_text(lines("first", 2))
    file = GroupFile(path, store)
    file.refresh()
    number = store.find(Query())[0][0].number
    if in_place:
        path.write_text(lines("second", 1))
    else:
        (tmp_path / "new").write_text(lines("second", 3))
        (tmp_path / "new").replace(path)
    file.refresh()
    assert shown() == [f"second-{at}" for at in ([0] if in_place else [2, 1, 0])]
    assert store.get(number) is None
    with path.open("a") as end:
        end.write(lines("third", 1))
    file.refresh()
    assert shown()[0] == "third-0"


def test_a_huge_number_is_zero(tmp_path):
    path, store = tmp_path / "g.jsonl", TrajectoryStore()
    odd = group("odd", trajectory("odd", 10**400, steps=10**400, changes={"folder": "/w", "more": -(10**400)}))
    path.write_text(json.dumps(odd) + "\n" + json.dumps(group("next", trajectory("next", 1.0))) + "\n")
    GroupFile(path, store).refresh()
    assert [(entry.score, entry.steps) for entry in store.find(Query())[0]] == [(1.0, 2), (0.0, 0)]
    found = store.get(0)
    assert found is not None
    assert found[1].changes.more == 0
    assert "next" in write_page(path).read_text()


def cells(page: str, at: int) -> list[str]:
    """A column of the page's table."""
    rows = re.search(r"<tbody>(.*)</tbody>", page, re.DOTALL)[1].split("<tr>")[1:]
    return [html.unescape(re.sub(r"<[^>]*>", "", row.split("<td")[at].partition(">")[2])).strip() for row in rows]


def scored(item: str, *scores: float) -> dict:
    return group(item, *(trajectory(f"{item}-{at}", score) for at, score in enumerate(scores)))


async def test_lists_sort_by_any_column():
    groups = [scored("b", 0.5, 1.0), scored("a", 0.0, 0.25)]
    async with serving(groups, token="t") as server, client(server, Authorization="Bearer t") as reader:

        async def scores(sort: str) -> list[str]:
            return cells((await reader.get("/trajectories", params={"sort": sort})).text, 1)

        latest_first = ["0.25", "0.00", "1.00", "0.50"]
        assert await scores("score") == ["0.00", "0.25", "0.50", "1.00"]
        assert await scores("-score") == ["1.00", "0.50", "0.25", "0.00"]
        assert await scores("item") == latest_first
        assert await scores("-item") == [*latest_first[2:], *latest_first[:2]]
        for unknown in ("", "-", "nosuch", "__class__"):
            assert await scores(unknown) == latest_first
        page = (await reader.get("/trajectories", params={"sort": "-score", "item": "a", "page": "1"})).text
        assert (
            '<th scope="col" class="num" aria-sort="descending"><a href="/trajectories?sort=score&amp;item=a">' in page
        )
        assert '<input type="hidden" name="sort" value="-score">' in page  # a filter keeps the order


async def test_items_have_pass_rates():
    groups = [scored("square-1", 1, 1, 0, 0), scored("square-10", 0, 0), scored("square-1", 0.6, 0), scored("c", 1)]
    async with serving(groups, token="t") as server, client(server, Authorization="Bearer t") as reader:
        page = (await reader.get("/items", params={"sort": "-rate"})).text
        assert cells(page, 1) == ["c", "square-1", "square-10"]
        assert cells(page, 2) == ["1", "6", "2"]
        assert cells(page, 4) == ["100 %", "33 %", "0 %"]
        assert cells(page, 5) == ["1.00", "0.33", "0.00"]
        assert cells(page, 6) == ["–", "0.60", "0.00"]
        assert "pass@1 0.444; pass@2 0.300; pass@4 0.933" in page
        assert cells((await reader.get("/items", params={"sort": "pass@2"})).text, 1) == ["c", "square-10", "square-1"]
        easier = (await reader.get("/items", params={"passing": "0.5"})).text
        assert cells(easier, 3) == ["1", "3", "0"]
        assert (await reader.get("/items", params={"passing": "x"})).status_code == 400
        whole = re.search(r'href="(/trajectories\?[^"]*square-1)"', page)[1]
        assert len(cells((await reader.get(html.unescape(whole))).text, 1)) == 6


async def test_scores_are_shown_over_time():
    def at(minute: int, score: float) -> dict:
        turns = [{"started_at": f"2020-01-02T03:{minute:02}:00+00:00"}]
        return group("i", trajectory(f"t{minute}", score, turns=turns))

    async with serving([], token="t", live=view) as server, client(server, Authorization="Bearer t") as reader:
        for minute, score in enumerate((0.0, -1.0, 1.0)):
            server._stored._store.add(at(minute, score))
        page = (await reader.get("/live")).text
        assert 'points="0.0,20.0 120.0,39.0 240.0,1.0"' in page
        assert "between -1 and 1; a point is 1 trajectory" in page
        assert len(re.findall(r"2020-01-0[123] \d\d:0[02]:00", page)) == 2


async def test_a_servers_pages():
    def looked() -> LiveView:
        rows = [open_there(f"i{at}", age_s=at, key=f"key{at % 2}", state="paused") for at in range(3)]
        return LiveView(in_flight=rows, history=[LiveSample(leased=2, waiting=1)])

    async with serving(None, token="t", live=looked) as server, client(server, Authorization="Bearer t") as reader:
        assert cells((await reader.get("/", params={"sort": "-age"})).text, 2) == ["i2", "i1", "i0"]
        page = (await reader.get("/live", params={"sort": "key"})).text
        assert cells(page, 1) == ["key0", "key0", "key1"]
        assert cells(page, 3) == ["(base)"] * 3
        assert "calls per second" not in page  # a server doesn't say
        for path in ("/trajectories", "/items", "/trajectory/0"):
            assert (await reader.get(path)).status_code == 404


async def test_keys_have_their_usage():
    usage = [("ci", f"image-{at}", Usage(1, 10.0 * at, 1.0)) for at in range(1, 8)]
    usage += [("alice", "(base)", Usage(1200, 90_000, 7200, 5 << 30)), ("bob", "(base)", Usage(1, 1.0, 80.0))]
    quotas = [("ci", QuotaUse("slots", 2, 20)), ("ci", QuotaUse("disk_mib", 600, 600)), ("new", QuotaUse("cpu", 0, 4))]
    opened = [open_there("i0", key="ci"), open_there("i1", key="ci")]
    looked = LiveView(in_flight=opened, usage=usage, quotas=quotas)
    async with serving(None, token="t", live=lambda: looked) as server, client(server, Authorization="Bearer t") as c:

        async def rows(**query: str) -> list[list[str]]:
            page = (await c.get("/live", params=query)).text
            table = page.partition('aria-label="Usage by key"')[2].partition("</table>")[0]
            texts = [re.split(r"<[^>]*>", row) for row in re.split(r"<tr[^>]*>", table)]
            return [[text.strip() for text in row if text.strip()] for row in texts]

        of = await rows()
        assert of[2] == ["alice", "0", "(base)", "1,200", "25 h 0 min", "2 h 0 min", "5,120.0 MiB", "100 %"]
        held = ["slots 2 of 20", ",", "disk_mib 600 of 600"]
        assert of[3] == ["ci", "2", "7", "5 min", "7.0 s", "0.0 MiB", "0 %", *held]
        assert of[11] == ["new", "0", "0", "0.0 s", "0.0 s", "0.0 MiB", "0 %", "cpu 0 of 4"]
        assert [row[:3] for row in of[4:10]] == [
            *([f"image-{at}", "1", f"{at}0 s"] for at in range(7, 2, -1)),
            ["2 more images", "2", "30 s"],
        ]
        assert [row[0] for row in await rows(keys="-cpu") if row[0] in {"alice", "bob", "ci"}] == ["alice", "bob", "ci"]
        assert [row[0] for row in await rows(keys="key", sort="-age")][2] == "alice"
        both = (await c.get("/", params={"keys": "-cpu", "sort": "-age", "x": "y"})).text
        assert 'href="/?sort=-age&amp;keys=cpu"' in both, "each table keeps the other's order"
        assert 'href="/?sort=age&amp;keys=-cpu"' in both
    async with serving([], token="t", live=view) as server, client(server, Authorization="Bearer t") as c:
        assert "Usage by key" not in (await c.get("/live")).text


async def test_equal_siblings_are_folded():
    def did(call_id: str, command: str):
        call = {"id": call_id, "function": {"name": "terminal", "arguments": json.dumps({"command": command})}}
        result = {"role": "tool", "tool_call_id": call_id, "content": '{"success": true, "output": "x"}'}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}, result], 1.0, {"trajectory_id": call_id}

    one = group("i", did("a", "ls"), did("b", "ls"))
    other = group("j", did("c", "ls"), did("d", "pwd"))
    async with serving([one, other], token="t") as server, client(server, Authorization="Bearer t") as reader:
        assert (await reader.get("/group/0")).text.count('<tr class="same">') == 2
        assert (await reader.get("/group/1")).text.count('<tr class="same">') == 1


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_nothing_hostile_comes_to_life(browser, tmp_path):
    (tmp_path / "g.jsonl").write_text(json.dumps(hostile()) + "\n")
    static = write_page(tmp_path / "g.jsonl")
    async with serving([hostile()], live=view) as server:
        page = await browser.new_page()
        dialogs, errors, foreign = [], [], []
        page.on("dialog", lambda dialog: dialogs.append(dialog) or dialog.dismiss())
        page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108 (playwright marks what it is given)
        page.on("request", lambda request: foreign.append(request.url) if "127.0.0.1" not in request.url else None)
        await page.goto(server.url)
        base = f"http://127.0.0.1:{server.port}"
        searched = "/trajectories?text=%3Cscript%3E&item=%22%3E"
        for path in ("/", "/trajectories", "/items", "/trajectory/0", "/group/0", searched):
            await page.goto(base + path)
            if path == "/":
                await page.wait_for_event("requestfinished", lambda request: request.url.endswith("/live"))
            await page.wait_for_timeout(50)
            await inert(page)
    async with serving(None, live=view_of_server) as server:
        await page.goto(server.url)
        assert await page.locator("td.one", has_text="alice").count() == 1
        assert await page.get_by_role("rowheader").count() == 2
        await inert(page)
        assert not dialogs
        assert not errors
        assert not foreign
        await page.goto(static.as_uri())
        await inert(page)


async def inert(page) -> None:
    """Nothing of the hostile text is an element, a title, or an unescaped control character."""
    assert "owned" not in (await page.title()).replace("document.title='owned'", "").replace("]0;owned", "")
    assert await page.locator("main img, main script, main a[href^='javascript']").count() == 0
    text = await page.locator("main").text_content()
    assert not set(text) & {"\x1b", "\x07", "\x9b", "\u202e"}
    if "[exit_code" in text:
        assert "{{ 7*191 }}" in text
        assert "1337" not in text


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_a_replay_by_keyboard(browser, tmp_path):
    bar = "10%\r\x1b[K\x1b[32m100%\x1b[0m done\b\b\b\bDONE"
    one = group("bars", trajectory("bars-0", 1.0, output=bar, turns=[{"model_s": 2.5, "tools_s": 1, "calls_s": [1]}]))
    (tmp_path / "g.jsonl").write_text(json.dumps(one) + "\n")
    static = write_page(tmp_path / "g.jsonl")
    async with serving([one]) as server:
        page = await browser.new_page()
        errors = []
        page.on("pageerror", lambda error: errors.append(error))  # noqa: PLW0108 (playwright marks what it is given)
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await page.goto(server.url)
        for address in (f"http://127.0.0.1:{server.port}/trajectory/0", static.as_uri()):
            await page.goto(address)
            if address == static.as_uri():
                await page.locator("summary").first.click()
                await page.locator("details details > summary").first.click()
            screen, clock = page.locator(".screen"), page.locator(".bar output")
            assert (await screen.text_content()).endswith("\n100% DONE\n\n")  # how it ended
            await screen.press("Home")
            await screen.press(".")
            assert await screen.text_content() == "# I look.\n$ cat bars-0.txt\n\n"
            assert await clock.text_content() == "2.5 s, 2 of 4"
            await screen.press("End")
            text = await screen.text_content()
            assert text.endswith("\n100% DONE\n[exit_code: 0]\n100% DONE\n\n")
            assert await page.locator(".screen .c2").first.text_content() == "100%"
            await screen.press("Home")
            assert await screen.text_content() == "\n"
            await page.get_by_label("speed").select_option("20")
            await page.get_by_role("button", name="Play").press("Enter")
            while await screen.text_content() != text:
                await page.wait_for_timeout(50)
            await page.get_by_role("button", name="Play").wait_for()
        assert not errors


LINES = "c => { const r = document.createRange(); r.selectNodeContents(c); return r.getClientRects().length }"
"""How many lines of text an element takes."""


SCREENS = [
    "plain\nlines\n",
    "10%\r\x1b[K\x1b[32m100%\x1b[0m done\b\b\b\bDONE",
    "tabs\tand\tmore\r\tx\rlong line\rshort",
    "abcdef\r\x1b[1;31mgh\x1b[0m\x1b[1K\x1b[0Kij\x1b[2Kkl",
    "\u00e9\u4e2d\U0001f600\rX\n\n\n<b>&amp;</b>",
    "\b\b\ra\b\b\tb\r",
    "\n".join(str(at) for at in range(2500)),
]


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_replay_without_scripts(browser, tmp_path):
    one = group("i", *(trajectory(f"t{at}", 1.0, output=output, info={}) for at, output in enumerate(SCREENS)))
    (tmp_path / "g.jsonl").write_text(json.dumps(one) + "\n")
    static = write_page(tmp_path / "g.jsonl").read_text()
    async with serving([one]) as server:
        screens: dict[bool, list[str]] = {}
        for scripts, found in ((True, ".replay .screen"), (False, ".replay pre")):
            page = await browser.new_page(java_script_enabled=scripts)
            await page.goto(server.url)
            screens[scripts] = []
            for at in range(len(SCREENS)):
                await page.goto(f"http://127.0.0.1:{server.port}/trajectory/{at}")
                screens[scripts].append((await page.locator(found).text_content()).strip("\n"))
                assert await page.locator(".keys").is_visible() is scripts
            await page.close()
    assert screens[False] == screens[True]
    assert screens[False][1].startswith("# I look.\n$ cat t1.txt\n100% DONE\n")
    for text in screens[False][:-1]:
        assert html.escape(text.splitlines()[2], quote=False) in static


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_no_page_is_wider_than_a_phone(browser):
    view = LiveView(
        containers=[ContainerSlots("0 a-name-of-a-container-that-is-long", 20, 1, 0, 0, ready=True)],
        in_flight=[InFlight("trajectory-of-a-long-name" * 3, "item" * 20, 5, "terminal " + "x" * 99, 1.0, 3)],
        faults=[("group dropped", "container_lost" * 9, 2)],
    )
    odd = hostile()
    odd["atropos"]["item"] += "x" * 99
    async with serving([*ordinary(), odd], live=lambda: view) as server:
        page = await browser.new_page(viewport={"width": 390, "height": 800})
        await page.goto(server.url)
        for path in (
            "/",
            "/trajectories",
            "/items",
            "/trajectory/0",
            "/group/0",
            "/trajectory/60",
            "/group/20",
            "/nosuch",
            "/trajectories?least=x",
        ):
            await page.goto(f"http://127.0.0.1:{server.port}{path}")
            assert await page.evaluate("document.documentElement.scrollWidth") == 390, path
        await page.goto(f"http://127.0.0.1:{server.port}/")
        kind = page.locator("td", has_text="group dropped")
        assert await kind.evaluate(LINES) == 1
    long = LiveView(in_flight=[open_there("i" * 200, image="x" * 400)], usage=[("k" * 63, "x" * 400, Usage(1, 2.0))])
    async with serving(None, live=lambda: long) as server:
        await page.goto(server.url)
        assert await page.evaluate("document.documentElement.scrollWidth") == 390


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_long_names_break_no_label(browser):
    row = trajectory("square", 1.0, info={"verifier_seconds": 1.5, "verifier_exit_code": 0})
    async with serving([group("square", row, row), hostile()]) as server:
        page = await browser.new_page(viewport={"width": 1280, "height": 800})
        await page.goto(server.url)
        for path, cells, count in (("trajectories", "td:last-child", 3), ("group/0", ".side th[scope=row]", 8)):
            await page.goto(f"http://127.0.0.1:{server.port}/{path}")
            found = await page.locator(cells).all()
            assert len(found) >= count
            assert {await cell.text_content() for cell in found if await cell.evaluate(LINES) != 1} == set()


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_the_live_page_by_keyboard(browser, port):
    numbers = {"n": 0}

    def counting() -> LiveView:
        numbers["n"] += 1
        return LiveView(
            numbers={"looks": str(numbers["n"])},
            containers=[ContainerSlots("0 c", 2, 1, 0, 0, ready=True)],
            in_flight=[InFlight(name, "i", age_s, "model", 1.0, 2) for name, age_s in (("young", 1), ("old", 9))],
        )

    async with serving(ordinary(), live=counting, port=port) as server:
        page = await browser.new_page()
        await page.goto(server.url)
        assert await page.locator(".cells i.leased").count() == 2
        await page.get_by_role("link", name="age").click()
        await page.wait_for_url("**/?sort=-age")
        while int(await page.locator("dd").first.text_content()) < 4:
            await page.wait_for_timeout(100)
        await page.keyboard.press("Tab")  # the skip link comes first
        assert await page.evaluate("document.activeElement.className") == "skip"
        for _ in range(4):
            await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "pause"
        await page.keyboard.press("Enter")
        before = await page.locator("dd").first.text_content()
        await page.wait_for_timeout(4500)
        assert await page.locator("dd").first.text_content() == before
        assert await page.locator("tbody td:first-child").all_text_contents() == ["old", "young"]
        await page.keyboard.press("Enter")
        await server.close()
        await page.get_by_text("The dashboard does not answer").wait_for()
        again = DashboardServer("squares", TrajectoryStore(), port=port, live=counting)
        await again.start()
        await page.get_by_text("open the URL that it printed").wait_for()
        assert await page.locator("dd").count() == 1  # the last numbers
        await again.close()
        await server.start()
        await page.goto(f"http://127.0.0.1:{server.port}/trajectories")
        await page.get_by_label("item").fill("square-3")
        await page.keyboard.press("Enter")
        await page.wait_for_url("**/trajectories?**")
        assert await page.locator("tbody tr").count() == 3
        await page.get_by_text("compare").first.click()
        assert await page.locator("tr.same").count() == 2  # the prompts
        assert await page.locator("tr.differs th", has_text="found").count() == 1


@pytest.mark.slow("starts servers")
@in_the_browser_s_loop
async def test_a_pause_holds_every_number(browser):
    looks, asked, answer = itertools.count(1), asyncio.Event(), asyncio.Event()

    async def held(route) -> None:
        asked.set()
        await answer.wait()
        await route.continue_()

    def counting() -> LiveView:
        return LiveView(numbers={"looks": str(next(looks))}, trouble="no room")

    async with serving([], live=counting) as server:
        page = await browser.new_page()
        await page.goto(server.url)
        await page.route("**/live", held)
        await asked.wait()
        await page.get_by_role("button", name="Pause").click()
        shown = await page.locator("dd").first.text_content()
        answer.set()
        await page.get_by_text("There is trouble; see below.").wait_for()  # said once the answer is there
        assert await page.locator("dd").first.text_content() == shown
