"""Where hooks verify: in a view of the trajectory's slot, or in the slot itself.

Files that set-up hooks made must be part of a view's root, so they are settled before the agent starts. Programs that
the hooks left running continue. What a verifying hook will do, its calls say one by one, as a task's tests say it
beforehand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from atropos.envs.config import SandboxEnvConfig
from atropos.envs.running.rollout import VerifierError
from atropos.slots import Slot
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.disarming import disarm, understand
from atropos.tasks.verifier.elsewhere import PACKAGES, bring
from atropos.tasks.verifier.home import home_of, may_be_shown
from atropos.tasks.verifier.preceding import preceded
from atropos.tasks.verifier.services import wait_for_young
from atropos.tasks.verifier.surroundings import (
    BEGAN,
    Surroundings,
    Wishes,
    git_settings,
    hook_profile,
    program_folders,
)
from atropos.tasks.verifier.texts import TaskTexts, named_folders
from atropos.tools import ToolExecutor
from atropos.wire import ViewInfo

MAX_TEXT_CHARS = 32 * 1024
"""Most that is read of what one call of a hook says."""
MAX_KEPT_TEXTS, MAX_KEPT_CHARS = 32, 2000
"""Most texts of a hook's earlier calls that count for later ones, and most that one of them may have."""


class HookTexts:
    """What a verifying hook says by its calls.

    Before each, what it would run, read or write of the agent's in the place of the hook's own is taken away.

    Args:
        shown: the view that it works in.
        prompt: what the agent was asked for.
    """

    def __init__(self, shown: ViewInfo, prompt: str) -> None:
        self._shown = shown
        self._prompt = prompt
        self._wishes = Wishes.of(TaskTexts(prompt, ()))
        self._said: list[str] = []
        self._own: set[str] = set()
        self._past: set[str] = set()

    async def before(self, slot: Slot, texts: Sequence[str], own: Sequence[str] = ()) -> None:
        """Before a call: what it says, and the paths of files that the hook brings by it.

        Raises:
            VerifierError: the agent left its folders in such a state that this can't be done.
            SandboxError: the slot was lost.
        """
        self._own.update(own)
        texts = [text[:MAX_TEXT_CHARS] for text in texts]
        names = tuple(path.removeprefix("/tests/") for path in self._own if path.startswith("/tests/"))
        # As scripts of a shell: that is what most of them are.
        said = TaskTexts(self._prompt, tuple(f"#!/bin/sh\n{text}" for text in (*self._said, *texts)), names)
        self._said = [*self._said, *(text for text in texts if len(text) <= MAX_KEPT_CHARS)][-MAX_KEPT_TEXTS:]
        workdir, folders = slot.profile.workdir, self._shown.folders
        read = await asyncio.to_thread(understand, said, workdir, folders, ())
        self._own.update(read.paths)
        # What earlier calls made is the hook's own by now.
        venvs, files = (tuple(path for path in paths if path not in self._past) for paths in (read.venvs, read.files))
        self._past.update(venvs, files)
        read = replace(read, venvs=venvs, files=files, preceded=tuple(preceded(read.preceded, self._own)))
        # By what the agent was asked alone: its own words may be in what the hook says. Repositories were looked
        # through when the view was opened.
        wishes = replace(self._wishes, places=read.wishes.places, repositories="")
        surroundings = Surroundings(folders, self._shown.programs, wishes=wishes)
        try:
            await disarm(slot, surroundings, read, links=self._shown.links, since=BEGAN)
        except VerifierFailed as error:
            raise VerifierError(str(error)) from error
        if read.wishes.refuses_links:
            settings = git_settings(self._wishes.where_links_lead_out())
            slot.profile = replace(slot.profile, env={**slot.profile.env, **settings})


async def settle(executor: ToolExecutor, trajectory_id: str, config: SandboxEnvConfig) -> None:
    """Make the files of set-up part of a view's root.

    Raises:
        SandboxError: the slot was lost, or its container keeps no more snapshots (`max_snapshots`, `max_snapshot_mib`).
    """
    if config.verifier_mode == "view" and executor.has_slot(trajectory_id):
        slot = await executor.slot(trajectory_id)
        await slot.settle()


async def begin(executor: ToolExecutor, trajectory_id: str, config: SandboxEnvConfig, prompt: str) -> HookTexts | None:
    """Switch later calls to where the agent's work is verified; a view also shows top-level folders named in `prompt`.

    Returns:
        What has to know of each of these calls, in a view.

    Raises:
        SandboxError: the slot was lost.
        VerifierError: a repository of the agent's can't be shown.
    """
    if not executor.has_slot(trajectory_id):
        return None
    in_view = config.verifier_mode == "view"
    if config.verifier_quiesce or not in_view:
        slot = await executor.slot(trajectory_id)
        await slot.quiesce()
    if not in_view:
        return None
    slot = await executor.slot(trajectory_id)
    programs = program_folders(slot.profile.env)
    # Before the view is made: what lies elsewhere must be in a folder that it shows.
    looked = await bring(slot, config.verifier_folders, programs)
    # A server that the agent has just started may not listen yet.
    if looked.company:
        await wait_for_young(slot, trajectory_id)
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
    return HookTexts(shown, prompt)
