"""The image store against a real registry: whole images or none, each once, within its bounds."""

import asyncio
import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from atropos.aio import cancel_and_wait
from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images.layer_store import LayerStore
from atropos.images.locks import try_lock
from atropos.images.manifests import MACHINE, MAX_JSON_BYTES
from atropos.images.programs import run
from atropos.images.reference import ImageSource
from atropos.images.store import ImageStore, StoredImage
from atropos.wire import ImageInfo
from tests import privileges
from tests.images.between import Between
from tests.images.making import as_index, entry, folder, layer, layout, link
from tests.images.registry import PASSWORD, USER, registry
from tests.images.stacks import shown
from tests.needs import require
from tests.repeats import TIMES
from tests.waiting import until

pytestmark = privileges.owners


@pytest.fixture
def at_once(monkeypatch):
    """Images make room in the moment in which they are used no more."""
    monkeypatch.setattr("atropos.images.layer_store.LET_GO_S", 0)


def store_at(tmp_path: Path, images, **settings) -> ImageStore:
    root = tmp_path / "store"
    root.mkdir(exist_ok=True)
    wanted = {"insecure_registries": (images.host,), "auth_file": images.auth_file, **settings}
    return ImageStore(ImageStoreSettings(folder=str(root), **wanted), str(root), 65_536)


def made(tmp_path: Path, images, name: str, *members, config=None) -> str:
    """Push an image of one layer; its id."""
    at = tmp_path / f"layout-{name.replace('/', '-').replace(':', '-')}"
    image_id = layout(at, layer(*members), config=config)
    images.push(at, name)
    return image_id


def nothing(_phase: str, _done: float | None) -> None:
    """Progress that nobody reads."""


def kept(tmp_path: Path, store: ImageStore) -> list[ImageInfo]:
    """Every image that is whole."""
    records = (tmp_path / "store/images").iterdir()
    return [image for record in records if (image := store.find(record.name)) is not None]


def files_of(store: ImageStore, image: ImageInfo) -> list[Path]:
    """What each layer of an image has in it, which is held; topmost first."""
    return list(map(Path, store.hold(image).folders))


def leftovers(tmp_path: Path) -> list[str]:
    return [path.name for path in (tmp_path / "store" / "work").iterdir() if path.is_dir()]


async def test_images_have_tags_and_digests(tmp_path, images):
    config = {"Env": ["PATH=/bin", "GREETING=hi=there"], "WorkingDir": "/srv", "User": "app"}
    at = tmp_path / "layout"
    image_id = layout(at, layer(folder("srv"), entry("srv/file", "hello", owner=(7, 8))), config=config)
    digest = images.push(at, "team/app:1")
    store = store_at(tmp_path, images)
    phases = []
    source = ImageSource.parse(f"{images.host}/team/app:1")
    image = await store.prepare(source, lambda phase, _: phases.append(phase))
    assert image.id == image_id
    assert (image.env, image.workdir, image.user) == ({"PATH": "/bin", "GREETING": "hi=there"}, "/srv", "app")
    file = files_of(store, image)[0] / "srv/file"
    assert (file.read_text(), file.stat().st_uid, file.stat().st_gid) == ("hello", 7, 8)
    assert list(dict.fromkeys(phases)) == ["pulling", "unpacking"]
    pinned = await store.prepare(ImageSource.parse(f"{images.host}/team/app@{digest}"), nothing)
    assert pinned.id == image_id
    assert [each.id for each in kept(tmp_path, store)] == [image_id]
    assert leftovers(tmp_path) == []


async def test_what_is_here_needs_no_registry(tmp_path, images):
    made(tmp_path, images, "once:1", entry("x", "x"))
    source = ImageSource.parse(f"{images.host}/once:1")
    image = await store_at(tmp_path, images).prepare(source, nothing)
    elsewhere = store_at(tmp_path, images, insecure_registries=())
    assert (await elsewhere.prepare(source, nothing)).id == image.id


@pytest.mark.parametrize(
    "name, words",
    [
        ("missing:1", "pulling: .*manifest unknown"),
        ("once@sha256:" + "0" * 64, "pulling: .*manifest unknown"),
    ],
)
async def test_a_missing_image_is_a_typed_error(tmp_path, images, name, words):
    with pytest.raises(ImageUnavailable, match=words) as caught:
        await store_at(tmp_path, images).prepare(ImageSource.parse(f"{images.host}/{name}"), nothing)
    assert "\n" not in str(caught.value)
    assert leftovers(tmp_path) == []


async def test_a_lost_registry_is_a_typed_error(tmp_path, images):
    with pytest.raises(ImageUnavailable, match=r"pulling: .*connection refused"):
        await store_at(tmp_path, images).prepare(ImageSource.parse("localhost:1/x:1"), nothing)


def bcrypt(password: str) -> str:
    """A password as htpasswd files keep it; empty where this C library has no bcrypt."""
    program = "import crypt,sys; print(crypt.crypt(sys.argv[1], crypt.mksalt(crypt.METHOD_BLOWFISH, rounds=16)))"
    done = subprocess.run([sys.executable, "-c", program, password], capture_output=True, text=True, check=False)
    return done.stdout.strip()


async def test_credentials_open_a_closed_registry(tmp_path):
    crypt = bcrypt(PASSWORD)
    if not crypt.startswith("$2"):
        pytest.skip("this Python has no bcrypt")
    with registry(tmp_path / "closed", auth=f"{USER}:{crypt}") as closed:
        made(tmp_path, closed, "private:1", entry("x", "x"))
        source = ImageSource.parse(f"{closed.host}/private:1")
        assert (await store_at(tmp_path, closed).prepare(source, nothing)).bytes > 0
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(ImageUnavailable, match="authentication required"):
            await store_at(tmp_path, closed, auth_file=None).prepare(source, nothing)


@pytest.mark.parametrize("spoil", ["truncated", "changed"])
async def test_a_spoiled_blob_is_never_an_image(tmp_path, images, monkeypatch, spoil):
    monkeypatch.setattr("atropos.images.pulling.PAUSES_S", (0.1,))
    at = tmp_path / "layout"
    layout(at, layer(entry("data", os.urandom(200_000))))
    images.push(at, f"{spoil}:1")
    digest = json.loads((at / "index.json").read_text())["manifests"][0]["digest"]
    manifest = json.loads((at / "blobs/sha256" / digest.removeprefix("sha256:")).read_text())
    blob = images.blob(manifest["layers"][0]["digest"])
    data = blob.read_bytes()
    blob.write_bytes(data[: len(data) // 2] if spoil == "truncated" else data[:-1000] + os.urandom(1000))
    store = store_at(tmp_path, images)
    with pytest.raises(
        ImageUnavailable, match=r"unpacking: layer .* is no|pulling: blobs/.* less than its manifest says"
    ):
        await store.prepare(ImageSource.parse(f"{images.host}/{spoil}:1"), nothing)
    assert (kept(tmp_path, store), leftovers(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([1], "config: not an object"),
        ({"Env": [5]}, "config: Env: no valid settings of commands"),
        ({"Env": ["A=\0"]}, "config: Env: "),
        ({"Env": ["A=\ud800"]}, "config: Env: "),
        ({"WorkingDir": "/\udcff"}, "config: WorkingDir: "),
        ({"User": 5}, "config: User: "),
        ({"Cmd": {"a": "b"}}, "config: Cmd: "),
        ({"Healthcheck": [1]}, "config: Healthcheck, Volumes: "),
        ({"Healthcheck": {"Test": "x"}}, "config: Healthcheck, Volumes: "),
        ({"Healthcheck": {"Test": ["CMD", 5]}}, "config: Healthcheck, Volumes: "),
        ({"Healthcheck": {"Test": ["CMD", "x"], "Interval": -1}}, "config: Healthcheck, Volumes: "),
        ({"Healthcheck": {"Test": ["CMD", "x"], "Retries": 10**400}}, "config: Healthcheck, Volumes: "),
        ({"Volumes": ["/x"]}, "config: Healthcheck, Volumes: "),
        ({"Volumes": {"/\0": {}}}, "config: Healthcheck, Volumes: "),
    ],
    ids=str,
)
async def test_a_bad_image_config_is_refused(tmp_path, images, config, words):
    made(tmp_path, images, "odd:1", entry("x", "x"), config=config)
    store = store_at(tmp_path, images)
    with pytest.raises(ImageUnavailable, match=f"pulling: not an image: {words}") as caught:
        await store.prepare(ImageSource.parse(f"{images.host}/odd:1"), nothing)
    assert "\n" not in str(caught.value)
    assert (kept(tmp_path, store), leftovers(tmp_path)) == ([], [])


async def test_another_machines_image_is_refused(tmp_path, images):
    at = tmp_path / "layout"
    layout(at, layer(entry("bin/sh", "x")), architecture="s390x")
    archive = tmp_path / "archive.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(at, ".")
    store = store_at(tmp_path, images)
    with pytest.raises(ImageUnavailable, match="it is for 's390x', and this machine is '"):
        await store.prepare(ImageSource.parse("oci-archive:x"), nothing, str(archive))
    assert (kept(tmp_path, store), leftovers(tmp_path)) == ([], [])


async def test_an_archive_writes_its_image_alone(tmp_path, images):
    """Neither through links that it has brought nor by names that climb: no name in it becomes a path."""
    at, archive, victim = tmp_path / "layout", tmp_path / "archive.tar", tmp_path / "victim"
    image_id = layout(at, layer(entry("x", "x")))
    victim.mkdir()
    with tarfile.open(archive, "w") as tar:
        tar.add(at, ".")
        tar.addfile(link("out", str(victim))[0])
        tar.addfile(entry("out/planted")[0])
    store = store_at(tmp_path, images)
    assert (await store.prepare(ImageSource.parse("oci-archive:x"), nothing, str(archive))).id == image_id
    assert list(victim.iterdir()) == []
    with tarfile.open(archive, "w") as tar:
        tar.add(at, ".")
        tar.addfile(entry("../../../victim/planted")[0])
    assert (await store.prepare(ImageSource.parse("oci-archive:y"), nothing, str(archive))).id == image_id
    assert list(victim.iterdir()) == []


@pytest.mark.parametrize("left", [0, 300, 100_000])
@pytest.mark.parametrize("cuts", [True, False], ids=["cut", "silent"])
async def test_a_cut_connection_is_a_typed_error(tmp_path, images, monkeypatch, left, cuts):
    monkeypatch.setattr("atropos.images.pulling.PAUSES_S", (0.1,))
    made(tmp_path, images, "far:1", entry("x", os.urandom(300_000)))
    async with Between(images.host, left, cuts=cuts) as between:
        store = store_at(tmp_path, between, pull_timeout_s=20 if cuts else 1)
        with pytest.raises(ImageUnavailable, match="pulling: " if cuts else "pulling: not done within 1 s"):
            await store.prepare(ImageSource.parse(f"{between.host}/far:1"), nothing)
        assert (kept(tmp_path, store), leftovers(tmp_path)) == ([], [])
        between.left = None
        store = store if cuts else store_at(tmp_path, between)  # a second may be too short for what is no failure
        assert (await store.prepare(ImageSource.parse(f"{between.host}/far:1"), nothing)).bytes >= 300_000


@pytest.mark.parametrize("left", [300, 100_000])
async def test_a_pull_outlasts_one_cut(tmp_path, images, left):
    made(tmp_path, images, "cut:1", entry("x", os.urandom(300_000)))
    async with Between(images.host, left) as between:
        source = ImageSource.parse(f"{between.host}/cut:1")
        pulling = asyncio.create_task(store_at(tmp_path, between).prepare(source, nothing))
        await until(lambda: between.left == 0 or pulling.done(), "it is cut")
        between.left = None
        assert (await pulling).bytes >= 300_000


async def test_a_slow_registry_gives_a_whole_image(tmp_path, images):
    made(tmp_path, images, "slow:1", entry("x", os.urandom(300_000)))
    async with Between(images.host, None, pause_s=0.1) as between:
        seen = []
        source = ImageSource.parse(f"{between.host}/slow:1")
        image = await store_at(tmp_path, between).prepare(source, lambda phase, done: seen.append((phase, done)))
        assert image.bytes >= 300_000
        assert [done for phase, done in seen if phase == "pulling" and done and 0 < done < 1], "progress is shown"


@pytest.mark.parametrize("busy_with", ["/manifests/", "/blobs/"])
async def test_a_busy_registry_is_asked_again(tmp_path, images, busy_with):
    """As one that restarts behind its proxy."""
    image_id = made(tmp_path, images, "busy:1", entry("x", "x"))
    left = 2

    async def answer(request: web.Request) -> web.Response:
        nonlocal left
        if left and busy_with in request.path:
            left -= 1
            return web.Response(status=503)
        kinds = [("Accept", kind) for kind in request.headers.getall("Accept", [])]
        async with session.get(f"http://{images.host}{request.path}", headers=kinds) as given:
            return web.Response(status=given.status, body=await given.read(), content_type=given.content_type)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with ClientSession() as session, TestServer(app) as front:
        host = f"127.0.0.1:{front.port}"
        store = store_at(tmp_path, SimpleNamespace(host=host, auth_file=None))
        assert (await store.prepare(ImageSource.parse(f"{host}/busy:1"), nothing)).id == image_id
    assert left == 0


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
async def test_a_cut_archive_is_a_typed_error(tmp_path, kind):
    archive = tmp_path / "image.tar"
    archive.write_bytes(layer(entry("manifest.json", "[" * 5000))[:2000])
    store = store_at(tmp_path, SimpleNamespace(host="127.0.0.1:9", auth_file=None))
    with pytest.raises(ImageUnavailable, match="pulling: not an image: unexpected end of data"):
        await store.prepare(ImageSource.parse(f"{kind}:x"), nothing, str(archive))


async def test_a_mirror_and_an_index_are_followed(tmp_path, images):
    at, other = tmp_path / "ours", tmp_path / "other"
    layout(other, layer(entry("x", "another machine's")))
    wanted = layout(at, layer(entry("x", "ours")))
    as_index(at, (other, "arm64"), (at, MACHINE))
    images.push(at, "mirrored/of:1", "--all")
    store = store_at(tmp_path, images, mirrors={"registry.invalid": f"{images.host}/mirrored"})
    assert (await store.prepare(ImageSource.parse("registry.invalid/of:1"), nothing)).id == wanted


async def test_an_index_images_size_is_known_ahead(tmp_path, images):
    at, other = tmp_path / "ours", tmp_path / "other"
    layout(other, layer(entry("x", "another machine's")))
    layout(at, layer(entry("x", os.urandom(17 << 20))))
    as_index(at, (other, "arm64"), (at, MACHINE), (other, "unknown"))
    digest = images.push(at, "index:1", "--all")
    for name in ("index:1", f"index@{digest}"):
        store = store_at(tmp_path, images, quota_mib=16)
        with pytest.raises(ImageUnavailable, match="pulling: 17 MiB, more than the store may hold"):
            await store.prepare(ImageSource.parse(f"{images.host}/{name}"), nothing)


async def test_fifty_requests_pull_once(tmp_path, images):
    made(tmp_path, images, "popular:1", entry("x", os.urandom(100_000)))
    source = ImageSource.parse(f"{images.host}/popular:1")
    pulls = []
    stores = [store_at(tmp_path, images) for _ in range(5)]
    found = await asyncio.gather(
        *(stores[index % 5].prepare(source, lambda phase, _: pulls.append(phase)) for index in range(50))
    )
    assert len({image.id for image in found}) == 1
    assert pulls.count("unpacking") == 1


@pytest.fixture
def programs(monkeypatch) -> list[asyncio.subprocess.Process]:
    """Those that were started, but for waits for the disk."""
    programs, start = [], asyncio.create_subprocess_exec

    async def counted(*command, **options):
        process = await start(*command, **options)
        if "sync" not in command:
            programs.append(process)
        return process

    monkeypatch.setattr("asyncio.create_subprocess_exec", counted)
    return programs


@pytest.mark.parametrize("hostile", [False, True], ids=["whole", "one is hostile"])
async def test_many_layers_take_few_programs(tmp_path, images, programs, hostile):
    members = [[entry(f"d{index}/x", str(index))] for index in range(24)]
    if hostile:
        members[12] = [entry("../x", "x")]
    layout(tmp_path / "layout", *(layer(folder("."), *each) for each in members))
    images.push(tmp_path / "layout", "many:1")
    store = store_at(tmp_path, images)
    preparing = store.prepare(ImageSource.parse(f"{images.host}/many:1"), nothing)
    if hostile:
        with pytest.raises(ImageUnavailable, match=r"unpacking: '\.\./x': a path that leaves the image"):
            await preparing
        assert (kept(tmp_path, store), leftovers(tmp_path)) == ([], [])
    else:
        assert len(files_of(store, await preparing)) == 24
    assert len(programs) <= 4
    await store.aclose()


async def test_images_share_programs(tmp_path, images, programs, monkeypatch):
    for name in "abcdef":
        members = entry(f"{name}/x", name), *([entry("../x", "x")] if name == "e" else [])
        made(tmp_path, images, f"many-{name}:1", *members)
    store = store_at(tmp_path, images)

    async def pull(name: str) -> ImageInfo:
        return await store.prepare(ImageSource.parse(f"{images.host}/many-{name}:1"), nothing)

    for name in "abc":
        await pull(name)
    assert len(programs) == 2
    for process in programs:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    await pull("d")
    assert len(programs) == 4
    with pytest.raises(ImageUnavailable, match="a path that leaves the image"):
        await pull("e")
    assert all(process.returncode is not None for process in programs)
    monkeypatch.setattr("atropos.images.pulling.IDLE_S", 0.1)
    await pull("f")
    await until(lambda: all(process.returncode is not None for process in programs), "idle programs have ended")
    await store.aclose()


@pytest.mark.parametrize("broken", ["whole", "cut early", "cut late", "another", "no header", "spoiled", "a lie"])
async def test_given_is_whole_or_refused(tmp_path, images, broken):
    layers = layer(folder("a"), entry("a/x", os.urandom(3_000_000))), layer(entry("a/y", "y")), layer(entry("a/.wh.x"))
    layout(tmp_path / "layout", *layers)
    images.push(tmp_path / "layout", f"given-{broken.replace(' ', '-')}:1")
    source = ImageSource.parse(f"{images.host}/given-{broken.replace(' ', '-')}:1")
    giver = store_at(tmp_path, images)
    image = await giver.prepare(source, nothing)
    there = tmp_path / "there"
    there.mkdir()
    taker = store_at(there, images)
    assert taker.lacking(image.layers) == (0, 1, 2)
    async with giver.give(image.id, (0, 1, 2)) as chunks:
        data = b"".join([chunk async for chunk in chunks])
    if broken == "cut early":
        data = data[: len(data) // 2]
    elif broken == "cut late":
        data = data[:-1]
    elif broken == "no header":
        data = b"x" * 100_000
    elif broken == "spoiled":
        data = data[:1_500_000] + bytes([data[1_500_000] ^ 1]) + data[1_500_001:]
    elif broken == "a lie":
        data = data.replace(image.layers[0].encode(), image.layers[1].encode(), 1)

    async def sent() -> AsyncIterator[bytes]:
        for at in range(0, len(data), 100_000):
            yield data[at : at + 100_000]

    image_id = "0" * 64 if broken == "another" else image.id
    if broken == "whole":
        taken = await taker.take(source, nothing, image_id, sent())
        assert (taken.id, taken.layers, taken.bytes) == (image.id, image.layers, image.bytes)
        assert [path.name for path in files_of(taker, taken)[-1].iterdir()] == ["a"]
        assert taker.lacking(image.layers) == ()
        async with taker.give(image.id, (0, 1, 2)) as chunks:  # and gives it as it was
            assert b"".join([chunk async for chunk in chunks]) == data
    else:
        with pytest.raises(ImageUnavailable) as caught:
            await taker.take(source, nothing, image_id, sent())
        assert "\n" not in str(caught.value)
        assert (kept(there, taker), leftovers(there)) == ([], [])
        assert (await taker.prepare(source, nothing)).id == image.id
    await giver.aclose()
    await taker.aclose()


async def test_images_pulled_together_are_whole(tmp_path, images, programs):
    names = [f"at-once-{index}:1" for index in range(12)]
    for name in names:
        made(tmp_path, images, name, entry("own", name), entry("large", os.urandom(300_000)))
    store = store_at(tmp_path, images)
    found = await asyncio.gather(
        *(store.prepare(ImageSource.parse(f"{images.host}/{name}"), nothing) for name in names)
    )
    for name, image in zip(names, found, strict=True):
        assert (files_of(store, image)[0] / "own").read_text() == name
    assert len(programs) <= 2 * 3  # three images at once
    await store.aclose()


@pytest.mark.usefixtures("at_once")
async def test_only_unused_images_make_room(tmp_path, images):
    names = [f"room{index}:1" for index in range(4)]
    for name in names:
        made(tmp_path, images, name, entry("x", os.urandom(6 << 20)))
    store, other = store_at(tmp_path, images, quota_mib=16), store_at(tmp_path, images, quota_mib=16)
    first = await store.prepare(ImageSource.parse(f"{images.host}/{names[0]}"), nothing)
    other.hold(first)  # another server of this host uses it
    second = await store.prepare(ImageSource.parse(f"{images.host}/{names[1]}"), nothing)
    third = await store.prepare(ImageSource.parse(f"{images.host}/{names[2]}"), nothing)
    here = {image.id for image in kept(tmp_path, store)}
    assert first.id in here
    assert third.id in here
    assert second.id not in here, "the one used longest ago makes room"
    store.hold(third)
    with pytest.raises(ImageUnavailable, match=r"more than \d+ MiB|is full|more than the"):
        await store.prepare(ImageSource.parse(f"{images.host}/{names[3]}"), nothing)
    other.release(first.id)
    fourth = await store.prepare(ImageSource.parse(f"{images.host}/{names[3]}"), nothing)
    assert {image.id for image in kept(tmp_path, store)} == {third.id, fourth.id}


@pytest.mark.usefixtures("at_once")
async def test_images_go_with_their_layers(tmp_path, images):
    store, folder = store_at(tmp_path, images, quota_mib=16), tmp_path / "store"
    for index in range(4):
        made(tmp_path, images, f"gone{index}:1", entry("x", os.urandom(6 << 20)))
        await store.prepare(ImageSource.parse(f"{images.host}/gone{index}:1"), nothing)
        here = {path.name for path in folder.joinpath("images").iterdir()}
        assert here == {image.id for image in kept(tmp_path, store)}
        assert {path.read_text() for path in folder.joinpath("names").iterdir()} == here
    assert here
    for path in folder.joinpath("layers").iterdir():  # by a server that was killed then
        shutil.rmtree(path)
    folder.joinpath("names/of-none").write_text("0" * 64)
    last = await store_at(tmp_path, images).prepare(ImageSource.parse(f"{images.host}/gone0:1"), nothing)
    assert [path.name for path in folder.joinpath("images").iterdir()] == [last.id]
    assert [path.read_text() for path in folder.joinpath("names").iterdir()] == [last.id]


@pytest.mark.usefixtures("at_once")
async def test_a_deep_image_makes_room(tmp_path, images):
    made(tmp_path, images, "deep:1", entry("d/" * 1500 + "f", os.urandom(10 << 20)))
    made(tmp_path, images, "next:1", entry("x", os.urandom(10 << 20)))
    store = store_at(tmp_path, images, quota_mib=16)
    await store.prepare(ImageSource.parse(f"{images.host}/deep:1"), nothing)
    image = await store.prepare(ImageSource.parse(f"{images.host}/next:1"), nothing)
    assert [each.id for each in kept(tmp_path, store)] == [image.id]
    assert leftovers(tmp_path) == []


def built(letter: str, mib: float, parent: str | None = None) -> ImageInfo:
    return ImageInfo(
        id=letter * 64, source=f"atropos-build:{letter * 64}", bytes=int(mib * 2**20), parent=parent and parent * 64
    )


def put(tmp_path: Path, letter: str, mib: int, parent: str | None = None) -> None:
    """An image of so many MiB, as it is after it was built; `parent`: the letters of those below it, topmost first."""
    image = built(letter, mib, parent and parent[0])
    layer = layer_at(tmp_path, letter)
    (layer / "files").mkdir(parents=True)
    (layer / "bytes").write_text(str(mib << 20))
    layers = tuple(each * 64 for each in letter + (parent or ""))
    (tmp_path / "store/images" / image.id).write_text(StoredImage(info=image, layers=layers).model_dump_json())


def layer_at(tmp_path: Path, letter: str) -> Path:
    return tmp_path / "store/layers" / (letter * 64)


async def empty(target: str) -> None:
    """The layer of a built image in which nothing is."""
    os.mkdir(target)


@contextlib.asynccontextmanager
async def being_kept(store: ImageStore, image: ImageInfo) -> AsyncIterator[None]:
    """Within, its layer is being copied; then that is given up."""
    begun = asyncio.Event()

    async def fill(_target: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    keeping = asyncio.create_task(store.keep(image, fill))
    await until(lambda: begun.is_set() or keeping.done(), "it is being copied")
    assert not keeping.done()
    try:
        yield
    finally:
        await cancel_and_wait([keeping])


@pytest.mark.usefixtures("at_once")
def test_images_in_demand_make_room_last(tmp_path, images):
    store = store_at(tmp_path, images, quota_mib=16)
    for used_at, letter in enumerate("abcd"):
        put(tmp_path, letter, 4)
        os.utime(layer_at(tmp_path, letter), (used_at, used_at))
    store.hold(store.find("a" * 64))
    assert store.known(f"atropos-build:{'b' * 64}")
    store.release("a" * 64)
    store.make_room(8 << 20)
    assert {image.id[0] for image in kept(tmp_path, store)} == {"a", "b"}


@pytest.mark.usefixtures("at_once")
def test_parents_make_room_last(tmp_path, images):
    """Without it they could not be used, but would take room."""
    store = store_at(tmp_path, images, quota_mib=16)
    for used in range(2):
        for letter, below in ("a", None), ("b", "a"), ("c", "ba"), ("d", "cba"):
            put(tmp_path, letter, 4, below)
        if used:
            store.hold(store.find("d" * 64))
            store.release("d" * 64)
        else:
            store.known(f"atropos-build:{'d' * 64}")
        for left in ("abc", "ab", "a", ""):
            store.make_room(16 - 4 * len(left) << 20)
            assert {image.id[0] for image in kept(tmp_path, store)} == set(left)


async def test_a_kept_build_outlasts_a_kill(tmp_path, images):
    store, image = store_at(tmp_path, images), built("b", 1)
    await store.keep(image, empty)
    for name in (tmp_path / "store/names").iterdir():
        name.unlink()
    assert await store.keep(image, empty) == image
    assert store_at(tmp_path, images).known(image.source) == image
    assert store.known("atropos-build:../../x") is None


@pytest.mark.usefixtures("at_once")
def test_an_orphan_image_makes_room(tmp_path, images):
    store = store_at(tmp_path, images, quota_mib=16)
    put(tmp_path, "b", 8, parent="a")
    assert kept(tmp_path, store) == []
    assert store.make_room(10 << 20) == 16 << 20
    assert list((tmp_path / "store/layers").iterdir()) == []


async def test_calls_of_slots_wait_for_no_removal(tmp_path, images, monkeypatch):
    made(tmp_path, images, "quick:1", entry("x", "x"))
    removed = []

    def remove(folder: str) -> None:
        name = Path(folder).name.partition("-")[0]
        removed.append((name, threading.current_thread() is threading.main_thread()))
        shutil.rmtree(folder)

    monkeypatch.setattr("atropos.images.layer_store.remove_tree", remove)
    (tmp_path / "store/work/killed").mkdir(parents=True)
    store = store_at(tmp_path, images)
    put(tmp_path, "b", 1, parent="a")
    (layer_at(tmp_path, "b") / "bytes").write_text("")
    await store.keep(built("b", 1), empty)
    await store.prepare(ImageSource.parse(f"{images.host}/quick:1"), nothing)
    pid = str(os.getpid())
    assert removed == [("killed", False), ("removed", False), (pid, False), (pid, False)]


async def test_an_unreadable_image_is_replaced(tmp_path, images):
    made(tmp_path, images, "damaged:1", entry("x", "x"))
    source = ImageSource.parse(f"{images.host}/damaged:1")
    image = await store_at(tmp_path, images).prepare(source, nothing)
    (tmp_path / "store/images" / image.id).write_text("")  # the machine lost power
    store = store_at(tmp_path, images)
    assert kept(tmp_path, store) == []
    assert await store.prepare(source, nothing) == image
    assert kept(tmp_path, store) == [image]


@pytest.mark.usefixtures("at_once")
def test_a_replaced_image_stays(tmp_path, images, monkeypatch):
    one = store_at(tmp_path, images, quota_mib=16)
    put(tmp_path, "b", 8, parent="a")

    def lock_late(fd: int) -> bool:
        """Another server drops the image without a parent, and keeps it anew, before this one has the lock."""
        late.undo()
        assert store_at(tmp_path, images, quota_mib=16).make_room(16 << 20) == 16 << 20
        put(tmp_path, "b", 8)
        return try_lock(fd)

    with monkeypatch.context() as late:
        late.setattr("atropos.images.layer_store.try_lock", lock_late)
        assert one.make_room(16 << 20) == 8 << 20
    assert [image.id for image in kept(tmp_path, store_at(tmp_path, images))] == ["b" * 64]


async def looked(tmp_path: Path) -> None:
    """Wait until one that waits for room has looked for it, and found what is no image."""
    broken = tmp_path / "store/layers/broken"
    broken.mkdir()
    await until(lambda: not broken.exists(), "one has looked for room")


@pytest.mark.usefixtures("at_once")
async def test_pulls_share_the_room(tmp_path, images):
    first, second = (store_at(tmp_path, images, quota_mib=16) for _ in range(2))
    put(tmp_path, "a", 4)
    async with being_kept(first, built("b", 10)):
        assert first.make_room(0) == 2 << 20, "the unused image stays where there is room"
        async with being_kept(second, built("c", 6)):
            assert first.make_room(0) == 0, "the unused image makes room"
            waits = asyncio.create_task(second.keep(last := built("d", 1), empty))
            await looked(tmp_path)
            assert not waits.done()
        assert await waits == last
    assert first.make_room(0) == 15 << 20


@pytest.mark.usefixtures("at_once")
async def test_a_second_claim_replaces_the_first(tmp_path):
    """As that of a stack which is flattened once its layers are here."""
    store = LayerStore(ImageStoreSettings(folder=str(tmp_path), quota_mib=16), tmp_path)
    async with store.work() as work:
        for wanted in (10 << 20, 12 << 20):
            assert await store.claim(wanted, work) == 16 << 20
            assert store.make_room(0) == (16 << 20) - wanted


async def test_an_image_makes_room_after_its_lease(tmp_path, images, monkeypatch):
    monkeypatch.setattr("atropos.images.layer_store.LET_GO_S", 3)
    store, other = (store_at(tmp_path, images, quota_mib=16) for _ in range(2))
    for letter in "ab":
        put(tmp_path, letter, 6)
    other.hold(store.find("a" * 64))
    os.utime(layer_at(tmp_path, "a"), (1, 1))
    assert store.make_room(16 << 20) == 4 << 20
    keeping = asyncio.create_task(store.keep(image := built("c", 16), empty))
    await looked(tmp_path)
    other.release("a" * 64)
    await keeping
    assert kept(tmp_path, store) == [image]


async def test_another_name_for_an_image_is_a_use(tmp_path, images):
    store = store_at(tmp_path, images, quota_mib=16)
    for name in ("set/one:1", "set/other:1"):
        made(tmp_path, images, name, entry("same", "x"))
        if layers := list((tmp_path / "store/layers").iterdir()):
            os.utime(layers[0], (1, 1))
        image = await store.prepare(ImageSource.parse(f"{images.host}/{name}"), nothing)
        store.make_room(16 << 20)
        assert store.hold(image)
        store.release(image.id)


@pytest.mark.usefixtures("at_once")
async def test_a_store_in_use_is_full(tmp_path, images):
    store = store_at(tmp_path, images, quota_mib=16)
    put(tmp_path, "a", 16)
    store.hold(store.find("a" * 64))
    with pytest.raises(ImageUnavailable, match="the image store is full: 16 of 16 MiB are in use"):
        await store.keep(built("b", 1), empty)


KEEPER = """
import asyncio, sys
from atropos.config import ImageStoreSettings
from atropos.images.store import ImageStore, StoredImage
from atropos.wire import ImageInfo

async def fill(_target):
    print("has its room", flush=True)
    await asyncio.Event().wait()

store = ImageStore(ImageStoreSettings(folder=sys.argv[1], quota_mib=16), sys.argv[1], 65536)
asyncio.run(store.keep(ImageInfo(id="a" * 64, source="atropos-build:a", bytes=16 << 20), fill))
"""


async def test_a_killed_servers_room_is_free(tmp_path, images):
    store = store_at(tmp_path, images, quota_mib=16)
    keeping = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", KEEPER, str(tmp_path / "store")), stdout=subprocess.PIPE
    )
    assert keeping.stdout is not None and await keeping.stdout.readline() == b"has its room\n"

    async def fill(target: str) -> None:
        assert leftovers(tmp_path) == [Path(target).parts[-3]]
        await empty(target)

    waits = asyncio.create_task(store.keep(image := built("b", 16), fill))
    await looked(tmp_path)
    keeping.kill()
    await keeping.wait()
    assert await waits == image


async def nothing_sent() -> AsyncIterator[bytes]:
    """An archive of which nothing comes."""
    for chunk in ():
        yield chunk


async def test_a_stopped_server_blocks_no_removal(tmp_path, images):
    store = store_at(tmp_path, images)
    put(tmp_path, "a", 1)
    fd = os.open(layer_at(tmp_path, "a"), os.O_RDONLY)
    try:
        assert try_lock(fd)  # as the one that is stopped
        with pytest.raises(ImageUnavailable, match="no longer in the store"):
            await asyncio.wait_for(asyncio.to_thread(store.hold, kept(tmp_path, store)[0]), 10)
    finally:
        os.close(fd)


async def test_starting_servers_leave_a_pull_alone(tmp_path, images):
    at, archive = tmp_path / "layout", tmp_path / "archive.tar"
    image_id = layout(at, *(layer(entry(f"f{index}", os.urandom(4 << 20))) for index in range(4)))
    with tarfile.open(archive, "w") as tar:
        tar.add(at, ".")
    store = store_at(tmp_path, images)
    pulling = asyncio.create_task(store.prepare(ImageSource.parse("oci-archive:x"), nothing, str(archive)))
    while not pulling.done():
        async with store_at(tmp_path, images).receiving(nothing_sent()):
            pass
    assert (await pulling).id == image_id


async def test_a_cancelled_pull_keeps_no_lock(tmp_path, images, monkeypatch):
    store = store_at(tmp_path, images)
    cleaning, go_on = threading.Event(), threading.Event()

    def remove_late(folder: str) -> None:
        cleaning.set()
        go_on.wait(60)
        shutil.rmtree(folder)

    monkeypatch.setattr("atropos.images.layer_store.remove_tree", remove_late)
    before = set(os.listdir("/proc/self/fd"))

    async def pull() -> None:
        async with store.receiving(nothing_sent()):
            await asyncio.Event().wait()

    pulling = asyncio.create_task(pull())
    await until(lambda: leftovers(tmp_path), "its work folder")
    pulling.cancel()
    assert await asyncio.to_thread(cleaning.wait, 60)
    pulling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pulling
    go_on.set()
    await until(lambda: leftovers(tmp_path) == [], "the end of cleaning up")
    await until(lambda: set(os.listdir("/proc/self/fd")) <= before, "the end of its lock")


async def test_servers_clean_up_after_killed_ones(tmp_path, images):
    left = tmp_path / "store/work"
    for index in range(300):
        (left / str(index) / "deep/er").mkdir(parents=True)
    (left / "registries-of-an-earlier-version.conf").touch()

    async def work() -> None:
        store = store_at(tmp_path, images)
        for _ in range(25):
            async with store.receiving(nothing_sent()) as file:
                os.utime(file)  # an error if it was removed

    await asyncio.gather(*(work() for _ in range(4)))
    assert [path.name for path in left.iterdir()] == ["registries-of-an-earlier-version.conf"]


async def test_an_older_versions_store_is_removed(tmp_path, images):
    made(tmp_path, images, "new:1", entry("x", "x"))
    used, unused = tmp_path / "store/trees/used", tmp_path / "store/trees/unused"
    for tree in (used, unused):
        (tree / "rootfs").mkdir(parents=True)
    fd = os.open(used, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    store = store_at(tmp_path, images)
    source = ImageSource.parse(f"{images.host}/new:1")
    names = tmp_path / "store/names"
    (names / hashlib.sha256(str(source).encode()).hexdigest()).write_text("a" * 64)
    image = await store.prepare(source, nothing)
    assert (used.exists(), unused.exists()) == (True, False)
    os.close(fd)
    async with store.receiving(nothing_sent()):
        assert not used.exists()
    assert kept(tmp_path, store) == [image]


async def test_a_layer_is_kept_once(tmp_path, images):
    shared = layer(folder("lib"), entry("lib/x", os.urandom(1 << 20)))
    first = layer(folder("etc"), entry("etc/first", "1"))
    for name, layers in {"a": (shared, first), "b": (first, shared), "c": (shared,), "d": (first, shared)}.items():
        layout(tmp_path / name, *layers, config={"Env": [f"NAME={name}"]})
        images.push(tmp_path / name, f"{name}:1")
    stores = [store_at(tmp_path, images) for _ in range(2)]
    found = await asyncio.gather(
        *(stores[n % 2].prepare(ImageSource.parse(f"{images.host}/{name}:1"), nothing) for n, name in enumerate("abcd"))
    )
    assert len({image.id for image in found}) == 4
    assert len(list((tmp_path / "store/layers").iterdir())) == 2


async def test_another_servers_layer_is_used(tmp_path):
    store = LayerStore(ImageStoreSettings(), tmp_path)
    place = tmp_path / "work/place"
    (place / "files").mkdir(parents=True)

    def another_is_first(layer: str) -> bool:
        shutil.copytree(place, tmp_path / "layers" / layer)
        return True

    store._drop = another_is_first
    await store.put(place, "a" * 64, 1, "a test", lasting=True)
    assert place.exists()
    store.release("a" * 64)


@pytest.mark.usefixtures("at_once")
async def test_an_image_lacking_a_layer_is_none(tmp_path, images):
    base, top = layer(entry("x", os.urandom(4 << 20))), layer(entry("y", os.urandom(4 << 20)))
    for name, layers in {"base": (base,), "top": (base, top)}.items():
        layout(tmp_path / name, *layers)
        images.push(tmp_path / name, f"{name}:1")
    store = store_at(tmp_path, images, quota_mib=16)
    found = {
        name: await store.prepare(ImageSource.parse(f"{images.host}/{name}:1"), nothing) for name in ("base", "top")
    }
    store.hold(found["base"])
    assert store.make_room(12 << 20) >= 11 << 20
    assert kept(tmp_path, store) == [found["base"]]
    again = await store.prepare(ImageSource.parse(f"{images.host}/top:1"), nothing)
    assert again == found["top"]


async def test_too_high_a_stack_is_flattened(tmp_path, images, monkeypatch):
    monkeypatch.setattr("atropos.images.stacking.MAX_LAYERS", 4)
    members = [(entry(f"f{index}", str(index)), entry(f".wh.f{index - 3}")) for index in range(9)]
    layout(tmp_path / "high", *(layer(*each) for each in members))
    images.push(tmp_path / "high", "high:1")
    store = store_at(tmp_path, images)
    image = await store.prepare(ImageSource.parse(f"{images.host}/high:1"), nothing)
    folders = files_of(store, image)
    assert len(folders) == 3
    with shown(folders, tmp_path / "root") as root:
        assert sorted(path.name for path in root.iterdir()) == ["f6", "f7", "f8"]
    built_on = await store.keep(built("b", 1, image.id[0]).model_copy(update={"parent": image.id}), empty)
    assert len(files_of(store, built_on)) == 4


async def test_a_layer_may_come_twice(tmp_path, images):
    """As that of no files, which builds make for each step that changes none."""
    one, none, two = layer(entry("a", "1")), layer(), layer(entry("a", "2"), entry("b", "2"))
    layout(tmp_path / "twice", one, none, two, none, one)
    images.push(tmp_path / "twice", "twice:1")
    store, source = store_at(tmp_path, images), ImageSource.parse(f"{images.host}/twice:1")
    image = await store.prepare(source, nothing)
    there = tmp_path / "there"
    there.mkdir()
    taker = store_at(there, images)
    async with store.give(image.id, taker.lacking(image.layers)) as chunks:
        taken = await taker.take(source, nothing, image.id, chunks)
    for each in (store, taker):
        with shown(files_of(each, taken), tmp_path / "root") as root:
            assert {path.name: path.read_text() for path in root.iterdir()} == {"a": "1", "b": "2"}
        await each.aclose()


async def test_a_root_keeps_its_mode(tmp_path, images):
    store, same = store_at(tmp_path, images), layer(entry("same", "x"))
    for number, mode in enumerate((0o755, 0o555, 0o755)):
        layout(tmp_path / f"on-{number}", layer(folder(".", mode=mode), entry(f"own-{number}", "x")), same)
        images.push(tmp_path / f"on-{number}", f"on{number}:1")
        image = await store.prepare(ImageSource.parse(f"{images.host}/on{number}:1"), nothing)
        with shown(files_of(store, image), tmp_path / "root") as root:
            assert root.stat().st_mode & 0o7777 == mode
    await store.aclose()


@pytest.mark.parametrize(("workdir", "file"), [("/etc/passwd", "etc/passwd"), ("/etc/passwd/deep", "etc/passwd")])
async def test_a_workdir_that_is_a_file_is_refused(tmp_path, images, workdir, file):
    name = f"workdir{len(workdir)}:1"
    made(tmp_path, images, name, entry("etc/passwd", ""), config={"WorkingDir": workdir})
    store = store_at(tmp_path, images)
    with pytest.raises(ImageUnavailable, match=f"unpacking: its WORKDIR {workdir} leads through a file, {file}"):
        await store.prepare(ImageSource.parse(f"{images.host}/{name}"), nothing)


async def test_a_workdir_is_made_unless_a_link(tmp_path, images):
    members = folder("srv", mode=0o700), link("app", "/srv/app")
    store = store_at(tmp_path, images)
    for workdir, folders in {"/srv/app": 2, "/app": 1, "/srv/": 1}.items():
        name = f"folder{len(workdir)}:1"
        made(tmp_path, images, name, *members, config={"WorkingDir": workdir})
        image = await store.prepare(ImageSource.parse(f"{images.host}/{name}"), nothing)
        with shown(found := files_of(store, image), tmp_path / "root") as root:
            assert len(found) == folders
            assert (root / "srv").stat().st_mode & 0o7777 == 0o700
            assert (root / "srv/app").is_dir() == (folders == 2)


@pytest.mark.parametrize("size", [70_000, 1_000_000, MAX_JSON_BYTES + 1])
async def test_programs_may_overfill_a_pipe(tmp_path, size):
    program = [sys.executable, "-c", f"import sys; sys.stdout.write('x' * {size})"]
    said = await run(program, "printing", folder=tmp_path, deadline_s=60)
    assert said == "x" * min(size, MAX_JSON_BYTES)


async def test_a_program_that_outlasts_its_kill_holds_up_nobody(tmp_path, monkeypatch):
    """As `sync` on a disk that has gigabytes to write: the kernel ends it when they are written."""
    ended = asyncio.subprocess.Process.wait

    async def outlasts(process) -> int:
        await asyncio.sleep(60)
        return await ended(process)

    monkeypatch.setattr(asyncio.subprocess.Process, "wait", outlasts)
    writing = asyncio.ensure_future(run(["sleep", "60"], "writing", folder=tmp_path, deadline_s=60))
    await asyncio.sleep(0.2)
    assert await cancel_and_wait([writing], 30)


@contextlib.contextmanager
def small_disk(at: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "small", str(at)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


async def test_a_full_disk_is_a_typed_error(tmp_path, images):
    made(tmp_path, images, "large:1", entry("x", os.urandom(5 << 20)))
    root = tmp_path / "store"
    root.mkdir()
    with small_disk(root):
        store = store_at(tmp_path, images)
        with pytest.raises(ImageUnavailable, match=r"disk .* is full"):
            await store.prepare(ImageSource.parse(f"{images.host}/large:1"), nothing)
        assert (kept(tmp_path, store), leftovers(tmp_path)) == ([], [])


@pytest.mark.parametrize(("there", "comes"), [(2 << 20, 1 << 20), (3 << 20, 3 << 19)], ids=["unpacked", "pulled"])
@pytest.mark.usefixtures("at_once")
async def test_a_small_disk_is_made_room_on(tmp_path, images, there, comes):
    image_id = layout(tmp_path / "layout", layer(entry("x", os.urandom(comes))))
    as_index(tmp_path / "layout", (tmp_path / "layout", MACHINE))  # as the images of most registries
    images.push(tmp_path / "layout", "large:2", "--all")
    root = tmp_path / "store"
    root.mkdir()
    with small_disk(root):
        store = store_at(tmp_path, images)
        put(tmp_path, "a", there >> 20)
        (layer_at(tmp_path, "a") / "files/x").write_bytes(os.urandom(there))
        assert (await store.prepare(ImageSource.parse(f"{images.host}/large:2"), nothing)).id == image_id
        assert [image.id for image in kept(tmp_path, store)] == [image_id]


@contextlib.contextmanager
def disk_at(folder: Path, disk: Path, *, new: bool = False) -> Iterator[None]:
    """An ext4 file system in a file."""
    require("mkfs.ext4")
    folder.mkdir(parents=True)
    if new:
        subprocess.run(["mkfs.ext4", "-q", "-F", str(disk)], check=True)
    if subprocess.run(["mount", "-o", "loop", str(disk), str(folder)], capture_output=True, check=False).returncode:
        pytest.skip("no loop devices")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("made_how", ["pulled", "pulled and on the disk", "built"])
async def test_a_power_cut_leaves_no_half_image(tmp_path, images, monkeypatch, made_how):
    data = os.urandom(1 << 20)
    made(tmp_path, images, "power:1", entry("x", data))
    disk, cut, again = tmp_path / "disk", tmp_path / "cut", tmp_path / "again"
    with disk.open("wb") as file:
        file.truncate(64 << 20)
    with disk_at(tmp_path / "store", disk, new=True):
        store = store_at(tmp_path, images)
        if made_how == "built":
            (tmp_path / "layer").mkdir()
            (tmp_path / "layer/x").write_bytes(data)
            image = ImageInfo(id="b" * 64, source="atropos-build:b", bytes=len(data))
            await store.keep(image, functools.partial(store.copy_layer, str(tmp_path / "layer")))
        else:
            if made_how == "pulled":  # the disk never has it
                monkeypatch.setattr("atropos.images.layer_store.LayerStore._sync", lambda *_: asyncio.Event().wait())
            monkeypatch.setattr("atropos.images.layer_store.SYNC_AFTER_S", 0)
            image = await store.prepare(ImageSource.parse(f"{images.host}/power:1"), nothing)
            (size,) = tmp_path.glob("store/layers/*/bytes")
            if made_how != "pulled":
                await until(lambda: size.read_text().isdecimal(), "the disk has it")
        kinds = [tmp_path / "store" / name for name in ("images", "layers", "names")]
        for early in (at for kind in kinds for at in (kind, *kind.iterdir(), *kind.glob("*/bytes"))):
            fd = os.open(early, os.O_RDONLY)
            os.fsync(fd)  # what the kernel happens to write first
            os.close(fd)
        shutil.copy(disk, cut)  # what is on the disk by now
        await store.aclose()
    boot = tmp_path / "boot"
    boot.write_text("another")
    monkeypatch.setattr("atropos.images.layer_store.BOOT_ID", boot)
    with disk_at(again / "store", cut):
        after = ImageStore(ImageStoreSettings(folder=str(again / "store")), str(again / "store"), 65_536)
        assert kept(again, after) == ([] if made_how == "pulled" else [image])
        if made_how != "pulled":
            (found,) = again.glob("store/layers/*/files/x")
            assert found.read_bytes() == data
        after.make_room(0)
        assert len(list(again.glob("store/layers/*"))) == (made_how != "pulled")


PULLER = """
import asyncio, sys
from atropos.config import ImageStoreSettings
from atropos.images.reference import ImageSource
from atropos.images.store import ImageStore
store = ImageStore(ImageStoreSettings(folder=sys.argv[1], insecure_registries=(sys.argv[2],)), sys.argv[1], 65536)
print("begins", flush=True)
asyncio.run(store.prepare(ImageSource.parse(sys.argv[2] + "/killed:1"), lambda *_: None))
"""


def pull_and_kill(root: Path, host: str, after_s: float) -> None:
    command = [sys.executable, "-c", PULLER, str(root), host]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"begins\n"
    time.sleep(after_s)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def files_in(store: ImageStore, image: ImageInfo) -> int:
    return sum(path.is_file() for files in files_of(store, image) for path in files.rglob("*"))


async def test_a_kill_leaves_an_image_whole_or_gone(tmp_path, images):
    at = tmp_path / "layout"
    layers = [[entry(f"d{index % 7}/{name}{index}", os.urandom(2000)) for index in range(1500)] for name in "abc"]
    layout(at, *(layer(*members) for members in layers))
    images.push(at, "killed:1")
    root = tmp_path / "store"
    root.mkdir()
    whole = 0
    rounds = TIMES * 3
    for index in range(rounds):
        shutil.rmtree(root)
        root.mkdir()
        await asyncio.to_thread(pull_and_kill, root, images.host, 1.2 * index / rounds)
        store = store_at(tmp_path, images)
        for image in kept(tmp_path, store):
            whole += 1
            assert files_in(store, image) == 4500
            store.release(image.id)
        after = await store.prepare(ImageSource.parse(f"{images.host}/killed:1"), nothing)
        assert files_in(store, after) == 4500
        store.release(after.id)
    assert leftovers(tmp_path) == []
    assert whole < rounds
