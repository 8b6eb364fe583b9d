"""Reads and writes files without blocking PID 1."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed, text
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.opening import check_regular, open_at_once, open_regular, read_all, write_all
from atropos.sandbox.programs.runner.paths import make_folders, path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.users import identity_of
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable
    from hashlib import sha256

    from atropos.sandbox.programs.runner.work import Outcome
else:  # hashlib loads OpenSSL
    try:
        from _sha2 import sha256
    except ImportError:
        from _sha256 import sha256


SMALL_FILE = 1 << 20
"""Largest file that PID 1 itself reads or writes; a child takes larger ones, so that other calls need not wait."""


def op_read_file(call: int, path: str, offset: int, max_bytes: int, user: str | None) -> None:
    """Answer with a file's bytes, if the user may read it."""
    path = path_of(path)
    identity = identity_of(user) if user else None
    if identity:
        Work(call, lambda: identity.perform(lambda: read_apart(path, offset, max_bytes)))
        return
    fd, status = open_regular(path)
    try:
        # A fork takes longer than reading a small file from memory.
        if not is_special(status.st_dev) and min(max_bytes, max(0, status.st_size - offset)) <= SMALL_FILE:
            link.answer(call, *read_result(fd, status, offset, max_bytes))
            return
    finally:
        os.close(fd)
    Work(call, lambda: read_apart(path, offset, max_bytes))


def read_apart(path: str, offset: int, max_bytes: int) -> Outcome:
    """Read a file that is large or special, in a child."""
    fd, status = open_apart(path)
    return read_result(fd, status, offset, max_bytes)


def open_apart(path: str) -> tuple[int, os.stat_result]:
    """A file that may be large or special, opened by a child."""
    fd, status = open_regular(path)
    if is_special(status.st_dev):
        owner = os.readlink(f"/proc/self/fd/{fd}").split("/")[2:3]
        if owner in (["1"], [str(os.getpid())]):  # a copy of PID 1, with all that it has in memory
            raise OpFailed("permission", f"is a file of the process that serves files: {text(path)}")
    return fd, status


def read_result(fd: int, status: os.stat_result, offset: int, max_bytes: int) -> Outcome:
    """A `file_result` of an open file."""
    if not is_special(status.st_dev):  # the kernel's own files say 0
        max_bytes = min(max_bytes, max(0, status.st_size - offset))  # it may have grown since
    data = read_all(fd, offset, max_bytes)
    size = max(status.st_size, offset + len(data) if data else 0)
    whole = offset == 0 and len(data) == size
    digest = sha256(data).hexdigest() if whole else None
    return "file_result", {"size": size, "mode": status.st_mode & 0o7777, "sha256": digest}, {"data": data}


def op_write_file(
    call: int, path: str, data: bytes, mode: int | None, append: bool, if_sha256: str | None, user: str | None
) -> None:
    """Write a file, making its parents; a user's is written in place, with what the user may."""
    path = path_of(path)
    identity = identity_of(user) if user else None

    def job() -> Outcome:
        # A user may be allowed to write a file but not its folder, where a rename would need to.
        how = os.O_APPEND if append else os.O_TRUNC if identity else 0
        return write_file(path, data, mode, if_sha256, in_place=how)

    if identity:
        Work(call, lambda: identity.perform(job))
    elif len(data) <= SMALL_FILE:
        link.answer(call, *job())
    else:
        Work(call, job)


def write_file(path: str, data: bytes, mode: int | None, if_sha256: str | None, *, in_place: int) -> Outcome:
    """Write a file, making its parents; `in_place` has the flag to open it with, or 0: it is replaced."""
    folder, name, old = target_of(path)
    try:
        if if_sha256 is not None:
            check_unchanged(folder, name, if_sha256)
        if in_place:
            flags = os.O_WRONLY | in_place | os.O_CREAT | os.O_NOFOLLOW
            fd = open_at_once(name, flags, 0o644 if mode is None else mode, folder)
            try:
                write_all(fd, data)
                if mode is not None:
                    os.fchmod(fd, mode)
            finally:
                os.close(fd)
        else:
            replace_file(folder, name, (data,), mode, old)
    finally:
        os.close(folder)
    return "done", {"count": len(data)}, {}


def target_of(path: str) -> tuple[int, str, os.stat_result | None]:
    """(descriptor of the folder, name, what is there) of a file to write; the folders above are made."""
    make_parents(path)
    folder, name = folder_of(path)
    try:
        old = os.stat(name, dir_fd=folder, follow_symlinks=False)
        check_regular(old, path)
    except FileNotFoundError:
        old = None
    except BaseException:
        os.close(folder)
        raise
    return folder, name, old


def make_parents(path: str) -> None:
    """The folders above a path."""
    parent = path.rpartition("/")[0]
    if parent and not os.path.isdir(parent):
        try:
            make_folders(parent)
        except FileExistsError:
            raise OpFailed("not_directory", f"a part of the path is not a directory: {text(path)}") from None


def folder_of(path: str) -> tuple[int, str]:
    """(descriptor of the parent folder, name), symbolic links in the last place followed, and never into /proc."""
    at, name = None, path
    try:
        # The kernel's own bound of links in a path (path_resolution(7)).
        for _ in range(40):
            parent, _, last = name.rpartition("/")
            if last in ("", ".", ".."):
                raise OpFailed("is_directory", f"is a directory: {text(path)}")
            folder = parent or ("/" if name.startswith("/") else ".")
            below = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
            if at is not None:
                os.close(at)
            at = below
            if is_special(os.fstat(at).st_dev):
                raise OpFailed(
                    "bad_path", f"files under /proc, /dev and /.atropos are not written this way: {text(path)}"
                )
            try:
                name = os.readlink(last, dir_fd=at)
            except OSError:
                return at, last
        raise OpFailed("bad_path", f"too many symbolic links: {text(path)}")
    except BaseException:
        if at is not None:
            os.close(at)
        raise


def replace_file(folder: int, name: str, pieces: Iterable[bytes], mode: int | None, old: os.stat_result | None) -> None:
    """Write a temporary file and rename it: readers see the old file or the new, and a full disk keeps the old."""
    beside = f".{os.urandom(9).hex()}.tmp"  # a name that no program can have taken already, and never too long
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(beside, flags, 0o644, dir_fd=folder)
    try:
        try:
            for data in pieces:
                write_all(fd, data)
            # The new file would be root's: programs of another user could not write it any more.
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                os.fchown(fd, old.st_uid, old.st_gid)
            if mode is None and old is not None:
                mode = old.st_mode & 0o7777
            if mode is not None:
                os.fchmod(fd, mode)  # after the owner: a change of owner clears setuid
        finally:
            os.close(fd)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        os.unlink(beside, dir_fd=folder)
        raise


def check_unchanged(folder: int, name: str, wanted: str) -> None:
    """Raises `OpFailed` where the file has not this digest any more."""
    try:
        fd = open_at_once(name, os.O_RDONLY | os.O_NOFOLLOW, folder=folder)
    except FileNotFoundError:
        raise OpFailed("changed", "the file is gone") from None
    try:
        # Twice what a read returns at most (MAX_FILE_BYTES): a larger file was never read as a whole, and has no
        # digest.
        digest, budget = sha256(), 64 << 20
        while budget > 0 and (data := os.read(fd, 1 << 18)):  # piece by piece: PID 1's memory is the slot's
            digest.update(data)
            budget -= len(data)
        if digest.hexdigest() != wanted:
            raise OpFailed("changed", "the file has changed since it was read")
    finally:
        os.close(fd)
