"""Cells for volumes on disk, where the disk can be limited: file systems made ahead, as large as a volume asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter

from atropos.aio import outlive
from atropos.config import ServerConfig
from atropos.errors import SandboxError
from atropos.sandbox.boot.root_phase import Entered
from atropos.sandbox.linux import disks

log = logging.getLogger(__name__)
CELL_DEADLINE_S = 20.0
"""Longest that a start waits for a cell that is being emptied, in seconds."""


class DiskCells:
    """The cells, those that volumes are in and the free ones.

    Attributes:
        mib: files that fit into all together; without file systems of their own, as if each slot had the largest.
        max_layers: how many layers have a cell; None: no bound.
    """

    def __init__(self, config: ServerConfig, entered: Entered) -> None:
        self.mib = config.slots * config.place_mib
        self._entered = entered
        self._free: list[str] = []
        self._freed = asyncio.Event()
        self._sizes: Counter[str] = Counter()
        """What is reserved on the disk for each, in MiB; a free one keeps it until another needs the room."""
        self._resizing = asyncio.Lock()
        self._volumes: Counter[str] = Counter()
        """How many are in each cell."""
        self.max_layers: int | None = None
        if entered.cells is not None and (plan := disks.CellPlan.of(config)) is not None:
            self.max_layers = plan.layers
            self.mib = entered.cells_mib
            # Reversed, as the last one is taken first: low numbers are used most.
            self._free.extend(f"{entered.cells}/{number}" for number in reversed(range(len(entered.images))))

    async def acquire(self, unique: str, mib: int, *, probe: bool = False, beside: str | None = None) -> str | None:
        """A new folder for a volume's files; None: none are on disk. Waits for room that is being emptied.

        Args:
            unique: its name.
            mib: how much the volume may hold.
            probe: whether it is the probe's.
            beside: such a folder of a layer, whose cell it shares.

        Raises:
            SandboxError: no room came free, or the disk has less than it had at the start.
        """
        entered = self._entered
        if entered.disk is None:
            return None
        if entered.cells is None:
            return f"{entered.disk}/{unique}"
        if probe:
            return f"{entered.cells}/{disks.PROBE}/{unique}"
        # A lease goes on in its snapshot's cell: it needs no room that it didn't have (decision 25).
        cell = await self._free_cell(mib) if beside is None else os.path.dirname(beside)
        self._volumes[cell] += 1
        return f"{cell}/{unique}"

    async def _free_cell(self, mib: int) -> str:
        try:
            async with asyncio.timeout(CELL_DEADLINE_S):
                while not self._free or mib > self._room + sum(self._sizes[each] for each in self._free):
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise SandboxError(
                f"files on disk: no room for {mib} MiB became free within {CELL_DEADLINE_S:g} s"
            ) from None
        # last in, first out, one of this size before all: fewer cells take room on the disk
        cell = next((each for each in reversed(self._free) if self._sizes[each] == mib), self._free[-1])
        self._free.remove(cell)
        if self._sizes[cell] != mib:
            # Reserved at once, before the first await: another lease must not count on the same room.
            self._sizes[cell] = mib
            try:
                # A cell that is half resized must be neither used nor given up: the work ends even where the lease is
                # cancelled.
                await outlive(self._resize(cell, mib, self._take_from_free()))
            except BaseException:
                self._put_back(cell)
                raise
        return cell

    @property
    def _room(self) -> int:
        """What is reserved for no cell."""
        return self.mib - self._sizes.total()

    def _take_from_free(self) -> dict[str, int]:
        """The free cells that give up theirs, so that all fit, and how much; they are not free until they have."""
        donors: dict[str, int] = {}
        while self._room < 0:
            cell = next(each for each in self._free if self._sizes[each])
            self._free.remove(cell)
            donors[cell] = self._sizes.pop(cell)
        return donors

    async def _resize(self, cell: str, mib: int, donors: dict[str, int]) -> None:
        """Give a cell another size, once those that give up theirs have done so: `donors`, which are free then."""

        def resize(cell: str, mib: int) -> None:
            disks.resize(self._entered.images[int(os.path.basename(cell))], cell, mib)

        async with self._resizing:  # what one gives up is the disk's before the next one takes it
            unreleased = dict(donors)
            try:
                for each in donors:
                    await asyncio.to_thread(resize, each, 0)
                    del unreleased[each]
                await asyncio.to_thread(resize, cell, mib)
            except OSError as error:
                # Donors that were not reached still have their blocks on the disk.
                self._sizes.update(unreleased)
                self._sizes[cell] = 0
                with contextlib.suppress(OSError):
                    await asyncio.to_thread(resize, cell, 0)
                raise SandboxError(f"files on disk: no room for {mib} MiB more ({error.strerror})") from error
            finally:
                self._put_back(*donors)

    def _put_back(self, *cells: str) -> None:
        self._free.extend(cells)
        self._freed.set()

    def release(self, disk: str | None) -> None:
        """Free the cell of a removed volume for reuse, if it was the last one and nothing is left."""
        if disk is None or self._entered.cells is None:
            return
        cell = os.path.dirname(disk)
        if os.path.basename(cell) == disks.PROBE:
            return
        self._volumes[cell] -= 1
        if self._volumes[cell]:
            return
        # Only an empty cell is used again: what could not be removed would be in the next lease's files.
        names = set(os.listdir(cell)) - {disks.BALLOON}
        if names:
            log.error("%s could not be emptied and is not used again: %s", cell, sorted(names)[:3])
        else:
            self._put_back(cell)
