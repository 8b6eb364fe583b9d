"""Names whose addresses change between the check and the connection: a real resolver, Chromium and `web_extract`."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos.api.external.browser import browser_available
from atropos.api.settings import BrowserSettings
from tests.e2e.names import AAAA, asking_us, missing, serving
from tests.e2e.servers import TOKEN, running
from tests.unit.api.site import Site
from tests.waiting import SLOWNESS

MISSING = browser_available(BrowserSettings()) or missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"no browser or no resolver of its own: {MISSING}")
ALLOWED, FORBIDDEN = "127.53.0.2", "127.53.0.3"
"""Nobody else listens there: a port that is free on one is free on the other."""


async def test_rebound_name_leads_nowhere(tmp_path: Path):
    """Two sites on one port: the name stands now for the one that may be visited, now for the one that may not."""
    turns = itertools.cycle([ALLOWED, ALLOWED, FORBIDDEN, ALLOWED, FORBIDDEN, FORBIDDEN])
    given: list[str] = []

    def answers(name: str, kind: int) -> list[str]:
        if name == "both.test":
            return [ALLOWED, FORBIDDEN] if kind != AAAA else []
        if name == "mapped.test":
            return [f"::ffff:{FORBIDDEN}"] if kind == AAAA else []
        if name != "turns.test" or kind == AAAA:
            return []
        given.append(next(turns))
        return [given[-1]]

    allowed = Site(ALLOWED, hangs_up=True)  # or a connection that was judged once is used again, with no name asked for
    await allowed.start()
    forbidden = Site(FORBIDDEN, allowed.port)
    await forbidden.start()
    settings = tmp_path / "settings.toml"
    settings.write_text(f'allow_hosts = ["{ALLOWED}"]\nonly = ["browser", "web_extract"]\n')
    numbers = itertools.count()
    try:
        async with (
            serving(answers) as names,
            running("tool-server", "--config", str(settings), within=asking_us(tmp_path)) as server,
            httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=90) as http,
        ):

            async def use(name: str, **arguments: Any) -> str:
                body = {"trajectory_id": "t", "call_id": f"c{next(numbers)}", "name": name, "arguments": arguments}
                answer = await http.post(f"{server.url}/execute", json=body)
                assert answer.status_code == 200, answer.text
                result = answer.json()["result"]
                return result["output"] or result["error"]

            async def both_come(shown: str, name: str, **arguments: Any) -> None:
                """A page that goes on asking takes turns, too: which one is whose is a matter of chance."""
                missing = {shown, "only public addresses"}
                answers: list[str] = []
                while missing and len(answers) < 60:
                    answers.append(await use(name, **arguments))
                    missing = {text for text in missing if text not in answers[-1]}
                assert not missing, answers

            site = f"turns.test:{allowed.port}"
            await both_come("page: Insist", "browser_navigate", url=f"http://{site}/insist")
            async with asyncio.timeout(120 * SLOWNESS):
                while "page: Insist" not in (page := await use("browser_navigate", url=f"http://{site}/insist")):
                    pass
                while "over:" not in page:
                    page = await use("browser_snapshot")
            statuses = page.partition("over: ")[2].split('"')[0].split()
            assert {"200", "403"} <= set(statuses), page
            await both_come("leased, used, reset", "web_extract", urls=[f"http://{site}/article"])
            mapped, both = f"http://mapped.test:{allowed.port}/article", f"http://both.test:{allowed.port}/article"
            assert "only public addresses" in await use("browser_navigate", url=mapped)
            assert "only public addresses" in await use("web_extract", urls=[mapped])
            for _ in range(3):  # of a name's addresses, only those that may be reached are
                assert "leased, used, reset" in await use("web_extract", urls=[both])
                assert "egress" not in await use("browser_navigate", url=both)
        assert {ALLOWED, FORBIDDEN} <= set(given)
        assert set(names.asked) == {"turns.test", "both.test", "mapped.test"}, "the browser asks for names itself"
        assert forbidden.seen == []
        assert "/article" in allowed.seen
    finally:
        await allowed.stop()
        await forbidden.stop()
