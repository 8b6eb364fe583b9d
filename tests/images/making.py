"""Small images for tests: layers from lists of members, an OCI layout around them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import shutil
import tarfile
from pathlib import Path

from atropos.images.manifests import MACHINE


def entry(
    name: str,
    data: bytes | str = b"",
    *,
    mode: int = 0o644,
    kind: bytes = tarfile.REGTYPE,
    link: str = "",
    owner: tuple[int, int] = (0, 0),
    pax: dict[str, str] | None = None,
) -> tuple[tarfile.TarInfo, bytes]:
    """One member of a layer."""
    info = tarfile.TarInfo(name)
    content = data.encode() if isinstance(data, str) else data
    info.size, info.mode, info.type, info.linkname, info.mtime = len(content), mode, kind, link, 1_700_000_000
    info.uid, info.gid = owner
    info.pax_headers = pax or {}
    return info, content


def folder(name: str, **more) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.DIRTYPE, **{"mode": 0o755, **more})


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.SYMTYPE, link=target, mode=0o777)


def hard_link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, kind=tarfile.LNKTYPE, link=target)


def layer(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """An uncompressed tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, content in members:
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


def plain(data: bytes) -> bytes:
    """A layer's tar, whether it is packed with gzip or not at all."""
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


def layout(
    at: Path, *layers: bytes, config: dict | None = None, compress: bool = True, architecture: str = MACHINE
) -> str:
    """An OCI layout with one image in the folder `at`; returns the image's id."""
    blobs = at / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def put(data: bytes) -> dict:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    diffs = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in layers]
    made = {
        "architecture": architecture,
        "os": "linux",
        "config": config or {},
        "rootfs": {"type": "layers", "diff_ids": diffs},
    }
    described = {"mediaType": "application/vnd.oci.image.config.v1+json", **put(json.dumps(made).encode())}
    kind = "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress else "")
    parts = [{"mediaType": kind, **put(gzip.compress(each, 1) if compress else each)} for each in layers]
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described,
        "layers": parts,
    }
    listed = {
        "mediaType": manifest["mediaType"],
        **put(json.dumps(manifest).encode()),
        "annotations": {"org.opencontainers.image.ref.name": "image"},
    }
    (at / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [listed]}))
    (at / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return described["digest"].removeprefix("sha256:")


def as_index(at: Path, *platforms: tuple[Path, str]) -> None:
    """Have the layout in the folder `at` name an index of several layouts' images, each with its architecture."""
    manifests = []
    for where, machine in platforms:
        if where != at:
            shutil.copytree(where / "blobs", at / "blobs", dirs_exist_ok=True)
        found = json.loads((where / "index.json").read_text())["manifests"][0]
        manifests.append({**found, "platform": {"os": "linux", "architecture": machine}, "annotations": {}})
    kind = "application/vnd.oci.image.index.v1+json"
    index = json.dumps({"schemaVersion": 2, "mediaType": kind, "manifests": manifests}).encode()
    digest = hashlib.sha256(index).hexdigest()
    (at / "blobs/sha256" / digest).write_bytes(index)
    named = {"org.opencontainers.image.ref.name": "image"}
    entries = [{"mediaType": kind, "digest": f"sha256:{digest}", "size": len(index), "annotations": named}]
    (at / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
