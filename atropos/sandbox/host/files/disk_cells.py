"""Cells for volumes on disk: file systems of one size, made ahead, where the disk can be limited."""

from __future__ import annotations

import asyncio
import logging
import os

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
        max_layers: how many layers have a cell; None: no bound.
    """

    def __init__(self, config: ServerConfig, entered: Entered) -> None:
        self._disk_mib = config.limits.disk_mib
        self._entered = entered
        # last in, first out: fewer cells take room on the disk
        self._free: asyncio.LifoQueue[str] = asyncio.LifoQueue()
        self._reserved: set[str] = set()
        self.max_layers: int | None = None
        if entered.cells is not None:
            plan = disks.CellPlan.of(config)
            self.max_layers = plan.layers
            for number in reversed(range(plan.cells)):
                self._free.put_nowait(f"{entered.cells}/{number}")

    async def acquire(self, unique: str, *, probe: bool = False) -> str | None:
        """The folder for a volume's files; None: they are in memory. Waits for a cell that is being emptied.

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
        try:
            async with asyncio.timeout(CELL_DEADLINE_S):
                cell = await self._free.get()
        except TimeoutError:
            raise SandboxError(f"volume='disk': no cell on disk became free within {CELL_DEADLINE_S:g} s") from None
        if cell not in self._reserved:
            try:
                await asyncio.to_thread(disks.reserve, entered.images[int(os.path.basename(cell))])
            except BaseException as error:
                self._free.put_nowait(cell)
                if isinstance(error, OSError):
                    mib = self._disk_mib
                    raise SandboxError(
                        f"volume='disk': the disk has no room for {mib} MiB more ({error.strerror})"
                    ) from error
                raise
            self._reserved.add(cell)
        return f"{cell}/{unique}"

    def release(self, disk: str | None) -> None:
        """Free the cell of a removed volume for reuse, if nothing is left in it."""
        if disk is None or self._entered.cells is None:
            return
        cell = os.path.dirname(disk)
        if os.path.basename(cell) == disks.PROBE:
            return
        names = os.listdir(cell)
        if names:
            log.error("%s could not be emptied and is not used again: %s", cell, names[:3])
        else:
            self._free.put_nowait(cell)
