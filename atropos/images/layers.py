"""Builds layers of images, one order after the other. A program of its own, without site-packages.

    layers MAX_MEMBERS IDS < ORDERS

An order is a line of JSON, `Unpack` or `Settle`; a packed layer that is no file follows its own. For each a line of
JSON is written: what `unpack.unpack` or `settle.settle` return. For exit codes see `untrusted.program`.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from atropos.images.settle import settle
from atropos.images.unpack import unpack
from atropos.images.untrusted import pieces, program

LOWER = "lower"
"""File of a layer's place: the files of those below it. An order must fit into a pipe at once."""


@dataclass(frozen=True)
class Unpack:
    """A layer that is to be unpacked.

    Attributes:
        place: the folder for it.
        max_bytes: most that it may take there.
        diff_id: digest of the tar.
        size: bytes of the packed layer.
        file: where that is; None: on stdin.
    """

    place: str
    max_bytes: int
    diff_id: str
    size: int
    file: str | None = None

    def carry_out(self, max_members: int, ids: int) -> dict[str, object]:
        """Unpack it."""
        with contextlib.ExitStack() as opened:
            file = 0 if self.file is None else opened.enter_context(open(self.file, "rb")).fileno()
            bounds = {"max_bytes": self.max_bytes, "max_members": max_members, "ids": ids}
            return unpack(pieces(file, self.size), self.place, self.diff_id, **bounds)


@dataclass(frozen=True)
class Settle:
    """A layer that is to be settled on those below it.

    Attributes:
        place: the folder with it.
        max_bytes: most that it may take there beyond what it takes.
    """

    place: str
    max_bytes: int

    @classmethod
    def on(cls, lower: Sequence[str], place: str, max_bytes: int) -> Settle:
        """On these files, topmost first."""
        with open(f"{place}/{LOWER}", "w", encoding="utf-8", errors="surrogateescape") as file:
            json.dump(lower, file)
        return cls(place, max_bytes)

    def carry_out(self, _max_members: int, _ids: int) -> dict[str, object]:
        """Settle it."""
        with open(f"{self.place}/{LOWER}", encoding="utf-8", errors="surrogateescape") as file:
            lower = json.load(file)
        # The place becomes the layer: what it holds stays in the store.
        os.unlink(file.name)
        return settle(self.place, self.max_bytes, lower)


def line(order: Unpack | Settle) -> bytes:
    """An order as the program reads it."""
    return json.dumps(asdict(order)).encode() + b"\n"


def main() -> int:
    """The program."""
    max_members, ids = map(int, sys.argv[1:])

    def carry_out_all() -> None:
        # A read of one byte at a time, which orders of some hundred bytes can bear.
        with open(0, "rb", buffering=0) as orders:  # a buffer would hold what follows a line
            while text := orders.readline():
                order = json.loads(text)
                done = (Unpack if "diff_id" in order else Settle)(**order).carry_out(max_members, ids)
                print(json.dumps(done), flush=True)

    return program(carry_out_all)
