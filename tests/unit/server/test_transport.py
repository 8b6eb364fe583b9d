"""Layers as a tar stream and back: nothing is lost, and nothing gets out.

ATROPOS_FAULTS above 1 nests folders 20,000 deep.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from atropos.errors import SandboxError
from atropos.sandbox.programs import snapshot_tar
from atropos.sandbox.programs.snapshot_tar import NotASnapshot, Unpacker, pack
from atropos.sandbox.server.snapshots import layer_tar
from atropos.sandbox.server.snapshots.layer_tar import COPY_BYTES, packed_layers
from tests import privileges
from tests.needs import needs
from tests.processes import descendants
from tests.repeats import TIMES
from tests.waiting import until

PROGRAM = snapshot_tar.__file__
DEPTH = 3_000 if TIMES == 1 else 20_000


def facts(top: bytes) -> dict[bytes, tuple]:
    """Everything of a tree that has to survive."""
    found: dict[bytes, tuple] = {}
    inodes: dict[int, bytes] = {}
    for folder, folders, files in os.walk(top):
        for name in [b"", *sorted(folders), *sorted(files)]:
            path = os.path.join(folder, name) if name else folder
            info = os.lstat(path)
            content: object = None
            if stat.S_ISREG(info.st_mode):
                content = Path(os.fsdecode(path)).read_bytes()
            elif stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            elif stat.S_ISCHR(info.st_mode):
                content = info.st_rdev
            user = {k: os.getxattr(path, k, follow_symlinks=False) for k in os.listxattr(path, follow_symlinks=False)}
            key = os.path.relpath(path, top)
            link = inodes.setdefault(info.st_ino, key) if stat.S_ISREG(info.st_mode) else None
            found[key] = (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, content, user, link)
    return found


def build(top: Path) -> None:
    (top / "etc").mkdir()
    (top / "etc/passwd").write_text("root:x:0:0")
    os.chmod(top / "etc/passwd", 0o4755)
    os.link(top / "etc/passwd", top / "etc/hard")
    os.symlink("/etc/shadow", top / "etc/link")
    os.symlink("../../../..", top / "up")
    os.mkfifo(top / "pipe", 0o640)
    os.mknod(top / "whiteout", 0o600 | stat.S_IFCHR, 0)
    (top / "binary").write_bytes(os.urandom(300_000))
    (top / "empty").touch()
    (top / ("n" * 255)).write_text("long")
    with open(os.path.join(os.fsencode(top), b"bad-\xff\xfe-name\n"), "wb") as file:
        file.write(b"x")
    (top / "closed").mkdir()
    (top / "closed/inside").write_text("secret")
    os.chown(top / "closed/inside", 1000, 33)
    os.chmod(top / "closed", 0)
    (top / "opaque").mkdir(mode=0o1777)
    for path, name, value in (
        ("opaque", "user.overlay.opaque", b"y"),
        ("binary", "user.bytes", bytes(range(256))),
        ("binary", "user.overlay.overlay.opaque", b"planted"),
        ("binary", b"user.\xff\xfe", b"no text"),
        ("binary", "user.=", b"\n"),
        ("binary", "user.k=v\nx", b"not user.k"),
        ("binary", "user.nämé", b"\xc3"),
        ("binary", "security.capability", struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)),
    ):
        try:
            os.setxattr(top / path, name, value)
        except OSError:
            pytest.skip("this file system has no user attributes")
    for path, when in (("empty", 1), ("opaque", 1_234_567_890_123_456_789)):
        os.utime(top / path, ns=(when, when))


@pytest.fixture
def layers(tmp_path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for path in made:
        path.mkdir()
        build(path)
    (made[1] / "empty").write_text("differs")
    return made


def fresh(tmp_path: Path, count: int = 2) -> list[str]:
    found = [tmp_path / f"out{n}" for n in range(count)]
    for path in found:
        path.mkdir(exist_ok=True)
    return [str(path) for path in found]


def packed(layers) -> bytes:
    out = io.BytesIO()
    pack([str(layer) for layer in layers], out)
    return out.getvalue()


@privileges.owners
def test_everything_survives(layers, tmp_path):
    archive = packed(layers)
    out = fresh(tmp_path)
    Unpacker(out).unpack(io.BytesIO(archive))
    for before, after in zip(layers, out, strict=True):
        assert facts(os.fsencode(before)) == facts(os.fsencode(after))
    assert packed(out) == archive


def test_holes_do_not_travel(tmp_path):
    layer = tmp_path / "layer"
    layer.mkdir()
    with (layer / "huge").open("wb") as file:
        file.truncate(1 << 40)
        for at, text in ((0, b"first"), (1 << 30, b"x" * 100_000), ((1 << 40) - 5, b"last!")):
            file.seek(at)
            file.write(text)
    with (layer / "hole").open("wb") as file:
        file.truncate(1 << 33)
    os.link(layer / "huge", layer / "again")
    archive = packed([layer])
    assert len(archive) < 1 << 20
    (out,) = fresh(tmp_path, 1)
    Unpacker([out]).unpack(io.BytesIO(archive))
    for name, size in (("huge", 1 << 40), ("hole", 1 << 33)):
        found = os.stat(Path(out, name))
        assert found.st_size == size
        assert found.st_blocks * 512 < 1 << 20
    assert os.stat(Path(out, "again")).st_nlink == 2
    with Path(out, "again").open("rb") as file:
        for at, text in ((0, b"first"), (5, bytes(100)), (1 << 30, b"x" * 100_000), ((1 << 40) - 5, b"last!")):
            file.seek(at)
            assert file.read(len(text)) == text
    assert packed([Path(out)]) == archive


def _forged(**attributes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        folder, link = tarfile.TarInfo("0"), tarfile.TarInfo("0/link")
        folder.type, link.type, link.linkname = tarfile.DIRTYPE, tarfile.SYMTYPE, "/etc"
        forged = tarfile.TarInfo("0/f")
        for name, value in attributes.items():
            setattr(forged, name, value)
        for info in (folder, link, forged):
            tar.addfile(info)
    return out.getvalue()


@privileges.owners
@pytest.mark.parametrize(
    "attributes",
    [
        {"pax_headers": {"SCHILY.xattr.security.capability": "x"}},
        {"pax_headers": {"SCHILY.xattr.trusted.overlay.redirect": "/etc"}},
        {"pax_headers": {"SCHILY.xattr.user.overlay.redirect": "/etc"}},
        {"pax_headers": {"ATROPOS.xattr." + b"user.overlay.metacopy".hex(): ""}},
        {"pax_headers": {"ATROPOS.xattr." + b"trusted.overlay.opaque".hex(): "y"}},
        {"pax_headers": {"ATROPOS.xattr.nohex": "y"}},
        {"type": tarfile.LNKTYPE, "linkname": "0/link"},
        {"pax_headers": {"size": "-1"}},
        {"uid": -1},
    ],
)
def test_what_no_server_exports_is_refused(tmp_path, attributes):
    done = subprocess.run(
        [sys.executable, "-I", "-S", PROGRAM, "unpack", *fresh(tmp_path, 1)],
        input=_forged(**attributes),
        capture_output=True,
        check=False,
    )
    assert done.returncode == snapshot_tar.INVALID, done.stderr
    assert len(done.stderr.splitlines()) == 1


@privileges.owners
@pytest.mark.parametrize("options", [[], ["--zstd"]])
def test_as_program_through_pipe(layers, tmp_path, options):
    out = fresh(tmp_path)
    command = [sys.executable, "-I", "-S", PROGRAM]
    archive = subprocess.run([*command, "pack", *options, *layers], capture_output=True, timeout=60, check=True).stdout
    subprocess.run([*command, "unpack", *options, *out], input=archive, capture_output=True, timeout=60, check=True)
    assert facts(os.fsencode(layers[0])) == facts(os.fsencode(out[0]))
    cut = subprocess.run(
        [*command, "unpack", *options, *fresh(tmp_path / "a", 2)], input=archive[: len(archive) // 2],
        capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert cut.returncode == snapshot_tar.INVALID
    assert cut.stderr


def test_damaged_is_refused(tmp_path):
    layer = tmp_path / "layer"
    layer.mkdir()
    for number in range(20):
        (layer / f"{number:02}").write_text(f"{number}\n")
    archive = packed([layer])
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        at = tar.getmembers()[10].offset
    damaged = bytearray(archive)
    damaged[at + 10] ^= 0xFF
    for broken in (archive[:at], archive[: at + 100], bytes(damaged)):
        shutil.rmtree(tmp_path / "out0", ignore_errors=True)
        with pytest.raises(NotASnapshot, match="cut off or damaged"):
            Unpacker(fresh(tmp_path, 1)).unpack(io.BytesIO(broken))


def test_moved_folder_nowhere(tmp_path, monkeypatch):
    (tmp_path / "slots/7/up").mkdir(parents=True)
    (tmp_path / "slots/7/up/secret").write_text("a neighbour's")
    layer = tmp_path / "slots/9/up"
    moved = layer / "a/b/c/d/0/y/z"
    moved.mkdir(parents=True)
    (moved / "file").touch()
    (layer / "a/b/c/d/7").mkdir()  # what the packer opens next, from where `..` has led it
    opened = os.listdir

    def listed(fd):
        names = opened(fd)
        if names == ["file"]:  # as a program of the slot might, while its folder is read
            moved.rename(layer / "z")
        return names

    monkeypatch.setattr(snapshot_tar.os, "listdir", listed)
    with pytest.raises(OSError, match="a folder was moved while it was read: 7"):
        packed([layer])


def test_a_socket_does_not_travel(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")  # a socket's name is short
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("s")
        out = fresh(tmp_path, 1)
        Unpacker(out).unpack(io.BytesIO(packed([tmp_path / "in"])))
    assert os.listdir(out[0]) == []


def chain(top: Path, depth: int) -> None:
    """Nested folders, some of them with two names of one file."""
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for number in range(depth):
        os.mkdir("deeper", dir_fd=fd)
        below = os.open("deeper", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
        if number % 500 == 0:
            os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
            os.link("file", "again", src_dir_fd=fd, dst_dir_fd=fd)
    os.close(os.open("bottom", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)


@pytest.mark.slow("large input")
def test_folders_nested_however_deep_travel(tmp_path):
    """As programs: in an archive with whole paths the names alone have 220 MB; of 20,000 folders a gigabyte, and no
    memory is left."""
    chain(tmp_path / "in", DEPTH)
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-I", "-S", PROGRAM]
    archive = subprocess.run([*command, "pack", tmp_path / "in"], capture_output=True, timeout=240, check=True).stdout
    assert len(archive) < 64 << 20
    subprocess.run([*command, "unpack", out], input=archive, capture_output=True, timeout=240, check=True)
    again = subprocess.run([*command, "pack", out], capture_output=True, timeout=240, check=True).stdout
    assert again == archive
    subprocess.run(["rm", "-rf", tmp_path / "in", out], check=True, timeout=60)


def test_names_at_any_depth(tmp_path):
    chain(tmp_path / "in", 100)
    deep = tmp_path / "in"
    for _ in range(70):
        deep /= "deeper"
    os.link(tmp_path / "in/deeper/file", deep / "link")
    (deep / "file").write_text("deep")
    os.link(deep / "file", tmp_path / "in/zz")
    archive = packed([tmp_path / "in"])
    out = fresh(tmp_path, 1)
    Unpacker(out).unpack(io.BytesIO(archive))
    assert packed(out) == archive
    assert Path(out[0], "zz").read_text() == "deep"
    assert Path(out[0], "deeper/file").stat().st_nlink == 3


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "", **fields) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def archive_of(*members: tarfile.TarInfo) -> io.BytesIO:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info in members:
            tar.addfile(info, io.BytesIO(b"x" * info.size))
    out.seek(0)
    return out


@pytest.mark.parametrize(
    "members",
    [
        [member("../evil")],
        [member("/etc/evil")],
        [member("0/../evil")],
        [member("0/a/../../evil")],
        [member("7/evil")],
        [member("-1/evil")],
        [member("0//evil")],
        [member("0/./evil")],
        [member("0")],
        [member("0/link", tarfile.SYMTYPE, "/"), member("0/link/evil")],
        [member("0/link", tarfile.SYMTYPE, ".."), member("0/link/evil", tarfile.DIRTYPE)],
        [member("0/link", tarfile.SYMTYPE, "/"), member("0/link", tarfile.DIRTYPE)],
        [member("0/link", tarfile.SYMTYPE, "/etc/evil"), member("0/link")],
        [member("0/hard", tarfile.LNKTYPE, "../outside")],
        [member("0/hard", tarfile.LNKTYPE, "1/other")],
        [member("0/s", tarfile.SYMTYPE, ".."), member("0/hard", tarfile.LNKTYPE, "0/s/outside")],
        [member("0/hard", tarfile.LNKTYPE, "0")],
        [member("0/disk", tarfile.BLKTYPE)],
        [member("0/null", tarfile.CHRTYPE, devmajor=1, devminor=3)],
        [member("0/twice"), member("0/twice")],
        [member("0/file"), member("0/file/below")],
        [member("evil", pax_headers={"ATROPOS.under": "0"})],
        [member("0", tarfile.DIRTYPE), member("../../evil", pax_headers={"ATROPOS.under": "0"})],
        [member("0", tarfile.DIRTYPE), member("evil", pax_headers={"ATROPOS.under": "-1"})],
        [member("0", tarfile.DIRTYPE), member("", tarfile.DIRTYPE, pax_headers={"ATROPOS.under": "0"})],
        [
            member("0", tarfile.DIRTYPE),
            member("1", tarfile.DIRTYPE),
            member("1/file"),
            member("0/hard", tarfile.LNKTYPE, "file", pax_headers={"ATROPOS.link-under": "1"}),
        ],
    ],
)
def test_what_leads_out_is_refused(members, tmp_path):
    (tmp_path / "outside").write_text("untouched")
    out = fresh(tmp_path)
    with pytest.raises((NotASnapshot, OSError)):
        Unpacker(out).unpack(archive_of(*members))
    assert (tmp_path / "outside").read_text() == "untouched"
    assert not (tmp_path / "evil").exists()
    assert not Path("/etc/evil").exists()
    assert not Path("/evil").exists()
    assert sorted(os.listdir(tmp_path)) == ["out0", "out1", "outside"]


@privileges.owners
def test_attributes_of_the_kernel_s_stay_out(tmp_path):
    info = member("0/file")
    info.pax_headers = {"SCHILY.xattr.security.selinux": "x", "SCHILY.xattr.trusted.overlay.opaque": "y"}
    out = fresh(tmp_path)
    with pytest.raises(NotASnapshot, match="an attribute that no snapshot has"):
        Unpacker(out).unpack(archive_of(info))
    assert os.listxattr(f"{out[0]}/file") == []


def endless(kind: bytes) -> bytes:
    """A header of this kind that claims 8 GiB."""
    info = tarfile.TarInfo("0/x")
    info.type, info.size = kind, 8 << 30
    return info.tobuf(tarfile.GNU_FORMAT)


BOMBS = {
    "a header without end": endless(tarfile.XHDTYPE),
    "a global header without end": endless(tarfile.XGLTYPE),
    "a name without end": endless(tarfile.GNUTYPE_LONGNAME),
    "nothing without end": tarfile.NUL * 1024,
    "folders without end": None,
}


def zstd(data: bytes) -> bytes:
    return subprocess.run(["zstd", "-q", "-1", "-c"], input=data, capture_output=True, check=True).stdout


@pytest.mark.slow("large input")
@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "zstd"])
def test_endless_is_refused(name, compressed, tmp_path):
    if compressed and shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    (tmp_path / "out").mkdir()
    folder = member("0", tarfile.DIRTYPE).tobuf(tarfile.GNU_FORMAT)
    head, body = (BOMBS[name] or folder, bytes(1 << 20) if BOMBS[name] else folder * 2048)
    if compressed:
        head, body = zstd(head), zstd(body * 16)  # frames one after the other are one stream
    command = [
        sys.executable,
        "-I",
        "-S",
        PROGRAM,
        "unpack",
        *(["--zstd"] if compressed else []),
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as unpacking:
        assert unpacking.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            unpacking.stdin.write(head)
            while True:
                unpacking.stdin.write(body)
        said = unpacking.communicate(timeout=120)[1].decode()
    assert unpacking.returncode == snapshot_tar.INVALID, said
    assert said.startswith("unpack: ") and len(said.splitlines()) == 1, said
    assert os.listdir(tmp_path / "out") == []


@privileges.mounts
def test_too_large_file_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(out)], check=True)
    try:
        (tmp_path / "in").mkdir()
        (tmp_path / "in/huge").touch()
        os.truncate(tmp_path / "in/huge", 1 << 40)
        archive = subprocess.run(
            ["tar", "-cS", "--transform=s,^,0/,", "-C", str(tmp_path / "in"), "huge"], capture_output=True, check=True
        )
        command = [sys.executable, "-I", "-S", PROGRAM, "unpack", str(out)]
        done = subprocess.run(command, input=archive.stdout, capture_output=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert os.stat(out / "huge").st_size == 1 << 40
        dense = archive_of(member("0/dense", size=8 << 20)).read()
        done = subprocess.run(command, input=dense, capture_output=True, timeout=120, check=False)
        assert done.returncode == 1 and b"No space left" in done.stderr, done.stderr
    finally:
        subprocess.run(["umount", str(out)], check=True)


@needs("zstd")
@pytest.mark.parametrize("given_up", [False, True])
async def test_silent_sender_is_ended(tmp_path, monkeypatch, given_up):
    before, there = set(descendants()), asyncio.Event()
    archive = zstd(archive_of(member("0/file", size=4 << 20)).read())

    async def chunks():
        yield archive[:20]
        await there.wait()
        yield archive[20 : len(archive) // 2]
        await asyncio.Event().wait()

    importing = asyncio.create_task(layer_tar.unpack_layers([str(tmp_path)], "a test", chunks(), compressed=True))
    await until(lambda: len(set(descendants()) - before) == 2, "the program and its zstd")
    if given_up:
        importing.cancel()
    else:
        monkeypatch.setattr(layer_tar, "SILENT_S", 1)
        there.set()
    await until(importing.done, "the end of the import")
    assert importing.cancelled() if given_up else isinstance(importing.exception(), SandboxError)
    await until(lambda: set(descendants()) <= before, "the end of its zstd, which ends by itself")


async def test_an_unread_export_ends(tmp_path):
    """As where its client is gone, or where what it is copied to is full: a slot that settles would stay stopped for
    ever."""
    (tmp_path / "large").write_bytes(os.urandom(4 << 20))
    before, written = set(descendants()), [0]

    def waits() -> bool:
        found = set(descendants()) - before
        written.extend(int(Path(f"/proc/{pid}/io").read_text().split("wchar: ")[1].split()[0]) for pid in found)
        return len(written) > 2 and written[-1] == written[-2] > 2 * COPY_BYTES

    async with asyncio.timeout(60):
        async with packed_layers([str(tmp_path)], "a test") as chunks:
            await anext(chunks)
            await until(waits, "a program whose output nobody reads")
    assert set(descendants()) <= before
