"""The slot's own users, from its /etc/passwd and /etc/group: the name service would load libraries of the slot."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

from atropos.sandbox.linux.syscalls import PR_SET_DUMPABLE, prctl
from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.opening import open_regular, read_all
from atropos.sandbox.programs.runner.start_failures import NO_SUCH_ID, UserRefused

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from atropos.sandbox.programs.runner.work import Outcome

MAX_TABLE_BYTES = 1 << 20
MAX_ID = 0xFFFF_FFFE
"""The number above means "no change" to the kernel."""
MAX_GROUPS = 1000
MAX_FIELDS = 6
"""Of a row that are split off: one of colons alone would be a million."""


class Identity:
    """Who a program runs as."""

    __slots__ = ("gid", "groups", "home", "name", "uid")

    def __init__(self, name: str, uid: int, gid: int, groups: list[int], home: str) -> None:
        self.name, self.uid, self.gid, self.groups, self.home = name, uid, gid, groups, home

    def environment(self) -> dict[str, str]:
        """The variables that a login sets."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def take(self) -> None:
        """Switch to this user irreversibly, in a child.

        Raises:
            UserRefused: slots have none of its numbers.
        """
        try:
            # Groups first: without uid 0 none of them can be set.
            os.setgroups(self.groups)
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
        except OSError as error:
            raise UserRefused(error.errno, error.strerror) from None
        prctl(PR_SET_DUMPABLE, 0)  # this user's own programs must not reach a copy of PID 1

    def perform(self, job: Callable[[], Outcome]) -> Outcome:
        """Switch to this user irreversibly, in a child, and run the job."""
        try:
            self.take()
        except UserRefused:
            raise OpFailed("not_supported", NO_SUCH_ID) from None
        return job()


def identity_of(user: str) -> Identity:
    """The identity of `name`, `uid`, `name:group`, `uid:gid` or `:group`, which is root's, as under Docker.

    A uid that /etc/passwd doesn't list has `/` as its home and, without a group, 0 as its group. Who names a group has
    no other.

    Raises:
        OpFailed: /etc/passwd or /etc/group doesn't have the name, or the number is no id.
    """
    login, _, group = user.partition(":")
    if not login and not group:
        raise OpFailed("unknown_user", f"no user is named: {user!r}")
    name, uid, gid, home = user_row(login)
    gid, groups = group_ids(name, group, gid)
    if uid > MAX_ID or gid > MAX_ID:
        raise OpFailed("unknown_user", f"not the number of a user and a group: {user!r}")
    # Its own group comes first, so that the bound never cuts it off.
    return Identity(name, uid, gid, [gid, *sorted(groups - {gid})][:MAX_GROUPS], home)


def user_row(wanted: str) -> tuple[str, int, int, str]:
    """Name, uid, gid and home of a user: the first row of that name or number; of no name, root's."""
    number = int(wanted or "0") if wanted.isdecimal() or not wanted else -1
    for row in table("/etc/passwd"):
        if len(row) >= 6 and is_id(row[2]) and is_id(row[3]) and (int(row[2]) == number or row[0] == wanted != ""):
            return row[0], int(row[2]), int(row[3]), row[5] or "/"
    if number < 0:
        raise OpFailed("unknown_user", f"this slot has no user {wanted!r} (see its /etc/passwd)")
    return wanted or "root", number, 0, "/"


def group_ids(member: str, group: str, gid: int) -> tuple[int, set[int]]:
    """The gid of the named group, alone; without a name, `gid` and those of the groups that have this member."""
    groups: set[int] = set()
    for row in table("/etc/group"):
        if len(row) >= 4 and is_id(row[2]):
            if group and group in (row[0], row[2]):
                return int(row[2]), groups
            if not group and len(groups) < MAX_GROUPS and f",{member}," in f",{row[3]},":
                groups.add(int(row[2]))
    if group and not group.isdecimal():
        raise OpFailed("unknown_user", f"this slot has no group {group!r} (see its /etc/group)")
    return int(group) if group else gid, groups


def is_id(field: str) -> bool:
    """Whether a field may be the number of a user or group."""
    return field.isdecimal() and len(field) <= len(str(MAX_ID))


def table(path: str) -> Iterator[list[str]]:
    """Rows of a file with colon-separated fields, one at a time: all at once may take a hundred times its size.

    None if it can't be read.
    """
    try:
        fd, _ = open_regular(path)
    except (OSError, OpFailed):
        return
    try:
        data = read_all(fd, 0, MAX_TABLE_BYTES)
    except OSError:
        return
    finally:
        os.close(fd)
    for line in io.BytesIO(data):
        yield line.decode("utf-8", "surrogateescape").rstrip("\n").split(":", MAX_FIELDS)
