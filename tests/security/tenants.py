"""Two tenants of an executor server: what one of them has, and requests of the other that want it.

`python -m tests.security.tenants 100000` sends so many drawn requests and ends with 1 at the first that finds anything;
`SEED=n` draws others.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
import urllib.parse
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from atropos.api.accounts.keys import digest
from atropos.api.e2b import daemon, rest
from atropos.api.executor.models import ExecutorServerSettings
from atropos.api.executor_api import create_executor_app
from atropos.slots import SlotPoolConfig

ALICE, BOB, ADMIN = "e2b_a11ce0", "e2b_b0b0", "e2b_ad0"
SECRET = "the-moon-is-made-of-cheese"
DOMAIN = "boxes.test"
TRAJECTORY, CALL, NAME, TEMPLATE = "7ra1ec70ad", "ca11-0001abcd", "5nap-c0ffee42", "7e3a1a7e-0c0a"
Answer = tuple[int, dict[str, str], bytes]


async def ask(
    app: FastAPI,
    key: str,
    method: str,
    target: str,
    body: object = None,
    headers: Sequence[tuple[str, str]] = (),
) -> Answer:
    """Send a request with a key to the app; what it answered."""
    path, _, query = target.partition("?")
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    usual = (("host", "test"), ("content-type", "application/json"))
    given = [*(one for one in usual if one[0] not in dict(headers)), ("content-length", str(len(data))), *headers]
    given += [("x-api-key", key), ("authorization", f"Bearer {key}")]
    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": urllib.parse.unquote(path),
        "raw_path": path.encode("utf-8", "surrogateescape"),
        "query_string": query.encode("utf-8", "surrogateescape"),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1", "replace")) for name, value in given],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    sent, status, heads, content = False, 0, {}, bytearray()

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            await asyncio.sleep(3600)
        sent = True
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, heads
        if message["type"] == "http.response.start":
            status = message["status"]
            heads = {name.decode(): value.decode() for name, value in message["headers"]}
        content.extend(message.get("body", b""))

    await app(scope, receive, send)  # type: ignore[arg-type]
    return status, heads, bytes(content)


@dataclass
class World:
    """A server with two tenants and an admin; `ids`: what Alice has, by kind."""

    app: FastAPI
    keys_file: Path
    audit_file: Path
    ids: dict[str, str] = field(default_factory=dict)

    async def alice(self, method: str, target: str, body: object = None, **more: Any) -> Any:
        status, _, content = await ask(self.app, ALICE, method, target, body, **more)
        assert status < 300, (status, content)
        return json.loads(content) if content else None


@contextlib.asynccontextmanager
async def serving(folder: Path, keys: dict[str, dict[str, Any]], **settings: Any) -> AsyncGenerator[World]:
    """A server with these keys, over real slots."""
    keys_file, audit_file = folder / "keys.json", folder / "audit.jsonl"
    keys_file.write_text(json.dumps(keys))
    pool = settings.pop("pool", SlotPoolConfig(backend="local", slots_per_container=4, max_containers=1))
    app = create_executor_app(
        ExecutorServerSettings(keys_file=str(keys_file), audit_file=str(audit_file), pool=pool, **settings)
    )
    async with app.router.lifespan_context(app):
        yield World(app, keys_file, audit_file)


def key(secret: str, **settings: Any) -> dict[str, Any]:
    """A key of a keys file."""
    return {"sha256": digest(secret.encode()), **settings}


@contextlib.asynccontextmanager
async def alice_and_bob(folder: Path) -> AsyncGenerator[World]:
    """Alice has one of everything, with her secret in it; Bob has a sandbox, which is all that he may have."""
    keys = {"alice": key(ALICE), "bob": key(BOB, slots=1), "root": key(ADMIN, admin=True)}
    async with serving(folder, keys, acquire_s=20, e2b_domain=DOMAIN) as world:
        opened = await world.alice("POST", "/trajectories", {"trajectory_id": TRAJECTORY})
        call = {"name": "terminal", "arguments": {"command": f"echo {SECRET} | tee note"}, "id": CALL}
        await world.alice("POST", f"/trajectories/{TRAJECTORY}/calls", call)
        metadata = {"metadata": {"owner": SECRET}, "envVars": {"WORD": SECRET}, "templateID": "base"}
        sandbox = (await world.alice("POST", "/e2b/sandboxes", metadata))["sandboxID"]
        inside = [("e2b-sandbox-id", sandbox)]
        octets = [*inside, ("content-type", "application/octet-stream")]
        await world.alice("POST", "/e2b/files?path=/root/note", SECRET.encode(), headers=octets)
        watch = {"path": "/root"}
        watcher = await world.alice("POST", "/e2b/filesystem.Filesystem/CreateWatcher", watch, headers=inside)
        await world.alice("POST", f"/e2b/sandboxes/{sandbox}/snapshots", {"name": NAME})
        paused = (await world.alice("POST", "/e2b/sandboxes", {"templateID": "base"}))["sandboxID"]
        await world.alice("POST", f"/e2b/sandboxes/{paused}/pause", {})
        built = await build(world, ALICE, TEMPLATE, f"echo {SECRET} > /built")
        shell = await world.alice("POST", "/shells", {"id": sandbox})
        world.ids = {
            "trajectory_id": opened["trajectory_id"],
            "call_id": CALL,
            "sandbox_id": sandbox,
            "paused": paused,
            "template_id": NAME,
            "watcher": watcher["watcherId"],
            "template": built["templateID"],
            "template_name": TEMPLATE,
            "build_id": built["buildID"],
            "shell_id": shell["shell_id"],
        }
        status, _, _ = await ask(world.app, BOB, "POST", "/e2b/sandboxes", {"templateID": "base"})
        assert status == 201
        yield world


async def build(world: World, who: str, name: str, command: str) -> Any:
    """Build a template of one command as somebody; what the API said at the start."""
    status, _, content = await ask(world.app, who, "POST", "/e2b/v3/templates", {"name": name})
    assert status == 202, content
    asked = json.loads(content)
    place = f"templates/{asked['templateID']}/builds/{asked['buildID']}"
    wanted = {"fromImage": "base", "steps": [{"type": "RUN", "args": [command]}]}
    assert (await ask(world.app, who, "POST", f"/e2b/v2/{place}", wanted))[0] == 202

    async def state() -> str:
        _, _, content = await ask(world.app, who, "GET", f"/e2b/{place}/status")
        assert json.loads(content)["status"] != "error", content
        return json.loads(content)["status"]

    async with asyncio.timeout(60):
        while await state() != "ready":  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return asked


async def check_alice(world: World) -> None:
    """All that Alice has is as she left it."""
    listed = await world.alice("GET", "/trajectories")
    assert [each["trajectory_id"] for each in listed["trajectories"]] == [TRAJECTORY]
    call = {"name": "terminal", "arguments": {"command": "cat note; ls -A | wc -l"}}
    answer = await world.alice("POST", f"/trajectories/{TRAJECTORY}/calls", call)
    assert answer["result"]["output"] == f"{SECRET}\n1\n", answer
    sandboxes = await world.alice("GET", "/e2b/v2/sandboxes")
    assert {each["sandboxID"]: each["state"] for each in sandboxes} == {
        world.ids["sandbox_id"]: "running",
        world.ids["paused"]: "paused",
    }
    assert [each["snapshotID"] for each in await world.alice("GET", "/e2b/snapshots")] == [NAME]
    assert [each["names"] for each in await world.alice("GET", "/e2b/templates")] == [[TEMPLATE]]
    assert [each["tag"] for each in await world.alice("GET", f"/e2b/templates/{TEMPLATE}/tags")] == ["default"]
    inside = [("e2b-sandbox-id", world.ids["sandbox_id"])]
    _, _, content = await ask(world.app, ALICE, "GET", "/e2b/files?path=/root/note", headers=inside)
    assert content.decode() == SECRET


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Every method and path of the server, those of the E2B API with `/e2b`; but for what makes templates.

    A name in it is the asker's own from then on.
    """
    found = [
        (method, route.path)
        for route in app.routes
        for method in sorted(getattr(route, "methods", None) or ())
        if method != "HEAD"
    ]
    mounted = [*rest.ROUTES, *daemon.ROUTES]
    return [
        *found,
        *(
            (method, f"/e2b{route.path}")
            for route in mounted
            for method in sorted(route.methods or ())
            if (method, route.path[3:]) != ("POST", "/templates")
        ),
    ]


BODIES: tuple[object, ...] = (
    None,
    {},
    {"wait_s": 0, "image": "docker-daemon:{id}"},
    {"trajectory_id": "{id}"},
    {"name": "terminal", "arguments": {"command": "cat /workspace/note"}, "id": "{id}"},
    {"templateID": "{id}", "timeout": 1},
    {"path": "/root/note", "source": "/root/note", "destination": "/tmp/x", "depth": 1},
    {"process": {"cmd": "cat", "args": ["/root/note"]}},
    {"process": {"pid": 1}, "input": {"stdin": "aGk="}, "signal": "SIGNAL_SIGKILL"},
    {"watcherId": "{id}"},
    {"timeout": 0},
    {"count": 1},
    {"name": "{id}"},
    {"id": "{id}", "rows": 5},
    {"allowOut": ["{id}"]},
    {"fromTemplate": "{id}", "steps": [{"type": "RUN", "args": ["cat /built"]}]},
    {"target": "{id}", "name": "{id}", "tags": ["{id}"]},
)
QUERIES = (
    "",
    "?path=/root/note",
    "?sandboxID={id}",
    "?name={id}",
    "?metadata=owner%3D{id}",
    "?nextToken=0-{id}",
    "?state=paused",
)


@dataclass(frozen=True)
class Drawn:
    """A request with a hole for an id."""

    method: str
    target: str
    body: object
    headers: tuple[tuple[str, str], ...]

    def of(self, one: str) -> tuple[str, str, object, tuple[tuple[str, str], ...]]:
        """With an id in its hole."""
        body = self.body
        if body is not None:
            body = json.loads(json.dumps(body).replace("{id}", one))
        target = self.target.replace("{id}", urllib.parse.quote(one, safe=""))
        return self.method, target, body, tuple((name, value.replace("{id}", one)) for name, value in self.headers)


def drawn(draw: random.Random, paths: Sequence[tuple[str, str]]) -> Drawn:
    """One of all requests."""
    method, path = draw.choice(paths)
    if draw.random() < 0.1:
        method = draw.choice(("GET", "POST", "DELETE", "PUT", "PATCH"))
    path = re.sub(r"\{[^}]*\}", "{id}", path)
    if draw.random() < 0.1:
        path = draw.choice(
            (f"{path}/", path.upper(), f"/e2b/..{path}", f"{path}/../{{id}}", path.replace("/", "//", 1))
        )
    headers = [("e2b-sandbox-id", "{id}")] if draw.random() < 0.7 else []
    if draw.random() < 0.1:
        headers.append(
            draw.choice((("e2b-sandbox-id", "{id}"), ("idempotency-key", "{id}"), ("x-access-token", "{id}")))
        )
    if draw.random() < 0.2:  # other ports' hosts are open to whoever knows the sandbox's id
        headers.append(("host", draw.choice((f"49983-{{id}}.{DOMAIN}", f"API.{DOMAIN}:80", f"sandbox.{DOMAIN}"))))
    return Drawn(method, path + draw.choice(QUERIES), draw.choice(BODIES), tuple(headers))


def unknown_like(one: str, draw: random.Random) -> str:
    """An id of the same form that nobody has."""
    return "".join(draw.choice("0123456789abcdef") if each in "0123456789abcdef" else each for each in one)


async def attack(world: World, count: int, seed: int = 1) -> dict[int, int]:
    """Send drawn requests as Bob that name what Alice has; answers by status.

    Raises:
        AssertionError: one says more than it would of an id that nobody has, or something of Alice's.
    """
    draw, paths, statuses = random.Random(seed), routes(world.app), dict[int, int]()
    for _ in range(count):
        request, one = drawn(draw, paths), draw.choice(list(world.ids.values()))
        other = unknown_like(one, draw)
        if other == one:
            continue
        answers: list[tuple[int, str]] = []
        for each in (one, other):
            async with asyncio.timeout(30):
                status, _, content = await ask(world.app, BOB, *request.of(each))
            answers.append((status, content.decode("utf-8", "replace").replace(each, "ID")))
        (status, text), unknown = answers
        statuses[status] = statuses.get(status, 0) + 1
        assert status < 500 or status in {501, 502, 503}, (request, one, answers)
        assert _steady(text) == _steady(unknown[1]) and status == unknown[0], (request, one, answers)
        assert SECRET not in text, (request, one, answers)
    return statuses


def _steady(text: str) -> str:
    """Without what differs between two answers to one request: times, usage."""
    return re.sub(r"\d+(\.\d+)?", "0", re.sub(r"[0-9a-f-]{8,}", "ID", text))


async def _main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with alice_and_bob(Path(folder)) as world:
            statuses = await attack(world, int(sys.argv[1]), int(os.environ.get("SEED", "1")))
            await check_alice(world)
    print(f"{sum(statuses.values())} requests found nothing: {dict(sorted(statuses.items()))}")


if __name__ == "__main__":
    asyncio.run(_main())
