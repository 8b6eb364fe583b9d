"""Slots that stand on images: any image, as its configuration says, shared and reset like every other slot."""

import asyncio
import contextlib
import gc
import gzip
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import pytest_asyncio

from atropos.config import ImageStoreSettings
from atropos.errors import ConfigError, ImageUnavailable, SandboxError
from atropos.images.reference import ImageSource
from atropos.metrics import exposition
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.pool.image_sources import local_image
from tests import privileges
from tests.images.between import Between
from tests.images.making import entry, folder, layer, layout, link
from tests.settings import shows
from tests.silent_server import silent_server
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    privileges.owners,
]
STORM = int(os.environ.get("ATROPOS_STORM", "6"))
"""Images of the storm, with four leases each."""
BUSYBOX = shutil.which("busybox") or "/bin/busybox"
CONFIG = {"Env": ["PATH=/tools:/bin", "GREETING=from the image"], "WorkingDir": "/srv/app"}


def busybox_image(
    at: Path,
    text: str = "hello",
    *,
    user: str | None = None,
    workdir: str = "/srv/app",
    python: str = "",
    config: dict | None = None,
    more_files: Sequence[tuple[tarfile.TarInfo, bytes]] = (),
    **more,
) -> str:
    """An image without Python, glibc or bash; its id."""
    if not Path(BUSYBOX).exists():
        pytest.skip("not installed: busybox-static")
    tools = [
        link(f"bin/{name}", "busybox")
        for name in ("sh", "cat", "ls", "id", "pwd", "env", "stat", "mkdir", "echo", "rm", "chmod")
    ]
    return layout(
        at,
        layer(folder("bin"), entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755), *tools),
        layer(
            entry("etc/passwd", "root:x:0:0::/root:/bin/sh\napp:x:1000:1000::/srv/app:/bin/sh\n"),
            folder("srv/app", owner=(1000, 1000)),
            entry("srv/app/text", text, owner=(1000, 1000)),
            *([entry("bin/python3", python, mode=0o755)] if python else []),
            *more_files,
        ),
        config=CONFIG | {"WorkingDir": workdir} | ({"User": user} if user else {}) | (config or {}),
        **more,
    )


def pool_for(tmp_path: Path, images=None, **more) -> SlotPool:
    hosts = (images.host,) if images else ()
    store = ImageStoreSettings(folder=str(tmp_path / "store"), insecure_registries=hosts)
    return SlotPool(SlotPoolConfig(**{"slots_per_container": 4, "max_containers": 1, "image_store": store, **more}))


@pytest_asyncio.fixture(name="pool", scope="module", loop_scope="module")
async def pool_fixture(tmp_path_factory):
    """For tests that need none of their own; each has images of its own."""
    async with pool_for(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture
def closed_home():
    """As /root: a server that is no longer root may not look into it."""
    with tempfile.TemporaryDirectory() as home:
        yield home


async def test_a_lease_stands_on_a_registrys_image(tmp_path, images, monkeypatch, closed_home):
    monkeypatch.setenv("HOME", closed_home)
    image_id = busybox_image(tmp_path / "layout")
    images.push(tmp_path / "layout", "busy:1")
    name = f"{images.host}/busy:1"
    async with pool_for(tmp_path, images) as pool:
        seen = []
        info = await pool.prepare(name, progress=lambda _, state: seen.append(state.phase))
        assert (info.id, seen[-1]) == (image_id, "ready")
        assert 'atropos_pool_prepare_seconds_count{result="ok"} 1' in exposition(pool.metrics())
        async with pool.lease("one", image=name) as slot:
            assert slot.image.id == image_id
            r = await slot.exec(
                'cat text; echo; pwd; echo "$GREETING"; id -u; stat -c %u:%g text; echo new > text; mkdir /opt'
            )
            assert (r.exit_code, r.output) == (0, "hello\n/srv/app\nfrom the image\n0\n1000:1000\n")
            await slot.write_file("/srv/app/more", b"x")
        async with pool.lease("two", image=name) as slot:
            r = await slot.exec("cat text; ls / /srv/app")
            assert "hello" in r.output, "nothing of an earlier lease is left in the image"
            assert "opt" not in r.output
            assert "more" not in r.output
        async with pool.lease("plain") as slot:
            assert slot.image is None
            assert (await slot.exec("echo $BASH_VERSION")).output.strip()


@shows("slot_image")
async def test_slot_image_is_the_default(tmp_path):
    plain, other = (f"oci:{tmp_path}/{name}" for name in ("plain", "other"))
    busybox_image(tmp_path / "plain", "plain")
    busybox_image(tmp_path / "other", "other")
    async with (
        pool_for(tmp_path, slot_image=plain) as pool,
        pool.lease("one") as slot,
        pool.lease("two", image=other) as another,
    ):
        assert [(await each.exec("cat text")).output for each in (slot, another)] == ["plain", "other"]
        await slot.exec("echo -n more >> text")
        async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
            assert (await fork.exec("cat text")).output == "plainmore"


@pytest.mark.skipif(os.path.isdir("/rootfs"), reason="a container's base is a machine of its own")
async def test_the_host_as_base_is_noted_once(tmp_path, caplog):
    image = f"oci:{tmp_path}/i"
    busybox_image(tmp_path / "i")
    noted = "slots without an image have this machine's programs"
    config = SlotPoolConfig(allow_network=True, image_store=ImageStoreSettings(folder=str(tmp_path / "store")))
    async with SlotPool(config) as pool:
        async with pool.lease("image", image=image):
            pass
        assert noted not in caplog.text
        for base in (None, "atropos-base:default"):
            async with pool.lease("base", image=base):
                pass
            assert caplog.text.count(noted) == 1


async def test_commands_run_as_the_images_user(pool, tmp_path):
    busybox_image(tmp_path / "layout", user="app")
    async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
        assert (await slot.exec("id -u; echo $HOME")).output == "1000\n/srv/app\n"
        assert (await slot.exec("id -u", user="root")).output == "0\n"


async def test_a_workdir_without_a_layer_is_made(pool, tmp_path):
    """As in a container: other builders than Docker's only name it."""
    busybox_image(tmp_path / "layout", user="app", workdir="/srv/not/there")
    async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
        assert (await slot.exec("pwd; stat -c %u:%a .")).output == "/srv/not/there\n0:755\n"


@pytest.mark.parametrize("workdir", ["srv/app", "/srv/./x/../app/", "/../srv/app"])
async def test_a_workdir_follows_its_path(pool, tmp_path, workdir):
    """Builders other than Docker's write it down as it was given."""
    busybox_image(tmp_path / "layout", workdir=workdir)
    async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
        assert (await slot.exec("pwd; cat text")).output.startswith("/srv/app\n")


@pytest.mark.parametrize(("passwd", "home"), [("", "/"), ("app:x:1:1::/app:\nroot:x:0:0::/home/root:\n", "/home/root")])
async def test_root_has_the_images_home_and_shell(pool, tmp_path, passwd, home):
    shell = layer(
        folder("bin"), entry("bin/busybox", Path(BUSYBOX).read_bytes(), mode=0o755), link("bin/sh", "busybox")
    )
    layout(tmp_path / "layout", shell, *([layer(entry("etc/passwd", passwd))] if passwd else []))
    async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
        assert (await slot.exec('echo "$HOME $SHELL"')).output == f"{home} /bin/sh\n"
        assert (await slot.exec('echo "$HOME"', env={"HOME": "/own"})).output == "/own\n"


async def test_input_of_any_length_needs_no_bash(pool, tmp_path):
    busybox_image(tmp_path / "layout")
    async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
        for command in ("/bin/busybox wc -c", ["/bin/busybox", "wc", "-c"]):
            assert (await slot.exec(command, stdin=bytes(5 << 20))).output == f"{5 << 20}\n"


async def test_a_layouts_images_are_named(pool, tmp_path):
    names = ["first", "host.example:5000/second:1.0"]
    at, manifests = tmp_path / "lay:out", []
    for number, name in enumerate(names):
        one = tmp_path / str(number)
        busybox_image(one, name)
        index = json.loads((one / "index.json").read_text())
        manifests.append(index["manifests"][0] | {"annotations": {"org.opencontainers.image.ref.name": name}})
        shutil.copytree(one, at, dirs_exist_ok=True)
    (at / "index.json").write_text(json.dumps(index | {"manifests": manifests}))
    for name in reversed(names):
        async with pool.lease(name, image=f"oci:{at}:{name}") as slot:
            assert (await slot.exec("cat text")).output == name
        source = ImageSource.parse(f"oci:{at}:{name}")
        async with local_image(source, None, asyncio.Semaphore()).opened() as chunks:
            sent = io.BytesIO(b"".join([chunk async for chunk in chunks]))
        with tarfile.open(fileobj=sent) as tar:
            blobs = [each.name for each in tar if each.isreg() and each.name.startswith("blobs/")]
        assert len(blobs) == 4, "a manifest, a configuration and two layers, of this image alone"
    for wrong in (str(at), f"{at}:third:1"):
        with pytest.raises(ConfigError, match=re.escape("it has: " + ", ".join(names))):
            await pool.prepare(f"oci:{wrong}")


async def test_forks_stand_on_the_image(tmp_path, images):
    busybox_image(tmp_path / "layout")
    images.push(tmp_path / "layout", "forked:1")
    name = f"{images.host}/forked:1"
    async with pool_for(tmp_path, images) as pool, pool.lease("origin", image=name) as slot:
        await slot.exec("echo prepared > text")
        snapshot = await slot.snapshot()
        async with pool.lease("fork", snapshot=snapshot) as fork:
            r = await fork.exec('cat text; echo "$GREETING"; pwd')
            assert (r.exit_code, r.output) == (0, "prepared\nfrom the image\n/srv/app\n")
        assert (await slot.exec("cat text; pwd")).output == "prepared\n/srv/app\n"


async def test_closed_docker_settings_stay(tmp_path, images, monkeypatch):
    busybox_image(tmp_path / "layout")
    images.push(tmp_path / "layout", "home:1")
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        Path(home, ".docker").mkdir(0o700)
        monkeypatch.setenv("HOME", home)
        async with pool_for(tmp_path, images) as pool, pool.lease("one", image=f"{images.host}/home:1") as slot:
            assert (await slot.exec("cat text")).output == "hello"


async def test_the_block_of_the_docs(tmp_path):
    busybox_image(tmp_path / "layout", python="#!/bin/sh\necho Python 3.13.9\n")
    text = (Path(__file__).parents[2] / "docs/images.md").read_text()
    block = text.split("```python\n")[1].split("```")[0]
    store = f"image_store={{'folder': '{tmp_path}/store'}}"
    block = block.replace("python:3.13-slim", f"oci:{tmp_path}/layout").replace(
        'backend="local"', f'backend="local", {store}'
    )
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", block], capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Python 3.13.9\n"), done.stderr


@pytest.mark.parametrize(
    "form", ["oci", "oci-archive", "oci-archive gzip", "docker-archive", "docker-archive gzip", "dir"]
)
async def test_a_local_image_needs_no_registry(pool, tmp_path, form):
    kind, *packed = form.split()
    at = tmp_path / "layout"
    busybox_image(at, f"from {form}", compress=False)
    where = at
    if kind == "dir":
        where = tmp_path / "rootfs"
        (where / "srv/app").mkdir(parents=True)
        (where / "bin").mkdir()
        shutil.copy(BUSYBOX, where / "bin/busybox")
        (where / "bin/sh").symlink_to("busybox")
        (where / "srv/app/text").write_text("from dir")
    elif kind != "oci":
        if shutil.which("skopeo") is None:
            pytest.skip("not installed: skopeo")
        where = tmp_path / "image.tar"
        target = f"{kind}:{where}" + (":x/y:1" if kind == "docker-archive" else "")
        await asyncio.to_thread(
            subprocess.run, ["skopeo", "--insecure-policy", "copy", "-q", f"oci:{at}:image", target], check=True
        )
    if packed:
        where.write_bytes(gzip.compress(where.read_bytes(), 1))
    async with pool.lease("one", image=f"{kind}:{where}") as slot:
        r = await slot.exec("/bin/busybox cat /srv/app/text")
        assert (r.exit_code, r.output) == (0, f"from {form}")


async def test_blobs_may_be_elsewhere(pool, tmp_path):
    """As Bazel's rules_oci have it."""
    busybox_image(tmp_path / "layout", "from elsewhere")
    (tmp_path / "layout/blobs/sha256").rename(tmp_path / "cache")
    (tmp_path / "layout/blobs/sha256").mkdir()
    for blob in (tmp_path / "cache").iterdir():
        (tmp_path / "layout/blobs/sha256" / blob.name).symlink_to(blob)
    async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
        assert (await slot.exec("cat /srv/app/text")).output == "from elsewhere"


async def test_a_changed_archive_is_not_sent(tmp_path):
    file = tmp_path / "image.tar"
    file.write_bytes(b"first")
    image = local_image(ImageSource.parse(f"oci-archive:{file}"), None, asyncio.Semaphore())
    async with image.opened() as chunks:
        assert [chunk async for chunk in chunks] == [b"first"]
    file.write_bytes(b"second")
    async with image.opened() as chunks:
        with pytest.raises(ConfigError, match=r"image\.tar has changed since"):
            _ = [chunk async for chunk in chunks]


async def test_removed_archive_is_sent_again(tmp_path):
    busybox_image(tmp_path / "layout", "sent again")
    image = f"oci:{tmp_path}/layout:image"
    async with pool_for(tmp_path) as pool:
        await pool.prepare(image)
        shutil.rmtree(next((tmp_path / "store" / "layers").iterdir()))
        async with pool.lease("one", image=image) as slot:
            assert (await slot.exec("cat text")).output == "sent again"


def open_in(folder: Path) -> set[str]:
    """Files of a folder that this process has open, those without a name among them."""
    return {file for file in map(os.path.realpath, Path("/proc/self/fd").iterdir()) if file.startswith(f"{folder}/")}


async def test_archives_live_as_long_as_readers(tmp_path, monkeypatch):
    busybox_image(tmp_path / "layout")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    async with pool_for(tmp_path) as pool:
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        image = f"oci:{tmp_path}/layout:image"
        asking = [asyncio.create_task(pool.prepare(image)) for _ in range(8)]
        await asyncio.sleep(0)
        asking[0].cancel()
        seen = 0
        while not asking[-1].done():
            seen = max(seen, len(open_in(temporary)))
            assert list(temporary.iterdir()) == []  # as SIGKILL would leave it
            await asyncio.sleep(0)
        await asyncio.gather(*asking[1:])
        assert seen == 1
        assert open_in(temporary) == set(), "every server has the image"
        gone = asyncio.create_task(pool.prepare(f"oci:{tmp_path}/layout"))
        await asyncio.sleep(0)
        gone.cancel()
    assert open_in(temporary) == set()


async def test_archives_wait_for_room(tmp_path, monkeypatch):
    for name in ("one", "two"):
        busybox_image(tmp_path / name)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    turns = asyncio.Semaphore(1)
    one, two = (local_image(ImageSource.parse(f"oci:{tmp_path}/{name}"), None, turns) for name in ("one", "two"))
    async with two.opened() as chunks:
        content = b"".join([chunk async for chunk in chunks])
    async with one.opened(), one.opened():
        assert len(open_in(temporary)) == 1
        gives_up = asyncio.create_task(two.opened().__aenter__())
        waits = two.opened()
        waiting = asyncio.create_task(waits.__aenter__())
        await asyncio.sleep(0.05)
        gives_up.cancel()
        assert (len(open_in(temporary)), waiting.done()) == (1, False)
    assert b"".join([chunk async for chunk in await waiting]) == content
    await waits.__aexit__(None, None, None)
    await until(lambda: open_in(temporary) == set(), "nothing is left")


async def test_image_lost_before_resending(tmp_path):
    busybox_image(tmp_path / "layout")
    image = f"oci:{tmp_path}/layout"
    async with pool_for(tmp_path) as pool:
        await pool.prepare(image)
        for folder in (tmp_path / "layout", *(tmp_path / "store" / "layers").iterdir()):
            shutil.rmtree(folder)
        with pytest.raises(ConfigError, match=f"image: {image} can't be read: No such file"):
            await pool.acquire("one", image=image)


async def test_a_changed_or_lost_archive_is_named(tmp_path):
    busybox_image(tmp_path / "layout")
    file, copy = tmp_path / "image.tar", tmp_path / "copy.tar"
    with tarfile.open(file, "w") as tar:
        tar.add(tmp_path / "layout", ".")
    image = f"oci-archive:{file}"
    async with pool_for(tmp_path) as pool:
        await pool.prepare(image)
        shutil.rmtree(next((tmp_path / "store" / "layers").iterdir()))
        shutil.copy(file, copy)
        with file.open("ab") as end:
            end.write(b"more")
        with pytest.raises(ConfigError, match=f"image: {file} has changed since"):
            await pool.acquire("one", image=image)
        file.unlink()
        with pytest.raises(ConfigError, match=f"image: {image} can't be read: No such file"):
            await pool.acquire("one", image=image)
        await (await pool.acquire("two", image=f"oci-archive:{copy}")).release()


async def test_archive_without_room(tmp_path, monkeypatch):
    busybox_image(tmp_path / "layout")
    image = local_image(ImageSource.parse(f"oci:{tmp_path}/layout"), None, asyncio.Semaphore())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=f"image: oci:{tmp_path}/layout can't be read: No such file"):
        async with image.opened():
            pass


async def test_slots_share_an_images_memory(tmp_path):
    busybox_image(tmp_path / "layout", "x" * (16 << 20))
    image = f"oci:{tmp_path}/layout:image"

    def used() -> int:
        return sum(path.lstat().st_blocks * 512 for path in (tmp_path / "store").rglob("*"))

    async with (
        pool_for(tmp_path, limits={"memory_mib": 64, "disk_mib": 8}) as pool,
        contextlib.AsyncExitStack() as slots,
    ):
        await pool.prepare(image)
        alone = used()
        for number in range(4):
            slot = await slots.enter_async_context(pool.lease(f"lease-{number}", image=image))
            assert (await slot.exec("cat text > /dev/null; echo x > more; stat -c %s text")).output == f"{16 << 20}\n"
        assert used() == alone < 20 << 20


async def test_bad_image_is_refused_early(tmp_path, images):
    async with pool_for(tmp_path, images) as pool:
        for name in ("No Such Name", "UPPER/case:1", "../up", "-o/x"):
            with pytest.raises(ConfigError, match=f"image: '{name}' is not a name"):
                await pool.acquire("one", image=name)
        layout(tmp_path / "bad", layer(entry("../out", "x")))
        with pytest.raises(ImageUnavailable, match=f"image oci:{tmp_path}/bad: unpacking: '../out'"):
            await pool.acquire("one", image=f"oci:{tmp_path}/bad")
        with pytest.raises(ConfigError, match=r"image: oci-archive:/nowhere.tar can't be read: No such file"):
            await pool.acquire("one", image="oci-archive:/nowhere.tar")
        with pytest.raises(ImageUnavailable, match=r"pulling: .*manifest unknown"):
            await pool.acquire("one", image=f"{images.host}/absent:1")
        async with pool.lease("two") as slot:
            assert (await slot.exec("true")).exit_code == 0


@shows("prepare_timeout_s")
async def test_a_wait_for_an_image_has_an_end(tmp_path):
    async with silent_server() as far, pool_for(tmp_path, prepare_timeout_s=0.5) as pool:
        with pytest.raises(ImageUnavailable, match=r"not prepared within 0\.5 s: pulling"):
            await pool.acquire("t", image=f"{far}/busy:1")


async def test_no_image_waits_for_one_that_fails(tmp_path, images):
    """Neither behind those that this server pulls, nor behind those that it waits for while another one does."""
    for index in range(2):
        busybox_image(tmp_path / f"layout{index}", f"image {index}")
        images.push(tmp_path / f"layout{index}", f"comes:{index}")
    here, comes = (f"{images.host}/comes:{index}" for index in range(2))
    async with silent_server() as far:
        never = [f"{far}/never:{index}" for index in range(4)]
        store = ImageStoreSettings(folder=str(tmp_path / "store"), insecure_registries=(images.host, far))
        more = {"image_store": store, "prepare_timeout_s": 100}
        async with pool_for(tmp_path, **more) as one, pool_for(tmp_path, **more) as other:
            phases = {}

            def progress_of(pool: SlotPool, name: str):
                return lambda _, state: phases.update({(pool, name): state.phase})

            def start(pool: SlotPool, names: list[str]) -> list[asyncio.Task]:
                return [asyncio.create_task(pool.prepare(each, progress=progress_of(pool, each))) for each in names]

            await one.prepare(here)
            pulling = start(one, never[:3])
            await until(lambda: list(phases.values()) == ["pulling"] * 3, "three are pulled")
            waiting = start(other, never[:3])
            await until(lambda: list(phases.values())[3:] == ["waiting"] * 3, "another server waits for them")
            await other.prepare(comes)
            waiting += start(other, never[3:])
            async with other.lease("t", image=here) as slot:
                assert (await slot.exec("cat text")).output == "image 0"
            async with one.lease("t", image=comes) as slot:
                assert (await slot.exec("cat text")).output == "image 1"
            for each in (*pulling, *waiting):
                assert not each.done()
                each.cancel()


async def test_a_lease_outlasts_its_pulling_server(tmp_path, images):
    busybox_image(tmp_path / "layout", "hello")
    images.push(tmp_path / "layout", "lost:1")
    async with Between(images.host, 0, cuts=False) as between, pool_for(tmp_path, between) as pool:
        asking = asyncio.create_task(pool.acquire("t", image=f"{between.host}/lost:1"))
        await until(lambda: any((tmp_path / "store/work").glob("*/parts")), "it is pulled")
        between.left = None
        os.kill(int(pool.backend.containers()[0].id.split("-")[0]), signal.SIGKILL)
        slot = await asking
        assert (await slot.exec("cat text")).output == "hello"
        await slot.release()


async def test_an_ended_server_has_no_built_image(tmp_path):
    async with pool_for(tmp_path) as pool:
        os.kill(int(pool.backend.containers()[0].id.split("-")[0]), signal.SIGKILL)
        (link,) = pool.links.values()
        assert await pool.find_built("0" * 64) is None
        await until(lambda: link.gone, "it is lost")
        with pytest.raises(SandboxError, match=f"container {link.container.id} is lost: "):
            await link.client.images.prepare("busybox")


async def test_a_cancelled_prepare_ends_quietly(tmp_path, caplog):
    async def cancelled() -> None:
        async with silent_server() as far, pool_for(tmp_path) as pool:
            seen = []
            asking = asyncio.create_task(
                pool.prepare(f"{far}/busy:1", progress=lambda _, state: seen.append(state.phase))
            )
            await until(lambda: "pulling" in seen, "it is pulled")
            asking.cancel()

    gc.collect()  # what tests before this one left
    caplog.clear()
    await cancelled()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_storm_pulls_each_image_once(tmp_path, images):
    names = []
    for index in range(STORM):
        busybox_image(tmp_path / f"layout{index}", f"image {index}")
        images.push(tmp_path / f"layout{index}", f"storm:{index}")
        names.append(f"{images.host}/storm:{index}")
    async with pool_for(tmp_path, images, acquire_timeout_s=10 * STORM) as pool:
        await pool.prepare(names[0])

        async def one(index: int) -> str:
            async with pool.lease(f"t{index}", image=names[index % STORM]) as slot:
                return (await slot.exec("cat text")).output

        async def ready() -> list[str]:
            found = []
            for index in range(10):
                async with pool.lease(f"ready{index}", image=names[0]) as slot:
                    found.append((await slot.exec("cat text")).output)
            return found

        storm = asyncio.gather(*(one(index) for index in range(4 * STORM)))
        assert await ready() == ["image 0"] * 10
        assert await storm == [f"image {index % STORM}" for index in range(4 * STORM)]
        status = await next(iter(pool.links.values())).client.status()
        assert status.counters["images_prepared"] == STORM
