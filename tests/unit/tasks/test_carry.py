"""What a hostile slot packs can't reach out of the folder that it is unpacked in."""

import bz2
import errno
import gzip
import io
import lzma
import tarfile
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos.slots.slot.results import SlotFileError
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.carry import CarriedArtifact, TooLarge, carry_out, copy_safely
from atropos.wire import FileResult

KINDS = {"f": tarfile.REGTYPE, "d": tarfile.DIRTYPE, "s": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "c": tarfile.CHRTYPE}


def archive(*members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = KINDS[kind], link, 0o751
            tar.addfile(info)
    return out.getvalue()


def safely(archive, path, exclude=()):
    """What is carried of an archive."""
    out = io.BytesIO()
    copy_safely(io.BytesIO(archive), out, path, exclude)
    return out.getvalue()


def names(data):
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return tar.getnames()


def test_ordinary_trees_pass_unchanged():
    data = archive(
        ("d", ".", ""), ("d", "./a", ""), ("f", "./a/b", ""), ("s", "./a/l", "/etc/passwd"), ("h", "./c", "./a/b")
    )
    assert names(safely(data, "/workspace")) == ["a", "a/b", "a/l", "c"]
    with tarfile.open(fileobj=io.BytesIO(safely(data, "/workspace"))) as tar:
        assert tar.getmember("a/b").mode == 0o751
        assert tar.getmember("c").linkname == "a/b"
        assert tar.getmember("a/l").linkname == "/etc/passwd"


def test_ways_out_are_left_out():
    data = archive(
        ("f", "/etc/ld.so.preload", ""),
        ("f", "../up", ""),
        ("f", "a/../../up", ""),
        ("s", "way", "/usr/bin"),
        ("f", "way/bash", ""),
        ("h", "hard", "way/bash"),
        ("h", "hard2", "/etc/shadow"),
        ("c", "device", ""),
        ("f", "good", ""),
    )
    assert names(safely(data, "/workspace")) == ["way", "good"]


def test_second_names_are_dropped():
    """Readers differ in which of the two they take."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("good")
        info.pax_headers = {"path": "../up", "GNU.sparse.name": "good"}
        tar.addfile(info)
    data = safely(out.getvalue(), "/workspace")
    assert names(data) == ["good"]
    assert b"../up" not in data


def test_excluded_artifacts_stay():
    data = archive(("f", "a.log", ""), ("f", "deep/b.log", ""), ("f", "deep/node_modules/c", ""), ("f", "deep/d", ""))
    assert names(safely(data, "/app", ("*.log", "node_modules/"))) == ["deep/d"]


def test_a_hard_link_becomes_the_file():
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, link in (
            ("./.cache/a", ""),
            ("./one", "./.cache/a"),
            ("./two", "./.cache/a"),
            ("./.cache/b", "./.cache/a"),
        ):
            info = tarfile.TarInfo(name)
            info.linkname, info.type, info.size = link, KINDS["h" if link else "f"], 0 if link else 3
            tar.addfile(info, io.BytesIO(b"abc"))
    with tarfile.open(fileobj=io.BytesIO(safely(out.getvalue(), "/root", (".cache",)))) as tar:
        assert [(one.name, one.linkname) for one in tar] == [("one", ""), ("two", "one")]
        assert tar.extractfile("one").read() == tar.extractfile("two").read() == b"abc"


def test_hard_links_are_known(tmp_path):
    for members, known in (((), False), ((("h", "b", "a"),), True)):
        kinds = copy_safely(io.BytesIO(archive(("f", "a", ""), *members)), io.BytesIO(), "/app")
        assert CarriedArtifact(tmp_path, None, kinds).has_hard_links == known


@pytest.mark.parametrize(
    ("number", "raised", "calls"),
    [(errno.EIO, VerifierFailed, ["read", "quiesce", "read"]), (errno.EFBIG, TooLarge, ["read"])],
)
async def test_only_what_kills_a_reading_is_ended(tmp_path, number, raised, calls):
    """A slot's programs, which may be services that the tests ask, live on where a file is too large."""
    made = []

    class Slot:
        async def run(self, _):
            return FileResult(data=b"x", size=2, mode=0o644)

        async def read_file_to(self, *_, **__):
            made.append("read")
            raise SlotFileError(number, "no")

        async def quiesce(self):
            made.append("quiesce")

    with pytest.raises(VerifierFailed) as caught:
        await carry_out(Slot(), "/app/a", tmp_path / "a", max_bytes=1)
    assert (caught.type, made) == (raised, calls)


def test_links_stay_in_the_folder():
    good = [
        ("python", "/usr/bin/python3"),
        ("sub/up", "../file"),
        ("abs", "/workspace/file"),
        ("two", "python"),
        ("dot", "./file"),
        ("sub/deep/top", "../.."),
    ]
    bad = [("answer", "/tests/expected"), ("up", "../tests/expected"), ("sub/out", "../../tests"), ("mem", "/proc/1/mem"), ("root", "/"),
           ("back", "/usr/../tests/expected"), ("way", "python/../../tests"), ("absolute", "/workspace/../tests"), ("logs", "/logs/verifier"),
           ("above", "sub/deep/top/../tests")]  # fmt: skip
    data = archive(*(("s", name, target) for name, target in good + bad))
    assert names(safely(data, "/workspace")) == [name for name, _ in good]


def test_sparse_file_stays_sparse():
    """Some bytes of an archive may say that a file has a terabyte."""
    out, hole = io.BytesIO(), 64 << 20
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("sparse")
        body = f"1\n{hole}\n0\n".encode().ljust(512, b"\0")
        info.size = len(body)
        info.pax_headers = {
            "GNU.sparse.major": "1",
            "GNU.sparse.minor": "0",
            "GNU.sparse.name": "sparse",
            "GNU.sparse.realsize": str(hole),
        }
        tar.addfile(info, io.BytesIO(body))
        tar.addfile(tarfile.TarInfo("good"))
    data = safely(out.getvalue(), "/workspace")
    assert names(data) == ["good"]
    assert len(data) < 1 << 20


def extended(**headers):
    """An archive of an empty file, of which an extended header says something else."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("a")
        info.pax_headers = headers
        tar.addfile(info)
    return out.getvalue()


def spoiled(archive: bytes, header: int) -> bytes:
    """An archive of empty files with a byte of one header changed."""
    data = bytearray(archive)
    data[512 * header + 10] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"nonsense" * 200, archive(("f", "a", ""))[:100]),
        gzip.compress(archive(("f", "a", "")), mtime=0),  # xdist's workers must agree on the tests' names
        *(pack(archive(("f", "a", ""))) for pack in (bz2.compress, lzma.compress)),
        *(spoiled(archive(("f", "a", ""), ("f", "b", ""), ("f", "c", "")), header) for header in (1, 2)),
        *(extended(mtime="inf"), extended(mtime="nan"), extended(size="-5"), extended(size="9" * 20)),
    ],
)
def test_no_archive_is_verifiers(data):
    with pytest.raises(VerifierFailed):
        safely(data, "/workspace")


part = st.sampled_from(["a", "b", "..", ".", ""])
path = st.lists(part, min_size=1, max_size=4).map("/".join)


@given(st.lists(st.tuples(st.sampled_from("fdsh"), path, path), max_size=12))
def test_no_member_leads_elsewhere(members):
    data = safely(archive(*[(k, n or "x", link) for k, n, link in members]), "/w")
    links = set()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for info in tar:
            parts = info.name.split("/")
            assert not info.name.startswith("/")
            assert ".." not in parts
            assert not any("/".join(parts[:n]) in links for n in range(1, len(parts)))
            if info.issym():
                links.add(info.name)
            if info.islnk():
                assert ".." not in info.linkname.split("/")
                assert not info.linkname.startswith("/")


def test_time_is_linear_in_depth():
    def seconds(depth):
        folder = "/".join("a" * depth)
        data = archive(("s", "l", "x"), *(("f", f"{folder}/{number}", "") for number in range(300)))
        started = time.process_time()
        safely(data, "/workspace", ["*.log", "b*c"])
        return time.process_time() - started

    seconds(10)
    small, large = seconds(60), seconds(1900)
    assert large < max(small, 0.01) * 12  # work that grows with the square takes 30 times as long
