"""Where hooks verify: in a view of the trajectory's slot, or in the slot itself.

What set-up hooks made must be part of a view's root, so it is settled before the agent works. That ends programs; where
a set-up hook left some running, or no more can be settled, the trajectory is verified in its own slot, with a warning.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from atropos.errors import NotSupported, PoolFull

if TYPE_CHECKING:
    from atropos.envs.config import SandboxEnvConfig
    from atropos.slots import Slot
    from atropos.tools import ToolExecutor

_log = logging.getLogger(__name__)
_ANYTHING_RUNS = "kill -0 -1"


class Verification:
    """Verification of one trajectory's work.

    Args:
        executor: holds the trajectory's slot.
        trajectory_id: whose slot it is.
        config: the env's settings.
    """

    def __init__(self, executor: ToolExecutor, trajectory_id: str, config: SandboxEnvConfig) -> None:
        self._executor = executor
        self._trajectory = trajectory_id
        self._config = config
        self._view = config.verifier_mode == "view"
        self._keeps_programs = False

    async def settle(self) -> None:
        """Set-up is over: make what it left part of a view's root.

        Raises:
            SandboxError: the slot was lost.
        """
        if not self._view or not self._executor.holds(self._trajectory):
            return None
        slot: Slot = await self._executor.slot(self._trajectory)
        reason = "set-up left programs running, which settling would end"
        if (await slot.exec(_ANYTHING_RUNS, timeout_s=10)).exit_code != 0:
            try:
                return await slot.settle()
            except (NotSupported, PoolFull) as error:
                reason = str(error)
        self._view, self._keeps_programs = False, True
        how = "after its programs have ended" if self._config.verifier_quiesce else "beside them (see verifier_quiesce)"
        _log.warning("%s is verified in its agent's own slot, %s: %s", self._trajectory, how, reason)
        return None

    async def open(self) -> None:
        """The agent has ended: from now on calls run where its work is verified.

        Raises:
            SandboxError: the slot was lost.
        """
        if not self._executor.holds(self._trajectory):
            return
        if self._config.verifier_quiesce or not (self._view or self._keeps_programs):
            slot: Slot = await self._executor.slot(self._trajectory)
            await slot.quiesce()
        if self._view:
            await self._executor.view(self._trajectory, self._config.verifier_folders)
