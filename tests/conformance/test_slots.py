"""The shipped tests of slots, on every backend; and what this process makes of a slot's files."""

import os
import tarfile

import pytest

from atropos.testing.slots import *  # noqa: F403


async def test_a_local_file_is_written_whole_or_stays_as_it_was(slot, tmp_path):
    target, other = tmp_path / "copy", tmp_path / "copy.part"
    other.write_text("another's")
    await slot.exec("echo short > file; mkdir folder; truncate -s 1M folder/long")
    await slot.read_file_to("file", target)
    for refused in (
        slot.read_file_to("folder/long", target, max_bytes=9),
        slot.download_to("folder", target, max_bytes=9),
    ):
        with pytest.raises(OSError, match=r"bytes|larger"):
            await refused
        assert target.read_bytes() == b"short\n"
    await slot.download_to("folder", target)
    with tarfile.open(target) as archive:
        assert max(member.size for member in archive) == 1 << 20
    assert sorted(os.listdir(tmp_path)) == ["copy", "copy.part"]
    assert other.read_text() == "another's"
