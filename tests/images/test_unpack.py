"""Layers from strangers: what an image may hold is unpacked exactly, and nothing reaches outside."""

import contextlib
import gzip
import hashlib
import os
import stat
import struct
import subprocess
import tarfile
import zlib

import pytest

from tests import privileges
from tests.images.making import entry, folder, hard_link, layer, link, plain
from tests.images.stacks import flattened, listed, repacked, shown, stacked, unpacked_alone
from tests.needs import require

pytestmark = privileges.owners


SHOWN = contextlib.ExitStack()


@pytest.fixture(autouse=True)
def _hidden():
    yield
    SHOWN.close()


def unpacked(tmp_path, *layers, **bounds):
    """(exit code, error text, the tree as overlay shows it) of the programs on these layers."""
    code, said, files = stacked(tmp_path, *layers, **bounds)
    root = tmp_path / "rootfs"
    if code == 0:
        SHOWN.enter_context(shown(files, root))
        assert listed(flattened(tmp_path, files)) == listed(root)
    return code, said, root


def test_files_come_out_as_the_layers_say(tmp_path):
    code, said, root = unpacked(
        tmp_path,
        layer(
            folder("etc"),
            entry("etc/passwd", "root:x:0:0\n", owner=(0, 0)),
            entry("usr/bin/sudo", b"\x7fELF", mode=0o4755, owner=(0, 27)),
            entry("home/me/notes", "mine", mode=0o600, owner=(1000, 1001)),
            link("bin", "usr/bin"),
            hard_link("usr/bin/sudo2", "usr/bin/sudo"),
            entry("run/fifo", kind=tarfile.FIFOTYPE),
            entry("dev/null", kind=tarfile.CHRTYPE),
        ),
    )
    assert (code, said) == (0, "")
    sudo = (root / "usr/bin/sudo").stat()
    assert (stat.S_IMODE(sudo.st_mode), sudo.st_uid, sudo.st_gid) == (0o4755, 0, 27)
    assert (root / "usr/bin/sudo2").samefile(root / "usr/bin/sudo")
    notes = (root / "home/me/notes").stat()
    assert (notes.st_uid, notes.st_gid, stat.S_IMODE(notes.st_mode), notes.st_mtime) == (
        1000,
        1001,
        0o600,
        1_700_000_000,
    )
    assert os.readlink(root / "bin") == "usr/bin"
    assert stat.S_ISFIFO((root / "run/fifo").lstat().st_mode)
    assert not (root / "dev/null").exists(), "device nodes are left out"


@pytest.mark.parametrize("program", ["gzip", "zstd"])
def test_every_compression_is_read(tmp_path, program):
    require(program)
    data = layer(entry("random", os.urandom(300_000)))
    compressed = subprocess.run([program, "-c"], input=data, capture_output=True, check=True).stdout
    code, said, root = unpacked(tmp_path, compressed, digests=[hashlib.sha256(data).hexdigest()])
    assert (code, said, (root / "random").stat().st_size) == (0, "", 300_000)


def test_a_lack_of_zstd_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    code, said, _ = unpacked(tmp_path, b"\x28\xb5\x2f\xfd" + bytes(100))
    assert (code, said) == (1, "a layer needs zstd, which is not installed on the sandbox server's machine")


def test_whiteouts_hide_lower_layers_alone(tmp_path):
    lower = layer(
        entry("a/one", "1"), entry("a/two", "2"), entry("b/old", "o"), entry("b/deep/old", "o"), entry("c", "c")
    )
    # `c` is a file below: the upper layer replaces it by a folder
    upper = layer(
        entry("b/new", "n"),
        entry("b/deep/new", "n"),
        entry("b/.wh..wh..opq"),
        entry("a/.wh.one"),
        entry(".wh.c"),
        entry("c/now-a-folder", "x"),
        entry("a/.wh.two"),
        entry("a/two", "again"),
        entry("kept", "k"),
        entry(".wh.kept"),
    )
    code, said, root = unpacked(tmp_path, lower, gzip.compress(upper))
    assert (code, said) == (0, "")
    found = sorted(str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir())
    assert found == ["a/two", "b/deep/new", "b/new", "c/now-a-folder", "kept"]
    assert (root / "a/two").read_text() == "again"


def test_names_may_begin_at_the_images_root(tmp_path):
    """As ko writes those of files, and kaniko a hard link's target."""
    lower = layer(entry("/usr/bin/git", "g"), entry("//usr/gone", "x"))
    upper = layer(hard_link("usr/bin/git-add", "/usr/bin/git"), entry("/usr/.wh.gone"))
    code, said, root = unpacked(tmp_path, lower, upper)
    assert (code, said) == (0, "")
    assert (root / "usr/bin/git-add").samefile(root / "usr/bin/git")
    assert sorted(each.name for each in (root / "usr").iterdir()) == ["bin"]


def test_a_repeated_folder_gets_its_mode(tmp_path):
    code, _, root = unpacked(tmp_path, layer(folder("d"), entry("d/file", "1")), layer(folder("d", mode=0o700)))
    assert code == 0
    assert (root / "d/file").exists()
    assert stat.S_IMODE((root / "d").stat().st_mode) == 0o700


def test_capabilities_stay(tmp_path):
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0).decode("latin1")
    member = entry(
        "bin/ping",
        b"x",
        mode=0o755,
        pax={
            "SCHILY.xattr.security.capability": capability,
            "SCHILY.xattr.user.overlay.opaque": "y",
            "SCHILY.xattr.trusted.overlay.redirect": "/etc",
            "SCHILY.xattr.user.note": "kept",
        },
    )
    code, said, root = unpacked(tmp_path, layer(member))
    assert (code, said) == (0, "")
    assert sorted(os.listxattr(root / "bin/ping")) == ["security.capability", "user.note"]


def _header(name: bytes, size: int, kind: bytes) -> bytes:
    info = tarfile.TarInfo(name.decode())
    info.type = kind
    info.size = size
    return info.tobuf(tarfile.PAX_FORMAT)


def _spoiled(data: bytes, at: int) -> bytes:
    """A layer with a header at `at` whose checksum is wrong."""
    return data[: at + 148] + b"7777777\0" + data[at + 156 :]


ESCAPES = {
    "a path that climbs": layer(entry("../outside", "x")),
    "a path that climbs in its middle": layer(entry("a/../../outside", "x")),
    "an absolute path that climbs": layer(entry("/../outside", "x")),
    "a climbing folder": layer(folder("../outside")),
    "a file through an absolute link": layer(link("out", "/OUTSIDE"), entry("out/file", "x")),
    "a file through a relative link": layer(link("out", "../.."), entry("out/file", "x")),
    "a file through a link to a link": layer(link("a", "b"), link("b", "/OUTSIDE"), entry("a/file", "x")),
    "a folder through a link": layer(link("out", "/OUTSIDE"), folder("out/made")),
    "a link through a link": layer(link("out", "/OUTSIDE"), link("out/planted", "x")),
    "a hard link to an absolute path": layer(hard_link("x", "/etc/passwd")),
    "a hard link that climbs": layer(hard_link("x", "../../../../etc/passwd")),
    "a hard link through a link": layer(link("out", "/etc"), hard_link("x", "out/passwd")),
    "a hard link to nothing": layer(hard_link("x", "missing")),
    "a hard link to a folder": layer(folder("d"), hard_link("x", "d")),
    "a whiteout that climbs": layer(entry("../.wh.outside")),
    "a fifo through a link": layer(link("out", "/OUTSIDE"), entry("out/f", kind=tarfile.FIFOTYPE)),
    "an owner beyond a slot's ids": layer(entry("x", "x", owner=(70_000, 0))),
    "a group beyond a slot's ids": layer(entry("x", "x", owner=(0, 4_000_000))),
    "a name that is too long": layer(entry("n" * 300, "x")),
    "a link loop as a parent": layer(link("a", "b"), link("b", "a"), entry("a/x", "x")),
    "a file as a parent": layer(entry("a", "x"), entry("a/b", "x")),
    "an unknown type": _header(b"x", 0, b"V") + bytes(1024),
    "no tar at all": b"this is no tar" * 100,
    "a tar that is cut off": layer(entry("big", b"x" * 100_000))[:20_000],
    "a header in the middle that is damaged": _spoiled(layer(entry("a", "x"), entry("b", "x"), entry("c", "x")), 1024),
    "a header in the middle that is cut off": layer(entry("a", "x"), entry("b", "x"))[:1124],
    "a header of gigabytes": _header(b"pax", 8 << 30, tarfile.XHDTYPE) + bytes(4096),
    "a negative size": layer(entry("x", "x"))[:124] + b"\xff" * 12 + layer(entry("x", "x"))[136:],
}


@pytest.mark.parametrize("what", ESCAPES)
def test_hostile_layers_are_refused(tmp_path, what):
    outside = tmp_path / "outside"
    work = tmp_path / "work" / "deep"
    work.mkdir(parents=True)
    (work / "secret").mkdir()
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    code, said, _ = unpacked(work, ESCAPES[what])
    assert code == 1, (code, said)
    assert len(said.splitlines()) == 1, said
    assert "Traceback" not in said
    assert not outside.exists()
    after = [str(path) for path in tmp_path.rglob("*") if not path.is_relative_to(work / "layer-0")]
    assert sorted(after) == sorted(before)


def test_a_refused_owner_has_a_cure(tmp_path):
    _, said, _ = unpacked(tmp_path, ESCAPES["an owner beyond a slot's ids"])
    assert said.endswith("; give it another one where the image is built (chown, or tar --no-same-owner)")


def test_a_broken_gzip_is_refused(tmp_path):
    packing = zlib.compressobj(wbits=31)
    start = packing.compress(layer(entry("big", bytes(200_000)))[:100_000]) + packing.flush(zlib.Z_FULL_FLUSH)
    code, said, _ = unpacked(tmp_path, start + b"\xff" * 1000, digests=["0" * 64])
    assert (code, said.partition(":")[0]) == (1, "layer 000000000000 is no tar")


def test_layer_says_if_it_is_remade(tmp_path):
    sparse = tmp_path / "sparse.tar"
    (tmp_path / "hole").write_bytes(b"x" + bytes(1 << 20) + b"y")
    subprocess.run(["tar", "-C", tmp_path, "-c", "-S", "-f", sparse, "hole"], check=True)
    for number, data in enumerate((b"", sparse.read_bytes(), layer(entry("a", "1"), entry("b", "2"), entry("b", "3")))):
        place = tmp_path / str(number)
        place.mkdir()
        assert unpacked_alone(place, data)[:2] == (0, "")
        if number == 2:  # the first b is gone
            assert not (place / "tar").exists()
        else:
            assert repacked(place) == plain(data)


def test_changed_file_is_not_given(tmp_path):
    assert unpacked_alone(tmp_path, layer(entry("a", "1")))[:2] == (0, "")
    (tmp_path / "files/a").write_text("another size")
    with pytest.raises(AssertionError, match="a has changed since it was unpacked"):
        repacked(tmp_path)


def test_links_are_never_followed(tmp_path):
    """In a slot they lead to the slot's own files."""
    target = tmp_path / "target"
    target.write_text("theirs")
    code, _, root = unpacked(tmp_path, layer(link("etc/passwd", str(target)), entry("etc/passwd", "image's own")))
    assert code == 0
    assert target.read_text() == "theirs"
    assert (root / "etc/passwd").read_text() == "image's own"


def test_a_wrong_digest_is_refused(tmp_path):
    code, said, _ = unpacked(tmp_path, layer(entry("x", "x")), digests=["0" * 64])
    assert (code, "not the one that the image names" in said) == (1, True)


def test_what_an_image_may_take_is_bounded(tmp_path):
    bomb = gzip.compress(layer(entry("zeros", bytes(8 << 20)), entry("ones", b"\1" * (8 << 20))))
    code, said, _ = unpacked(tmp_path, bomb, max_bytes=4 << 20)
    room = "MiB that the image store has room for (image_store.quota_mib)"
    assert (code, said) == (1, f"zeros: a file of 8388608 bytes, more than the 4 {room}")
    many = layer(*(entry(f"f{index}", "x") for index in range(200)))
    code, said, _ = unpacked(tmp_path, many, max_members=100)
    assert (code, said) == (1, "more than 100 files and folders")
    small = layer(*(entry(f"f{index}", b"x" * 5000) for index in range(200)))
    code, said, _ = unpacked(tmp_path, small, max_bytes=1 << 20)
    assert (code, said) == (1, f"it unpacks to more than the 1 {room}")
    tail = gzip.compress(layer(entry("x", "x")) + bytes(64 << 20))
    code, said, _ = unpacked(tmp_path, tail, max_bytes=1 << 20)
    assert (code, said) == (1, "a layer that is larger than its bound")


def test_holes_stay_holes(tmp_path):
    code, said, root = unpacked(tmp_path, layer(entry("sparse", bytes(32 << 20) + b"end")))
    assert (code, said) == (0, "")
    found = (root / "sparse").stat()
    assert (found.st_size, found.st_blocks * 512 < 4 << 20) == ((32 << 20) + 3, True)


def test_with_one_id_all_is_roots(tmp_path):
    code, said, root = unpacked(tmp_path, layer(entry("x", "x", owner=(1000, 1000))), ids=1)
    assert (code, said, (root / "x").stat().st_uid) == (0, "", 0)


def test_a_full_disk_is_named(tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(small)], check=True)
    try:
        data = layer(entry("x", os.urandom(2 << 20)))
        code, said, _ = unpacked_alone(small, data)
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert (code, "No space left" in said) == (28, True)


def test_a_layers_size_and_needs_are_told(tmp_path):
    data = layer(folder("."), folder("d"), entry("d/x", b"x" * 5000))
    _, _, found = unpacked_alone(tmp_path, data)  # the last 4096: what else its tar has
    assert found == {"bytes": 4096 + 8192 + 4096 + 4096, "stands_alone": True, "has_root": True}


def unpadded(*names: str, size: int = 5) -> bytes:
    """A layer that ends with its last file's last byte, as some writers leave it."""
    whole = layer(*(entry(name, b"x" * size) for name in names))
    return whole[: 512 * 2 * (len(names) - 1) + 512 + size]


def test_a_layer_may_end_without_zeros(tmp_path):
    code, said, root = unpacked(tmp_path, unpadded("a", "b"), b"", gzip.compress(unpadded("c")), gzip.compress(b""))
    assert (code, said) == (0, "")
    assert {path.name: path.read_text() for path in root.iterdir()} == dict.fromkeys("abc", "xxxxx")


def test_a_cut_layer_is_refused(tmp_path):
    code, said, _ = unpacked(tmp_path, unpadded("a", size=500)[:-1])
    assert (code, "unexpected end of data" in said) == (1, True)


def test_times_are_kept_to_the_nanosecond(tmp_path):
    at = 1_700_000_000_123_456_789
    pax = {"mtime": "1700000000.123456789"}
    code, _, root = unpacked(tmp_path, layer(folder("d", pax=pax), entry("d/f", "x", pax=pax), entry("d/plain", "x")))
    assert code == 0
    assert [(root / name).stat().st_mtime_ns for name in ("d", "d/f", "d/plain")] == [at, at, at // 10**9 * 10**9]


def test_a_whiteout_beside_its_folder_hides(tmp_path):
    """The OCI image specification has whiteouts mean lower layers alone; umoci and the engines differ in some orders."""
    lower = layer(folder("d"), entry("d/old", "old"), folder("e"), entry("e/old", "old"))
    upper = layer(
        entry(".wh.d"), folder("d"), entry("d/new", "new"), folder("e"), entry("e/new", "new"), entry(".wh.e")
    )
    code, _, root = unpacked(tmp_path, lower, upper)
    assert code == 0
    assert sorted(str(path.relative_to(root)) for path in root.rglob("*")) == ["d", "d/new", "e", "e/new"]


def test_hard_links_reach_lower_layers(tmp_path):
    """As containerd, which unpacks a layer over those below it; where layers lie apart, as with overlay2, it is an
    error."""
    code, _, root = unpacked(tmp_path, layer(entry("lower", "text")), layer(hard_link("upper", "lower")))
    assert code == 0
    assert (root / "upper").samefile(root / "lower")


def test_an_implied_folder_is_as_below(tmp_path):
    lower = layer(
        folder(".", mode=0o555), folder("d", mode=0o2750, owner=(3, 4), pax={"SCHILY.xattr.user.note": "kept"})
    )
    code, said, root = unpacked(tmp_path, lower, layer(entry("d/new", "n"), entry("e/new", "n")))
    assert (code, said) == (0, "")
    seen = listed(root)
    assert [seen[name][:3] for name in (".", "d", "e")] == [(0o40555, 0, 0), (0o42750, 3, 4), (0o40755, 0, 0)]
    assert (seen["d"][3], seen["d"][5]) == (1_700_000_000 * 10**9, ["user.note"])


@pytest.mark.parametrize("below", [link("bin", "usr/bin"), entry("bin", "a file")], ids=["link", "file"])
def test_a_layer_passes_no_lower_link(tmp_path, below):
    code, said, _ = unpacked(tmp_path, layer(below), layer(entry("bin/new", "n")))
    assert (code, said) == (1, "bin: leads through a link or a file")


def test_a_needless_whiteout_is_dropped(tmp_path):
    """Overlay would list it in a folder that one layer alone has."""
    upper = layer(folder("own"), entry("own/.wh.gone"), entry("none/.wh.gone"), entry("d/.wh.gone"))
    code, _, root = unpacked(tmp_path, layer(folder("d")), upper)
    assert code == 0
    assert sorted(listed(root)) == [".", "d", "own"]


def test_an_opaque_root_hides_all(tmp_path):
    lower = layer(entry("a/old", "o"), entry("b/old", "o"), entry("c", "o"))
    code, _, root = unpacked(tmp_path, lower, layer(entry("a/new", "n"), entry(".wh..wh..opq")))
    assert (code, sorted(listed(root))) == (0, [".", "a", "a/new"])


def test_a_hidden_folder_stays_hidden(tmp_path):
    upper = layer(entry("d", "a file"), folder("d"), entry("d/new", "n"))
    code, _, root = unpacked(tmp_path, layer(entry("d/old", "o")), upper)
    assert (code, sorted(listed(root))) == (0, [".", "d", "d/new"])


def test_stacks_are_as_overlay_has_them(tmp_path):
    layers = [
        layer(entry("a/1", "1"), entry("a/2", "2"), entry("b/c/1", "1"), link("l", "a"), entry("f", "f")),
        layer(entry("a/.wh.1"), entry("b/.wh..wh..opq"), entry("b/2", "2"), folder("f"), entry("f/x", "x")),
        layer(entry("b/c/3", "3"), entry(".wh.a"), hard_link("g", "f/x"), hard_link("h", "g")),
        layer(entry("a/4", "4"), entry(".wh.l"), entry("f/.wh.x")),
    ]
    code, said, root = unpacked(tmp_path, *layers)
    assert (code, said) == (0, "")
    files = sorted(name for name, seen in listed(root).items() if seen[4] is not None)
    assert files == ["a/4", "b/2", "b/c/3", "g", "h"]
    assert (root / "g").samefile(root / "h")
