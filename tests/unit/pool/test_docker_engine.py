"""An engine on a socket of this test's: what it says of itself, of a pull and of a container, and what it leaves
unsaid."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots import SlotPool
from atropos.slots.backends.docker.engine import DockerEngine
from tests.engines import pool_config
from tests.files import write_files

IMAGE = "registry.example/sandbox:1"


@contextlib.asynccontextmanager
async def engine(folder: Path, answers: dict[str, Any], *, podman: bool = False, **info: Any) -> AsyncIterator[str]:
    """An engine on a socket; yields its address.

    Args:
        answers: by the end of a path, what is answered: JSON, or a handler; anything else is not there.
        podman: what it says it is.
        info: what it says of itself beyond that.
    """
    component = "Podman Engine" if podman else "Engine"
    known = {"/version": {"ApiVersion": "1.43", "Version": "5.8.6", "Components": [{"Name": component}]}, "/info": info}

    async def answer(request: web.Request) -> web.StreamResponse:
        for end, found in (known | answers).items():
            if request.path.endswith(end):
                return await found(request) if callable(found) else web.json_response(found)
        return web.json_response({"message": "No such image"}, status=404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, str(folder / "docker.sock")).start()
    try:
        yield f"unix://{folder}/docker.sock"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[DockerEngine]:
    connection = DockerEngine("pool", address)
    try:
        await asyncio.to_thread(connection.connect)
        yield connection
    finally:
        connection.close()


@contextlib.asynccontextmanager
async def engine_that_pulls(folder: Path, events: Sequence[object], *, repeats: bool) -> AsyncIterator[DockerEngine]:
    """An engine without the image, whose pull says these events and does not end.

    Args:
        repeats: it says the last event again and again, as one with containerd's image store.
    """

    async def pull(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        for event in events:
            await stream.prepare(request)
            await stream.write(json.dumps(event).encode() + b"\n")
        while repeats:
            await stream.write(json.dumps(events[-1]).encode() + b"\n")
            await asyncio.sleep(0.01)
        return await asyncio.Future()

    async with engine(folder, {"/images/create": pull}) as address, connected(address) as connection:
        yield connection


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
async def test_a_stuck_pull_ends(tmp_path, monkeypatch, caplog, events, repeats, said):
    monkeypatch.setattr("atropos.slots.backends.docker.engine.PULL_NOTE_S", 0.1)
    monkeypatch.setattr("atropos.slots.backends.docker.engine.PULL_S", 0.5)
    async with engine_that_pulls(tmp_path, events, repeats=repeats) as connection:
        with pytest.raises(BackendUnavailable) as caught:
            await asyncio.to_thread(connection.image_id, IMAGE)
    words = f"no progress for 0 s; the last that Docker said of it: {said}"
    assert (
        str(caught.value).replace("for 1 s", "for 0 s").partition("): ")[2] == f"Docker can't pull {IMAGE!r}: {words}"
    )
    assert f"pulling {IMAGE}: {words}" in caplog.messages


async def test_broken_pull_has_a_reason(tmp_path):
    broken = {"errorDetail": {"message": "unexpected EOF"}, "error": "unexpected EOF"}
    async with engine_that_pulls(tmp_path, [LAYER, broken], repeats=False) as connection:
        with pytest.raises(BackendUnavailable, match=f"Docker can't pull '{IMAGE}': unexpected EOF"):
            await asyncio.to_thread(connection.image_id, IMAGE)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (404, "manifest for registry.example/sandbox:1 not found: manifest unknown: manifest unknown"),
        (
            404,
            "pull access denied for registry.example/sandbox, repository does not exist or may require 'docker login'",
        ),
        (403, "error from registry: DENIED"),
        (500, "unexpected status from HEAD request to http://registry.example/v2/sandbox/manifests/1: 403 Forbidden"),
        (500, "pull access denied, repository does not exist or may require authorization: authorization failed"),
        (
            500,
            "initializing source docker://registry.example/sandbox:1: reading manifest 1: unauthorized: UNAUTHORIZED",
        ),
        (500, "reading manifest 1 in registry.example/sandbox: manifest unknown"),
    ],
)
async def test_missing_image_is_config(tmp_path, status, message):
    async def pull(request: web.Request) -> web.Response:
        return web.json_response({"message": message}, status=status)

    async with engine(tmp_path, {"/images/create": pull}) as address, connected(address) as connection:
        with pytest.raises(ConfigError, match=r"image \(an env's sandbox_image\): Docker has no image"):
            await asyncio.to_thread(connection.image_id, IMAGE)


@pytest.mark.parametrize(
    "message",
    [
        "toomanyrequests: You have reached your pull rate limit",
        "dial tcp: lookup registry.example: no such host",
        "http: server gave HTTP response to HTTPS client",
        "received unexpected HTTP status: 500 Internal Server Error",
        "dial tcp 10.0.0.1:40300: connect: connection refused",
    ],
)
async def test_registry_trouble_is_passing(tmp_path, message):
    async def pull(request: web.Request) -> web.Response:
        return web.json_response({"message": message}, status=500)

    async with engine(tmp_path, {"/images/create": pull}) as address, connected(address) as connection:
        with pytest.raises(BackendUnavailable, match=r"sandbox_image\): Docker can't pull"):
            await asyncio.to_thread(connection.image_id, IMAGE)


async def test_refusal_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("atropos.sandbox.linux.host_limits.BUSY", 0)
    asked = 0

    async def refuse(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.json_response({"message": "opening seccomp profile failed: permission denied"}, status=500)

    answers = {"/containers/create": refuse, "/containers/json": [], "/json": {"Id": "sha256:1"}, "/events": []}
    async with engine(tmp_path, answers, podman=True) as address:
        with pytest.raises(BackendUnavailable) as caught:
            await SlotPool(pool_config("docker", docker_host=address, start_timeout_s=600)).start()
    assert str(caught.value) == "Podman refused: opening seccomp profile failed: permission denied"
    assert asked == 1


GPUS = {"gpus": 2, "gpu_devices": ("a.org/gpu",), "max_containers": 1}
ELSEWHERE = {"KernelVersion": "6.10.14-linuxkit"}
FOLDERS = ("/etc/cdi", "/var/run/cdi")


def podman(version: str) -> dict[str, Any]:
    """How Podman answers to /version."""
    return {"/version": {"ApiVersion": "1.41", "Version": version, "Components": [{"Name": "Podman Engine"}]}}


async def asked_for_gpus(folder: Path, folders: Sequence[str], answers: dict[str, Any], **says: Any) -> dict[str, Any]:
    """What an engine is asked for, so that a container has two GPUs by the files in these folders."""
    given: dict[str, Any] = {}

    async def create(request: web.Request) -> web.Response:
        given.update(await request.json())
        return web.json_response({"message": "enough seen"}, status=400)

    known = {"/containers/create": create, "/containers/json": [], "/json": {"Id": "sha256:1"}, "/events": []}
    async with engine(folder, {**known, **answers}, **says) as address:
        config = pool_config("docker", docker_host=address, start_timeout_s=600, cdi_folders=folders, **GPUS)
        with pytest.raises(BackendUnavailable, match="enough seen"):
            await SlotPool(config).start()
    return given["HostConfig"]


async def test_specifications_go_by_name(tmp_path):
    nodes = {"one": "/dev/null", "two": "/dev/zero"}
    devices = [{"name": name, "containerEdits": {"deviceNodes": [{"path": path}]}} for name, path in nodes.items()]
    folder = write_files(
        tmp_path / "cdi", {"a.json": json.dumps({"cdiVersion": "0.5.0", "kind": "a.org/gpu", "devices": devices})}
    )
    given = await asked_for_gpus(tmp_path, [str(folder)], {}, CDISpecDirs=[str(folder), "/etc/cdi"])
    (asked,) = given["DeviceRequests"]
    assert (asked["Driver"], asked["DeviceIDs"]) == ("cdi", ["a.org/gpu=one", "a.org/gpu=two"])
    assert given["Binds"] == [f"{folder}:{folder}:ro"]


async def test_a_container_has_all_that_is_named(tmp_path):
    """Its server looks for what no slot gets, too."""
    os.mkfifo(tmp_path / "pipe")
    mount = {"hostPath": str(tmp_path / "pipe"), "containerPath": "/run/pipe", "options": ["ro"]}
    devices = [
        {"name": path[5:], "containerEdits": {"deviceNodes": [{"path": path}]}} for path in ("/dev/null", "/dev/zero")
    ]
    spec = {"cdiVersion": "0.5.0", "kind": "a.org/gpu", "devices": devices, "containerEdits": {"mounts": [mount]}}
    folder = write_files(tmp_path / "cdi", {"a.json": json.dumps(spec)})
    given = await asked_for_gpus(tmp_path, [str(folder)], {}, CDISpecDirs=["/etc/cdi"])
    assert [each["PathInContainer"] for each in given["Devices"]] == ["/dev/null", "/dev/zero"]
    assert given["Binds"] == [f"{folder}:{folder}:ro", f"{tmp_path}/pipe:/run/pipe:ro"]


@pytest.mark.parametrize(
    ("answers", "says", "driver", "ids"),
    [
        ({}, {"CDISpecDirs": FOLDERS}, "cdi", ["a.org/gpu=0", "a.org/gpu=1"]),
        (podman("5.8.6"), {}, "cdi", ["a.org/gpu=0", "a.org/gpu=1"]),
        ({}, {}, "", ["0", "1"]),
        ({}, {"CDISpecDirs": ["/etc/cdi"]}, "", ["0", "1"]),
    ],
    ids=["with CDI", "Podman", "without", "with fewer folders"],
)
async def test_engines_elsewhere_are_asked(tmp_path, answers, says, driver, ids):
    given = await asked_for_gpus(tmp_path, FOLDERS, answers, **says, **ELSEWHERE)
    (asked,) = given["DeviceRequests"]
    assert (asked["Driver"], asked["DeviceIDs"], asked["Count"]) == (driver, ids, 0)
    assert ["gpu"] in asked["Capabilities"] or driver, "as by --gpus"
    assert given["Binds"] == [f"{folder}:{folder}:ro" for folder in FOLDERS]


@pytest.mark.parametrize(
    ("answers", "says", "why"),
    [
        (podman("5.3.1"), ELSEWHERE, "gpus: Podman 5.3.1.* takes no names of CDI devices .*; it needs Podman 5.4"),
        (
            {},
            {"CDISpecDirs": ["/etc/cdi"]},
            r"gpus: 2 wanted; of gpu_devices \(a.org/gpu\) this machine has none, by the files in /proc/fs",
        ),
    ],
    ids=["Podman elsewhere", "here"],
)
async def test_absent_gpus_end_the_start(tmp_path, answers, says, why):
    known = {"/containers/json": [], "/json": {"Id": "sha256:1"}, "/events": []}
    async with engine(tmp_path, {**known, **answers}, **says) as address:
        config = pool_config("docker", docker_host=address, start_timeout_s=600, cdi_folders=("/proc/fs",), **GPUS)
        with pytest.raises(BackendUnavailable, match=why):
            await SlotPool(config).start()


@pytest.mark.parametrize("podman", [True, False])
@pytest.mark.parametrize(
    ("says", "published"),
    [
        ({}, False),
        ({"KernelVersion": os.uname().release}, False),
        ({"SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"]}, True),
        ({"Rootless": True}, True),
        ({"KernelVersion": "6.10.14-linuxkit"}, True),
    ],
    ids=["as root", "this kernel", "rootless", "rootless, by Podman 4.3", "Docker Desktop"],
)
async def test_engine_gets_what_it_takes(tmp_path, podman, says, published):
    given: dict[str, Any] = {}

    async def create(request: web.Request) -> web.Response:
        given.update(await request.json())
        return web.json_response({"message": "enough seen"}, status=400)

    info = {"SecurityOptions": ["name=seccomp,profile=builtin"]} | says
    answers = {"/containers/create": create, "/containers/json": [], "/json": {"Id": "sha256:1"}, "/events": []}
    async with engine(tmp_path, answers, podman=podman, **info) as address:
        with pytest.raises(BackendUnavailable, match="enough seen"):
            await SlotPool(pool_config("docker", docker_host=address)).start()
    (profile,) = given["HostConfig"]["SecurityOpt"]
    text = profile.removeprefix("seccomp=")
    assert json.loads(Path(text).read_text() if podman else text)["defaultAction"] == "SCMP_ACT_ERRNO"
    ports = {"8787/tcp": [{"HostIp": "127.0.0.1", "HostPort": ""}]}
    assert given["HostConfig"].get("PortBindings") == (ports if published else None)
