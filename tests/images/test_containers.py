"""Images on every backend: sent by the pool's machine, pulled by the container's own skopeo, shared by a folder of the host."""

import os

import pytest

from atropos.config import ImageStoreSettings
from atropos.slots import SlotPool
from tests.backends import Engine
from tests.engines import params
from tests.images.test_leases import busybox_image

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="owners of files need root")


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
        assert [path.name for path in (tmp_path / "store" / "trees").iterdir()] == [image_id]
