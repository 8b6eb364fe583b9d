"""What each cell on a disk holds is known, also where the disk refuses to change it."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest

from atropos.errors import SandboxError
from atropos.sandbox.host.files.disk_cells import DiskCells
from atropos.sandbox.linux import disks
from tests.unit.server.fakes import config


async def test_unshrunk_cell_keeps_its_room(tmp_path, monkeypatch):
    for name in "0123":
        (tmp_path / name).mkdir()
    asked, broken = [], set()

    def resize(image, cell, mib):
        asked.append((image, mib))
        if (image, mib) in broken:
            raise OSError(errno.EIO, "the disk fails")

    monkeypatch.setattr(disks, "resize", resize)
    entered = SimpleNamespace(disk=str(tmp_path), cells=str(tmp_path), images=range(4), cells_mib=300)
    cells = DiskCells(config(slots=4, largest_disk_mib=300), entered)
    for folder in [await cells.acquire(name, 100) for name in "abc"]:
        cells.release(folder)
    asked.clear()
    broken.update((image, 0) for image in (0, 1, 2))
    with pytest.raises(SandboxError, match="no room for 250 MiB more"):
        await cells.acquire("d", 250)
    assert len(asked) == 2, "the first that is to give up its room, and the one that was to have it"
    asked.clear()
    broken.clear()
    await cells.acquire("e", 250)
    assert [mib for _, mib in asked] == [0, 0, 250], "both others gave up theirs first"
