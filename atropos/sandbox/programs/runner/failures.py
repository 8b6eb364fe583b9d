"""Operations that could not be done, as values for the model."""

from __future__ import annotations

import errno
import os


class OpFailed(Exception):
    """An operation that could not be done: a value for the model, not a fault."""

    def __init__(self, error: str, message: str, limit: str | None = None) -> None:
        super().__init__(message)
        self.error, self.message, self.limit = error, message, limit


ERROR_OF_ERRNO = {
    errno.ENOENT: "not_found",
    errno.EISDIR: "is_directory",
    errno.ENOTDIR: "not_directory",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.EROFS: "permission",
    errno.EEXIST: "exists",
    errno.ENOTEMPTY: "exists",
    errno.ENAMETOOLONG: "bad_path",
    errno.ELOOP: "bad_path",
    errno.EINVAL: "bad_path",
    errno.ENXIO: "not_regular",
    errno.EFBIG: "too_large",
    errno.E2BIG: "too_large",
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EMFILE: "limit",
    errno.EAGAIN: "limit",
    errno.ENOMEM: "limit",
}
LIMIT_OF_ERRNO = {errno.EMFILE: "files", errno.EAGAIN: "pids", errno.ENOMEM: "memory"}


def failure(error: BaseException, path: str = "") -> OpFailed:
    """An exception as `OpFailed`."""
    if isinstance(error, OpFailed):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        where = f": {text(path)}" if path else ""
        return OpFailed(
            ERROR_OF_ERRNO.get(error.errno, "io"), os.strerror(error.errno) + where, limit_of_errno(error.errno)
        )
    if isinstance(error, ValueError):  # UnicodeError is one
        return OpFailed("bad_path", f"{error}: {text(path)}")
    if isinstance(error, MemoryError):
        return OpFailed("limit", "out of memory", "memory")
    return OpFailed("io", f"{type(error).__name__}: {error}")


def limit_of_errno(number: int) -> str | None:
    """The slot's limit that an error number means."""
    if number in (errno.ENOSPC, errno.EDQUOT):
        try:
            # ENOSPC says both; the root is on the slot's volume.
            return "inodes" if os.statvfs("/").f_favail == 0 else "disk"
        except OSError:
            return "disk"
    return LIMIT_OF_ERRNO.get(number)


def text(value: str | bytes) -> str:
    """Text that any JSON reader takes: what isn't UTF-8 is shown as a replacement character."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    # Surrogates, by which Python has undecodable bytes in names, are no valid UTF-8.
    return value.encode("utf-8", "replace").decode("utf-8")
