"""Where hooks verify: in a view of the trajectory's slot, or in the slot itself.

Files that set-up hooks made must be part of a view's root, so they are settled before the agent starts. Programs that the
hooks left running continue.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atropos.envs.config import SandboxEnvConfig
    from atropos.tools import ToolExecutor


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

    async def settle(self) -> None:
        """Make the files of set-up part of a view's root.

        Raises:
            SandboxError: the slot was lost, or its container keeps no more snapshots (`max_snapshots`, `max_snapshot_mib`).
        """
        if self._view and self._executor.has_slot(self._trajectory):
            slot = await self._executor.slot(self._trajectory)
            await slot.settle()

    async def open(self) -> None:
        """Switch later calls to where the agent's work is verified.

        Raises:
            SandboxError: the slot was lost.
        """
        if not self._executor.has_slot(self._trajectory):
            return
        if self._config.verifier_quiesce or not self._view:
            slot = await self._executor.slot(self._trajectory)
            await slot.quiesce()
        if self._view:
            await self._executor.view(self._trajectory, self._config.verifier_folders)
