"""`filesystem.Filesystem`: what is at a path of a sandbox."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from atropos.api.e2b import messages
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.sandbox import E2bSandbox, iso
from atropos.slots.slot.results import ExecResult

_FIELDS = ("%i", "%y", "%Y", "%m", "%s", "%u", "%g", "%T@", "%l", "%p")
_FORMAT = "".join(rf"{field}\0" for field in _FIELDS)
_TYPES = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}
_EXISTS, _NO_FOLDER = 17, 20  # as EEXIST and ENOTDIR
_REASONS = {
    ": No such file or directory": "not_found",
    ": Not a directory": "not_found",
    ": Permission denied": "permission_denied",
}
"""How `find` and others say why they failed."""


class FileEntry:
    """What `find` says about a path."""

    __slots__ = ("group", "inode", "kind", "link", "mode", "modified", "owner", "path", "size", "target")

    def __init__(self, fields: Sequence[str]) -> None:
        inode, self.kind, self.target, mode, size, self.owner, self.group, modified, self.link, self.path = fields
        self.inode, self.mode, self.size, self.modified = int(inode), int(mode, 8), int(size), float(modified)
        if not 0 <= self.mode <= 0o7777 or not self.path:
            raise ValueError(f"mode {mode[:20]}, path {self.path[:200]!r}")

    @classmethod
    def read(cls, printed: str) -> list[FileEntry]:
        """Those that `find` printed; names and targets of links hold any character but the one that ends a field."""
        fields = printed.split("\0")[:-1]
        return [cls(fields[start : start + len(_FIELDS)]) for start in range(0, len(fields), len(_FIELDS))]

    def info(self) -> Json:
        """As the protocol's `EntryInfo`."""
        target = posixpath.normpath(posixpath.join(posixpath.dirname(self.path), self.link))  # absolute, as E2B has it
        link = {"symlinkTarget": target, "isSymlink": True} if self.kind == "l" else {}
        return {
            "name": posixpath.basename(self.path) or "/",
            "type": _TYPES.get(self.target, "FILE_TYPE_UNSPECIFIED"),
            "path": self.path,
            "size": str(self.size),  # JSON of protocol buffers has 64-bit numbers as text
            "mode": self.mode,
            "permissions": _permissions(self.kind, self.mode),
            "owner": self.owner,
            "group": self.group,
            "modifiedTime": iso(self.modified),
            **link,
        }


def _permissions(kind: str, mode: int) -> str:
    # As Go writes a mode, since E2B's daemon is in Go: a link is L.
    bits = "".join(letter if mode >> (8 - at) & 1 else "-" for at, letter in enumerate("rwxrwxrwx"))
    return {"d": "d", "l": "L"}.get(kind, "-") + bits


def path_of(sandbox: E2bSandbox, path: str) -> str:
    """An absolute path: relative ones and `~` begin at the sandbox's home.

    Raises:
        RpcError: no file can be called that.
    """
    if "\0" in path:
        raise RpcError("invalid_argument", "a path has no zero byte")
    home = sandbox.slot.profile.workdir
    if path == "~" or path.startswith("~/"):
        path = "." + path[1:]
    return posixpath.normpath(posixpath.join(home, path))


async def _run(sandbox: E2bSandbox, command: Sequence[str], user: str | None) -> ExecResult:
    """Run one of the slot's programs, whatever the sandbox's variables are, and even if its home is missing."""
    env = {"LC_ALL": "C"}
    return await sandbox.slot.exec(command, workdir="/", user=user, split=True, clean_env=True, env=env)


async def find(sandbox: E2bSandbox, path: str, depth: int, user: str | None, *, follow: bool = True) -> list[FileEntry]:
    """A path (with `follow`, what it leads to, where it is a link), and what is below it, down to a depth.

    Raises:
        RpcError: there is nothing, it may not be read, there is too much of it, or `find` fails.
    """
    command = ["find", "-H" if follow else "-P", path, "-maxdepth", str(depth), "-printf", _FORMAT]
    result = await _run(sandbox, command, user)
    if result.truncated:
        raise RpcError("out_of_range", f"there is too much below {path} for one list")
    failure = _failure(result)
    try:
        entries = FileEntry.read(result.stdout or "")
    except ValueError:  # the slot's programs may have put another `find` there
        raise RpcError("internal", f"find printed what can't be read: {(result.stdout or '')[:200]!r}") from None
    # With 1 it ends also where a folder below can't be read: what it lists is an answer, but the path alone is none.
    if not entries or (failure.code == "permission_denied" and len(entries) == 1) or result.exit_code not in {0, 1}:
        raise failure
    return entries


def _failure(result: ExecResult) -> RpcError:
    """Why a program failed, as far as it says that itself."""
    if result.error is not None:
        return RpcError("invalid_argument" if result.error.startswith("unknown_user") else "internal", result.error)
    message = (result.stderr or "").strip()
    code = next((code for end, code in _REASONS.items() if message.endswith(end)), "internal")
    return RpcError(code, message[:1000] or f"a program of the sandbox ended with {result.exit_code}")


async def _at(sandbox: E2bSandbox, path: str, user: str | None) -> Json:
    entry, *_ = await find(sandbox, path, 0, user, follow=False)
    return {"entry": entry.info()}


async def stat(sandbox: E2bSandbox, message: messages.AtPath, user: str | None) -> Json:
    """`Stat`."""
    return await _at(sandbox, path_of(sandbox, message.path), user)


async def list_dir(sandbox: E2bSandbox, message: messages.ListDir, user: str | None) -> Json:
    """`ListDir`."""
    # Protocol buffers leave out a number that isn't set, so that 0 is none.
    folder, *entries = await find(sandbox, path_of(sandbox, message.path), message.depth or 1, user)
    if folder.kind != "d":
        raise RpcError("invalid_argument", f"path {folder.path!r} is no directory")
    return {"entries": [entry.info() for entry in sorted(entries, key=lambda entry: entry.path)]}


async def make_dir(sandbox: E2bSandbox, message: messages.AtPath, user: str | None) -> Json:
    """`MakeDir`."""
    path = path_of(sandbox, message.path)
    script = f'[ -d "$1" ] && exit {_EXISTS}; [ -e "$1" ] && exit {_NO_FOLDER}; mkdir -p -- "$1"'
    result = await _run(sandbox, ["sh", "-c", script, "sh", path], user)
    if result.exit_code == _EXISTS:
        raise RpcError("already_exists", f"directory {path!r} exists")
    if result.exit_code == _NO_FOLDER:
        raise RpcError("invalid_argument", f"path {path!r} exists, and is no directory")
    _check(result)
    return await _at(sandbox, path, user)


async def move(sandbox: E2bSandbox, message: messages.Move, user: str | None) -> Json:
    """`Move`."""
    source, target = path_of(sandbox, message.source), path_of(sandbox, message.destination)
    await _at(sandbox, source, user)  # a missing one is refused before the target's parents are made
    script = 'mkdir -p -- "$(dirname -- "$2")" && mv -T -- "$1" "$2"'
    _check(await _run(sandbox, ["sh", "-c", script, "sh", source, target], user))
    return await _at(sandbox, target, user)


async def remove(sandbox: E2bSandbox, message: messages.AtPath, user: str | None) -> Json:
    """`Remove`; a missing path is no error."""
    _check(await _run(sandbox, ["rm", "-rf", "--", path_of(sandbox, message.path)], user))
    return {}


def _check(result: ExecResult) -> None:
    if not result.ok:
        raise _failure(result)
