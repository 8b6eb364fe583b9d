"""Where tests run, with what the agent left in its place: a view, the agent's own slot, or a fresh one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from atropos.errors import NotSupported
from atropos.slots import Slot
from atropos.slots.slot.profile import PLAIN
from atropos.slots.slot.results import ExecResult
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.config import Collect
from atropos.tasks.format.service import MAIN
from atropos.tasks.format.task import Task
from atropos.tasks.verifier.artifacts import Carried, put_down, taken_along
from atropos.tasks.verifier.elsewhere import PACKAGES, bring
from atropos.tasks.verifier.home import home_of, put_aside, put_back
from atropos.tasks.verifier.links import cut_links
from atropos.tasks.verifier.mode import Mode
from atropos.tasks.verifier.repositories import take_out
from atropos.tasks.verifier.services import Keep, end_processes
from atropos.tasks.verifier.surroundings import (
    MAX_PROGRAM_FOLDERS,
    Surroundings,
    Wishes,
    image_variables,
    program_folders,
)
from atropos.tasks.verifier.texts import makes_links, named_folders, read_texts, renames_across, venvs_of_tests
from atropos.tasks.verifier.venvs import remove_venvs, venvs_made
from atropos.wire import VIEW_HOME

_log = logging.getLogger(__name__)


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
    await _collect(slot, task)
    slot.profile = PLAIN
    if chosen == "view":
        return slot, await _open_view(slot, task, keep)
    if chosen == "shared":
        await _collect_beside(slot, task)
        return slot, Surroundings(company=await end_processes(slot, task, keep))
    if fresh is None:
        raise ValueError("a separate verifier needs `fresh`")
    await slot.quiesce()
    await _collect_beside(slot, task)
    await bring(slot, [one.source for one in task.artifacts if one.service == MAIN])
    slots = _slots(slot, task)
    async with taken_along([(slots[one.service], one.source, one.exclude) for one in task.artifacts]) as carried:
        slot = await fresh()
        slot.profile = PLAIN
        return slot, await _carry_all(slot, judged, carried)


async def _carry_all(slot: Slot, judged: Task, carried: Carried) -> Surroundings:
    """Put the artifacts into a fresh slot; its home and programs stay as they are."""
    read = await asyncio.to_thread(_read, judged, tuple(path for path, _ in carried))
    surroundings = Surroundings(tuple(path for path, _ in carried), wishes=read.wishes)
    home = home_of(await profile_of(slot, judged, judged.verifier_settings))
    folders = [path for path in read.programs if surroundings.holds(path) and path not in surroundings.folders]
    inside = surroundings.holds(home)
    programs = await put_aside(slot, home if inside else None, folders) if inside or folders else ()
    await put_down(slot, carried)
    if any(artifact is not None and artifact.has_hard_links for _, artifact in carried):
        await slot.settle()  # what tests write into one file is then not in the others
    await put_back(slot, folders, programs)
    surroundings = replace(surroundings, programs=programs, home=VIEW_HOME if inside else None)
    await _disarm(slot, surroundings, read)
    return surroundings


async def _open_view(slot: Slot, task: Task, keep: Keep) -> Surroundings:
    """Run the tests beside the agent's programs, where these reach nothing but the folders that they wrote in."""
    if keep == "none":
        await slot.quiesce()
    workdir = task.recipe.workdir
    others = [one.source for one in task.artifacts if not f"{one.source}/".startswith(f"{workdir.rstrip('/')}/")]
    read = await asyncio.to_thread(_read, task, (workdir, *others))
    await bring(slot, (workdir, *others), read.programs)
    home = await _home_within(slot, task, (workdir, *others))
    async with taken_along([(slot, path, ()) for path in others]) as carried:
        try:
            shown = await slot.view(
                [workdir], optional=read.optional, programs=read.programs, home=home, as_layer=read.as_layer
            )
        except NotSupported as error:
            _log.warning("%s: verified in the agent's slot: %s", task.name, error)
            return Surroundings(company=await end_processes(slot, task, keep))
        await put_down(slot, [(path, artifact) for path, artifact in carried if artifact is not None])
    surroundings = Surroundings(
        (*shown.folders, *others), shown.programs, None if home is None else VIEW_HOME, read.wishes
    )
    await _disarm(slot, surroundings, read)
    return surroundings


async def _disarm(slot: Slot, found: Surroundings, read: _Reading) -> None:
    await remove_venvs(slot, [path for path in read.made if found.holds(path)])
    if found.wishes.repositories and found.folders:
        await take_out(slot, found.folders, found.wishes.repositories)
    await cut_links(slot, found.folders, found.wishes.places)


@dataclass(frozen=True)
class _Reading:
    """What a task's texts and variables say of its view: the arguments of `Slot.view`, and what is wanted.

    Attributes:
        made: virtual environments that tests make.
    """

    optional: tuple[str, ...]
    programs: tuple[str, ...]
    as_layer: bool
    wishes: Wishes
    made: tuple[str, ...]


def _read(task: Task, folders: Sequence[str]) -> _Reading:
    texts = read_texts(task)
    made = venvs_made(texts, task.recipe.workdir)
    programs = (*made, *venvs_of_tests(texts, task.recipe.workdir), *program_folders(image_variables(task)))
    return _Reading(
        optional=(PACKAGES, *named_folders(texts.whole)),
        programs=programs[:MAX_PROGRAM_FOLDERS],
        as_layer=renames_across(texts.tests, folders) or makes_links(texts.tests, folders),
        wishes=Wishes.of(texts),
        made=made,
    )


async def _home_within(slot: Slot, task: Task, folders: Sequence[str]) -> str | None:
    """The home of a view's programs, if the view shows it: by the agent's word, who gains nothing by a lie."""
    try:
        home = home_of(await profile_of(slot, task, task.verifier_settings))
    except TaskBroken:
        return None
    return home if Surroundings(tuple(folders)).holds(home) else None


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
            _note(task, hook, await slot.exec(hook.command, workdir=task.recipe.workdir, timeout_s=hook.timeout_sec))


async def _collect_beside(slot: Slot, task: Task) -> None:
    """Run the hooks of services, as in their containers: of a separate verifier's task once the agent's have ended."""
    slots = _slots(slot, task)
    for hook in task.config.verifier.collect:
        if hook.service != MAIN:
            user, command = None if hook.user is None else str(hook.user), ("/bin/sh", "-c", hook.command)
            _note(task, hook, await slots[hook.service].exec(command, user=user, timeout_s=hook.timeout_sec))


def _note(task: Task, hook: Collect, result: ExecResult) -> None:
    if result.exit_code != 0:  # as in Harbor: the tests say what is missing
        _log.warning(
            "%s: verifier.collect: `%.100s` ended with %s: %s",
            *(task.name, hook.command, result.exit_code, result.output[-300:].strip()),
        )
