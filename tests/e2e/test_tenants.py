"""Several keys on one executor server: nothing of one is another's, quotas hold, and each gets its share."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest

from atropos.api import gate
from atropos.api.accounts.keys import digest
from atropos.api.e2b.messages import StartBuild
from atropos.api.e2b.recipes import SandboxStart, task_of
from atropos.metrics import percentiles
from atropos.slots import Quotas, Share, SlotPool, SlotPoolConfig
from atropos.tasks.prepare import TaskImages
from tests.e2e.servers import TOKEN, running
from tests.repeats import TIMES
from tests.security.tenants import (
    ADMIN,
    ALICE,
    BOB,
    SECRET,
    World,
    alice_and_bob,
    ask,
    attack,
    build,
    check_alice,
    key,
    serving,
)
from tests.waiting import until

REQUESTS = 1000 * TIMES
"""Drawn requests of an attack; 10^5 by `python -m tests.security.tenants 100000`."""


async def get(world: World, who: str, target: str) -> Any:
    status, _, content = await ask(world.app, who, "GET", target)
    assert status == 200, (status, content)
    return json.loads(content)


async def test_keys_find_nothing_else(tmp_path: Path):
    async with alice_and_bob(tmp_path) as world:
        statuses = await attack(world, REQUESTS)
        assert statuses[404] > 0.1 * REQUESTS, statuses
        assert statuses[502] > 0.1 * REQUESTS, "the daemon's routes were asked for no sandbox of another"
        for target, field in (("/trajectories", "trajectories"), ("/usage", "usage")):
            assert SECRET not in json.dumps(await get(world, BOB, target))
            assert {each.get("key", "bob") for each in (await get(world, BOB, target))[field]} <= {"bob"}
        assert len(await get(world, BOB, "/e2b/v2/sandboxes")) == 1
        assert await get(world, BOB, "/e2b/snapshots") == []
        assert (await get(world, BOB, "/health")) == {"status": "ok"}
        await check_alice(world)


async def test_a_name_is_each_keys_own(tmp_path: Path):
    async with serving(tmp_path, {"alice": key(ALICE), "bob": key(BOB)}, acquire_s=20) as world:
        made: dict[str, str] = {}
        for who in (ALICE, BOB):
            assert (await ask(world.app, who, "POST", "/trajectories", {"trajectory_id": "one"}))[0] == 201
            call = {"name": "terminal", "arguments": {"command": f"echo {who} >> note; cat note"}, "id": "same"}
            status, _, content = await ask(world.app, who, "POST", "/trajectories/one/calls", call)
            assert (status, json.loads(content)["result"]["output"]) == (200, f"{who}\n")
            made[who] = json.loads((await ask(world.app, who, "POST", "/e2b/sandboxes", {"templateID": "base"}))[2])[
                "sandboxID"
            ]
            status, _, _ = await ask(world.app, who, "POST", f"/e2b/sandboxes/{made[who]}/snapshots", {"name": "mine"})
            assert status == 201
        await ask(world.app, BOB, "DELETE", "/e2b/templates/mine")
        assert [each["names"] for each in await get(world, ALICE, "/e2b/snapshots")] == [["mine"]]
        status, _, content = await ask(world.app, BOB, "POST", "/e2b/sandboxes", {"templateID": "mine"})
        assert (status, b"mine" in content) == (400, True), content  # an image of no registry, as any other word


async def test_builds_are_a_keys_own(tmp_path: Path):
    """A step may have read what only its key's secrets open."""
    async with serving(tmp_path, {"alice": key(ALICE), "bob": key(BOB)}, acquire_s=20) as world:
        stamps: list[str] = []
        for who in (ALICE, ALICE, BOB):
            await build(world, who, "same", "date +%N > /stamp")
            status, _, content = await ask(world.app, who, "POST", "/e2b/sandboxes", {"templateID": "same"})
            assert status == 201, content
            inside = [("e2b-sandbox-id", json.loads(content)["sandboxID"])]
            stamps.append((await ask(world.app, who, "GET", "/e2b/files?path=/stamp", headers=inside))[2].decode())
        assert stamps[0] == stamps[1] != stamps[2]
        assert len(await get(world, BOB, "/e2b/templates")) == 1


async def test_nobody_guesses_a_builds_name(tmp_path: Path):
    """Whoever knows what `atropos-build:KEY` was made of, and for whom, can name it as an image."""
    async with serving(tmp_path, {"alice": key(ALICE)}, acquire_s=20) as world:
        step = f"echo {uuid4()} > /stamp"  # builds of earlier runs are still on the host
        await build(world, ALICE, "known", step)
        steps = [{"type": "RUN", "args": [step]}]
        wanted = StartBuild.model_validate({"fromImage": "base", "steps": steps})
        same = task_of("known", wanted, None, SandboxStart(), tmp_path, None)
        carried_out: dict[str, int] = {}
        for owner in ("", "alice", "alice ", f"{digest(ALICE.encode())} "):
            images = TaskImages(world.app.state.executor.pool, (), owner=owner)
            await images.prepare(same)
            carried_out[owner] = images.counters["steps"]
        *guessed, known = carried_out.values()
        assert (all(guessed), known) == (True, 0), carried_out


async def test_only_admins_see_all(tmp_path: Path):
    async with alice_and_bob(tmp_path) as world:
        assert (await ask(world.app, BOB, "GET", "/metrics"))[0] == 403
        status, _, content = await ask(world.app, ADMIN, "GET", "/metrics")
        assert status == 200
        assert 'atropos_key_leases_total{key="alice",image="(base)"} 3' in content.decode()
        assert {each["key"] for each in (await get(world, ADMIN, "/usage"))["usage"]} == {"alice", "bob"}
        assert (await get(world, ADMIN, "/trajectories"))["trajectories"] == []


async def test_keys_change_live(tmp_path: Path):
    async with serving(tmp_path, {"alice": key(ALICE)}, acquire_s=20) as world:
        assert (await ask(world.app, BOB, "GET", "/tools"))[0] == 401
        status, _, content = await ask(world.app, ALICE, "POST", "/e2b/sandboxes", {"templateID": "base"})
        sandbox = json.loads(content)["sandboxID"]
        assert (await ask(world.app, ALICE, "POST", "/trajectories", {}))[0] == 201

        async def answers(who: str, status: int) -> None:
            async with asyncio.timeout(30):
                while (await ask(world.app, who, "GET", f"/e2b/sandboxes/{sandbox}"))[0] != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        world.keys_file.write_text(json.dumps({"alice": key(ALICE, slots=2), "bob": key(BOB)}))
        await answers(BOB, 404)
        status, _, content = await ask(world.app, ALICE, "POST", "/trajectories", {})
        assert (status, json.loads(content)["code"]) == (429, "quota"), "its new quota holds, and what it has goes on"
        world.keys_file.write_text('{"alice": ')
        await asyncio.sleep(2)  # a file that is half written is read, and nothing becomes of it
        await answers(ALICE, 200)
        world.keys_file.write_text(json.dumps({"bob": key(BOB)}))
        await answers(ALICE, 401)
        pool = world.app.state.executor.pool
        await until(lambda: pool.stats().leased == 0, "what the removed key had has ended")


async def test_a_used_up_quota_is_named(tmp_path: Path):
    quotas = {
        "slots: 1 of 1": {"slots": 1},
        "memory_mib: 1024 of 1500": {"memory_mib": 1500},
        "disk_mib: 512 of 600": {"disk_mib": 600},
        "cpu: 1 of 1.5": {"cpu": 1.5, "limits": {"cpu_quota": 1}},
    }
    owners = {f"{ALICE}{number}": what for number, what in enumerate(quotas)}
    keys = {f"alice{number}": key(who, **quotas[what]) for number, (who, what) in enumerate(owners.items())}
    async with serving(tmp_path, {**keys, "bob": key(BOB)}, acquire_s=20) as world:
        for who, what in owners.items():
            status, heads, _ = await ask(world.app, who, "POST", "/trajectories", {})
            assert status == 201
            status, _, content = await ask(world.app, who, "POST", "/trajectories", {})
            assert (status, json.loads(content)["code"]) == (429, "quota")
            assert what in json.loads(content)["message"]
            status, _, content = await ask(world.app, who, "POST", "/e2b/sandboxes", {"templateID": "base"})
            assert status == 429
            assert what in json.loads(content)["message"]
            report = await get(world, who, "/usage")
            assert what in [f"{each['quota']}: {each['used']:g} of {each['most']:g}" for each in report["quotas"]]
            status, others, _ = await ask(world.app, BOB, "POST", "/trajectories", {})
            assert status == 201
            assert (await get(world, BOB, "/usage"))["quotas"] == []
            await ask(world.app, who, "DELETE", heads["location"])
            status, _, content = await ask(world.app, who, "POST", "/e2b/sandboxes", {"templateID": "base"})
            assert status == 201
            await ask(world.app, who, "DELETE", f"/e2b/sandboxes/{json.loads(content)['sandboxID']}")
            await ask(world.app, BOB, "DELETE", others["location"])


async def test_bodies_count_by_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async with serving(tmp_path, {"alice": key(ALICE), "bob": key(BOB)}, acquire_s=20) as world:
        inside = {}
        for who in (ALICE, BOB):
            status, _, content = await ask(world.app, who, "POST", "/e2b/sandboxes", {"templateID": "base"})
            assert status == 201
            inside[who] = [("e2b-sandbox-id", json.loads(content)["sandboxID"])]
        (alice,) = (each for each in world.app.state.tenants.all() if each.account.name == "alice")
        monkeypatch.setattr(gate, "MAX_HELD_BYTES", 1_000_000)
        alice.account.bodies.held += 900_000  # as requests have that are under way
        data = b"x" * 200_000
        for body, target, headers in (
            ({"trajectory_id": "x" * 200_000}, "/trajectories", []),
            ({"templateID": "x" * 200_000}, "/e2b/sandboxes", []),
            (data, "/e2b/files?path=/f", [("content-type", "application/octet-stream")]),
            (data, "/e2b/filesystem.Filesystem/Stat", []),
            (b"\0\0\3\x0d\x40" + data, "/e2b/process.Process/Start", []),
            (b"\0\0\3\x0d\x40" + data, "/e2b/process.Process/StreamInput", []),
        ):
            status, _, content = await ask(world.app, ALICE, "POST", target, body, [*inside[ALICE], *headers])
            assert b"bodies of" in content, (target, status, content[:300])
            assert status == (200 if "/process" in target else 429), (target, status)
            _, _, content = await ask(world.app, BOB, "POST", target, body, [*inside[BOB], *headers])
            assert b"bodies of" not in content, (target, content[:300])
        assert alice.account.bodies.held == 900_000


async def test_quotas_hold(tmp_path: Path):
    keys = {"alice": key(ALICE, snapshots=1, images=1), "bob": key(BOB, rate_per_s=0.001, burst=2)}
    async with serving(tmp_path, keys, acquire_s=20) as world:
        content = (await ask(world.app, ALICE, "POST", "/e2b/sandboxes", {"templateID": "base"}))[2]
        sandbox = json.loads(content)["sandboxID"]
        assert (await ask(world.app, ALICE, "POST", f"/e2b/sandboxes/{sandbox}/snapshots", {"name": "one"}))[0] == 201
        for path in ("snapshots", "pause"):
            status, _, content = await ask(world.app, ALICE, "POST", f"/e2b/sandboxes/{sandbox}/{path}", {})
            assert (status, b"quota snapshots" in content) == (429, True), content
        assert (await get(world, ALICE, f"/e2b/sandboxes/{sandbox}"))["state"] == "running"
        await ask(world.app, ALICE, "DELETE", "/e2b/templates/one")
        assert (await ask(world.app, ALICE, "POST", f"/e2b/sandboxes/{sandbox}/pause", {}))[0] == 204
        for image, refused in (("a.invalid/one", False), ("a.invalid/one", False), ("a.invalid/two", True)):
            status, _, content = await ask(world.app, ALICE, "POST", "/prepare", {"image": image, "wait_s": 0})
            assert (status == 429) == refused, content
        assert [(await ask(world.app, BOB, "GET", "/tools"))[0] for _ in range(3)] == [200, 200, 429]
        status, heads, _ = await ask(world.app, BOB, "GET", "/e2b/sandboxes")
        assert (status, heads["retry-after"]) == (429, "1")


async def test_audit_log_and_usage(tmp_path: Path):
    async with serving(tmp_path, {"alice": key(ALICE)}, acquire_s=20) as world:
        opened = json.loads((await ask(world.app, ALICE, "POST", "/trajectories", {}))[2])["trajectory_id"]
        busy = "python3 -c 'import time\nwhile time.process_time() < 0.3: pass'"
        for name, command in (("terminal", busy), ("terminal", "exit 3"), ("no-such-tool", "")):
            call = {"name": name, "arguments": {"command": command}}
            assert (await ask(world.app, ALICE, "POST", f"/trajectories/{opened}/calls", call))[0] == 200
        world.audit_file.rename(tmp_path / "rotated")
        await ask(world.app, ALICE, "DELETE", f"/trajectories/{opened}")
        lines = [json.loads(line) for line in (tmp_path / "rotated").read_text().splitlines()]
        lines += [json.loads(line) for line in world.audit_file.read_text().splitlines()]
        assert {line["key"] for line in lines} == {"alice"}
        assert {line["id"] for line in lines} == {opened}
        assert [(line["event"], line.get("tool"), line.get("outcome")) for line in lines] == [
            ("trajectory.open", None, None),
            ("call", "terminal", "ok"),
            ("call", "terminal", "error"),
            ("call", "(unknown)", "error"),
            ("trajectory.end", None, "ended"),
        ]
        assert busy not in world.audit_file.read_text()
        (row,) = (await get(world, ALICE, "/usage"))["usage"]
        assert (row["key"], row["image"], row["leases"]) == ("alice", "(base)", 1)
        assert row["cpu_s"] >= 0.3
        assert row["slot_s"] >= row["cpu_s"] / os.cpu_count()  # type: ignore[operator]


async def test_refusals_are_audited(tmp_path: Path):
    async with serving(tmp_path, {"alice": key(ALICE, slots=1, images=1, snapshots=0)}, acquire_s=20) as world:
        sandbox = (await world.alice("POST", "/e2b/sandboxes", {"templateID": "base"}))["sandboxID"]
        for target, body in (
            ("/e2b/sandboxes", {"templateID": "base"}),
            ("/e2b/sandboxes", {"templateID": "code-interpreter-v1"}),
            (f"/e2b/sandboxes/{sandbox}/snapshots", {"name": "one"}),
            ("/e2b/v3/templates", {"name": "No Name"}),
            ("/prepare", {"image": "a.invalid/one", "wait_s": 0}),
            ("/prepare", {"image": "a.invalid/two", "wait_s": 0}),
            ("/trajectories", {"trajectory_id": "t1"}),
            ("/trajectories", {"trajectory_id": "t2", "image": "oci:/etc"}),
            ("/shells", {"id": "bob/secret"}),
        ):
            await ask(world.app, ALICE, "POST", target, body)
        lines = [json.loads(line) for line in world.audit_file.read_text().splitlines()]
        assert [(line["event"], line["outcome"]) for line in lines if "refused" in line["event"]] == [
            ("sandbox.refused", "quota"),
            ("sandbox.refused", "config_error"),
            ("snapshot.refused", "quota"),
            ("template.refused", "config_error"),
            ("image.refused", "quota"),
            ("trajectory.refused", "quota"),
            ("trajectory.refused", "invalid"),
            ("shell.refused", "not_found"),
        ]


async def test_a_secret_may_come_after_its_key(tmp_path: Path):
    async with serving(tmp_path, {"alice": key(ALICE)}, acquire_s=20) as world:
        await get(world, ALICE, "/tools")
        secrets = {"git": {"hosts": ["git.example"], "file": str(tmp_path / "later")}}
        world.keys_file.write_text(json.dumps({"alice": key(ALICE, secrets=secrets)}))
        await asyncio.sleep(2)  # it is found wrong meanwhile
        (tenant,) = world.app.state.tenants.all()
        assert not tenant.account.share.secrets
        (tmp_path / "later").write_text("a-secret-of-gits")
        await until(lambda: tenant.account.share.secrets, "the key has its secret")


@pytest.mark.parametrize(("target", "how"), [("", "killed"), ("/pause", "paused")])
async def test_what_is_done_in_a_sandbox_is_audited(tmp_path: Path, target: str, how: str):
    """Files that went in and out, and a command that its sandbox's end cut short."""
    async with serving(tmp_path, {"alice": key(ALICE)}, acquire_s=20) as world:
        one = (await world.alice("POST", "/e2b/sandboxes", {"templateID": "base"}))["sandboxID"]
        inside = [("e2b-sandbox-id", one)]

        async def do(method: str, target: str, body: object, kind: str = "application/json") -> int:
            heads = [*inside, ("content-type", kind)]
            return (await ask(world.app, ALICE, method, f"/e2b{target}", body, headers=heads))[0]

        assert await do("POST", "/files?path=a", b"secret", "application/octet-stream") == 200
        assert await do("GET", "/files?path=a", None) == 200
        assert await do("GET", "/files?path=none", None) == 404
        assert await do("POST", "/filesystem.Filesystem/Stat", {"path": "a"}) == 200
        assert await do("POST", "/filesystem.Filesystem/Move", {"source": "a", "destination": "b"}) == 200
        message = json.dumps({"process": {"cmd": "sleep", "args": ["1000"]}}).encode()
        started = b"\0" + len(message).to_bytes(4) + message
        running = asyncio.create_task(do("POST", "/process.Process/Start", started, "application/connect+json"))
        sandbox = next(iter(world.app.state.tenants.all())).sandboxes.find(one)
        await until(lambda: sandbox.commands, "the command runs")
        await ask(world.app, ALICE, "POST" if target else "DELETE", f"/e2b/sandboxes/{one}{target}", {})
        await running
        lines = [json.loads(line) for line in world.audit_file.read_text().splitlines()]
        assert [(line["event"], line.get("tool"), line.get("outcome")) for line in lines[1:6]] == [
            ("file", "write", "ok"),
            ("file", "read", "ok"),
            ("file", "read", "error"),
            ("file", "move", "ok"),
            ("command", None, how),
        ]
        assert lines[6]["event"] == ("sandbox.pause" if target else "sandbox.end")


async def test_a_lost_pause_is_audited(tmp_path: Path):
    async with serving(tmp_path, {"alice": key(ALICE)}, acquire_s=20) as world:
        paused = (await world.alice("POST", "/e2b/sandboxes", {"templateID": "base"}))["sandboxID"]
        await world.alice("POST", f"/e2b/sandboxes/{paused}/pause", {})
        (link,) = world.app.state.executor.pool.links.values()
        os.kill(int(link.container.place.removeprefix("pid ")), signal.SIGKILL)
        await until(lambda: link.gone is not None, "the container is lost")
        assert (await ask(world.app, ALICE, "POST", f"/e2b/sandboxes/{paused}/connect", {}))[0] == 404
        lines = [json.loads(line) for line in world.audit_file.read_text().splitlines()]
        assert [(line["event"], line.get("outcome")) for line in lines] == [
            ("sandbox.create", None),
            ("sandbox.pause", None),
            ("sandbox.end", "slot_lost"),
        ]


async def test_keys_by_the_command_line(tmp_path: Path):
    async def atropos(*words: str) -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "atropos.cli", *words, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()

    secret = (await atropos("keys", "add", "alice", "--set", "slots=1")).strip()
    assert secret not in (tmp_path / "keys.json").read_text()
    flags = ("--backend", "local", "--slots-per-container", "1", "--max-containers", "1")
    files = ("--keys-file", str(tmp_path / "keys.json"), "--audit-file", str(tmp_path / "audit"))
    async with (
        running("executor-server", *flags, *files) as server,
        httpx.AsyncClient(base_url=server.url, timeout=60) as client,
    ):
        alice = {"Authorization": f"Bearer {secret}"}
        assert (await client.get("/tools", headers={"Authorization": "Bearer wrong"})).status_code == 401
        opened = await client.post("/trajectories", json={}, headers=alice)
        assert opened.status_code == 201
        assert (await client.get("/metrics", headers=alice)).status_code == 403
        assert (await client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"})).status_code == 200
        await client.delete(opened.headers["Location"], headers=alice)
        opened = await client.post("/trajectories", json={"trajectory_id": "alices"}, headers=alice)
        seen = await atropos("top", server.url, "--token", TOKEN, "--once")
        assert "1 of 1 slots leased" in seen
        assert "alice alices" in seen
        assert (await client.get("/status", headers=alice)).status_code == 403
        await client.delete(opened.headers["Location"], headers=alice)
        told = json.loads(await atropos("usage", server.url, "--token", TOKEN, "--json"))
        assert [(row["key"], row["leases"]) for row in told["usage"]] == [("alice", 2)]
        assert told["quotas"] == [{"key": "alice", "quota": "slots", "used": 0, "most": 1}]
        assert "used now" in await atropos("usage", server.url, "--token", TOKEN)
    assert "alice: trajectory.open" in server.log
    assert "alice: trajectory.end" in server.log


async def test_small_client_is_in_time():
    """Half a second a lease: the wait for the next slot that comes free, with and without 200 that came before."""
    config = SlotPoolConfig(backend="local", slots_per_container=4, max_containers=1, acquire_timeout_s=300)
    waits: dict[str, float] = {}
    async with SlotPool(config) as pool:
        big, small = Share(), Share(Quotas())

        async def hold(share: Share | None, seconds: float) -> None:
            async with pool.lease("big", share=share):
                await asyncio.sleep(seconds)

        for crowd in ("four that hold the slots", "two hundred"):
            tasks = [asyncio.create_task(hold(big, 0.5)) for _ in range(4 if crowd.startswith("four") else 200)]
            found: list[float] = []
            for _ in range(8):
                while pool.stats().free:  # those of the crowd of four are followed by others, so that nothing is free
                    tasks += [asyncio.create_task(hold(big, 0.5)) for _ in range(pool.stats().free)]
                    await asyncio.sleep(0.01)
                asked = asyncio.get_running_loop().time()
                async with pool.lease("small", share=small):
                    found.append(asyncio.get_running_loop().time() - asked)
            waits[crowd] = percentiles(found, 0.95)[0]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    alone, beside = waits.values()
    assert beside <= 2 * alone, waits


async def test_servers_share_keys_and_audit_log(tmp_path: Path):
    keys, audit = tmp_path / "keys.json", tmp_path / "audit.jsonl"
    keys.write_text(json.dumps({"alice": key(ALICE)}))
    settings = (
        "--max-containers",
        "1",
        "--slots-per-container",
        "2",
        "--keys-file",
        str(keys),
        "--audit-file",
        str(audit),
    )
    async with running("executor-server", *settings) as old, running("executor-server", *settings) as new:
        for server, name in ((old, "one"), (new, "two"), (old, "three")):
            headers = {"Authorization": f"Bearer {ALICE}"}
            async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=60) as client:
                (await client.post("/trajectories", json={"trajectory_id": name})).raise_for_status()
    events = [(each["event"], each["id"]) for each in map(json.loads, audit.read_text().splitlines())]
    assert events[:3] == [("trajectory.open", "one"), ("trajectory.open", "two"), ("trajectory.open", "three")]
    assert {each for event, each in events if event == "trajectory.end"} == {"one", "two", "three"}
