"""Files of template builds: archives that clients send, unpacked into folders of this machine until they are built."""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import shutil
import tarfile
import tempfile
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import IO

from atropos.api.e2b.connect import RpcError
from atropos.archives import WholeTar

MAX_UPLOAD_BYTES = 8 << 30
"""Most that one build's files may be."""
MAX_MEMBERS = 200_000
_COPY_BYTES = 1 << 20


class Uploads:
    """The files of one template's builds, each upload in a folder that has its hash as its name.

    Args:
        most: bytes that they may be, packed or unpacked.

    Attributes:
        removed: whether nothing needs them any more.
    """

    def __init__(self, most: int = MAX_UPLOAD_BYTES) -> None:
        self._most = most
        self.folder = Path(tempfile.mkdtemp(prefix="atropos-template-"))
        self._bytes = 0
        self.removed = False

    def __contains__(self, files_hash: str) -> bool:
        return (self.folder / files_hash).is_dir()

    async def receive(self, files_hash: str, body: AsyncIterator[bytes]) -> None:
        """Unpack a tar archive, gzipped or not, unless the files of its hash are there.

        Raises:
            RpcError: it is none, or too large.
        """
        try:
            with tempfile.TemporaryFile(dir=self.folder) as archive:
                size = 0
                async for chunk in body:
                    size += len(chunk)
                    self._check(size)
                    await asyncio.to_thread(archive.write, chunk)
                await asyncio.to_thread(self._unpack, files_hash, archive)
        except FileNotFoundError:
            raise RpcError("not_found", "the build that these files are for has begun, or is gone") from None

    def _check(self, more: int) -> None:
        if self._bytes + more > self._most:
            raise RpcError("resource_exhausted", f"the files of a build are at most {self._most:,} bytes")

    def _unpack(self, files_hash: str, archive: IO[bytes]) -> None:
        archive.seek(0)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".") as fresh:
            top = Path(fresh, "files")
            top.mkdir()
            try:
                with tarfile.open(fileobj=archive, tarinfo=WholeTar) as tar:
                    for count, member in enumerate(tar):
                        if count >= MAX_MEMBERS:
                            raise RpcError("resource_exhausted", f"an upload has at most {MAX_MEMBERS:,} files")
                        self._check(member.size)
                        self._bytes += self._extract(tar, member, top)
            except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                raise RpcError("invalid_argument", f"the upload is no tar archive: {error}") from None
            if files_hash not in self:
                Path(fresh, "files").rename(self.folder / files_hash)

    def _extract(self, tar: tarfile.TarFile, member: tarfile.TarInfo, top: Path) -> int:
        """Write a member below a folder, through no link; what is neither file, folder nor link is left out.

        Returns:
            The bytes that it takes.
        """
        path = _below(top, member.name)
        if path == top:
            return 0
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            path.mkdir(exist_ok=True)
            path.chmod(member.mode & 0o7777 | 0o700)
            return 0
        if path.is_symlink() or path.is_file():
            path.unlink()
        if member.issym():
            path.symlink_to(member.linkname)
        elif member.islnk():
            if not (target := _below(top, member.linkname)).is_file():
                raise RpcError("invalid_argument", f"{member.name[:200]!r} is a link to what isn't there")
            shutil.copy2(target, path, follow_symlinks=False)
            return path.lstat().st_size
        elif member.isreg():
            source = tar.extractfile(member)
            assert source is not None
            with path.open("xb") as file:
                shutil.copyfileobj(source, file, _COPY_BYTES)
            path.chmod(member.mode & 0o7777 | 0o600)
            return member.size
        return 0

    def remove(self) -> None:
        """Forget the files."""
        self.removed = True
        with contextlib.suppress(OSError):
            shutil.rmtree(self.folder)


def _below(top: Path, name: str) -> Path:
    """The place of a member.

    Raises:
        RpcError: it leads out of the folder, or through a link.
    """
    inside = posixpath.normpath(name)
    if inside.startswith(("/", "..")) or "\0" in name:
        raise RpcError("invalid_argument", f"{name[:200]!r} leads out of the upload")
    path = top / inside
    if any(above.is_symlink() for above in path.parents if above.is_relative_to(top)):
        raise RpcError("invalid_argument", f"{name[:200]!r} leads through a link of the upload")
    return path
