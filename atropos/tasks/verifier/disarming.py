"""What a verifier would run, read or write of the agent's in the place of its own, by its texts: and its removal."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from atropos.slots import Slot
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.elsewhere import PACKAGES
from atropos.tasks.verifier.links import cut_links
from atropos.tasks.verifier.preceding import RULES, make_way, preceded, take_places
from atropos.tasks.verifier.repositories import take_out
from atropos.tasks.verifier.surroundings import MAX_PROGRAM_FOLDERS, Surroundings, Wishes
from atropos.tasks.verifier.texts import (
    TaskTexts,
    folders_made,
    is_spoken_of,
    makes_links,
    named_folders,
    renames_across,
    unspoken_names,
    venvs_of_tests,
    written,
)
from atropos.tasks.verifier.venvs import remove_venvs, venvs_made

_CHANGES_ALL = re.compile(r"\bch(?:mod|own|grp)\s+(?:-\S+\s+){,20}(?:-\w*R|--recursive)")
"""Commands after which all files were changed at the same time, so that it doesn't tell the agent's modules from the
tests' any more."""


@dataclass(frozen=True)
class Reading:
    """What texts and variables say of a view: the arguments of `Slot.view`, and what is wanted.

    Attributes:
        venvs: virtual environments that tests make.
        paths: what they write.
        written: what of it nobody speaks of to the agent.
        files: those of these that are files.
        names: names that they know and nobody speaks of.
        preceded: files that they write, of which what the agent has beside them may take the place.
    """

    optional: tuple[str, ...]
    programs: tuple[str, ...]
    as_layer: bool
    wishes: Wishes
    venvs: tuple[str, ...]
    paths: tuple[str, ...]
    written: tuple[str, ...]
    files: tuple[str, ...]
    names: str
    preceded: tuple[str, ...]


def understand(texts: TaskTexts, workdir: str, folders: Sequence[str], programs: Sequence[str]) -> Reading:
    """What texts say.

    Args:
        texts: a task's, or a hook's.
        workdir: where the tests start.
        folders: what the agent wrote.
        programs: more folders that may be of programs.
    """
    venvs, (paths, files) = venvs_made(texts, workdir), written(texts, workdir)
    unspoken = [path for path in paths if not is_spoken_of(path, workdir, texts.asked)]
    rules = () if RULES[0] in texts.asked else RULES
    alike = any(_CHANGES_ALL.search(test) for test in texts.tests)
    first = [path for path in paths if posixpath.basename(path) in rules]
    first += [path for path in unspoken if path.endswith(".js") or (alike and path.endswith(".py"))]
    return Reading(
        optional=(PACKAGES, *sorted({*named_folders(texts.whole)} - folders_made(texts))),
        programs=(*venvs, *venvs_of_tests(texts, workdir), *programs)[:MAX_PROGRAM_FOLDERS],
        as_layer=renames_across(texts.tests, folders) or makes_links(texts.tests, folders),
        wishes=Wishes.of(texts, workdir),
        venvs=venvs,
        paths=paths,
        written=tuple(unspoken),
        files=tuple(sorted({*files}.intersection(unspoken))),
        names=unspoken_names(texts),
        preceded=tuple(preceded(first, paths)),
    )


async def disarm(
    slot: Slot, surroundings: Surroundings, read: Reading, *, links: bool, since: str = ""
) -> Surroundings:
    """Take away what tests would run, read or write of the agent's in the place of their own.

    Args:
        slot: where they will run.
        surroundings: what the agent wrote.
        read: what their texts say.
        links: whether the agent's folders have any that are followed.
        since: links that are younger than this path are the tests' own; empty: there are none.

    Raises:
        VerifierFailed: it can't be done.
    """
    wishes = surroundings.wishes
    # In this order: what is removed need not be looked through, and git is asked before links are replaced.
    await remove_venvs(slot, [path for path in read.venvs if surroundings.holds(path)])
    take = partial(
        take_out, slot, surroundings.folders, wishes.repositories, links=not wishes.links, clones=wishes.clones
    )
    if wishes.repositories and surroundings.folders and await take():
        wishes = wishes.where_links_lead_out()
    # Not the folders themselves: they are mounts, or where the tests start.
    own = [path for path in read.written if surroundings.holds(path) and path not in surroundings.folders]
    if links:
        cut, names = ((), "") if wishes.links else (own, read.names)
        await cut_links(slot, surroundings.folders, wishes.places, cut, names, since)
    reason = await make_way(slot, [path for path in read.preceded if surroundings.holds(path)])
    if not reason:
        reason = await take_places(slot, [path for path in read.files if path in own])
    if reason:
        raise VerifierFailed(reason)
    return replace(surroundings, wishes=wishes)
