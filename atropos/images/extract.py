"""Takes one image out of an archive from a stranger. A program of its own, without site-packages and without a network.

    extract TRANSPORT ARCHIVE NAME FOLDER MAX_BYTES

FOLDER gets what `layout.read_folder` reads: `manifest.json`, and configuration and layers, each named by its SHA-256.
NAME may be empty where the archive has one image. Nothing of the archive becomes a path: its members are read where
they lie, by name. For exit codes see `untrusted.program`.

Sources: OCI image specification 1.1, image layout; Docker image specification 1.2, combined archive;
containers-transports(5).
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import sys
import tarfile
from collections.abc import Iterator
from typing import IO, Any, cast

from atropos.archives import WholeTar
from atropos.errors import ConfigError
from atropos.images.manifests import (
    MACHINE,
    MAX_DEPTH,
    MAX_JSON_BYTES,
    architecture,
    chosen,
    config_digest,
    is_index,
    named,
    objects,
    parse,
    which,
)
from atropos.images.reference import ImageSource, check_digest
from atropos.images.untrusted import BROKEN, ImageRefused, decompressed, is_compressed, pieces, program

CHUNK = 1 << 20


class Archive:
    """The members of a tar, by their names; of two with one name the later one, as unpacking it would leave.

    Raises:
        ImageRefused: it is no tar, or a damaged one.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._tar = tarfile.open(fileobj=file, mode="r:", tarinfo=WholeTar)  # noqa: SIM115 (as long as this program)
        # All headers first: `index.json` and `manifest.json` may stand behind what they name.
        self._members = {_plain(member.name): member for member in self._tar}

    def open(self, name: str) -> IO[bytes]:
        """A file of it; `docker save` makes a layer that it has already a link."""
        # Bounded, as links may lead in a circle; `_plain` keeps each of them within the archive.
        path = _plain(name)
        for _ in range(MAX_DEPTH):
            member = self._members.get(path)
            if member is None:
                break
            if member.isreg():
                return cast("IO[bytes]", self._tar.extractfile(member))
            below = posixpath.dirname(path) if member.issym() else ""
            path = _plain(posixpath.join(below, member.linkname))
        raise ImageRefused(f"the archive has no file {name!r:.200}")

    def read(self, name: str) -> bytes:
        """A small file."""
        # One byte more, by which `parse` sees that it is too large.
        return self.open(name).read(MAX_JSON_BYTES + 1)


class Target:
    """The folder that an image's parts are written to."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = folder
        self._remaining = max_bytes
        self._room = f"more than the {max_bytes >> 20} MiB that the image store may hold (image_store.quota_mib)"

    def copy(self, source: IO[bytes]) -> str:
        """Copy a part; its SHA-256, which is its name."""
        # Its name is known only at the end; nothing takes a part that is not whole by its digest.
        part, digest = os.path.join(self._folder, "part"), hashlib.sha256()
        with open(part, "wb") as file:
            while chunk := source.read(CHUNK):
                self._remaining -= len(chunk)
                if self._remaining < 0:
                    raise ImageRefused(self._room)
                digest.update(chunk)
                file.write(chunk)
        os.rename(part, os.path.join(self._folder, digest.hexdigest()))
        return digest.hexdigest()

    def spool(self, source: Iterator[bytes]) -> IO[bytes]:
        """A file without a name that holds a stream."""
        # tarfile needs to seek, as members are read by name. Without a name (open(2), O_TMPFILE), it is gone when this
        # program is, however that ends.
        file = open(os.open(self._folder, os.O_RDWR | os.O_TMPFILE, 0o600), "w+b")  # noqa: SIM115 (its user closes it)
        for chunk in source:
            self._remaining -= len(chunk)
            if self._remaining < 0:
                raise ImageRefused(self._room)
            file.write(chunk)
        file.seek(0)
        return file

    def finish(self, config: str, layers: list[str]) -> None:
        """Write the manifest."""
        manifest = {"config": self._part(config), "layers": [self._part(each) for each in layers]}
        with open(os.path.join(self._folder, "manifest.json"), "w", encoding="ascii") as file:
            json.dump(manifest, file)

    def _part(self, digest: str) -> dict[str, object]:
        return {"digest": f"sha256:{digest}", "size": os.path.getsize(os.path.join(self._folder, digest))}


def from_layout(archive: Archive, name: str, target: Target) -> None:
    """Take an image out of an OCI layout: the one of that name, and of an index the one for this machine."""

    def take(expected: str) -> str:
        actual = target.copy(archive.open(f"blobs/sha256/{expected}"))
        # A registry is checked by the layers' diff ids alone (decision 27). Here the configuration is taken by this
        # digest.
        if actual != expected:
            raise ImageRefused(f"the blob {expected[:12]} is not the one that its name says ({actual[:12]})")
        return actual

    manifest: dict[str, Any] = {"manifests": named(parse(archive.read("index.json"), "index.json"), name)}
    # An index may name an index, and a hostile one itself.
    for _ in range(MAX_DEPTH):
        if not is_index(manifest):
            break
        digest = chosen(objects(manifest, "manifests"))
        manifest = parse(archive.read(f"blobs/sha256/{digest}"), f"manifest {digest[:12]}")
    layers = [check_digest(each.get("digest")) for each in objects(manifest, "layers")]
    target.finish(take(config_digest(manifest)), [take(each) for each in layers])


def from_save(archive: Archive, name: str, target: Target) -> None:
    """Take an image out of what `docker save` writes: the one with that tag."""
    images = objects({"all": json.loads(archive.read("manifest.json"))}, "all")
    matching = [each for each in images if not name or _full(name) in map(_full, _texts(each, "RepoTags"))]
    # `docker save` of an image for several machines lists each of them under the same tag.
    if len(matching) > 1:
        matching = [each for each in matching if _machine(archive, each) == MACHINE]
    if len(matching) != 1:
        raise ImageRefused(which(tag for each in images for tag in _texts(each, "RepoTags")))
    layers = [target.copy(archive.open(each)) for each in _texts(matching[0], "Layers")]
    target.finish(target.copy(archive.open(str(matching[0].get("Config")))), layers)


def _machine(archive: Archive, image: dict[str, Any]) -> str:
    return architecture(str(parse(archive.read(str(image.get("Config"))), "a configuration").get("architecture")))


def _texts(image: dict[str, Any], key: str) -> list[str]:
    return [str(each) for each in image.get(key) or ()]


def _full(tag: str) -> str:
    try:
        return str(ImageSource.parse(f"docker://{tag}"))
    except ConfigError:
        return tag


def _plain(name: str) -> str:
    return posixpath.normpath(f"/{name}")


def extract(transport: str, path: str, name: str, target: Target) -> None:
    """Take the image out.

    Raises:
        ImageRefused: there is none of that name, or none that is whole.
    """
    take = {"oci-archive": from_layout, "docker-archive": from_save}[transport]
    try:
        with open(path, "rb") as file:
            # tarfile's own decompression knows no zstd, and has no bound.
            packed = is_compressed(file.fileno())
            take(Archive(target.spool(decompressed(pieces(file.fileno()))) if packed else file), name, target)
    # TypeError and AttributeError: JSON of another form than the specification's.
    except (tarfile.TarError, *BROKEN, ValueError, TypeError, AttributeError) as error:
        raise ImageRefused(f"not an image: {error}") from None


def main() -> int:
    """The program."""
    transport, path, name, folder, max_bytes = sys.argv[1:]
    return program(lambda: extract(transport, path, name, Target(folder, int(max_bytes))))
