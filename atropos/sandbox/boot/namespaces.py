"""User namespaces: the ids for slots, entering a namespace with its maps, and why the kernel refuses one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from atropos.errors import IsolationUnavailable
from atropos.sandbox.linux import syscalls
from atropos.sandbox.linux.sysctl import sysctl

ID_BASE = 100_000
"""First host id of the range: above every account, below what systemd gives to its own containers."""
FIRST_ID = 1000
"""First id below `ID_BASE` that no account of a system has."""
SLOT_IDS = 65_536
CREATORS = 1024
"""Uids from which slots' namespaces are created, one each, so that the kernel counts their objects apart."""
Extent = tuple[int, int, int]
"""First id inside a user namespace, first id outside, and how many."""


def free_extents(uid_map: str) -> list[Extent]:
    """The ids of slots, the server's after them and `CREATORS` more, as far as a namespace maps so many.

    They begin at `ID_BASE`, whose ids own the files of the sandbox image, and go on below it where those above are too
    few, as in a rootless engine's container.
    """
    mapped = [(int(inside), int(inside) + int(count)) for inside, _, count in map(str.split, uid_map.splitlines())]
    parts = [(max(first, ID_BASE), end) for first, end in mapped]
    parts += [(max(first, FIRST_ID), min(end, ID_BASE)) for first, end in mapped]
    needed = SLOT_IDS + 1 + CREATORS
    extents: list[Extent] = []
    for first, end in parts:
        have = sum(count for *_, count in extents)
        if count := min(end - first, needed - have) if end > first else 0:
            extents.append((have, first, count))
    have = sum(count for *_, count in extents)
    # Enough for the accounts of usual images; files of higher owners would be shown as nobody's.
    if have < 4096:
        raise IsolationUnavailable(
            f"this container maps only {sum(end - first for first, end in mapped)} user ids; {needed} from {ID_BASE} "
            "on are needed (user namespace remapping of the container engine: widen its range in /etc/subuid, or turn "
            "it off for this container)"
        )
    return extents


def outside(extents: list[Extent], inside: int) -> int:
    """What an id inside a user namespace is outside."""
    return next(first + inside - begin for begin, first, count in extents if begin <= inside < begin + count)


def subordinate(file: str) -> tuple[int, int]:
    """The largest range of ids of this user in /etc/subuid or /etc/subgid: (first, count), (0, 0) without one."""
    import pwd

    names = {str(os.getuid())}
    try:
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        pass
    try:
        with open(file, encoding="utf-8") as lines:
            ranges = [line.strip().split(":") for line in lines]
    except OSError:
        return 0, 0
    extents = [
        (int(r[1]), int(r[2])) for r in ranges if len(r) == 3 and r[0] in names and r[1].isdigit() and r[2].isdigit()
    ]
    return max(extents, key=lambda extent: extent[1], default=(0, 0))


def unshare(flags: int) -> None:
    """Leave namespaces of the caller for new ones.

    Raises:
        IsolationUnavailable: the kernel refuses; the message says what to change.
    """
    try:
        syscalls.unshare(flags)
    except OSError as error:
        raise IsolationUnavailable(why_no_userns(error)) from error


def enter_namespaces(write_maps: Callable[[int], None], before: Callable[[], None] | None = None) -> None:
    """Enter a user and mount namespace; a short-lived child that stays outside writes the maps."""
    main = os.getpid()
    go_r, go_w = os.pipe()
    answer_r, answer_w = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(go_w)
        message = b""
        try:
            if os.read(go_r, 1):
                write_maps(main)
        except BaseException as error:  # it travels to the parent through the pipe
            message = f"{error}".encode(errors="replace") or b"failed"
        os.write(answer_w, message)
        os._exit(0)
    os.close(answer_w)
    os.close(go_r)
    try:
        if before is not None:
            before()
        unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
        os.write(go_w, b"x")
        # An empty read is success: the writer has closed its end without a word.
        message = os.read(answer_r, 4096)
    finally:
        # Where the unshare failed, this lets the child read its end of file and go.
        os.close(go_w)
        os.close(answer_r)
        os.waitpid(writer, 0)
    if message:
        raise IsolationUnavailable(f"user ids could not be mapped: {message.decode(errors='replace')}")


def write_maps(pid: int, extents: list[Extent]) -> None:
    """Map the ids of a process's user namespace, as a privileged process may."""
    text = "".join(f"{inside} {outside} {count}\n" for inside, outside, count in extents)
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(text, encoding="ascii")


def write_subordinate_maps(pid: int, uids: list[Extent], gids: list[Extent]) -> None:
    """Map the ids of a process's user namespace by `newuidmap` and `newgidmap`, as an ordinary user must."""
    import subprocess

    for program, extents in (("newuidmap", uids), ("newgidmap", gids)):
        numbers = [str(number) for extent in extents for number in extent]
        done = subprocess.run([program, str(pid), *numbers], check=False, capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"{program}: {done.stderr.strip()}; check /etc/subuid and /etc/subgid")


def why_no_userns(error: OSError) -> str:
    """What to change where the kernel refuses a user namespace."""
    if sysctl("user/max_user_namespaces", -1) == 0:
        return "user namespaces are off: sysctl -w user.max_user_namespaces=15000"
    if sysctl("kernel/unprivileged_userns_clone", -1) == 0:
        return "user namespaces are for root alone here: sysctl -w kernel.unprivileged_userns_clone=1"
    if sysctl("kernel/apparmor_restrict_unprivileged_userns", -1) == 1:
        return (
            "AppArmor restricts user namespaces: sysctl -w kernel.apparmor_restrict_unprivileged_userns=0, or a "
            "profile for this Python that allows 'userns'"
        )
    if error.errno == errno.ENOSPC:
        return "too many user namespaces, or nested too deep: raise sysctl user.max_user_namespaces"
    if error.errno == errno.EINVAL:
        return "this kernel has no user namespaces (CONFIG_USER_NS)"
    return (
        f"no user namespace could be made ({error}): a container's seccomp profile must allow unshare, mount and clone"
    )
