"""Where hooks verify: in a view of the trajectory's slot, or in the slot itself.

Files that set-up hooks made must be part of a view's root, so they are settled before the agent starts. Programs that
the hooks left running continue.
"""

from __future__ import annotations

from atropos.envs.config import SandboxEnvConfig
from atropos.envs.running.rollout import VerifierError
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.elsewhere import PACKAGES, bring
from atropos.tasks.verifier.home import home_of, may_be_shown
from atropos.tasks.verifier.surroundings import hook_profile, program_folders
from atropos.tasks.verifier.texts import named_folders
from atropos.tools import ToolExecutor


async def settle(executor: ToolExecutor, trajectory_id: str, config: SandboxEnvConfig) -> None:
    """Make the files of set-up part of a view's root.

    Raises:
        SandboxError: the slot was lost, or its container keeps no more snapshots (`max_snapshots`, `max_snapshot_mib`).
    """
    if config.verifier_mode == "view" and executor.has_slot(trajectory_id):
        slot = await executor.slot(trajectory_id)
        await slot.settle()


async def begin(executor: ToolExecutor, trajectory_id: str, config: SandboxEnvConfig, prompt: str) -> None:
    """Switch later calls to where the agent's work is verified; a view also shows top-level folders named in `prompt`.

    Raises:
        SandboxError: the slot was lost.
        VerifierError: a repository of the agent's can't be shown.
    """
    if not executor.has_slot(trajectory_id):
        return
    in_view = config.verifier_mode == "view"
    if config.verifier_quiesce or not in_view:
        slot = await executor.slot(trajectory_id)
        await slot.quiesce()
    if in_view:
        slot = await executor.slot(trajectory_id)
        programs = program_folders(slot.profile.env)
        # Before the view is made: what lies elsewhere must be in a folder that it shows.
        await bring(slot, config.verifier_folders, programs)
        optional = [*named_folders(prompt), PACKAGES]
        home = home_of(slot.profile)
        shown = await executor.view(
            trajectory_id,
            config.verifier_folders,
            optional=optional,
            programs=programs,
            home=home if may_be_shown(home, config.verifier_folders) else None,
        )
        try:
            slot.profile = await hook_profile(slot, shown, prompt)
        except VerifierFailed as error:
            raise VerifierError(str(error)) from error
