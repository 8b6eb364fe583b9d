"""Where tests run, with what the agent left in its place: a view, the agent's own slot, or a fresh one."""

from __future__ import annotations

import asyncio
import functools
import logging
import tarfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial

from atropos.errors import NotSupported
from atropos.slots import Slot
from atropos.slots.slot.profile import PLAIN
from atropos.slots.slot.results import ExecResult
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.config import Collect
from atropos.tasks.format.service import MAIN
from atropos.tasks.format.task import Task
from atropos.tasks.verifier.artifacts import Carried, put_down, taken_along
from atropos.tasks.verifier.disarming import Reading, disarm, understand
from atropos.tasks.verifier.elsewhere import bring
from atropos.tasks.verifier.home import home_of, may_be_shown, put_aside, put_back
from atropos.tasks.verifier.mode import Mode
from atropos.tasks.verifier.services import Keep, end_processes, wait_for_young
from atropos.tasks.verifier.surroundings import Surroundings, image_variables, program_folders
from atropos.tasks.verifier.texts import read_texts

_log = logging.getLogger(__name__)
MAX_READ = 32
"""Tasks of which it is remembered what their texts say: trajectories of one group are judged at about the same time."""
_understood = functools.lru_cache(maxsize=MAX_READ)(understand)


async def place(
    slot: Slot, task: Task, judged: Task, chosen: Mode, fresh: Callable[[], Awaitable[Slot]] | None, keep: Keep
) -> tuple[Slot, Surroundings]:
    """Prepare where the tests run: a slot, and what of the agent's is in it.

    Args:
        slot: where the agent worked.
        task: whose work it is.
        judged: whose tests run.
        chosen: where they do.
        fresh: gives the slot of a separate verifier.
        keep: which of the agent's processes are left.
    """
    # First, as the agent's own programs may be what the hooks ask.
    await _collect(slot, task)
    # The agent's variables and user end here; the tests get their own.
    slot.profile = PLAIN
    if chosen == "view":
        return slot, await _open_view(slot, task, keep)
    if chosen == "shared":
        await _collect_beside(slot, task)
        return slot, Surroundings(company=await end_processes(slot, task, keep))
    if fresh is None:
        raise ValueError("a separate verifier needs `fresh`")
    # Before anything is carried: what is copied while it changes belongs to no moment.
    await slot.quiesce()
    await _collect_beside(slot, task)
    await bring(slot, [one.source for one in task.artifacts if one.service == MAIN])
    slots = _slots(slot, task)
    async with taken_along([(slots[one.service], one.source, one.exclude) for one in task.artifacts]) as carried:
        # Only now: the agent's slot, and its room, may have to be given back first.
        slot = await fresh()
        slot.profile = PLAIN
        return slot, await _carry_all(slot, judged, carried)


async def _carry_all(slot: Slot, judged: Task, carried: Carried) -> Surroundings:
    """Put the artifacts into a fresh slot; its home and programs stay as they are."""
    read = await asyncio.to_thread(_read, judged, tuple(path for path, _ in carried))
    surroundings = Surroundings(tuple(path for path, _ in carried), wishes=read.wishes)
    profile = await profile_of(slot, judged, judged.verifier_settings)
    home = home_of(profile)
    folders = [path for path in read.programs if surroundings.holds(path) and path not in surroundings.folders]
    inside = surroundings.holds(home)
    programs = await put_aside(slot, home if inside else None, folders) if inside or folders else ()
    await put_down(slot, carried)
    paths = [path for path, artifact in carried if artifact is not None]
    if profile.user is not None and paths:
        # They are root's by now, and some may be closed to all but their owner.
        owner = f"{profile.user.uid}:{profile.user.gid}"
        await exec_plain(slot, ("chown", "-Rh", owner, *paths))
    if any(artifact is not None and artifact.has_hard_links for _, artifact in carried):
        await slot.settle()  # what tests write into one file is then not in the others
    await put_back(slot, folders, programs)
    surroundings = replace(surroundings, programs=programs, home=home if inside else None)
    return await disarm(slot, surroundings, read, links=_has_links(carried))


async def _open_view(slot: Slot, task: Task, keep: Keep) -> Surroundings:
    """Run the tests beside the agent's programs, where these reach nothing but the folders that they wrote in."""
    if keep == "none":
        await slot.quiesce()
    workdir = task.recipe.workdir
    others = [one.source for one in task.artifacts if not f"{one.source}/".startswith(f"{workdir.rstrip('/')}/")]
    read = await asyncio.to_thread(_read, task, (workdir, *others))
    looked = await bring(slot, (workdir, *others), read.programs)
    # A server that the agent has just started may not listen yet.
    if looked.company and keep != "none":
        await wait_for_young(slot, task.name)
    home = await _home(slot, task)
    empty = () if looked.company else looked.empty
    async with taken_along([(slot, path, ()) for path in others], empty) as carried:
        try:
            shown = await slot.view(
                [workdir],
                optional=read.optional,
                programs=read.programs,
                home=home if home is not None and may_be_shown(home, (workdir, *others)) else None,
                as_layer=read.as_layer,
            )
        except NotSupported as error:
            # A weaker place, but a verdict: the folder can't be shown whoever judges.
            _log.warning("%s: verified in the agent's slot: %s", task.name, error)
            return Surroundings(company=await end_processes(slot, task, keep))
        await put_down(slot, [(path, artifact) for path, artifact in carried if artifact is not None])
        links = shown.links or _has_links(carried)
    surroundings = Surroundings((*shown.folders, *others), shown.programs, wishes=read.wishes)
    if home is not None and surroundings.holds(home):
        surroundings = replace(surroundings, home=home)
    return await disarm(slot, surroundings, read, links=links)


def _has_links(carried: Carried) -> bool:
    return any(artifact is not None and tarfile.SYMTYPE in artifact.kinds for _, artifact in carried)


def _read(task: Task, folders: Sequence[str]) -> Reading:
    programs = program_folders(image_variables(task))
    return _understood(read_texts(task), task.recipe.workdir, tuple(folders), programs)


async def _home(slot: Slot, task: Task) -> str | None:
    """The home of the tests' user, by the agent's word, who gains nothing by a lie; None: there is no such user."""
    try:
        return home_of(await profile_of(slot, task, task.verifier_settings))
    except TaskBroken:
        return None


def _slots(slot: Slot, task: Task) -> dict[str, Slot]:
    """The slots of a task by the names of its services."""
    beside = (each.service.name for each in task.beside if each.service is not None)
    return {MAIN: slot, **dict(zip(beside, slot.group[1:], strict=False))}


async def _collect(slot: Slot, task: Task) -> None:
    """Run the hooks of the agent's own slot."""
    for hook in task.config.verifier.collect:
        if hook.service == MAIN:
            slot.profile = PLAIN
            if hook.user is not None:
                slot.profile = await profile_of(slot, task, replace(task.agent_settings, user=str(hook.user)))
            await _run(task, hook, partial(slot.exec, hook.command, workdir=task.recipe.workdir))


async def _collect_beside(slot: Slot, task: Task) -> None:
    """Run the hooks of services, as in their containers: of a separate verifier's task once the agent's have ended."""
    slots = _slots(slot, task)
    for hook in task.config.verifier.collect:
        if hook.service != MAIN:
            user, command = None if hook.user is None else str(hook.user), ("/bin/sh", "-c", hook.command)
            await _run(task, hook, partial(slots[hook.service].exec, command, user=user))


async def _run(task: Task, hook: Collect, run: Callable[..., Awaitable[ExecResult]]) -> None:
    """Run a hook, and once more where it takes too long, as on a host that stalls."""
    result = await run(timeout_s=hook.timeout_sec)
    if result.timed_out:
        result = await run(timeout_s=hook.timeout_sec)
    if result.exit_code != 0:  # as in Harbor: the tests say what is missing
        _log.warning(
            "%s: verifier.collect: `%.100s` ended with %s: %s",
            *(task.name, hook.command, result.exit_code, result.output[-300:].strip()),
        )
