"""The images of one host, unpacked: each once, shared read-only by every sandbox server that uses the folder.

    names/HASH        what a source last meant: one line, the image's id; none for a built image, whose source has its id
    trees/ID/         image.json (`ImageInfo`) and rootfs/; there from the moment in which it is whole. Of a built image
                      rootfs/ is one layer, as overlay keeps it, to be stacked on its parent
    work/RANDOM/      what is being pulled, unpacked or removed, and skopeo's temporary files; locked as long as that goes
                      on, and removed by whoever finds it unlocked
    locks/NAME        who pulls a source or unpacks an image

Everything appears by a rename, once it is on the disk, so that a kill or a power cut at any moment leaves a whole image
or none. An image in use is locked
(flock, shared) by each server that uses it, and the lock ends with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images import extract, unpack
from atropos.images.layout import SCHEMA_1, PulledImage, image_info, read_folder
from atropos.images.locks import is_still, locked, try_lock
from atropos.images.manifests import MAX_DEPTH, chosen, is_index, is_plain, objects, parse
from atropos.images.programs import Skopeo, run, write_whole
from atropos.images.reference import ImageSource, check_digest
from atropos.trees import remove_tree
from atropos.wire import ImageInfo

BASE, BUILD = "atropos-base:", "atropos-build:"
MAX_MEMBERS = 2_000_000
CLAIM = "claim"
"""File of a work folder: how many bytes its image will take, in digits."""
UNPACKED_RATIO = 3
"""Bytes of an unpacked layer for one of its compressed bytes: Debian's and Python's images have 2.5 to 3."""
LET_GO_S = 12.0
"""How long an image stays after it was made, asked for or in use, whatever room is needed: until its lease, or the next one,
begins. A little more than a server takes to let go of an image that nothing stands on."""
ROOM_POLL_S = 0.5
PARALLEL = 3
"""Images that one server pulls at once: enough to fill a network, few enough that each gets on."""
_UNTAGGED = re.compile(r"(:[^:/@]+|@.*)$")
Phase = Literal["waiting", "pulling", "unpacking"]
Progress = Callable[[Phase, float | None], None]
"""Called with the phase and how much of it is done, from 0 to 1, where that is known."""


class ImageStore:
    """The folder of images, as one sandbox server uses it.

    Args:
        settings: where it is and how much it may hold.
        ids: how many ids a slot has; 1: every file belongs to root.
    """

    def __init__(self, settings: ImageStoreSettings, folder: str, ids: int) -> None:
        self._settings = settings
        self._root = Path(folder)
        self._ids = ids
        self._limit = settings.quota_mib << 20
        self._skopeo = Skopeo(settings, self._root)
        self._turns = asyncio.Semaphore(PARALLEL)
        self._held: dict[str, tuple[int, int]] = {}
        """Of images in use: the descriptor that locks it, and how many use it."""
        self._known: dict[str, ImageInfo] = {}
        for name in ("names", "trees", "work", "locks"):
            self._root.joinpath(name).mkdir(exist_ok=True)

    def __repr__(self) -> str:
        return f"<ImageStore {self._root}: {len(self._held)} images in use>"

    # ---------------------------------------------------------------------------------------------------------- asking

    def known(self, source: str) -> ImageInfo | None:
        """The image that a source last meant, if it is here; who asks is about to use it."""
        try:
            if source.startswith(BUILD):
                image_id = source.removeprefix(BUILD)
            else:
                image_id = (self._root / "names" / _hash(source)).read_text(encoding="ascii")
            chain = self._chain(check_digest(f"sha256:{image_id}"))
        except (OSError, ValueError):
            return None
        for each in chain:
            self._touch(each.id)
        return chain[0] if chain else None

    def find(self, image_id: str) -> ImageInfo | None:
        """An image by its id, if it and those below it are here."""
        return next(iter(self._chain(image_id)), None)

    def hold(self, image: ImageInfo) -> str:
        """Use an image until this server ends, so that nobody removes it. Returns its root file system's folder.

        Raises:
            ImageUnavailable: it has just been removed.
        """
        tree = self._root / "trees" / image.id
        fd, uses = self._held.get(image.id, (-1, 0))
        if not uses:
            try:
                fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError as error:
                raise ImageUnavailable(f"image {image.source}: it is no longer in the store") from error
            if not (try_lock(fd, shared=True) and is_still(tree, fd)):
                os.close(fd)
                raise ImageUnavailable(f"image {image.source}: it is no longer in the store")
        self._held[image.id] = fd, uses + 1
        self._known[image.id] = image
        self._touch(image.id)
        return str(tree / "rootfs")

    def release(self, image_id: str) -> None:
        """Undo one `hold`."""
        fd, uses = self._held.pop(image_id, (-1, 0))
        if uses > 1:
            self._held[image_id] = fd, uses - 1
        elif uses:
            self._touch(image_id)
            os.close(fd)

    def _touch(self, image_id: str) -> None:
        """Mark an image as the one used last. Called for an image before those below it, it makes room before these."""
        now = time.time_ns()  # the kernel's own clock for this stands still for milliseconds
        with contextlib.suppress(OSError):
            os.utime(self._root / "trees" / image_id, ns=(now, now))

    def chain(self, image: ImageInfo) -> list[ImageInfo]:
        """An image and its parents, topmost first; the last one has none, or is a layer on a server's base.

        Raises:
            ImageUnavailable: one of them was removed.
        """
        found = self._chain(image.id)
        if not found:
            raise ImageUnavailable(f"image {image.source}: it, or an image below it, is no longer in the store")
        return found

    # ------------------------------------------------------------------------------------------------------- preparing

    async def prepare(self, source: ImageSource, progress: Progress, archive: str | None = None) -> ImageInfo:
        """The image of a source, pulled and unpacked if it is not here yet.

        Args:
            source: where it comes from.
            progress: called with each phase.
            archive: a file with the image, where the source is one that only the client can read.

        Raises:
            ImageUnavailable: no such image, no access, a broken or hostile one, no room; the message names the phase.
        """
        name = str(source)
        async with self._locked(f"source-{_hash(name)}", progress):
            known = self.known(name)
            if known is not None:
                return known
            async with self._turns:
                progress("pulling", None)
                async with self._work() as work:
                    pulled = await self._pull(source, work, progress, archive)
                    image = await self._unpack(pulled, name, work, progress)
            write_whole(self._root / "names" / _hash(name), image.id.encode())
            return image

    async def _pull(self, source: ImageSource, work: Path, progress: Progress, archive: str | None) -> PulledImage:
        what, pulled = f"image {source}: pulling", work / "pulled"
        pulled.mkdir()
        if archive is None:
            await self._fetch(source, work, pulled, progress)
        else:
            # a part of the content's name, or that and the image's name in it
            name = source.name.partition(":")[2]
            await asyncio.to_thread(self.make_room, 0)
            await self._run_program(extract, what, source.transport, archive, name, pulled, self._limit)
        try:
            return await asyncio.to_thread(read_folder, pulled)
        except ValueError as error:
            raise ImageUnavailable(f"{what}: not an image: {error}") from error

    async def _fetch(self, source: ImageSource, work: Path, pulled: Path, progress: Progress) -> None:
        """Pull an image's parts from its registry, and from nowhere else: what a manifest's `urls` say is not followed."""
        what = f"image {source}: pulling"
        try:
            origin, text = await self._located(str(source), work)
            expected = sum(int(layer["size"]) for layer in json.loads(text)["layers"])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ImageUnavailable(f"{what}: not an image: {error}") from error
        if expected > self._limit:
            most = f"more than the store may hold ({self._settings.quota_mib} MiB)"
            raise ImageUnavailable(f"{what}: {expected >> 20} MiB, {most}")
        await asyncio.to_thread(self.make_room, expected)

        def report() -> None:
            done = sum(_size_of(path) for path in work.glob("*/*"))
            progress("pulling", min(1.0, done / expected) if expected else None)
            if done > self._limit:
                raise ImageUnavailable(f"{what}: more than {self._settings.quota_mib} MiB")

        if is_plain(text):
            # its own retries are for what fails in the middle: what can't be reached at all is told at once, by `inspect` before it
            arguments = ["copy", "--retry-times", "2", "--dest-compress", origin, f"dir:{pulled}"]
        else:  # by their digests alone, one after the other, into a folder that it names
            arguments = ["layers", "--retry-times", "2", origin]
        await self._skopeo.run(arguments, str(source), work, report, self._limit)
        for made in work.glob("layers-*"):
            pulled.rmdir()
            made.rename(pulled)

    async def _located(self, name: str, work: Path) -> tuple[str, str]:
        """Where a registry has this machine's image, by digest, and its manifest.

        Raises:
            ValueError: there is none.
        """
        origin = name
        for _ in range(MAX_DEPTH):
            text = await self._skopeo.run(["inspect", "--raw", origin], name, work)
            manifest = parse(text.encode(), "its manifest")
            if not is_index(manifest):
                if manifest.get("schemaVersion") == 1:
                    raise ValueError(SCHEMA_1)
                return f"{_UNTAGGED.sub('', name)}@sha256:{hashlib.sha256(text.encode()).hexdigest()}", text
            origin = f"{_UNTAGGED.sub('', name)}@sha256:{chosen(objects(manifest, 'manifests'))}"
        raise ValueError(f"more than {MAX_DEPTH} indices, each in another")

    async def _unpack(self, pulled: PulledImage, source: str, work: Path, progress: Progress) -> ImageInfo:
        async with self._locked(f"image-{pulled.id}", progress):
            there = self.find(pulled.id)
            if there is not None:
                return there
            progress("unpacking", None)
            what, tree = f"image {source}: unpacking", work / "tree"
            rootfs = tree / "rootfs"
            rootfs.mkdir(parents=True)
            rootfs.chmod(0o755)
            compressed = sum(_size_of(Path(path)) for path, _ in pulled.layers)
            try:
                room = await self._claim(compressed * UNPACKED_RATIO, work)
            except ImageUnavailable as error:
                raise ImageUnavailable(f"{what}: {error}") from None
            workdir = image_info(pulled, source, 0).workdir or "/"
            layers = itertools.chain(*pulled.layers)
            done = await self._run_program(unpack, what, rootfs, room, MAX_MEMBERS, self._ids, workdir, *layers)
            image = image_info(pulled, source, done["bytes"])
            await self._write_out(tree, image)
            os.rename(tree, self._root / "trees" / pulled.id)
            return image

    async def _run_program(self, module: ModuleType, what: str, *arguments: object) -> Any:
        """Run one of the programs that read what strangers sent; its result."""
        program = [sys.executable, "-I", "-S", os.path.abspath(str(module.__file__)), *map(str, arguments)]
        said = await run(program, what, folder=self._root, deadline_s=self._settings.unpack_timeout_s)
        return json.loads(said.splitlines()[-1])

    async def keep(self, image: ImageInfo, fill: Callable[[str], Awaitable[None]]) -> ImageInfo:
        """Keep a layer as a built image; under an id that is here already, the one that is here.

        Args:
            image: its id, its parent, and how many bytes the layer has.
            fill: makes the folder with the layer, as overlay keeps it.

        Raises:
            ImageUnavailable: there is no room.
        """
        async with self._locked(f"image-{image.id}", lambda _phase, _done: None), self._work() as work:
            there = self.find(image.id)
            if there is not None:
                return there
            room = await self._claim(image.bytes, work)
            if room < image.bytes:
                raise ImageUnavailable(
                    f"image {image.source}: {image.bytes >> 20} MiB, and the store has room for {room >> 20}"
                )
            tree = work / "tree"
            tree.mkdir()
            await fill(str(tree / "rootfs"))
            await self._write_out(tree, image)
            await asyncio.to_thread(self._drop, image.id)  # its parent is gone
            os.rename(tree, self._root / "trees" / image.id)
            return image

    async def _write_out(self, tree: Path, image: ImageInfo) -> None:
        """Complete an image, and have the disk hold all of it before its name leads there, whenever the power fails."""
        (tree / "image.json").write_text(image.model_dump_json(), encoding="utf-8")
        sync = ["sync", "-f", str(tree)]
        await run(sync, f"image {image.source}: writing", folder=self._root, deadline_s=self._settings.unpack_timeout_s)

    async def copy_layer(self, layer: str, target: str) -> None:
        """Copy a layer that nothing changes, whiteouts and attributes included.

        Raises:
            ImageUnavailable: the disk is full, or it takes too long.
        """
        copy = ["cp", "-a", "--preserve=all", "--sparse=auto", "--", layer, target]
        await run(copy, "keeping a built layer", folder=self._root, deadline_s=self._settings.unpack_timeout_s)

    # --------------------------------------------------------------------------------------------------------- locking

    def _locked(self, name: str, progress: Progress) -> contextlib.AbstractAsyncContextManager[None]:
        """One holder on this host at a time."""
        return locked(self._root / "locks" / name, lambda: progress("waiting", None))

    @contextlib.asynccontextmanager
    async def _work(self) -> AsyncGenerator[Path]:
        await asyncio.to_thread(self._sweep)
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        made, work = self._root / "locks" / name, self._root / "work" / name
        made.mkdir()
        fd = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            os.rename(made, work)  # locked by now: what stands there unlocked is removed
            yield work
        finally:
            await asyncio.shield(asyncio.to_thread(_remove_locked, work, fd))

    @contextlib.asynccontextmanager
    async def receiving(self, chunks: AsyncIterator[bytes]) -> AsyncGenerator[str]:
        """A file with what comes in, for `prepare`; removed afterwards.

        Raises:
            ImageUnavailable: it is larger than the store may be, or the disk is full.
        """
        size = 0
        async with self._work() as work:
            path = work / "archive.tar"
            try:
                with path.open("wb") as file:
                    async for chunk in chunks:
                        size += len(chunk)
                        if size > self._settings.quota_mib << 20:
                            raise ImageUnavailable(f"the archive is larger than {self._settings.quota_mib} MiB")
                        await asyncio.to_thread(file.write, chunk)
            except OSError as error:
                raise ImageUnavailable(f"the archive could not be kept: {error.strerror}") from error
            yield str(path)

    def _sweep(self) -> None:
        """Remove what killed servers left behind. Blocking."""
        for path in self._root.joinpath("work").iterdir():
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # just removed; a file of earlier versions
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if try_lock(fd):
                    _remove_locked(path, fd)
                else:
                    os.close(fd)

    # ------------------------------------------------------------------------------------------------------------ room

    async def _claim(self, wanted: int, work: Path) -> int:
        """Make room for an image; until its work folder is removed, what was claimed in it is taken for all other claims.

        Waits for the room of images that are being made, and of those that a server is about to let go.

        Returns:
            Bytes that may be added; less than `wanted` when images in use take the rest.

        Raises:
            ImageUnavailable: these leave no room at all.
        """
        end = time.monotonic() + 2 * LET_GO_S  # one is let go, and then stays for a while
        while True:
            async with self._locked("room", lambda _phase, _done: None):
                await asyncio.to_thread(self._sweep)  # what killed servers claimed
                room = await asyncio.to_thread(self.make_room, wanted)
                if room >= wanted or (time.monotonic() >= end and not self._claimed()):
                    if room <= 0:
                        quota_mib = self._settings.quota_mib
                        raise ImageUnavailable(
                            f"the image store is full: {quota_mib - (room >> 20)} of {quota_mib} MiB are in use"
                        )
                    (work / CLAIM).write_text(str(min(wanted, room)), encoding="utf-8")
                    return room
            await asyncio.sleep(ROOM_POLL_S)

    def _claimed(self) -> int:
        """Bytes that are being unpacked or kept."""
        claimed = 0
        for claim in self._root.glob(f"work/*/{CLAIM}"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # just removed; just made
                claimed += int(claim.read_text(encoding="utf-8"))
        return claimed

    def make_room(self, wanted: int) -> int:
        """Remove images that nobody uses, the one used longest ago first, until `wanted` bytes fit into quota and disk.

        Those used within `LET_GO_S` stay.

        Returns:
            Bytes that may be added; less than `wanted`, or below zero, when images in use, and those being unpacked, take
            the rest.
        """
        quota = self._settings.quota_mib << 20
        images: list[ImageInfo] = []
        used_at = self._used_at()
        for image_id in sorted(used_at, key=lambda each: used_at[each]):
            if (image := self._read(image_id)) is not None:
                images.append(image)
            else:  # damaged, or another version's: nobody could use, count or replace it
                self._drop(image_id)
        claimed = self._claimed()
        used = sum(image.bytes for image in images) + claimed
        free = shutil.disk_usage(self._root).free - claimed
        for image in images:
            fits = used + wanted <= quota and wanted <= free
            if fits or used_at[image.id] > time.time_ns() - LET_GO_S * 1e9:
                break
            if self._drop(image.id):
                used -= image.bytes
                free += image.bytes
        return quota - used

    def _drop(self, image_id: str) -> bool:
        """Remove one image if no server uses it."""
        tree = self._root / "trees" / image_id
        try:
            fd = os.open(tree, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return True
        if not (try_lock(fd) and is_still(tree, fd)):
            os.close(fd)
            return False
        removed = self._root / "work" / f"removed-{image_id[:12]}-{os.urandom(4).hex()}"
        os.rename(tree, removed)
        _remove_locked(removed, fd)
        return True

    def _used_at(self) -> dict[str, int]:
        """When each image was used last, in nanoseconds since the epoch."""
        found: dict[str, int] = {}
        for tree in self._root.joinpath("trees").iterdir():
            with contextlib.suppress(FileNotFoundError):  # just removed
                found[tree.name] = tree.stat().st_mtime_ns
        return found

    def _chain(self, image_id: str) -> list[ImageInfo]:
        """An image and those below it; empty where one of them is not here."""
        found: list[ImageInfo] = []
        below: str | None = image_id
        while below is not None and not below.startswith(BASE):
            image = self._read(below)
            if image is None:
                return []
            found.append(image)
            below = image.parent
        return found

    def _read(self, image_id: str) -> ImageInfo | None:
        """What is kept of an image; it never changes while the image is here."""
        if image_id in self._held:  # nobody can remove it
            return self._known[image_id]
        tree = self._root / "trees" / image_id
        if image_id in self._known and tree.is_dir():
            return self._known[image_id]
        self._known.pop(image_id, None)
        try:
            text = (tree / "image.json").read_text(encoding="utf-8")
            image = self._known[image_id] = ImageInfo.model_validate_json(text)
        except (OSError, ValueError):
            return None
        return image


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _remove_locked(folder: Path, fd: int) -> None:
    """Remove a folder that `fd` locks, which keeps others from removing it at the same time."""
    try:
        remove_tree(str(folder))  # other ways recurse
    finally:
        os.close(fd)


def _size_of(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0
