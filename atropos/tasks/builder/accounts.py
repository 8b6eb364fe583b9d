"""Users and groups of a slot, as its own /etc/passwd and /etc/group name them."""

from __future__ import annotations

from dataclasses import replace

from atropos.slots import Slot
from atropos.slots.slot.profile import Profile, UserAccount
from atropos.tasks.errors import TaskBroken
from atropos.tasks.format.recipe import ROOT, StepSettings
from atropos.tasks.format.task import Task

MAX_BYTES = 1 << 20
"""Most that is read of /etc/passwd or /etc/group, which an agent may have filled."""


async def profile_of(slot: Slot, task: Task, settings: StepSettings) -> Profile:
    """What commands start with under these settings; the user is looked up in the slot.

    Raises:
        TaskBroken: there is no such user.
    """
    try:
        user = None if settings.user is None else await account_of(slot, settings.user)
    except TaskBroken as error:
        raise TaskBroken(f"{task.name}: {error}") from None
    return Profile(settings.workdir, settings.env, user)


async def account_of(slot: Slot, user: str) -> UserAccount | None:
    """Who `name`, `uid`, `name:group`, `uid:gid` or `:group` (root's) is in the slot; None for root in its own group.

    Raises:
        TaskBroken: there is no such user or group.
    """
    name, _, group = user.partition(":")
    name = name or "0"
    # Of the slot, never of this machine: numbers are the image's own.
    people, groups = [await _entries(slot, path) for path in ("/etc/passwd", "/etc/group")]
    row = next((entry for entry in people if _is_account(entry) and name in {entry[0], entry[2]}), None)
    # A number needs no entry: Docker runs with it, in root's group.
    if row is None and not name.isdecimal():
        raise TaskBroken(f"there is no user {name!r} in the slot; add it with RUN useradd")
    account = (
        UserAccount("", int(name), 0, "/")
        if row is None
        else UserAccount(row[0], int(row[2]), int(row[3]), row[5], member=not group)
    )
    if group:
        account = replace(account, gid=_group(groups, group))
    return None if (account.uid, account.gid) == (0, 0) else account


async def owner_ids(slot: Slot, owner: str | None) -> tuple[int, int]:
    """The numbers of --chown: a name alone means its login group too, a number alone that number.

    Raises:
        TaskBroken: there is no such user or group.
    """
    if owner is None or owner in ROOT:  # also where there is no /etc/passwd
        return 0, 0
    name, _, group = owner.partition(":")
    name = "0" if name in ROOT else name
    if name.isdecimal():
        groups = await _entries(slot, "/etc/group") if group and not group.isdecimal() else []
        return int(name), _group(groups, group) if group else int(name)
    account = await account_of(slot, owner)
    return (0, 0) if account is None else (account.uid, account.gid)


def _is_account(entry: list[str]) -> bool:
    return len(entry) > 5 and entry[2].isdecimal() and entry[3].isdecimal()


def _group(groups: list[list[str]], group: str) -> int:
    number = next((entry[2] for entry in groups if len(entry) > 2 and group in {entry[0], entry[2]}), group)
    if not number.isdecimal():
        raise TaskBroken(f"there is no group {group!r} in the slot; add it with RUN groupadd")
    return int(number)


async def _entries(slot: Slot, path: str) -> list[list[str]]:
    try:
        text = (await slot.read_file(path, max_bytes=MAX_BYTES)).decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.split(":") for line in text.splitlines() if ":" in line]
