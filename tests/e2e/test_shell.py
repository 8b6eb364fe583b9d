"""`atropos shell`: a terminal into what a server's key has open, beside its calls, and in the audit log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.e2e.servers import TOKEN, Server, running
from tests.security.tenants import ALICE, BOB, key
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")
OPENERS = {"removed": "e2b_e0", "demoted": "e2b_e1"}
"""Admins, each of one test, which takes it away."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(folder: Path) -> AsyncIterator[Server]:
    keys, audit = folder / "keys.json", folder / "audit.jsonl"
    admins = {name: key(secret, admin=True) for name, secret in OPENERS.items()}
    keys.write_text(json.dumps({"alice": key(ALICE), "bob": key(BOB), **admins}))
    slots = ("--backend", "local", "--slots-per-container", "3", "--max-containers", "1")
    async with running("executor-server", *slots, "--keys-file", str(keys), "--audit-file", str(audit)) as server:
        yield server


def client_of(server: Server, who: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {who}"}, timeout=60)


@contextlib.asynccontextmanager
async def opened(server: Server, who: str, **wanted: str) -> AsyncIterator[str]:
    async with client_of(server, who) as client:
        trajectory = (await client.post("/trajectories", json=wanted)).raise_for_status().json()["trajectory_id"]
        try:
            yield trajectory
        finally:
            await client.delete(f"/trajectories/{trajectory}")


class Terminal:
    """`atropos shell` on a terminal of 30 lines of 100 characters."""

    def __init__(self, server: Server, who: str, subject: str) -> None:
        self.end, there = pty.openpty()
        subprocess.run(["stty", "rows", "30", "cols", "100"], stdin=there, check=True)
        self.shown = ""
        command = [sys.executable, "-m", "atropos.cli", "shell", subject, "--url", server.url]
        env = {**os.environ, "ATROPOS_EXECUTOR_TOKEN": who}
        self.process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=there, env=env, start_new_session=True
        )
        os.close(there)
        os.set_blocking(self.end, False)

    async def shows(self, text: str) -> None:
        def there() -> bool:
            with contextlib.suppress(BlockingIOError, OSError):
                self.shown += os.read(self.end, 65_536).decode("utf-8", "replace")
            return text in self.shown

        await until(there, f"{text!r} is shown")

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    async def code(self) -> int:
        await until(lambda: self.process.poll() is not None, "it has ended")
        return self.process.returncode


def audited(folder: Path, event: str, trajectory: str) -> list[dict]:
    lines = map(json.loads, (folder / "audit.jsonl").read_text().splitlines())
    return [
        {name: each[name] for name in each if name not in {"time", "seconds"}}
        for each in lines
        if (each["event"], each["id"]) == (event, trajectory)
    ]


async def test_a_shell_runs_beside_calls(server: Server, folder: Path):
    async with opened(server, ALICE) as trajectory, client_of(server, ALICE) as client:
        call = {
            "name": "terminal",
            "arguments": {"command": "echo here > mark; while [ -e mark ]; do sleep 0.1; done; echo gone"},
        }
        calling = asyncio.create_task(client.post(f"/trajectories/{trajectory}/calls", json=call))
        terminal = Terminal(server, TOKEN, trajectory)  # an admin's
        await terminal.shows("#")
        terminal.type("stty size; until cat /workspace/mark; do sleep 0.1; done; echo $((40 + 2))\r")
        await terminal.shows("30 100")
        await terminal.shows("here")
        await terminal.shows("42")
        # A ^C that comes before bash waits for a program may be lost: the program itself says that it runs.
        terminal.type("sh -c 'echo runs$((50 + 5)); exec sleep 1000'\r")
        await terminal.shows("runs55")
        terminal.type("\x03rm /workspace/mark; echo mine > /workspace/left; exit 3\r")
        assert await terminal.code() == 3, terminal.shown
        assert "gone" in (await calling).json()["result"]["output"]
        assert audited(folder, "shell.open", trajectory) == [
            {"key": "token", "event": "shell.open", "id": trajectory, "owner": "alice"}
        ]
        assert [each["outcome"] for each in audited(folder, "shell.end", trajectory)] == [3]
        os.close(terminal.end)


async def test_ends_with_client_and_slot(server: Server, folder: Path):
    async with opened(server, ALICE) as trajectory, client_of(server, ALICE) as client:
        gone, left = Terminal(server, ALICE, trajectory), Terminal(server, ALICE, trajectory)
        for each in (gone, left):
            await each.shows("#")
        gone.process.kill()
        await gone.code()
        await until(lambda: len(audited(folder, "shell.end", trajectory)) == 1, "the shell has ended with its client")
        await client.delete(f"/trajectories/{trajectory}")
        await left.shows("the slot has ended, and the shell with it")
        assert await left.code() == 70
        for each in (gone, left):
            os.close(each.end)


@pytest.mark.parametrize(("opener", "admin"), [("removed", None), ("demoted", False)], ids=OPENERS)
async def test_ends_with_its_openers_rights(server: Server, folder: Path, opener: str, admin: bool | None):
    async with opened(server, ALICE) as trajectory:
        terminal = Terminal(server, OPENERS[opener], trajectory)
        await terminal.shows("#")
        keys = json.loads((folder / "keys.json").read_text())
        del keys[opener]
        kept = {} if admin is None else {opener: key(OPENERS[opener], admin=admin)}
        (folder / "keys.json").write_text(json.dumps({**keys, **kept}))
        await until(lambda: len(audited(folder, "shell.end", trajectory)) == 1, "the shell has ended")
        assert await terminal.code() != 0
        os.close(terminal.end)


async def test_key_opens_its_own_only(server: Server):
    async with (
        opened(server, ALICE, trajectory_id="same"),
        opened(server, BOB, trajectory_id="same"),
        opened(server, ALICE) as mine,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):

        async def asked(who: str, method: str, target: str, body: object = None) -> httpx.Response:
            return await client.request(method, target, json=body, headers={"Authorization": f"Bearer {who}"})

        assert (await asked(BOB, "POST", "/shells", {"id": mine})).status_code == 404
        assert (await asked(BOB, "POST", "/shells", {"id": f"alice/{mine}"})).status_code == 404
        both = await asked(TOKEN, "POST", "/shells", {"id": "same"})
        assert (both.status_code, both.json()["message"]) == (
            409,
            "several are called so; write one of alice/same, bob/same",
        )
        shell = (await asked(TOKEN, "POST", "/shells", {"id": "bob/same"})).json()["shell_id"]
        for method, rest in (("GET", "/output"), ("POST", "/input"), ("PUT", "/size"), ("DELETE", "")):
            assert (await asked(BOB, method, f"/shells/{shell}{rest}", {})).status_code == 404
        for rows, status in ((True, 422), ("24", 422), (24.0, 204)):
            assert (await asked(TOKEN, "PUT", f"/shells/{shell}/size", {"rows": rows})).status_code == status
        assert (await asked(TOKEN, "DELETE", f"/shells/{shell}")).status_code == 200


@pytest.mark.parametrize("given", ["pipe", "file"])
async def test_what_is_piped_is_typed(server: Server, tmp_path: Path, given: str):
    async with opened(server, ALICE) as trajectory:
        script = tmp_path / "script"
        script.write_text("echo $((6 * 7)); exit 4\n")
        with script.open() as file:
            ran = await asyncio.to_thread(
                subprocess.run,
                [sys.executable, "-m", "atropos.cli", "shell", trajectory, "--url", server.url, "--token", ALICE],
                capture_output=True,
                **({"stdin": file} if given == "file" else {"input": script.read_bytes()}),
            )
        assert (ran.returncode, b"42" in ran.stdout) == (4, True), ran
