"""Gets images from their registries, and from nowhere else. A program of its own, without site-packages.

    fetch < ORDERS

An order is a line of JSON. One begins an image: `registry`, the arguments of `Registry`, and a `folder`, which gets
`manifest.json`, this machine's, and the configuration, named by its digest; then `{}` is written. Those that follow
name its layers, each by `digest` and `size` and a descriptor, `to`, which the packed layer is written to, several at
once. Now and then a line is written: `bytes`, how many of all came. The next image begins when all layers have come.
For exit codes see `untrusted.program`.

What knows the credentials unpacks nothing. And a sandbox server's own process, which imports this module, has no TLS
(`sandbox/__main__.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atropos.images.manifests import MAX_DEPTH, chosen, config_digest, is_index, objects, parse
from atropos.images.untrusted import ImageRefused, program

if TYPE_CHECKING:
    from atropos.images.registry import Registry

# Often enough for a progress bar; a line for each piece would wake the server thousands of times a second.
REPORT_S = 0.2


class Fetch:
    """An image that is being got.

    Args:
        registry: where from.
        folder: what `layout.read_folder` reads.
    """

    def __init__(self, registry: Registry, folder: Path) -> None:
        self._registry = registry
        self._folder = folder
        self._lock = threading.Lock()
        self._came = self._reported = 0
        self._reported_at = 0.0
        self._ended = False

    def end(self) -> None:
        """All layers have come: say nothing more of them."""
        with self._lock:
            self._ended = True

    def describe(self) -> None:
        """Get what the image is.

        Raises:
            ImageRefused: there is none for this machine.
        """
        try:
            data, manifest = self._located()
            digest = config_digest(manifest)
        except ValueError as error:
            raise ImageRefused(f"not an image: {error}") from None
        # The bytes as they came, not JSON written anew: a digest may be computed of them.
        self._folder.joinpath("manifest.json").write_bytes(data)
        self._folder.joinpath(digest).write_bytes(self._registry.small(digest))

    def _located(self) -> tuple[bytes, dict[str, Any]]:
        reference = self._registry.reference
        for _ in range(MAX_DEPTH):
            data = self._registry.manifest(reference)
            manifest = parse(data, "its manifest")
            if not is_index(manifest):
                return data, manifest
            # By digest from here on, so that a tag that moves meanwhile changes nothing.
            reference = f"sha256:{chosen(objects(manifest, 'manifests'))}"
        raise ValueError(f"more than {MAX_DEPTH} indices, each in another")

    def layer(self, digest: str, size: int, to: int) -> None:
        """Get a layer; what goes wrong ends the program."""

        def take(piece: bytes) -> bool:
            # A view: a write to a pipe may take a part of it (pipe(7)), and slices of bytes would be copies.
            rest = memoryview(piece)
            with contextlib.suppress(BrokenPipeError):  # who unpacks it has refused it, and says why
                while rest:
                    rest = rest[os.write(to, rest) :]
            self._report(len(piece))
            # Something is left only where the reader has closed the pipe: no more is asked of the registry.
            return not rest

        try:
            self._registry.blob(digest, size, take)
        except ImageRefused as error:
            print(error, file=sys.stderr, flush=True)
        except Exception:
            traceback.print_exc()
        else:
            self._report(0, at_once=True)
            return
        # `sys.exit` ends a thread alone. The server reads the reason from stderr, and replaces all programs of the
        # image.
        if not self._ended:
            os._exit(1)

    def _report(self, count: int, *, at_once: bool = False) -> None:
        with self._lock:
            self._came += count
            now = time.monotonic()
            # After `end`, a line would be taken for one of the next image.
            if self._ended or self._came == self._reported:
                return
            if at_once or now - self._reported_at > REPORT_S:
                self._reported, self._reported_at = self._came, now
                print(json.dumps({"bytes": self._came}), flush=True)


def main() -> int:
    """The program."""
    from atropos.images.registry import Registry

    def fetch() -> None:
        fetching: Fetch | None = None
        for line in sys.stdin:
            order = json.loads(line)
            if "folder" not in order:
                assert fetching is not None
                # Layers come at once, each over a connection of its own; at most as many as there are programs that
                # unpack. Daemons, so that the end of stdin ends all of them.
                threading.Thread(target=fetching.layer, kwargs=order, daemon=True).start()
                continue
            if fetching is not None:
                fetching.end()
            fetching = Fetch(Registry(**order["registry"]), Path(order["folder"]))
            fetching.describe()
            print("{}", flush=True)

    return program(fetch)
