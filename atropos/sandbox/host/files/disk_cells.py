"""Cells for volumes on disk: file systems of one size, made ahead, where the disk can be limited."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter

from atropos.config import ServerConfig
from atropos.errors import SandboxError
from atropos.sandbox.boot.root_phase import Entered
from atropos.sandbox.linux import disks

log = logging.getLogger(__name__)
CELL_DEADLINE_S = 20.0
"""Longest that a start waits for a cell that is being emptied, in seconds."""


class DiskCells:
    """The free cells.

    Attributes:
        places: how many there are; without a file system of their own, as many as slots.
        max_layers: how many layers have a cell; None: no bound.
    """

    def __init__(self, config: ServerConfig, entered: Entered) -> None:
        self.places = config.slots
        self._entered = entered
        # last in, first out: fewer cells take room on the disk
        self._free: asyncio.LifoQueue[str] = asyncio.LifoQueue()
        self._reserved: set[str] = set()
        self._volumes: Counter[str] = Counter()
        """How many are in each cell."""
        self.max_layers: int | None = None
        if entered.cells is not None and (plan := disks.CellPlan.of(config)) is not None:
            self.max_layers = plan.layers
            self.places = len(entered.images)
            for number in reversed(range(self.places)):
                self._free.put_nowait(f"{entered.cells}/{number}")

    async def acquire(self, unique: str, *, probe: bool = False, beside: str | None = None) -> str | None:
        """A new folder for a volume's files; None: none are on disk. Waits for a cell that is being emptied.

        Args:
            unique: its name.
            probe: whether it is the probe's.
            beside: such a folder of a layer, whose cell it shares.

        Raises:
            SandboxError: no cell came free, or the disk has no room for one.
        """
        entered = self._entered
        if entered.disk is None:
            return None
        if entered.cells is None:
            return f"{entered.disk}/{unique}"
        if probe:
            return f"{entered.cells}/{disks.PROBE}/{unique}"
        cell = await self._free_cell() if beside is None else os.path.dirname(beside)
        self._volumes[cell] += 1
        return f"{cell}/{unique}"

    async def _free_cell(self) -> str:
        entered = self._entered
        try:
            async with asyncio.timeout(CELL_DEADLINE_S):
                cell = await self._free.get()
        except TimeoutError:
            raise SandboxError(f"files on disk: no cell became free within {CELL_DEADLINE_S:g} s") from None
        if cell not in self._reserved:
            image = entered.images[int(os.path.basename(cell))]
            try:
                await asyncio.to_thread(disks.reserve, image)
            except BaseException as error:
                self._free.put_nowait(cell)
                if isinstance(error, OSError):
                    mib = os.fstat(image).st_size >> 20
                    raise SandboxError(f"files on disk: no room for {mib} MiB more ({error.strerror})") from error
                raise
            self._reserved.add(cell)
        return cell

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
        names = os.listdir(cell)
        if names:
            log.error("%s could not be emptied and is not used again: %s", cell, names[:3])
        else:
            self._free.put_nowait(cell)
