"""The shipped tests of slots, on every backend; and what this process makes of a slot's files."""

import os
import tarfile

import pytest

from atropos.errors import ConfigError
from atropos.slots import PortForward
from atropos.testing.slots import *  # noqa: F403


async def test_local_file_is_whole_or_old(slot, tmp_path):
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


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda slot: slot.exec("true", timeout_s=-1), r"timeout_s: .* greater than 0 \(got -1\)"),
        (lambda slot: slot.exec("true", env={"A": 1}), r"env\.A: .* string \(got 1\)"),
        (lambda slot: slot.exec("true", env={"A=B": "1"}), r"env: 'A=B': a variable has a name, no '='"),
        (lambda slot: slot.exec("true", env={"A": "\0"}), "env: 'A': .* no zero byte"),
        (lambda slot: slot.start("true", buffer_bytes=-1), "buffer_bytes: "),
        (lambda slot: slot.write_file("a", b"", mode=-1), "mode: "),
        (lambda slot: slot.download("a", max_bytes=-1), "max_bytes: "),
        (lambda slot: slot.exec(5), r"command: .*string.* \(got int\)"),
        (lambda slot: slot.exec("true", env=["A=1"]), r"env: .* \(got list\)"),
        (lambda slot: slot.write_file("a", None), r"data: .*bytes.* \(got NoneType\)"),
        (lambda slot: slot.upload("/etc/hostname", 5), r"path: .*string \(got int\)"),
        (lambda slot: slot.start("cat", pty=(1, 2, 3)), r"pty: .* \(got tuple\)"),
        (lambda slot: slot.keep("no key"), "key: "),
        (lambda slot: slot.mount("/tmp", 5), "path: "),
        (lambda slot: slot.view(5), r"folders: .* \(got int\)"),
        (lambda slot: PortForward.to_slot(slot, "80"), r"port: .*integer.* \(got str\)"),
    ],
)
async def test_a_wrong_argument_is_named(slot, call, said):
    with pytest.raises(ConfigError, match=said):
        await call(slot)
    assert (await slot.exec("echo on")).output == "on\n"


async def test_snapshot_spares_programs(pool):
    async with pool.lease("origin") as slot:
        process = await slot.start("echo one > file; read line; echo $line")
        await slot.exec("until [ -e file ]; do sleep 0.01; done")
        async with await slot.snapshot(keep_running=True) as snapshot, pool.lease("fork", snapshot=snapshot) as fork:
            assert await fork.read_file("file") == b"one\n"
            assert await fork.processes() == []
        await process.write("still here\n")
        assert (await process.wait(), await process.read()) == (0, b"still here\n")


async def test_uploaded_fifo_stays_one(slot, tmp_path):
    (tmp_path / "in").mkdir()
    os.mkfifo(tmp_path / "in/pipe", 0o640)
    for _ in range(2):
        await slot.upload(tmp_path, "given")
    result = await slot.exec("stat -c '%F %a %u' given/in/pipe; echo through > given/in/pipe & cat given/in/pipe")
    assert result.output == "fifo 640 0\nthrough\n"


async def test_holes_stay_holes(slot, tmp_path):
    await slot.exec("printf head > holes; truncate -s 20M holes; printf tail >> holes; truncate -s 21M holes")
    await slot.read_file_to("holes", tmp_path / "copy")
    found = (tmp_path / "copy").stat()
    assert (found.st_size, found.st_blocks * 512 < 1 << 20) == (21 << 20, True)
    content = (tmp_path / "copy").read_bytes()
    assert (content[:4], content[20 << 20 :][:4], content.count(0)) == (b"head", b"tail", (21 << 20) - 8)
