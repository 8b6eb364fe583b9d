"""Images of a registry on several nodes."""

from __future__ import annotations

import pytest

from atropos.config import ImageStoreSettings
from atropos.slots import SlotPool
from atropos.slots.pool import image_pulls
from tests.e2e.cluster.test_nodes import config_for, node_of, nothing_left
from tests.engines import address_for_containers
from tests.images.between import Between
from tests.images.conftest import images  # noqa: F401 - a fixture
from tests.images.registry import several

pytestmark = [pytest.mark.nomad, pytest.mark.xdist_group("cluster"), pytest.mark.timeout(600)]


async def test_a_cluster_pulls_an_image_once(cluster, tmp_path, images, monkeypatch):  # noqa: F811
    monkeypatch.setattr(image_pulls, "STALLED_S", 300.0)  # a busy disk is no stall
    names = several(tmp_path, images, "cluster")
    async with Between(images.host, None, address=address_for_containers()) as between:
        store = ImageStoreSettings(insecure_registries=(between.host,))
        config = config_for(cluster, slots_per_container=1, image_store=store)
        async with SlotPool(config) as pool:
            for number, name in enumerate(names, 1):
                image = f"{between.host}/{name}"
                await pool.prepare(image)
                assert len(between.blobs) == len(set(between.blobs)) == 1 + 3 * number  # with a configuration each
                async with pool.lease("a", image=image) as a, pool.lease("b", image=image) as b:
                    nodes = {node_of(cluster, config.job_id, slot.container) for slot in (a, b)}
                    assert len(nodes) == 2
                    assert [(await slot.exec("cat /a/own")).output for slot in (a, b)] == [str(number)] * 2
        await nothing_left(cluster, config.job_id)
