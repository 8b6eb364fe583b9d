"""An image comes from where its name says, and from nowhere else."""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images.manifests import MACHINE
from atropos.images.reference import ImageSource
from atropos.images.store import ImageStore
from atropos.slots.pool.image_sources import local_image
from atropos.wire import ImageInfo
from tests import privileges
from tests.images.making import as_index, entry, layer, layout
from tests.images.stacks import flattened
from tests.needs import require

pytestmark = privileges.owners
SOURCES = ("registry", "oci", "oci-archive", "docker-archive", "dir")
LAYERS = (layer(entry("lower", "x" * 5000)), layer(entry("upper", os.urandom(5000))))


@contextlib.asynccontextmanager
async def listener():
    """A server on loopback that must hear nothing: its URL, and who came."""
    heard = []

    async def hear(_reader, writer) -> None:
        heard.append(writer.get_extra_info("peername"))
        writer.close()

    server = await asyncio.start_server(hear, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/blob", heard


@contextlib.asynccontextmanager
async def served(at: Path):
    """A registry that has the layout's image, whatever its manifest says: real ones refuse some that others let pass."""
    blobs = at / "blobs/sha256"

    async def answer(request: web.Request) -> web.Response:
        _, last = request.path.rsplit("/", 1)
        if request.path == "/v2/":
            return web.Response()
        if last == "1":
            last = json.loads((at / "index.json").read_text())["manifests"][0]["digest"]
        data = (blobs / last.removeprefix("sha256:")).read_bytes()
        kind = json.loads(data)["mediaType"] if "/manifests/" in request.path else "application/octet-stream"
        return web.Response(body=data, content_type=kind, headers={"Docker-Content-Digest": last})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with TestServer(app) as server:
        yield f"127.0.0.1:{server.port}"


def rewrite(at: Path, change) -> None:
    """Change the text of the layout's manifests, each of which is named anew."""
    blobs = at / "blobs/sha256"

    def changed(part: dict) -> dict:
        file = blobs / part["digest"].removeprefix("sha256:")
        manifest = json.loads(file.read_text())
        if "manifests" in manifest:
            manifest["manifests"] = [changed(each) for each in manifest["manifests"]]
        data = change(json.dumps(manifest)).encode()
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return part | {"digest": f"sha256:{digest}", "size": len(data)}

    index = json.loads((at / "index.json").read_text())
    index["manifests"] = [changed(each) for each in index["manifests"]]
    (at / "index.json").write_text(change(json.dumps(index)))


def saved(at: Path, to: Path, change) -> None:
    """The layout's image as `docker save` writes it, with the sources of its layers that newer engines add."""
    index = json.loads((at / "index.json").read_text())
    blobs = at / "blobs/sha256"
    manifest = json.loads((blobs / index["manifests"][0]["digest"].removeprefix("sha256:")).read_text())
    config, *layers = (
        f"blobs/sha256/{part['digest'].removeprefix('sha256:')}" for part in (manifest["config"], *manifest["layers"])
    )
    sources = {part["digest"]: part for part in manifest["layers"]}
    listed = [{"Config": config, "RepoTags": ["x/y:1"], "Layers": layers, "LayerSources": sources}]
    with tarfile.open(to, "w") as tar:
        tar.add(at, ".")
        tar.addfile(*_member("manifest.json", change(json.dumps(listed))))


def _member(name: str, text: str):
    info, data = entry(name, text)
    return info, io.BytesIO(data)


async def prepared(tmp_path: Path, source: str, host: str = "127.0.0.1:9") -> tuple[ImageInfo, Path]:
    """The image as a server takes it, and its root."""
    root = tmp_path / "store"
    root.mkdir()
    store = ImageStore(ImageStoreSettings(folder=str(root), insecure_registries=(host,)), str(root), 65_536)
    wanted, archive = ImageSource.parse(source), None
    if wanted.transport != "docker":
        local = await asyncio.to_thread(local_image, wanted, None, asyncio.Semaphore())
        async with local.opened() as chunks:
            archive = tmp_path / "sent"
            archive.write_bytes(b"".join([chunk async for chunk in chunks]))
        wanted = ImageSource.parse(local.name)
    image = await store.prepare(wanted, lambda *_: None, archive and str(archive))
    return image, flattened(tmp_path, [Path(files) for files in store.hold(image).folders])


def with_urls(spelling: str):
    """Gives each part of a manifest, its configuration's too, a place elsewhere."""

    def change(text: str) -> str:
        return text.replace('"digest":', f'{spelling}, "digest":')

    return change


@pytest.mark.parametrize(
    ("spelling", "compress"),
    [
        ('"urls": ["URL"]', True),
        ('"URLs": ["URL"]', False),
        ('"url\\u017f": ["URL"]', True),
        ('"urls": ["URL"], "urls": []', False),
    ],
)
@pytest.mark.parametrize("kind", SOURCES)
async def test_nobody_is_asked_for_what_urls_name(tmp_path, kind, spelling, compress):
    at = tmp_path / "layout"
    layout(at, *LAYERS, compress=compress)
    as_index(at, (at, "riscv64"), (at, "amd64"), (at, "arm64"))
    async with listener() as (url, heard):
        change = with_urls(spelling.replace("URL", url))
        if kind == "docker-archive":
            layout(tmp_path / "one", *LAYERS, compress=compress)
            saved(tmp_path / "one", tmp_path / "image.tar", change)
        rewrite(at, change)
        if kind == "registry":
            async with served(at) as host:
                _, root = await prepared(tmp_path, f"{host}/image:1", host)
        elif kind == "dir":  # the root file system of a pool's owner; with a manifest in it, as skopeo's `dir:` has
            _, root = await prepared(tmp_path, f"dir:{at}")
            assert (root / "index.json").read_bytes() == (at / "index.json").read_bytes()
        elif kind == "oci":
            _, root = await prepared(tmp_path, f"oci:{at}")
        else:
            if kind == "oci-archive":
                with tarfile.open(tmp_path / "image.tar", "w") as tar:
                    tar.add(at, ".")
            _, root = await prepared(tmp_path, f"{kind}:{tmp_path}/image.tar")
        if kind != "dir":
            assert sorted(path.name for path in root.iterdir()) == ["lower", "upper"]
        assert heard == []


@pytest.mark.parametrize("kind", ["nondistributable", "unheard-of"])
async def test_foreign_layers_come_by_the_registry(tmp_path, kind):
    """As Docker takes it on Linux."""
    at = tmp_path / "layout"
    layout(at, *LAYERS)
    async with listener() as (url, heard):
        rewrite(
            at, lambda text: with_urls(f'"urls": ["{url}"]')(text).replace("image.layer.v1", f"image.layer.{kind}.v1")
        )
        async with served(at) as host:
            _, root = await prepared(tmp_path, f"{host}/image:1", host)
    assert sorted(path.name for path in root.iterdir()) == ["lower", "upper"]
    assert heard == []


@pytest.mark.parametrize("kind", ["oci-archive", "docker-archive"])
async def test_a_files_images_are_named(tmp_path, kind):
    names = ["host.example:5000/first:1.0", "second:2"]
    at, images = tmp_path / "both", []
    for name in names:
        one = tmp_path / name.partition(":")[0]
        layout(one, layer(entry("name", name)))
        images.append(json.loads((one / "index.json").read_text())["manifests"][0])
        shutil.copytree(one, at, dirs_exist_ok=True)
    listed = []
    for name, image in zip(names, images, strict=True):
        image["annotations"] = {"org.opencontainers.image.ref.name": name}
        manifest = json.loads((at / "blobs/sha256" / image["digest"].removeprefix("sha256:")).read_text())
        config, *layers = (
            f"blobs/sha256/{each['digest'].removeprefix('sha256:')}"
            for each in (manifest["config"], *manifest["layers"])
        )
        listed.append({"Config": config, "RepoTags": [name], "Layers": layers})
    (at / "index.json").write_text(json.dumps({"manifests": images}))
    (at / "manifest.json").write_text(json.dumps(listed))
    file = tmp_path / "image:s.tar"
    with tarfile.open(file, "w") as tar:
        tar.add(at, ".")
    for name in names:
        shutil.rmtree(tmp_path / "store", ignore_errors=True)
        _, root = await prepared(tmp_path, f"{kind}:{file}:{name}")
        assert (root / "name").read_text() == name
    for wrong in (str(file), f"{file}:third:1"):
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(ImageUnavailable, match=re.escape("it has: " + ", ".join(names))):
            await prepared(tmp_path, f"{kind}:{wrong}")


def changed_config(at: Path, change) -> None:
    """Change the layout's configuration, as other builders write it, and name it anew."""
    blobs = at / "blobs/sha256"

    def change_manifest(text: str) -> str:
        manifest = json.loads(text)
        if "config" in manifest:
            config = json.loads((blobs / manifest["config"]["digest"].removeprefix("sha256:")).read_text())
            change(config)
            data = json.dumps(config).encode()
            digest = hashlib.sha256(data).hexdigest()
            (blobs / digest).write_bytes(data)
            manifest["config"] |= {"digest": f"sha256:{digest}", "size": len(data)}
        return json.dumps(manifest)

    rewrite(at, change_manifest)


async def everywhere(tmp_path: Path, at: Path) -> list[Path]:
    """The image's root from a layout and from a registry."""
    roots = []
    async with served(at) as host:
        for number, source in enumerate((f"oci:{at}", f"{host}/image:1")):
            (tmp_path / str(number)).mkdir()
            _, root = await prepared(tmp_path / str(number), source, host)
            roots.append(root)
    return roots


@pytest.mark.parametrize("odd", ["empty os", "amd64 v1", "x86_64", "nested indices", "zstd in a Docker manifest"])
async def test_other_builders_layouts_are_read(tmp_path, odd):
    require("zstd")
    at = tmp_path / "layout"
    layout(at, *LAYERS)
    if odd == "empty os":  # as `crane append` on no base
        changed_config(at, lambda config: config.update(os=""))
    elif odd == "x86_64":
        changed_config(at, lambda config: config.update(architecture={"amd64": "x86_64"}.get(MACHINE, MACHINE)))
    elif odd == "amd64 v1":
        as_index(at, (at, "riscv64"), (at, MACHINE))
        rewrite(at, lambda text: text.replace('"architecture": "amd64"', '"architecture": "amd64", "variant": "v1"'))
    elif odd == "nested indices":
        as_index(at, (at, MACHINE))
        index = json.loads((at / "index.json").read_text())
        entries = [entry | {"platform": None} for entry in index["manifests"]]
        outer = json.dumps(
            {"schemaVersion": 2, "mediaType": index["manifests"][0]["mediaType"], "manifests": entries}
        ).encode()
        digest = hashlib.sha256(outer).hexdigest()
        (at / "blobs/sha256" / digest).write_bytes(outer)
        index["manifests"][0] |= {"digest": f"sha256:{digest}", "size": len(outer)}
        (at / "index.json").write_text(json.dumps(index))
    else:
        docker = "application/vnd.docker"

        def as_dockers(text: str) -> str:
            manifest = json.loads(text)
            if "layers" not in manifest:
                return text
            for each, data in zip(manifest["layers"], LAYERS, strict=True):
                packed = subprocess.run(["zstd", "-c"], input=data, capture_output=True, check=True).stdout
                digest = hashlib.sha256(packed).hexdigest()
                (at / "blobs/sha256" / digest).write_bytes(packed)
                each |= {
                    "mediaType": f"{docker}.image.rootfs.diff.tar.zstd",
                    "digest": f"sha256:{digest}",
                    "size": len(packed),
                }
            manifest["config"]["mediaType"] = f"{docker}.container.image.v1+json"
            return json.dumps(manifest | {"mediaType": f"{docker}.distribution.manifest.v2+json"})

        rewrite(at, as_dockers)
    for root in await everywhere(tmp_path, at):
        assert sorted(path.name for path in root.iterdir()) == ["lower", "upper"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config.pop("rootfs"), "its configuration has no rootfs"),
        (
            lambda config: config["rootfs"].pop("diff_ids"),
            "its manifest has 2 layers, and its configuration the digests",
        ),
        (
            lambda config: config["rootfs"].update(diff_ids=None),
            "its manifest has 2 layers, and its configuration the digests",
        ),
        (lambda config: config.update(rootfs=[]), "its configuration has no rootfs"),
        (lambda config: config.update(os="windows"), "it is for 'windows', not for Linux"),
        (
            lambda config: config.update(config={"WorkingDir": "/lower"}),
            "its WORKDIR /lower leads through a file, lower",
        ),
    ],
)
async def test_what_is_no_image_is_refused(tmp_path, change, said):
    at = tmp_path / "layout"
    layout(at, *LAYERS)
    changed_config(at, change)
    with pytest.raises(ImageUnavailable, match=re.escape(said)):
        await prepared(tmp_path, f"oci:{at}")
