"""Archives of template builds: what they hold lies in their own folder, and nothing else does."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from atropos.api.e2b.connect import RpcError
from atropos.api.e2b.template_rest import MAX_LINKS, UPLOADS, Link, UploadLinks
from atropos.api.e2b.uploads import Uploads

HASH = "ab" * 32


@pytest.fixture
def uploads() -> Iterator[Uploads]:
    made = Uploads(most=100_000)
    yield made
    made.remove()
    assert not made.folder.exists()


def archive(*members: dict[str, Any], data: bytes = b"") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for member in members:
            info = tarfile.TarInfo(member["name"])
            info.type = member.get("type", tarfile.REGTYPE)
            info.linkname = member.get("linkname", "")
            info.mode = member.get("mode", 0o644)
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


async def sent(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 1000):
        yield body[at : at + 1000]


FOLDER, LINK, HARD = tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
async def test_files_folders_and_links_are_there(uploads: Uploads, pack: Any):
    members = (
        {"name": "d", "type": FOLDER, "mode": 0o700},
        {"name": "d/run", "mode": 0o755},
        {"name": "d/same", "type": HARD, "linkname": "d/run"},
        {"name": "d/away", "type": LINK, "linkname": "/usr/bin/python3"},
        {"name": "./late/one"},
        {"name": "d/pipe", "type": tarfile.FIFOTYPE},
    )
    assert HASH not in uploads
    await uploads.receive(HASH, sent(pack(archive(*members, data=b"#!"))))
    assert HASH in uploads
    top = uploads.folder / HASH
    assert sorted(path.relative_to(top).as_posix() for path in top.rglob("*")) == [
        "d", "d/away", "d/run", "d/same", "late", "late/one",
    ]  # fmt: skip
    assert (top / "d/run").read_bytes() == (top / "d/same").read_bytes() == b"#!"
    assert (top / "d/run").stat().st_mode & 0o777 == 0o755
    assert os.readlink(top / "d/away") == "/usr/bin/python3"


@pytest.mark.parametrize(
    "members",
    [
        [{"name": "../out"}],
        [{"name": "/tmp/out"}],
        [{"name": "a/../../out"}],
        [{"name": "l", "type": LINK, "linkname": "/tmp"}, {"name": "l/out"}],
        [{"name": "l", "type": LINK, "linkname": ".."}, {"name": "l/x", "type": FOLDER}],
        [{"name": "copy", "type": HARD, "linkname": "/etc/passwd"}],
        [{"name": "copy", "type": HARD, "linkname": "../../../etc/passwd"}],
        [{"name": "l", "type": LINK, "linkname": "/etc"}, {"name": "copy", "type": HARD, "linkname": "l/passwd"}],
        [{"name": "copy", "type": HARD, "linkname": "missing"}],
    ],
)
async def test_nothing_leads_out_of_it(uploads: Uploads, tmp_path: Path, members: list[dict[str, Any]]):
    with pytest.raises(RpcError):
        await uploads.receive(HASH, sent(archive(*members, data=b"x")))
    assert HASH not in uploads
    assert list(uploads.folder.iterdir()) == []
    assert not Path("/tmp/out").exists()


async def test_replaced_link_is_not_used(uploads: Uploads, tmp_path: Path):
    (tmp_path / "mine").write_text("mine")
    members = ({"name": "f", "type": LINK, "linkname": str(tmp_path / "mine")}, {"name": "f"})
    await uploads.receive(HASH, sent(archive(*members, data=b"theirs")))
    assert (uploads.folder / HASH / "f").read_bytes() == b"theirs"
    assert (tmp_path / "mine").read_text() == "mine"


async def test_too_large_is_refused(uploads: Uploads):
    bomb = gzip.compress(archive({"name": "zeros"}, data=bytes(1_000_000)))
    for body in (bytes(200_000), bomb, b"no archive", archive({"name": "cut"}, data=b"x" * 5000)[:3000]):
        with pytest.raises(RpcError):
            await uploads.receive(HASH, sent(body))
        assert list(uploads.folder.iterdir()) == []
    uploads.remove()
    with pytest.raises(RpcError, match="has begun, or is gone"):
        await uploads.receive(HASH, sent(archive({"name": "late"})))
    uploads.folder.mkdir()


def test_links_leave_others_alone(uploads: Uploads):
    """However many one key asks for."""
    links, another = UploadLinks(), Uploads()
    kept = links.add(Link(uploads, HASH))
    many = [links.add(Link(another, HASH)) for _ in range(MAX_LINKS + 1)]
    assert [links.find(f"{UPLOADS}{each}") is None for each in (kept, many[0], many[1])] == [False, True, False]
    another.remove()
    links.add(Link(uploads, HASH))
    assert links.find(f"{UPLOADS}{many[-1]}") is None
