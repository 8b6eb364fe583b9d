"""Live pages: an env's during a real run on local slots, and those over an executor server."""

from __future__ import annotations

import asyncio
import contextlib
import html
import json
import re
import sys
from collections.abc import AsyncGenerator

import httpx
import pytest
from typer.testing import CliRunner

from atropos.cli.app import command_line
from atropos.envs import HermesAgentBaseEnv
from tests.e2e.hermes_support import call, groups, make, script
from tests.e2e.servers import TOKEN, running
from tests.security.tenants import ALICE, BOB, key
from tests.settings import shows

CHANGES = "touch made; echo new >> kept; rm gone; read < /tmp/gate"
"""Goes on until it has been seen."""
LOOKED_S = 0.2
WORKS = script({"calls": [call("terminal", command=CHANGES)]}, "finished")
LARGE = script({"calls": [call("terminal", command="head -c 2000000 /dev/zero > zeros")]}, "finished")
LAST = script("nothing")
PAGES = ("/", "/live", "/live.json", "/trajectories", "/trajectory/0", "/trajectory/0.cast", "/group/0")


class Env(HermesAgentBaseEnv):
    name = "shown"
    pages: dict[str, str]
    tokens: set[str]
    servers: set[int]

    async def setup(self):
        self.pages = {}
        self.seen = asyncio.Event()
        self.rows = self.load_rows()

    async def get_next_item(self):
        return next(self.rows, None)

    async def setup_rollout(self, item, ctx):
        await ctx.terminal("echo old > kept; echo bye > gone; mkfifo /tmp/gate")

    def client(self):
        server = self.dashboard.server
        address = f"http://{server.host}:{server.port}"
        return httpx.AsyncClient(base_url=address, headers={"Authorization": "Bearer s3cret"}, timeout=60)

    async def execute_tool(self, trajectory_id, call):
        if call.arguments != {"command": CHANGES}:
            return await super().execute_tool(trajectory_id, call)
        slot = await self.executor.slot(trajectory_id)
        running = asyncio.ensure_future(super().execute_tool(trajectory_id, call))
        if not self.pages:
            await self.look()
            self.seen.set()
        await self.seen.wait()
        await slot.exec("echo > /tmp/gate", concurrent=True)
        return await running

    async def look(self):
        """At the live page, while both members are at work."""
        self.pages["live"] = ""
        self.servers = {int(each.id.partition("-")[0]) for each in self.pool.backend.containers()}
        async with self.client() as client, httpx.AsyncClient(timeout=60) as bare:
            self.pages["bare"] = str((await bare.get(client.base_url)).status_code)
            while self.pages["live"].count(html.escape(CHANGES)) < 2:
                self.pages["live"] = (await client.get("/live")).text
        await asyncio.sleep(LOOKED_S)

    async def compute_reward(self, item, result, ctx):
        await ctx.write_file("of-the-verifier", "unseen")
        if item["prompt"] == LAST:
            async with self.client() as client:
                while "/trajectory/1" not in (await client.get("/trajectories")).text:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                self.pages["end"] = (await client.get("/trajectory/0")).text
                self.pages |= {path: (await client.get(path)).raise_for_status().text for path in PAGES}
            self.pages["metrics"] = self.metrics_text()
            self.tokens = {container.token for container in self.pool.backend.containers()}
        return 1.0


@shows("dashboard_port", "dashboard_host", "dashboard_token")
async def test_run_is_seen_live_and_after(policy, tmp_path, capfd):
    settings = {
        "dashboard_port": 0,
        "dashboard_host": "127.0.0.2",
        "dashboard_token": "s3cret",
        "tool_server_token": "of-the-tools",
    }
    rows = [{"prompt": WORKS}, {"prompt": LAST}, {"prompt": LARGE}]
    env = make(Env, policy, tmp_path, rows, process_concurrency=1, api_key="of-the-model", **settings)
    assert "s3cret" not in env.config.model_dump_json()
    await env.process_manager()
    assert env.pages["bare"] == "401"
    pid = re.search(r'<td class="one">0 pid (\d+)<', env.pages["live"])[1]
    assert int(pid) in env.servers, "a trajectory's container is named after its server's process"
    cells = re.search(r'<span class="cells">(.*?)</span>', env.pages["live"])[1]
    assert [cells.count(f'class="{state}"') for state in ("leased", "free", "retired", "others")] == [2, 2, 0, 0]
    assert "terminal" in env.pages["end"]
    assert "touch made" in env.pages["end"]
    assert "data-cast" in env.pages["end"]
    [first, last, large] = groups(tmp_path)
    [worked, answered] = first["atropos"]["trajectories"][0]["turns"]
    assert LOOKED_S <= worked["calls_s"][0] <= worked["tools_s"]
    assert answered["calls_s"] == []
    [changed, nothing, unknown] = (each["atropos"]["trajectories"][0]["changes"] for each in (first, last, large))
    assert changed["folder"] == "/workspace"
    assert [(one["path"], one["change"], one["diff"]) for one in changed["files"]] == [
        ("gone", "removed", "@@ -1 +0,0 @@\n-bye"),
        ("kept", "changed", "@@ -1 +1,2 @@\n old\n+new"),
        ("made", "added", ""),
    ]
    assert '<span class="add">+new\n' in env.pages["end"]
    assert nothing == {}
    assert unknown["note"] == "it holds more than 1 MiB"
    assert f"dashboard: http://127.0.0.2:{env.dashboard.server.port}/?token=s3cret" in capfd.readouterr().out
    for kind in ("atif", "cast"):
        to = ("--format", kind, "--to", str(tmp_path / kind))
        done = CliRunner().invoke(command_line(), ["trajectories", "export", str(tmp_path / "groups.jsonl"), *to])
        assert done.exit_code == 0, done.output
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in {"s3cret", "of-the-tools", "of-the-model", *env.tokens}:
        assert not any(secret in text for text in (*env.pages.values(), *files))
    async with env.client() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/")


@contextlib.asynccontextmanager
async def dashboard_of(url: str, secret: str) -> AsyncGenerator[httpx.AsyncClient]:
    """`atropos dashboard URL` with a server's key; a reader of its pages."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli", "dashboard", url, "--port", "0", "--key", secret, "--token", "reader"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said = (await process.stdout.readline()).decode()
        address = said.removeprefix("dashboard: ").partition("/?")[0]
        assert address.startswith("http"), said
        async with httpx.AsyncClient(base_url=address, headers={"Authorization": "Bearer reader"}) as reader:
            yield reader
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


def table(page: str, name: str) -> list[list[str]]:
    """The rows of a page's table without its head: the texts in each."""
    body = page.partition(f'aria-label="{name}"')[2].partition("</thead>")[2].partition("</table>")[0]
    rows = [re.sub(r"<[^>]*>", "\n", row) for row in body.split("<tr>")[1:]]
    return [[text for text in html.unescape(row).split("\n") if text.strip()] for row in rows]


async def test_operators_see_what_is_open(tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps({"alice": key(ALICE), "bob": key(BOB)}))
    settings = ("--backend", "local", "--max-containers", "1", "--slots-per-container", "4")
    async with (
        running("executor-server", *settings, "--keys-file", str(tmp_path / "keys.json")) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        alice, bob = ({"Authorization": f"Bearer {secret}", "X-API-Key": secret} for secret in (ALICE, BOB))
        opened = {"trajectory_id": "alices-own"}
        (await client.post("/trajectories", json=opened, headers=alice)).raise_for_status()
        asked = {"name": "terminal", "arguments": {"command": "echo of-alice"}}
        (await client.post("/trajectories/alices-own/calls", json=asked, headers=alice)).raise_for_status()
        made = await client.post("/e2b/sandboxes", json={"templateID": "base"}, headers=bob)
        sandbox = made.json()["sandboxID"]
        start = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "sleep 9876"]}}).encode()
        framed = b"\0" + len(start).to_bytes(4, "big") + start
        inside = {**bob, "E2b-Sandbox-Id": sandbox, "Content-Type": "application/connect+json"}
        async with client.stream("POST", "/e2b/process.Process/Start", content=framed, headers=inside) as output:
            await anext(output.aiter_bytes())  # the process's start
            async with dashboard_of(server.url, TOKEN) as reader:
                page = (await reader.get("/", params={"sort": "key"})).raise_for_status().text
                [of_alice, of_bob] = table(page, "Open sandboxes and trajectories")
                container = of_alice[3]
                assert re.fullmatch(r"0 pid \d+", container)
                assert of_alice[:3] == ["alice", "alices-own", "(base)"]
                assert [of_alice[4], of_alice[6], of_alice[7]] == ["open", "0", 'terminal {"command": "echo of-alice"}']
                assert of_bob[:5] == ["bob", sandbox, "base", container, "running"]
                assert of_bob[6:8] == ["1", "sleep 9876"]
                assert f'aria-label="container {container}: 2 leased, 2 free, 0 retired"' in page
                used = table(page, "Usage by key")
                assert sorted(row[:4] for row in used) == [["alice", "1", "(base)", "1"], ["bob", "1", "(base)", "1"]]
                assert all(re.fullmatch(r"\d+\.\d s", row[4]) for row in used)
                for secret in (TOKEN, ALICE, BOB):
                    assert secret not in page
                (await client.delete("/trajectories/alices-own", headers=alice)).raise_for_status()

                async def shown() -> str:
                    return (await reader.get("/live")).text

                async with asyncio.timeout(30):
                    while "alices-own" in await shown():  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                server.process.terminate()
                async with asyncio.timeout(60):
                    while "does not answer" not in await shown():  # noqa: ASYNC110
                        await asyncio.sleep(0.2)
                assert sandbox in await shown(), "the last numbers stay"


async def test_other_keys_see_nothing(tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps({"alice": key(ALICE)}))
    async with running("executor-server", "--keys-file", str(tmp_path / "keys.json"), "--backend", "local") as server:
        for secret, said in ((ALICE, "shows itself to admin keys alone"), ("wrong", "refuses the token")):
            with pytest.raises(AssertionError, match=said):
                async with dashboard_of(server.url, secret):
                    pass
