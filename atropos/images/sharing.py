"""Images from one host to another: an image's configuration, and the tars of layers, made again as they were.

    a line of JSON       `config`: how many bytes it has; `layers`: the digest (diff id) and size of each tar
    the configuration
    the tars             lowest first

Whoever gets them checks all: the configuration's digest is the image's id, and it names the digests of the layers.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import hashlib
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

from atropos.errors import ImageUnavailable
from atropos.images import repack
from atropos.images.layer_store import LayerStore
from atropos.images.layout import PackedLayer
from atropos.images.manifests import MAX_JSON_BYTES
from atropos.images.programs import module_command, streamed
from atropos.images.stacking import names
from atropos.images.tar_record import tar_size
from atropos.images.unpack import RECORD


def lacking(store: LayerStore, diff_ids: Sequence[str]) -> tuple[int, ...]:
    """Which layers of an image, lowest first, are not here; the others are about to be used."""
    missing: list[int] = []
    for index in range(len(diff_ids)):
        if (layer := _here(store, diff_ids[: index + 1])) is None:
            missing.append(index)
        else:
            store.touch([layer])
    return tuple(missing)


def _here(store: LayerStore, diff_ids: Sequence[str]) -> str | None:
    """The id of the last of these layers, which lie on each other, where it is here."""
    return next((layer for layer in names(diff_ids) if store.has([layer])), None)


@contextlib.asynccontextmanager
async def given(
    store: LayerStore, config: bytes, diff_ids: Sequence[str], wanted: Sequence[int], what: str
) -> AsyncGenerator[AsyncIterator[bytes]]:
    """An image for another host.

    Args:
        store: the layers that are here.
        config: the image's configuration.
        diff_ids: its layers, lowest first.
        wanted: which of them the other host lacks.
        what: what is done, for errors.

    Raises:
        ImageUnavailable: a layer is not here, or can't be made again.
    """
    with contextlib.ExitStack() as held:
        layers: list[tuple[str, int]] = []
        folders: list[Path] = []
        for index in sorted(wanted):
            layer = _here(store, diff_ids[: index + 1])
            if layer is None or not store.hold(layer):
                raise ImageUnavailable(f"{what}: layer {diff_ids[index][:12]} is no longer here")
            # Held until all is sent: the other host would get a part of a tar.
            held.callback(store.release, layer)
            folder = Path(store.files(layer)).parent
            # The layer replaced one of its own files, whose first content is gone (decision 28).
            if (size := tar_size(f"{folder}/{RECORD}")) is None:
                raise ImageUnavailable(f"{what}: layer {diff_ids[index][:12]} can't be made again")
            layers.append((diff_ids[index], size))
            folders.append(folder)
        header = json.dumps({"config": len(config), "layers": layers}).encode() + b"\n"

        async def chunks() -> AsyncIterator[bytes]:
            yield header + config
            if folders:
                async with streamed(module_command(repack, *folders), what, folder=store.root) as tars:
                    async for chunk in tars:
                        yield chunk

        yield chunks()


class Arrival:
    """An image that comes from another host.

    Args:
        chunks: what comes.
        what: what is done, for errors.
    """

    def __init__(self, chunks: AsyncIterator[bytes], what: str) -> None:
        self._chunks = chunks
        self._what = what
        self._buffer = b""
        self._layers: collections.deque[tuple[str, int]] = collections.deque()
        """Those that are to come."""

    async def describe(self, image_id: str, parts: Path) -> None:
        """Get what the image is, into a folder; as `layout.read_folder` reads it.

        Raises:
            ImageUnavailable: it is another one, or none.
        """
        try:
            header = json.loads(await self._line())
            self._layers.extend((str(digest), int(size)) for digest, size in header["layers"])
            # The header is unchecked: it may not say how much memory is taken.
            config = b"".join([piece async for piece in self._bytes(min(int(header["config"]), MAX_JSON_BYTES))])
            digests = json.loads(config)["rootfs"]["diff_ids"]
        except (ValueError, LookupError, TypeError) as error:
            raise ImageUnavailable(f"{self._what}: not an image: {error!r:.200}") from None
        if hashlib.sha256(config).hexdigest() != image_id:
            raise ImageUnavailable(f"{self._what}: its configuration is not what its digest says")
        # Those that are not sent are here already, and their size is asked for by nobody.
        sizes = dict(self._layers)
        (parts / image_id).write_bytes(config)
        layers = [{"digest": each, "size": sizes.get(str(each).removeprefix("sha256:"), 0)} for each in digests]
        manifest = {"config": {"digest": f"sha256:{image_id}"}, "layers": layers}
        (parts / "manifest.json").write_text(json.dumps(manifest), encoding="ascii")

    async def bring(self, layer: PackedLayer, to: int) -> None:
        """Write a layer to a descriptor; what came before it is left out.

        Raises:
            ImageUnavailable: it is not among those that come, or what came broke off.
        """
        # a pipe of its own, which the program that asks registries doesn't find changed
        pipe = os.open(f"/proc/self/fd/{to}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while self._layers:
                diff_id, size = self._layers.popleft()
                async for piece in self._bytes(size):
                    if diff_id == layer.diff_id:
                        await _write(pipe, piece)
                if diff_id == layer.diff_id:
                    return
        finally:
            os.close(pipe)
        raise ImageUnavailable(f"{self._what}: layer {layer.diff_id[:12]} was not sent")

    async def _line(self) -> bytes:
        line = b""
        # Bounded, as the other end may never send a newline.
        while b"\n" not in line and len(line) <= MAX_JSON_BYTES:
            line += await self._some(MAX_JSON_BYTES)
        line, _, self._buffer = line.partition(b"\n")
        return line

    async def _bytes(self, size: int) -> AsyncIterator[bytes]:
        while size:
            piece = await self._some(size)
            size -= len(piece)
            yield piece

    async def _some(self, most: int) -> bytes:
        """The next bytes, as many as are there."""
        try:
            while not self._buffer:
                self._buffer = await anext(self._chunks)
        except (OSError, StopAsyncIteration) as error:
            raise ImageUnavailable(f"{self._what}: it did not arrive whole ({error!r})") from error
        some, self._buffer = self._buffer[:most], self._buffer[most:]
        return some


async def _write(pipe: int, data: bytes) -> None:
    rest = memoryview(data)
    with contextlib.suppress(BrokenPipeError):  # who reads it has ended, and said why
        while rest:
            try:
                rest = rest[os.write(pipe, rest) :]
            except BlockingIOError:
                # asyncio's own pipe transport would set O_NONBLOCK for good, and close the descriptor at the end.
                await _writable(pipe)


async def _writable(pipe: int) -> None:
    """Wait until a pipe takes more."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_writer(pipe, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_writer(pipe)
