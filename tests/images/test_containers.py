"""Images on every backend: sent by the pool's machine, pulled by the container's own server, shared by a folder of the
host."""

import asyncio
import os
from pathlib import Path

import pytest

from atropos.config import ImageStoreSettings
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.slots.backends.local.backend import LocalBackend, LocalServer
from atropos.tasks.prepare import TaskImages
from tests import privileges
from tests.backends import Engine
from tests.engines import address_for_containers, params
from tests.images.between import Between
from tests.images.making import entry, layer, layout
from tests.images.registry import several
from tests.images.test_leases import busybox_image, pool_for
from tests.images.test_task_images import make
from tests.silent_server import silent_server
from tests.waiting import until

pytestmark = privileges.owners


@pytest.fixture(scope="module", params=params())
def engine(request) -> Engine:
    return Engine(request.param)


async def test_a_lease_stands_on_an_image(engine, tmp_path):
    image_id = busybox_image(tmp_path / "layout", f"on {engine.name}")
    # a nomad container keeps its own; the others share a folder of this test's
    store = ImageStoreSettings(folder=None if engine.name == "nomad" else str(tmp_path / "store"))
    config = engine.config(slots_per_container=2, max_containers=1, image_store=store)
    async with SlotPool(config) as pool:
        async with pool.lease("one", image=f"oci:{tmp_path}/layout") as slot:
            assert slot.image.id == image_id
            r = await slot.exec("cat text; stat -c %u:%g text; echo; id -u")
            assert (r.exit_code, r.output) == (0, f"on {engine.name}1000:1000\n\n0\n")
        async with pool.lease("two", image=f"oci:{tmp_path}/layout") as slot:
            assert (await slot.exec("cat text")).output == f"on {engine.name}"
    assert await engine.residue(config) == []
    if engine.name == "docker":
        assert [path.name for path in (tmp_path / "store" / "images").iterdir()] == [image_id]


async def test_a_built_task_is_in_every_container(engine, tmp_path):
    busybox_image(tmp_path / "layout")
    task = make(
        tmp_path / "task",
        f"FROM oci:{tmp_path}/layout\nRUN echo made > made\nFROM debian\nWORKDIR /app\nRUN echo two > two; rm /etc/shells\n"
        "COPY --from=0 /srv/app/made one\n",
    )
    # docker and nomad: each container keeps its own images, and is brought what the other built
    store = ImageStoreSettings(folder=str(tmp_path / "store") if engine.name == "local" else None)
    config = engine.config(slots_per_container=1, min_containers=2, max_containers=2, image_store=store)
    async with SlotPool(config) as pool:
        prepared = await TaskImages(pool).prepare(task)
        async with pool.lease("one", image=prepared.image) as one, pool.lease("two", image=prepared.image) as two:
            assert one.container != two.container
            for slot in (one, two):
                r = await slot.exec("cd /app; cat one two; ls /etc/shells")
                assert r.output.startswith("made\ntwo\nls: cannot access"), r.output
    assert await engine.residue(config) == []


class ApartBackend(LocalBackend):
    """Containers that share no images, as those of Docker and Nomad; the third starts once it may.

    `mirrors`: where the first pulls from, and the second, in the place of 127.0.0.1:1, where nothing listens.
    """

    def __init__(self, config: SlotPoolConfig, folder: Path, mirrors: tuple[str, ...] = ()) -> None:
        super().__init__(config)
        self.folder, self.third, self.mirrors = folder, asyncio.Event(), mirrors

    async def launch(self, index: int, token: str) -> LocalServer:
        if index == 2:
            await self.third.wait()
        store = ImageStoreSettings(folder=str(self.folder / str(index)), insecure_registries=self.mirrors)
        if self.mirrors:
            store = store.model_copy(update={"mirrors": {"127.0.0.1:1": self.mirrors[index]}})
        config = self.config.server_config(token).model_copy(update={"image_store": store})
        return await LocalServer.launch(config, self.scratch, self.command)


async def test_new_containers_get_the_built_image(tmp_path):
    task = make(tmp_path / "task", "FROM debian\nWORKDIR /app\nRUN echo made > made\n")
    config = Engine("local").config(slots_per_container=1, max_containers=3)
    backend = ApartBackend(config, tmp_path)
    async with SlotPool(config, backend=backend) as pool:
        prepared = await TaskImages(pool).prepare(task)
        async with pool.lease("first"):
            waits = asyncio.create_task(pool.acquire("waits", image=prepared.image))
            await until(lambda: pool.stats().waiting == 1, "it waits for a slot")
            async with pool.lease("second"):  # takes what the other gave up while its image is copied there
                await until(lambda: pool.stats().waiting == 1, "it waits for a slot again")
                backend.third.set()
                slot = await waits
                assert (await slot.exec("cat /app/made")).output == "made\n"
                await slot.release()


async def test_image_is_pulled_once(tmp_path, images):
    names = [f"127.0.0.1:1/{name}" for name in several(tmp_path, images, "shared")]
    config = Engine("local").config(slots_per_container=1, min_containers=3, max_containers=3)
    async with Between(images.host, None) as between:
        backend = ApartBackend(config, tmp_path, (between.host,) * 3)
        backend.third.set()
        async with SlotPool(config, backend=backend) as pool:
            for number, name in enumerate(names):
                await pool.prepare(name)
                assert len(between.blobs) == len(set(between.blobs)) == 4 + 3 * number  # with a configuration each
            async with (
                pool.lease("a", image=names[0]) as a,
                pool.lease("b", image=names[0]) as b,
                pool.lease("c", image=names[1]) as c,
            ):
                assert len({slot.container for slot in (a, b, c)}) == 3
                outputs = [(await slot.exec("cat /a/own; ls /a; busybox md5sum /large")).output for slot in (a, b, c)]
            assert outputs[0] == outputs[1]
            assert outputs[0].startswith("1own\n")
            assert outputs[2].startswith("2own\n")


@pytest.mark.parametrize("name", params("docker", "nomad"))
async def test_containers_of_engines_share_a_pull(tmp_path, images, name):
    names = several(tmp_path, images, f"shared-{name}")
    engine = Engine(name)
    async with Between(images.host, None, address=address_for_containers()) as between:
        store = ImageStoreSettings(insecure_registries=(between.host,))
        config = engine.config(slots_per_container=1, min_containers=3, max_containers=3, image_store=store)
        async with SlotPool(config) as pool:
            for number, image in enumerate((f"{between.host}/{each}" for each in names), 1):
                await pool.prepare(image)
                assert len(between.blobs) == len(set(between.blobs)) == 1 + 3 * number  # with a configuration each
                async with pool.lease("a", image=image) as a, pool.lease("b", image=image) as b:
                    assert a.container != b.container
                    assert [(await slot.exec("cat /a/own")).output for slot in (a, b)] == [str(number)] * 2
    assert await engine.residue(config) == []


@pytest.mark.parametrize("spoiled", ["content", "record", "configuration", "all"])
async def test_given_layers_are_checked(tmp_path, images, spoiled):
    name = f"127.0.0.1:1/{several(tmp_path, images, f'spoiled-{spoiled}')[0]}"
    config = Engine("local").config(slots_per_container=1, min_containers=1, max_containers=2)
    async with Between(images.host, None) as between:
        backend = ApartBackend(config, tmp_path, (between.host,) * 2)
        async with SlotPool(config, backend=backend) as pool:
            await pool.prepare(name)
            assert len(between.blobs) == 4
            spoil(tmp_path / "0", spoiled)
            async with pool.lease("a"), pool.lease("b", image=name) as slot:
                assert (await slot.exec("cat /a/own; ls /a")).output == "1own\n"
            assert len(between.blobs) == 8


def spoil(store: Path, what: str) -> None:
    """Change what a store keeps."""
    if what == "configuration":
        for path in store.glob("configs/*"):
            path.write_text("{}")
    elif what == "all":
        for path in store.glob("configs/*"):
            path.unlink()
    else:
        for path in store.glob("layers/*/files/large" if what == "content" else "layers/*/tar"):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)


@pytest.mark.parametrize("other", ["hangs", "refuses"])
async def test_leases_pass_containers_that_fail(tmp_path, images, monkeypatch, other):
    monkeypatch.setattr("atropos.slots.pool.image_pulls.Pulls._giver", lambda *_: None)
    busybox_image(tmp_path / "layout", "hello")
    images.push(tmp_path / "layout", "near:1")
    config = Engine("local").config(slots_per_container=1, min_containers=2, max_containers=2, prepare_timeout_s=600)
    async with silent_server() as silent:
        far = silent if other == "hangs" else "127.0.0.1:1"
        async with SlotPool(config, backend=ApartBackend(config, tmp_path, (images.host, far))) as pool:
            task = make(tmp_path / "task", "FROM 127.0.0.1:1/near:1\nRUN echo built > /built\n")
            prepared = await TaskImages(pool).prepare(task)
            async with pool.lease("built", image=prepared.image) as slot:
                assert (await slot.exec("cat /built")).output == "built\n"
            async with pool.lease("one", image="127.0.0.1:1/near:1") as slot:
                assert (await slot.exec("cat text")).output == "hello"
                waits = asyncio.create_task(pool.acquire("two", image="127.0.0.1:1/near:1"))
                if other == "refuses":
                    await until(lambda: waits.done() or pool.stats().waiting, "it waits in line")
                async with pool.lease("plain") as plain:
                    assert plain.container != slot.container
                assert not waits.done(), "for the container that has the image"
            second = await waits
            assert second.container == slot.container
            await second.release()


async def test_unable_container_is_given_it(tmp_path, images):
    busybox_image(tmp_path / "layout", "hello")
    images.push(tmp_path / "layout", "near:1")
    config = Engine("local").config(slots_per_container=1, min_containers=2, max_containers=2)
    async with (
        SlotPool(config, backend=ApartBackend(config, tmp_path, ("127.0.0.1:1", images.host))) as pool,
        pool.lease("one", image="127.0.0.1:1/near:1") as one,
        pool.lease("two", image="127.0.0.1:1/near:1") as two,
    ):
        assert one.container != two.container
        assert [(await slot.exec("cat text")).output for slot in (one, two)] == ["hello", "hello"]


async def test_waiting_leases_ask_for_containers(tmp_path, images):
    busybox_image(tmp_path / "layout", "hello")
    images.push(tmp_path / "layout", "near:1")
    config = Engine("local").config(slots_per_container=1, max_containers=2, prepare_timeout_s=600)
    async with (
        silent_server() as silent,
        SlotPool(config, backend=ApartBackend(config, tmp_path, (silent, images.host))) as pool,
        pool.lease("plain"),  # beside which there is no room
        asyncio.timeout(60),
        pool.lease("one", image="127.0.0.1:1/near:1") as slot,
    ):
        assert (await slot.exec("cat text")).output == "hello"


async def test_new_containers_get_the_local_image(tmp_path):
    busybox_image(tmp_path / "layout", "sent")
    image = f"oci:{tmp_path}/layout"
    config = Engine("local").config(slots_per_container=1, max_containers=2)
    async with (
        SlotPool(config, backend=ApartBackend(config, tmp_path)) as pool,
        pool.lease("one", image=image) as one,
        asyncio.timeout(60),
        pool.lease("two", image=image) as two,
    ):
        assert two.container != one.container
        assert (await two.exec("cat text")).output == "sent"


async def test_a_pulling_container_is_not_closed(tmp_path, images):
    layout(tmp_path / "layout", layer(entry("x", os.urandom(2_000_000))))
    images.push(tmp_path / "layout", "idle:1")
    async with (
        Between(images.host, None, pause_s=0.1) as between,
        pool_for(tmp_path, between, min_containers=0, idle_container_s=0.5) as pool,
    ):
        async with pool.lease("starts a container"):
            pass
        image = await pool.prepare(f"{between.host}/idle:1")
        assert image is not None
        assert image.bytes >= 2_000_000
        await until(lambda: pool.stats().containers == 0, "it is closed after that")
