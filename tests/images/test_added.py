"""What a container's runtime adds to an image: the names of the machine, where the image doesn't say them itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio

from atropos.tasks.folder import load_task
from tests import privileges
from tests.images.making import entry, folder, link
from tests.images.test_leases import busybox_image, pool_for

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    privileges.owners,
]
SEE = "cat /etc/hosts /etc/hostname; busybox readlink /etc/mtab; [ -e /etc/resolv.conf ] && echo resolv"
ADDED = (
    "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\nff02::1\tip6-allnodes\nff02::2\tip6-allrouters\n"
    "127.0.1.1\tatropos\natropos\n/proc/mounts\nresolv\n"
)


@pytest_asyncio.fixture(name="pool", scope="module", loop_scope="module")
async def pool_fixture(tmp_path_factory):
    async with pool_for(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


async def seen(slot) -> str:
    return (await slot.exec(SEE, workdir="/")).output


async def test_missing_files_are_added_unwritten(pool, tmp_path: Path):
    name = f"oci:{tmp_path}/layout"
    busybox_image(tmp_path / "layout")
    async with pool.lease("one", image=name) as slot:
        assert await seen(slot) == ADDED
        await slot.view(["/srv/app"])
        assert await seen(slot) == ADDED, "so has a view"
    (tmp_path / "Dockerfile").write_text(f"FROM {name}\nRUN ({SEE}) > /seen\n")
    built = await pool.prepare(load_task(tmp_path / "Dockerfile"))
    async with pool.lease("built", image=built.source) as slot:
        assert (await slot.exec("cat /seen")).output == ADDED
    store = Path(pool.config.image_store.folder)
    assert list(store.rglob("seen")), "where the layers are"
    assert not list(store.rglob("etc/hosts"))


async def test_written_files_stay(pool, tmp_path: Path):
    name = f"oci:{tmp_path}/layout"
    files = (
        folder("etc", mode=0o750, owner=(7, 7)),
        entry("etc/hosts", "10.0.0.1 db # localhost\n127.0.0.1 localhost"),
        entry("etc/hostname", "mine\n"),
        entry("etc/resolv.conf", ""),
    )
    busybox_image(tmp_path / "layout", more_files=files)
    async with pool.lease("one", image=name) as slot:
        found = (await slot.exec(SEE + "; stat -c %a:%u /etc")).output
        hosts = "10.0.0.1 db # localhost\n127.0.0.1 localhost\n127.0.1.1\tatropos\n"
        assert found == f"{hosts}mine\n/proc/mounts\nresolv\n750:7\n"
        await slot.exec("echo '10.0.0.2 other' > /etc/hosts; rm /etc/mtab /etc/hostname")
        async with await slot.snapshot() as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
            assert (await seen(fork)).startswith("10.0.0.2 other\n")
            assert "hostname" not in (await fork.exec("ls /etc")).output
    async with pool.lease("next", image=name) as slot:
        assert (await seen(slot)).startswith(hosts)


@pytest.mark.parametrize(
    ("resolv", "stays"),
    [
        (entry("etc/resolv.conf", "search corp\nnameserver 192.0.2.53\n"), True),
        (entry("etc/resolv.conf", "nameserver 127.0.0.53\noptions edns0\n"), False),
        (entry("etc/resolv.conf", "nameserver ::1\n"), False),
        (entry("etc/resolv.conf", "# written by systemd\n"), False),
        (link("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf"), False),
    ],
    ids=["server", "loopback", "loopback6", "none", "link"],
)
async def test_reachable_name_servers_stay(pool, tmp_path: Path, resolv, stays: bool):
    name = f"oci:{tmp_path}/layout"
    busybox_image(tmp_path / "layout", more_files=(folder("etc"), resolv))
    async with pool.lease("one", image=name) as slot:
        output = (await slot.exec("cat /etc/resolv.conf", workdir="/")).output
    assert output == ("search corp\nnameserver 192.0.2.53\n" if stays else "nameserver 198.18.0.1\n")
