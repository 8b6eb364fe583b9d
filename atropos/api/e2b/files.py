"""`filesystem.Filesystem`: what is at a path of a sandbox; and the upload and download of files."""

from __future__ import annotations

import posixpath
import zlib
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Sequence

from python_multipart import MultipartParser
from python_multipart.multipart import parse_options_header

from atropos import wire
from atropos.api.e2b import messages
from atropos.api.e2b.connect import Json, RpcError
from atropos.api.e2b.sandbox import Sandbox, iso
from atropos.slots.slot.results import ExecResult, file_error

PIECE_BYTES = 1 << 20
"""Size of the pieces in which files are sent, both ways."""
_FIELDS = ("%i", "%y", "%Y", "%m", "%s", "%u", "%g", "%T@", "%l", "%p")
_FORMAT = "".join(rf"{field}\0" for field in _FIELDS)
_TYPES = {"f": "FILE_TYPE_FILE", "d": "FILE_TYPE_DIRECTORY", "l": "FILE_TYPE_SYMLINK"}
_EXISTS, _NO_FOLDER = 17, 20
_REASONS = {
    ": No such file or directory": "not_found",
    ": Not a directory": "not_found",
    ": Permission denied": "permission_denied",
}
"""How `find` and others say why they failed."""
_GZIP = 16 + zlib.MAX_WBITS


class Entry:
    """What `find` says about a path."""

    __slots__ = ("group", "inode", "kind", "link", "mode", "modified", "owner", "path", "size", "target")

    def __init__(self, fields: Sequence[str]) -> None:
        inode, self.kind, self.target, mode, size, self.owner, self.group, modified, self.link, self.path = fields
        self.inode, self.mode, self.size, self.modified = int(inode), int(mode, 8), int(size), float(modified)

    @classmethod
    def read(cls, printed: str) -> list[Entry]:
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
            "size": str(self.size),
            "mode": self.mode,
            "permissions": _permissions(self.kind, self.mode),
            "owner": self.owner,
            "group": self.group,
            "modifiedTime": iso(self.modified),
            **link,
        }


def _permissions(kind: str, mode: int) -> str:
    bits = "".join(letter if mode >> (8 - at) & 1 else "-" for at, letter in enumerate("rwxrwxrwx"))
    return {"d": "d", "l": "L"}.get(kind, "-") + bits


def path_of(sandbox: Sandbox, path: str) -> str:
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


async def _run(sandbox: Sandbox, command: Sequence[str], user: str | None) -> ExecResult:
    """Run one of the slot's programs, in whatever variables the sandbox was created with."""
    return await sandbox.slot.exec(command, user=user, split=True, clean_env=True, env={"LC_ALL": "C"})


async def find(sandbox: Sandbox, path: str, depth: int, user: str | None, *, follow: bool = True) -> list[Entry]:
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
        entries = Entry.read(result.stdout or "")
    except ValueError:  # the slot's programs may have put another `find` there
        raise RpcError("internal", f"find printed what can't be read: {(result.stdout or '')[:200]!r}") from None
    if not entries or (failure.code == "permission_denied" and len(entries) == 1) or result.exit_code not in {0, 1}:
        raise failure
    return entries


def _failure(result: ExecResult) -> RpcError:
    """Why a program failed, as far as it says that itself."""
    if result.error is not None:
        return RpcError("invalid_argument" if result.error.startswith("unknown_user") else "internal", result.error)
    said = (result.stderr or "").strip()
    code = next((code for end, code in _REASONS.items() if said.endswith(end)), "internal")
    return RpcError(code, said[:1000] or f"a program of the sandbox ended with {result.exit_code}")


async def _at(sandbox: Sandbox, path: str, user: str | None) -> Json:
    entry, *_ = await find(sandbox, path, 0, user, follow=False)
    return {"entry": entry.info()}


async def stat(sandbox: Sandbox, message: messages.AtPath, user: str | None) -> Json:
    """`Stat`."""
    return await _at(sandbox, path_of(sandbox, message.path), user)


async def list_dir(sandbox: Sandbox, message: messages.ListDir, user: str | None) -> Json:
    """`ListDir`."""
    folder, *entries = await find(sandbox, path_of(sandbox, message.path), message.depth or 1, user)
    if folder.kind != "d":
        raise RpcError("invalid_argument", f"path {folder.path!r} is no directory")
    return {"entries": [entry.info() for entry in sorted(entries, key=lambda entry: entry.path)]}


async def make_dir(sandbox: Sandbox, message: messages.AtPath, user: str | None) -> Json:
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


async def move(sandbox: Sandbox, message: messages.Move, user: str | None) -> Json:
    """`Move`."""
    source, target = path_of(sandbox, message.source), path_of(sandbox, message.destination)
    await _at(sandbox, source, user)
    script = 'mkdir -p -- "$(dirname -- "$2")" && mv -T -- "$1" "$2"'
    _check(await _run(sandbox, ["sh", "-c", script, "sh", source, target], user))
    return await _at(sandbox, target, user)


async def remove(sandbox: Sandbox, message: messages.AtPath, user: str | None) -> Json:
    """`Remove`; a missing path is no error."""
    _check(await _run(sandbox, ["rm", "-rf", "--", path_of(sandbox, message.path)], user))
    return {}


def _check(result: ExecResult) -> None:
    if not result.ok:
        raise _failure(result)


# ------------------------------------------------------------------------------------------------- upload and download


async def read(sandbox: Sandbox, path: str, user: str | None) -> AsyncGenerator[bytes]:
    """A file's content in pieces, each read when the last one has gone.

    Raises:
        OSError: it can't be read.
    """
    path, offset = path_of(sandbox, path), 0
    while True:
        wanted = wire.ReadFile(path=path, offset=offset, max_bytes=PIECE_BYTES, user=user)
        result = await sandbox.slot.run(wanted)
        if isinstance(result, wire.OpError):
            raise file_error(result, path)
        assert isinstance(result, wire.FileResult)
        yield result.data
        if len(result.data) < PIECE_BYTES:
            return
        offset += len(result.data)


async def write(sandbox: Sandbox, path: str, content: AsyncIterable[bytes], user: str | None) -> Json:
    """Write a file as its content comes, making its parents.

    Raises:
        OSError: it can't be written.
    """
    path = path_of(sandbox, path)
    append, piece = False, bytearray()

    async def put() -> None:
        result = await sandbox.slot.run(wire.WriteFile(path=path, data=bytes(piece), append=append, user=user))
        if isinstance(result, wire.OpError):
            raise file_error(result, path)
        piece.clear()

    async for chunk in content:
        piece += chunk
        if len(piece) >= PIECE_BYTES:
            await put()
            append = True
    if piece or not append:
        await put()
    return {"name": posixpath.basename(path), "type": "file", "path": path}


async def unzipped(content: AsyncIterable[bytes]) -> AsyncGenerator[bytes]:
    """What a gzip stream of one member or several holds, in pieces of bounded size.

    Raises:
        RpcError: it is none.
    """
    stream = zlib.decompressobj(wbits=_GZIP)
    try:
        async for chunk in content:
            while chunk:
                if stream.eof:
                    stream = zlib.decompressobj(wbits=_GZIP)
                yield stream.decompress(chunk, PIECE_BYTES)
                chunk = stream.unconsumed_tail or stream.unused_data  # noqa: PLW2901
        yield stream.flush()
        if not stream.eof:
            raise RpcError("invalid_argument", "the body is cut off: its gzip stream has no end")
    except zlib.error as error:
        raise RpcError("invalid_argument", f"the body is no gzip: {error}") from None


async def write_parts(
    sandbox: Sandbox, content_type: str, body: AsyncIterator[bytes], path: str | None, user: str | None
) -> list[Json]:
    """Write the files of a multipart body as it comes: each at its filename, or at `path`.

    Raises:
        OSError: one can't be written.
        RpcError: the body is no multipart form.
    """
    parts = _Parts(content_type, body)
    written: list[Json] = []
    while (name := await parts.next()) is not None:
        written.append(await write(sandbox, path or name, parts.content(), user))
    return written


class _Parts:
    """The parts of a multipart body, in the order in which they come."""

    def __init__(self, content_type: str, body: AsyncIterator[bytes]) -> None:
        boundary = parse_options_header(content_type)[1].get(b"boundary")
        if not boundary:
            raise RpcError("invalid_argument", "the body is neither application/octet-stream nor multipart/form-data")
        self._body = body
        self._read: list[str | bytes | None] = []
        self._header, self._value, self._name = bytearray(), bytearray(), ""
        callbacks = {
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": lambda: self._read.append(self._name),
            "on_part_data": self._part_data,
            "on_part_end": lambda: self._read.append(None),
        }
        self._parser = MultipartParser(boundary, callbacks)  # pyright: ignore[reportArgumentType] (a TypedDict)

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._read.append(data[start:end])

    def _header_end(self) -> None:
        if bytes(self._header).lower() == b"content-disposition":
            options = parse_options_header(bytes(self._value))[1]
            self._name = options.get(b"filename", b"").decode("utf-8", "replace").replace("%22", '"')
        self._header.clear()
        self._value.clear()

    async def _token(self) -> str | bytes | None:
        """A part's name, a piece of it, or None at its end.

        Raises:
            StopAsyncIteration: the body is over.
        """
        while not self._read:
            chunk = await anext(self._body)
            try:
                self._parser.write(chunk)
            except ValueError as error:
                raise RpcError("invalid_argument", f"the body is no multipart form: {error}") from None
        return self._read.pop(0)

    async def next(self) -> str | None:
        """The file name of the next part; None after the last one."""
        while True:
            try:
                token = await self._token()
            except StopAsyncIteration:
                return None
            if isinstance(token, str):
                return token

    async def content(self) -> AsyncGenerator[bytes]:
        """What the part holds."""
        while True:
            try:
                token = await self._token()
            except StopAsyncIteration:
                raise RpcError("invalid_argument", "the body ends within a file") from None
            if token is None:
                return
            if isinstance(token, bytes):
                yield token
