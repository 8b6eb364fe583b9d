"""Gets an image from its registry, and from nowhere else. A program of its own, without site-packages.

    fetch FOLDER < ORDERS

The first line on stdin is JSON: the arguments of `Registry`. FOLDER gets `manifest.json`, this machine's, and the
configuration, named by its digest; then a line of JSON is written. Each further line on stdin names a layer by its
`digest` and `size` and a descriptor, `to`, which the packed layer is written to, several at once. Now and then a line
is written: `bytes`, how many of all came. For exit codes see `untrusted.program`.

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
        self._folder.joinpath("manifest.json").write_bytes(data)
        self._folder.joinpath(digest).write_bytes(self._registry.small(digest))

    def _located(self) -> tuple[bytes, dict[str, Any]]:
        reference = self._registry.reference
        for _ in range(MAX_DEPTH):
            data = self._registry.manifest(reference)
            manifest = parse(data, "its manifest")
            if not is_index(manifest):
                return data, manifest
            reference = f"sha256:{chosen(objects(manifest, 'manifests'))}"
        raise ValueError(f"more than {MAX_DEPTH} indices, each in another")

    def layer(self, digest: str, size: int, to: int) -> None:
        """Get a layer; what goes wrong ends the program."""

        def take(piece: bytes) -> bool:
            left = memoryview(piece)
            with contextlib.suppress(BrokenPipeError):  # who unpacks it has refused it, and says why
                while left:
                    left = left[os.write(to, left) :]
            self._report(len(piece))
            return not left

        try:
            self._registry.blob(digest, size, take)
        except ImageRefused as error:
            print(error, file=sys.stderr, flush=True)
        except Exception:
            traceback.print_exc()
        else:
            self._report(0, at_once=True)
            return
        os._exit(1)

    def _report(self, count: int, *, at_once: bool = False) -> None:
        with self._lock:
            self._came += count
            now = time.monotonic()
            if self._came > self._reported and (at_once or now - self._reported_at > REPORT_S):
                self._reported, self._reported_at = self._came, now
                print(json.dumps({"bytes": self._came}), flush=True)


def main() -> int:
    """The program."""
    from atropos.images.registry import Registry

    (folder,) = sys.argv[1:]

    def fetch() -> None:
        fetching = Fetch(Registry(**json.loads(sys.stdin.readline())), Path(folder))
        fetching.describe()
        print("{}", flush=True)
        for line in sys.stdin:
            threading.Thread(target=fetching.layer, kwargs=json.loads(line), daemon=True).start()

    return program(fetch)
