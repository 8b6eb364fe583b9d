"""A verifier's home and programs that stay as the image has them, in folders that the agent wrote in."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Sequence
from dataclasses import replace

from atropos.slots import Slot
from atropos.slots.slot.profile import Profile
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import VerifierFailed
from atropos.wire import VIEW_HOME

_ASIDE = "/run/programs"
_TOOLS = "bin|go|R|perl5|node_modules|snap"
"""What programs look for in a home by themselves, beside hidden files."""
_USUAL = ("", "root", "home", "var", "nonexistent")
"""Folders at the top that homes are in, and that no view shows by itself."""


def is_tool(name: str) -> bool:
    """Whether what a home has of this name is the image's in `VIEW_HOME`."""
    return name.startswith(".") or name in _TOOLS.split("|")


def may_be_shown(home: str, folders: Sequence[str]) -> bool:
    """Whether a view of these folders may show a home: it is in one of them, or in another at the top."""
    inside = any(f"{home}/".startswith(f"{folder.rstrip('/')}/") for folder in folders)
    return inside or (home.startswith("/") and home.split("/")[1] not in _USUAL)


def home_of(profile: Profile) -> str:
    """Where a profile's programs have their home."""
    return posixpath.normpath(profile.expanded("~"))


async def move_in(slot: Slot, profile: Profile) -> Profile:
    """The verifier's profile with its home at `VIEW_HOME`, from which links lead to what else lies in the old one.

    Raises:
        VerifierFailed: the agent left the old one in such a state that this can't be done.
    """
    uid = 0 if profile.user is None else profile.user.uid
    # The sixth field of passwd(5): `~` and programs that ask for the home by the user, not by HOME, find the new one.
    account = rf"s#^\([^:]*:[^:]*:{uid}:[^:]*:[^:]*:\)[^:]*:#\1{VIEW_HOME}:#"
    await _done(
        slot,
        f"[ ! -f /etc/passwd ] || sed -i '{account}' /etc/passwd; cd {VIEW_HOME} || exit; "
        f'for f in *; do case "$f" in {_TOOLS}) ;; *) rm -rf -- "./$f" || exit ;; esac; done; '
        f"cd -- {shlex.quote(home_of(profile))} || exit 0; set --; "
        f'for f in *; do case "$f" in {_TOOLS}) ;; *) [ ! -e "$f" ] || set -- "$@" "$PWD/$f" ;; esac; done; '
        f'[ $# = 0 ] || ln -s -- "$@" {VIEW_HOME}/',
    )
    user = None if profile.user is None else replace(profile.user, home=VIEW_HOME)
    return replace(profile, user=user, env={**profile.env, "HOME": VIEW_HOME})


async def put_aside(slot: Slot, home: str | None, programs: Sequence[str]) -> tuple[str, ...]:
    """Copy a home to `VIEW_HOME`, and folders of programs to where no artifact comes; those that have programs.

    Raises:
        VerifierFailed: there is no room.
    """
    move = [f"mkdir -p {_ASIDE} {VIEW_HOME}"]
    if home is not None:
        move.append(f"if [ -d {shlex.quote(home)} ]; then cp -a -- {shlex.quote(home)}/. {VIEW_HOME}/; fi")
    for number, path in enumerate(programs):
        quoted = shlex.quote(path)
        marks = f"[ -e {quoted}/pyvenv.cfg ] || [ -d {quoted}/conda-meta ]"
        if posixpath.basename(path) == "node_modules":
            marks = f"[ -d {quoted} ]"
        aside = f"{_ASIDE}/{number}"
        # -a keeps links and owners: a venv's programs are links to its Python.
        move.append(f"if {marks}; then rm -rf {aside} && cp -a -- {quoted} {aside} && echo {number}; fi")
    result = await _done(slot, " && ".join(move))
    return tuple(programs[int(number)] for number in result.split())


async def put_back(slot: Slot, wanted: Sequence[str], programs: Sequence[str]) -> None:
    """Put folders of programs, of all that were `wanted`, back in the place of what an artifact has there.

    Raises:
        VerifierFailed: the artifact has a file in the place of a folder above one.
    """
    for path in programs:
        quoted, above = shlex.quote(path), shlex.quote(posixpath.dirname(path))
        # Numbered by all that were wanted, as `put_aside` named them.
        number = wanted.index(path)
        aside = f"{_ASIDE}/{number}"
        back = f"rm -rf -- {quoted} && mkdir -p -- {above} && mv -- {aside} {quoted}"
        await _done(slot, f"if [ -e {aside} ]; then {back}; fi")


async def _done(slot: Slot, script: str) -> str:
    done = await exec_plain(slot, script)
    if done.exit_code != 0:
        raise VerifierFailed(f"the verifier's home and programs can't be kept apart: {done.output[-300:].strip()}")
    return done.output
