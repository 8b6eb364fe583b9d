"""A Docker engine on a socket of this test's: what it says of a pull, and what it leaves unsaid."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web

from atropos.errors import BackendUnavailable
from atropos.slots.backends.docker import engine
from atropos.slots.backends.docker.engine import DockerEngine

IMAGE = "registry.example/sandbox:1"


@contextlib.asynccontextmanager
async def engine_that_pulls(folder: Path, events: Sequence[object], *, repeats: bool) -> AsyncIterator[DockerEngine]:
    """An engine without the image, whose pull says these events and does not end.

    Args:
        repeats: it says the last event again and again, as one with containerd's image store.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path.endswith("/version"):
            return web.json_response({"ApiVersion": "1.43"})
        if not request.path.endswith("/images/create"):
            return web.json_response({"message": "No such image"}, status=404)
        stream = web.StreamResponse()
        for event in events:
            await stream.prepare(request)
            await stream.write(json.dumps(event).encode() + b"\n")
        while repeats:
            await stream.write(json.dumps(events[-1]).encode() + b"\n")
            await asyncio.sleep(0.01)
        return await asyncio.Future()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "docker.sock")).start()
    connection = DockerEngine("pool", f"unix://{folder}/docker.sock")
    try:
        await asyncio.to_thread(connection.connect)
        yield connection
    finally:
        connection.close()
        await runner.cleanup()


LAYER = {"id": "4f4fb700ef54", "status": "Downloading", "progress": "1MB/30MB", "progressDetail": {"current": 1}}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("events", "repeats", "said"),
    [
        ([], False, "nothing; does its registry answer?"),
        ([LAYER], False, "4f4fb700ef54 Downloading 1MB/30MB"),
        ([LAYER], True, "4f4fb700ef54 Downloading 1MB/30MB"),
    ],
)
async def test_a_pull_that_gets_no_further_is_said_and_ends(tmp_path, monkeypatch, caplog, events, repeats, said):
    monkeypatch.setattr(engine, "PULL_NOTE_S", 0.1)
    monkeypatch.setattr(engine, "PULL_S", 0.5)
    async with engine_that_pulls(tmp_path, events, repeats=repeats) as connection:
        with pytest.raises(BackendUnavailable) as caught:
            await asyncio.to_thread(connection.image_id, IMAGE)
    words = f"no progress for 0 s; the last that Docker said of it: {said}"
    assert str(caught.value).replace("for 1 s", "for 0 s") == f"sandbox_image: Docker can't pull {IMAGE!r}: {words}"
    assert f"pulling {IMAGE}: {words}" in caplog.messages


async def test_a_pull_that_breaks_off_gives_dockers_reason(tmp_path):
    broken = {"errorDetail": {"message": "unexpected EOF"}, "error": "unexpected EOF"}
    async with engine_that_pulls(tmp_path, [LAYER, broken], repeats=False) as connection:
        with pytest.raises(BackendUnavailable, match=f"Docker can't pull '{IMAGE}': unexpected EOF"):
            await asyncio.to_thread(connection.image_id, IMAGE)
