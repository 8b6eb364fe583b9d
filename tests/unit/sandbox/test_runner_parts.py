"""Parts of the runner by themselves: what serves an operation, what is kept of an output, and who a program runs as."""

from __future__ import annotations

import inspect
import os
import tracemalloc
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos import wire
from atropos.sandbox.programs.runner import main, users
from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.files.files import read_apart, read_result, write_file
from atropos.sandbox.programs.runner.opening import open_regular
from atropos.sandbox.programs.runner.processes.head_tail import HeadTail

OPERATIONS = [each for each in get_args(get_args(wire.Operation)[0]) if each is not wire.SetNetwork]  # the server's own


@pytest.mark.parametrize("operation", OPERATIONS)
def test_served_with_its_fields(operation: type[wire.SlotOperation]) -> None:
    handler = main.OPS[operation.model_fields["op"].default]
    assert {"call", *operation.model_fields} - operation.withheld == set(inspect.signature(handler).parameters)


@settings(max_examples=100)
@given(st.integers(2, 64), st.lists(st.binary(max_size=200), max_size=30))
def test_output_whole_or_two_ends(limit: int, pieces: list[bytes]) -> None:
    kept = HeadTail(limit)
    for piece in pieces:
        kept.add(piece)
    whole = b"".join(pieces)
    assert kept.total == len(whole)
    if not kept.dropped():
        assert kept.value() == whole
        return
    half = limit // 2
    note = b"\n[... %d bytes dropped ...]\n" % (len(whole) - 2 * half)
    assert kept.value() == whole[:half] + note + whole[-half:]


def test_tiny_pieces_are_cheap() -> None:
    """It is PID 1's memory, and so its slot's."""
    kept = HeadTail(200_000)
    tracemalloc.start()
    for _ in range(120_000):
        kept.add(b"%c%c" % (65, 66))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < 2_000_000


TABLES = {
    "/etc/passwd": ["root:x:0:0::/root:/bin/sh", "ada:x:1000:1000::/home/ada:/bin/sh", "cut:x:1", "odd:x:a:b:c:/:x"],
    "/etc/group": ["root:x:0:", "ada:x:1000:", "video:x:44:ada,bob", "docker:x:998:bob"],
}


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        ("ada", ("ada", 1000, 1000, [1000, 44], "/home/ada")),
        ("1000", ("ada", 1000, 1000, [1000, 44], "/home/ada")),
        ("ada:docker", ("ada", 1000, 998, [998], "/home/ada")),
        ("4242", ("4242", 4242, 0, [0], "/")),
        ("4242:7", ("4242", 4242, 7, [7], "/")),
    ],
)
def test_users_of_the_slots_tables(monkeypatch, user, expected) -> None:
    monkeypatch.setattr(users, "table", lambda path: [line.split(":") for line in TABLES[path]])
    found = users.identity_of(user)
    assert (found.name, found.uid, found.gid, found.groups, found.home) == expected


@pytest.mark.parametrize("user", ["nobody", "cut", "odd", "ada:nogroup", "4294967295", "ada:4294967295"])
def test_unknown_user_is_refused(monkeypatch, user) -> None:
    monkeypatch.setattr(users, "table", lambda path: [line.split(":") for line in TABLES[path]])
    with pytest.raises(OpFailed):
        users.identity_of(user)


@pytest.mark.parametrize("name", ["a" * 300, "dangling", "circle", "folder", "fifo", "file/below"])
def test_a_failed_write_costs_no_descriptor(tmp_path, name) -> None:
    """PID 1 writes small files itself: it would soon have no descriptors for commands."""
    (tmp_path / "dangling").symlink_to("/no-such-folder/file")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises((OpFailed, OSError)):
        write_file(str(tmp_path / name), b"x", None, None, in_place=0)
    assert set(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("offset", [0, 4, 5, 100])
def test_size_wherever_it_is_read(tmp_path, offset) -> None:
    (tmp_path / "file").write_bytes(b"hello")
    _, fields, blobs = read_apart(str(tmp_path / "file"), offset, 1000)
    assert (fields["size"], blobs["data"]) == (5, b"hello"[offset:])


def test_growing_is_read_in_part(tmp_path) -> None:
    """PID 1 has decided by that length to read the file itself, into its slot's memory."""
    (tmp_path / "file").write_bytes(b"hello")
    fd, found = open_regular(str(tmp_path / "file"))
    os.truncate(tmp_path / "file", 64 << 20)
    _, fields, blobs = read_result(fd, found, 1, 64 << 20)
    os.close(fd)
    assert (fields["size"], blobs["data"]) == (5, b"ello")
