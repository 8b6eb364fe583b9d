"""The slot's own users, from its /etc/passwd and /etc/group: the name service would load libraries of the slot."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.opening import open_regular, read_all
from atropos.sandbox.programs.runner.start_failures import NO_SUCH_ID
from atropos.sandbox.programs.runner.syscalls import deny_tracing

if TYPE_CHECKING:
    from collections.abc import Callable

    from atropos.sandbox.programs.runner.work import Outcome

MAX_TABLE_BYTES = 1 << 20
MAX_ID = 0xFFFF_FFFE
"""The number above means "no change" to the kernel."""
MAX_GROUPS = 1000


class Identity:
    """Who a program runs as."""

    __slots__ = ("gid", "groups", "home", "name", "uid")

    def __init__(self, name: str, uid: int, gid: int, groups: list[int], home: str) -> None:
        self.name, self.uid, self.gid, self.groups, self.home = name, uid, gid, groups, home

    def environment(self) -> dict[str, str]:
        """The variables that a login sets."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name}

    def perform(self, job: Callable[[], Outcome]) -> Outcome:
        """Switch to this user irreversibly, in a child, and run the job."""
        try:
            os.setgroups(self.groups)
            os.setresgid(self.gid, self.gid, self.gid)
            os.setresuid(self.uid, self.uid, self.uid)
        except OSError:
            raise OpFailed("not_supported", NO_SUCH_ID) from None
        if not deny_tracing():  # this user's own programs must not reach a copy of PID 1
            raise OpFailed("io", "the process that serves files could not be protected")
        return job()


def identity_of(user: str) -> Identity:
    """The identity of `name`, `uid`, `name:group` or `uid:gid`.

    A uid that /etc/passwd doesn't list has `/` as its home and, without a group, 0 as its group, as under Docker.

    Raises:
        OpFailed: /etc/passwd or /etc/group doesn't have the name, or the number is no id.
    """
    name, _, group = user.partition(":")
    users = [row for row in table("/etc/passwd") if len(row) >= 6 and row[2].isdecimal() and row[3].isdecimal()]
    found = next((row for row in users if row[0] == name), None)
    if found is None and name.isdecimal():
        found = next((row for row in users if int(row[2]) == int(name)), [name, "", name, "0", "", "/"])
    if found is None:
        raise OpFailed("unknown_user", f"this slot has no user {name!r} (see its /etc/passwd)")
    rows = [row for row in table("/etc/group") if len(row) >= 4 and row[2].isdecimal()]
    gid = group_id(group, rows) if group else int(found[3])
    uid = int(found[2])
    if uid > MAX_ID or gid > MAX_ID:
        raise OpFailed("unknown_user", f"not the number of a user and a group: {user!r}")
    others = sorted({int(row[2]) for row in rows if found[0] in row[3].split(",")} - {gid})
    return Identity(found[0], uid, gid, [gid, *others][:MAX_GROUPS], found[5] or "/")


def group_id(group: str, rows: list[list[str]]) -> int:
    """The number of a group."""
    for row in rows:
        if row[0] == group:
            return int(row[2])
    if group.isdecimal():
        return int(group)
    raise OpFailed("unknown_user", f"this slot has no group {group!r} (see its /etc/group)")


def table(path: str) -> list[list[str]]:
    """Rows of a file with colon-separated fields; none if it can't be read."""
    try:
        fd, _ = open_regular(path)
    except (OSError, OpFailed):
        return []
    try:
        data = read_all(fd, 0, MAX_TABLE_BYTES)
    except OSError:
        return []
    finally:
        os.close(fd)
    return [line.split(":") for line in data.decode("utf-8", "surrogateescape").splitlines()]
