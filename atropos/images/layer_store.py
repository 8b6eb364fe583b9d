"""The layers of one host: each once and whole, shared read-only by all sandbox servers that use the folder.

    layers/ID/        files/, as overlay keeps them, and `bytes`, how many those are; there from the moment in which
                      it is whole. Until the disk has it, the id of this boot stands there, too
    work/RANDOM/      what is being pulled, unpacked or removed; locked as long as that goes on, and removed by whoever
                      finds it unlocked
    locks/NAME        who pulls a source or unpacks a layer

A layer appears by a rename, so that a kill at any moment leaves a whole one or none. After a power cut those that the
disk may not have, which are of an earlier boot, count as damaged. One in use is locked (flock, shared) by each server
that uses it, and the lock ends with the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from pathlib import Path

from atropos.aio import Tasks
from atropos.config import ImageStoreSettings
from atropos.errors import ImageUnavailable
from atropos.images.locks import is_still, locked, try_lock
from atropos.images.programs import run, write_whole
from atropos.trees import remove_tree

CLAIM = "claim"
"""File of a work folder: how many bytes its layers will take, in digits."""
BYTES = "bytes"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
FORMER = "trees"
"""Where earlier versions kept images."""
LET_GO_S = 12.0
"""How long a layer stays after it was made, asked for or in use, whatever room is needed: until its lease, or the next
one, begins. A little more than a server takes to let go of an image that nothing stands on."""
ROOM_POLL_S = 0.5
SYNC_AFTER_S = 1.0
"""Pause before what was pulled is written to the disk: it is done once for all layers of an image, and beside none."""


class LayerStore:
    """The folder of layers, as one sandbox server uses it.

    Attributes:
        dropped: how many layers it has removed.
    """

    def __init__(self, settings: ImageStoreSettings, root: Path) -> None:
        self._settings = settings
        self.root = root
        self.quota = settings.quota_mib << 20
        self.dropped = 0
        # One lock for all uses: flock belongs to the open file (flock(2)), so each further open would need one of its
        # own.
        self._held: dict[str, tuple[int, int]] = {}
        """Of layers in use: the descriptor that locks it, and how many use it."""
        self._boot = BOOT_ID.read_text(encoding="ascii").strip()
        self._tasks = Tasks(repr(self))
        self._syncing = asyncio.Lock()
        self._written = self._on_disk = 0
        """How often something was to be on the disk, and how many of these times it is."""
        for name in ("layers", "work", "locks"):
            root.joinpath(name).mkdir(exist_ok=True)

    def __repr__(self) -> str:
        return f"<LayerStore {self.root}: {len(self._held)} layers in use>"

    # ------------------------------------------------------------------------------------------------------------ using

    def files(self, layer: str) -> str:
        """The folder that overlay stacks."""
        return f"{self.root}/layers/{layer}/files"

    def has(self, layers: Iterable[str]) -> bool:
        """Whether all of these are here."""
        return all(layer in self._held or self.size(layer) is not None for layer in layers)

    def hold(self, layer: str) -> bool:
        """Use a layer until `release`, so that nobody removes it; False: it is not here."""
        fd, uses = self._held.get(layer, (-1, 0))
        if not uses:
            path = self._path(layer)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                return False
            # Between open and lock another server may have renamed it away to remove it: then the lock is on what has
            # no name.
            if not (try_lock(fd, shared=True) and is_still(path, fd) and self.size(layer) is not None):
                os.close(fd)
                return False
        self._held[layer] = fd, uses + 1
        return True

    def release(self, layer: str) -> None:
        """Undo one `hold`."""
        fd, uses = self._held.pop(layer, (-1, 0))
        if uses > 1:
            self._held[layer] = fd, uses - 1
        elif uses:
            # It was in use until now. The mark comes before the lock ends, as after it another server may remove it at
            # once.
            self.touch([layer])
            os.close(fd)

    def touch(self, layers: Iterable[str]) -> None:
        """Mark layers as those used last.

        Of a stack, topmost first: what is above makes room before what it stands on.
        """
        for layer in layers:
            if layer not in self._held:
                now = time.time_ns()  # the kernel's own clock for this stands still for milliseconds
                # It may just have been removed, or belong to another user's server.
                with contextlib.suppress(OSError):
                    os.utime(self._path(layer), ns=(now, now))

    def size(self, layer: str) -> int | None:
        """Bytes of a layer; None: it is not here, or damaged."""
        try:
            size, _, boot = (self._path(layer) / BYTES).read_text(encoding="ascii").partition(" ")
            # A layer that names an earlier boot was not synced before that ended: the name may be on the disk, and its
            # files empty.
            return int(size) if boot in {"", self._boot} else None
        except (OSError, ValueError):
            return None

    def _path(self, layer: str) -> Path:
        return self.root / "layers" / layer

    # ----------------------------------------------------------------------------------------------------------- making

    async def put(self, place: Path, layer: str, size: int, what: str, *, lasting: bool) -> None:
        """Make a folder's content a layer, and hold it; if a layer of this id exists, hold that one instead.

        Args:
            place: the folder, with `files`.
            layer: its id.
            size: its bytes.
            what: what it is for, in errors.
            lasting: whether it survives a power cut from now on; else once the disk has it, for which nobody waits.
        """
        # Two images with the same layer may unpack it at once, as each waits for its own chain's lock alone.
        if self.hold(layer):
            return
        if lasting:
            # A file system may write a rename before the data of what is renamed.
            await self._sync(what)  # before its name leads there, whenever the power fails
        (place / BYTES).write_text(str(size) if lasting else f"{size} {self._boot}", encoding="ascii")
        # By which `_confirm` knows the layer again: meanwhile it may have made room, and been unpacked anew.
        inode = place.stat().st_ino
        # A loop, as another server may be first with the rename, and its layer may be damaged, or be removed again.
        while not self.hold(layer):
            await asyncio.to_thread(self._drop, layer)  # it is damaged
            try:
                os.rename(place, self._path(layer))
            except OSError as error:  # another server was first
                if error.errno not in {errno.EEXIST, errno.ENOTEMPTY}:
                    raise
        if not lasting:
            self._tasks.spawn(self._confirm(layer, size, inode, what), f"sync of layer {layer[:12]}")

    async def _confirm(self, layer: str, size: int, inode: int, what: str) -> None:
        """Note of a layer that the disk has it, once it does."""
        await asyncio.sleep(SYNC_AFTER_S)
        await self._sync(what)
        with contextlib.suppress(FileNotFoundError):  # it made room
            fd = os.open(self._path(layer), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if try_lock(fd, shared=True) and os.fstat(fd).st_ino == inode:  # it stays until this is done
                    write_whole(Path(f"/proc/self/fd/{fd}", BYTES), str(size).encode())
            finally:
                os.close(fd)

    async def aclose(self) -> None:
        """Wait for the disk no more."""
        await self._tasks.cancel()

    async def _sync(self, what: str) -> None:
        """Have the disk hold what was written until now; those who ask while it writes share the next time."""
        self._written += 1
        asked = self._written
        # syncfs(2) writes the whole file system, so that one call does for all who asked before it began.
        async with self._syncing:
            if self._on_disk < asked:
                # Read before the call: what is written while it runs may not be part of it.
                written = self._written
                command, deadline_s = ["sync", "-f", str(self.root)], self._settings.unpack_timeout_s
                await run(command, what, folder=self.root, deadline_s=deadline_s)
                self._on_disk = written

    def locked(
        self, name: str, waiting: Callable[[], None] = lambda: None
    ) -> contextlib.AbstractAsyncContextManager[None]:
        """One holder on this host at a time."""
        return locked(self.root / "locks" / name, waiting)

    @contextlib.asynccontextmanager
    async def work(self) -> AsyncGenerator[Path]:
        """A folder for what is being made."""
        await asyncio.to_thread(self._sweep)
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        lock, work = self.root / "locks" / name, self.root / "work" / name
        lock.mkdir()
        fd = os.open(lock, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # Made and locked under locks/, where no sweep looks; made in work/, it would stand there unlocked for a moment.
        fcntl.flock(fd, fcntl.LOCK_EX)
        try:
            os.rename(lock, work)  # locked by now: what stands there unlocked is removed
            yield work
        finally:
            # A cancelled pull must not leave gigabytes behind, nor the lock open.
            await asyncio.shield(asyncio.to_thread(_remove_locked, work, fd))

    def _sweep(self) -> None:
        """Remove what killed servers and earlier versions left behind. Blocking."""
        for path in (*self.root.glob("work/*"), *self.root.glob(f"{FORMER}/*")):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # just removed; a file of earlier versions
                fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                if try_lock(fd):
                    _remove_locked(path, fd)
                else:
                    os.close(fd)

    # ------------------------------------------------------------------------------------------------------------- room

    async def claim(self, wanted: int, work: Path) -> int:
        """Make room for layers. Until the work folder is removed or claims anew, it counts as used for all others.

        Waits for the room of layers that are being made, and of those that a server is about to let go.

        Returns:
            Bytes that may be added; less than `wanted` when layers in use take the rest.

        Raises:
            ImageUnavailable: these leave no room at all.
        """
        # A stack that is flattened claims a second time. What it first claimed for is in the store by now, and would
        # count twice; and this would wait for its own claim to end.
        (work / CLAIM).unlink(missing_ok=True)
        end = time.monotonic() + 2 * LET_GO_S  # one is let go, and then stays for a while
        while True:
            # Two servers that measured at once would both give away the same room.
            async with self.locked("room"):
                await asyncio.to_thread(self._sweep)  # what killed servers claimed
                room = await asyncio.to_thread(self.make_room, wanted)
                # Less than wanted is given only when nothing is about to come free: `wanted` is an estimate
                # (UNPACKED_RATIO), and may do.
                if room >= wanted or (time.monotonic() >= end and not self._claimed()):
                    if room <= 0:
                        quota_mib = self._settings.quota_mib
                        raise ImageUnavailable(
                            f"the image store is full: {quota_mib - (room >> 20)} of {quota_mib} MiB are in use"
                        )
                    # Within the work folder, so that a killed server's claim goes with its folder.
                    (work / CLAIM).write_text(str(min(wanted, room)), encoding="utf-8")
                    return room
            await asyncio.sleep(ROOM_POLL_S)

    def _claimed(self) -> int:
        """Bytes that are being unpacked or kept."""
        claimed = 0
        for claim in self.root.glob(f"work/*/{CLAIM}"):
            with contextlib.suppress(FileNotFoundError, ValueError):  # just removed; just made
                claimed += int(claim.read_text(encoding="utf-8"))
        return claimed

    def make_room(self, wanted: int) -> int:
        """Remove layers that nobody uses, the one used longest ago first, until `wanted` bytes fit into quota and disk.

        Those used within `LET_GO_S` stay.

        Returns:
            Bytes that may be added; less than `wanted`, or below zero, when layers in use, and those being made, take
            the rest.
        """
        used_at = self._used_at()
        sizes: dict[str, int] = {}
        for layer in sorted(used_at, key=lambda each: used_at[each]):
            if (size := self.size(layer)) is not None:
                sizes[layer] = size
            else:  # nobody could use, count or replace it
                self._drop(layer)
        # Claims in full, although a part of them may be on the disk already: the error is on the safe side, and short.
        claimed = self._claimed()
        used = sum(sizes.values()) + claimed
        # The quota is not all: others write to the same disk.
        free = shutil.disk_usage(self.root).free - claimed
        for layer, size in sizes.items():
            fits = used + wanted <= self.quota and wanted <= free
            # Sorted by time: whatever follows was used later still.
            if fits or used_at[layer] > time.time_ns() - LET_GO_S * 1e9:
                break
            if self._drop(layer):
                used -= size
                free += size
        return self.quota - used

    def _drop(self, layer: str) -> bool:
        """Remove one layer if no server uses it."""
        path = self._path(layer)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return True
        # Every use holds a shared lock, so the exclusive one says that nobody uses it.
        if not (try_lock(fd) and is_still(path, fd)):
            os.close(fd)
            return False
        # A rename first: a layer that is removed file by file would be there in part, and could be held.
        removed = self.root / "work" / f"removed-{layer[:12]}-{os.urandom(4).hex()}"
        os.rename(path, removed)
        self.dropped += 1
        _remove_locked(removed, fd)
        return True

    def _used_at(self) -> dict[str, int]:
        """When each layer was used last, in nanoseconds since the epoch."""
        times: dict[str, int] = {}
        for path in self.root.joinpath("layers").iterdir():
            with contextlib.suppress(FileNotFoundError):  # just removed
                times[path.name] = path.stat().st_mtime_ns
        return times


def _remove_locked(folder: Path, fd: int) -> None:
    """Remove a folder that `fd` locks, which keeps others from removing it at the same time."""
    try:
        remove_tree(str(folder))  # other ways recurse
    finally:
        os.close(fd)
