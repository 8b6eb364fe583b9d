"""Reading and writing files in the trajectory's slot."""

from __future__ import annotations

import difflib
import posixpath
import struct
from typing import Annotated

from pydantic import Field

from atropos import wire
from atropos.tools.arguments import NO_NUL, Arguments
from atropos.tools.base import Tool, ToolError, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed.text import decode, is_binary, plural

CHUNK_BYTES = 1 << 20
"""Bytes read at a time in search of the requested lines."""
SCAN_BYTES = 64 << 20
"""Most bytes of a file that are searched for them."""
MAX_LINE = 2000
"""Characters of one line that are shown."""
DEFAULT_LINES = 500
_COMPARED = 60
"""Characters of names that are compared: it takes the cube of their number, on the event loop."""
PathText = Annotated[str, Field(min_length=1, max_length=4096), NO_NUL]
"""At most Linux's PATH_MAX characters."""

_KINDS: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF87a", "a GIF image"),
    (b"GIF89a", "a GIF image"),
    (b"BM", "a BMP image"),
    (b"\x7fELF", "an ELF program"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "a gzip file"),
    (b"%PDF-", "a PDF document"),
    (b"BZh", "a bzip2 file"),
    (b"\xfd7zXZ\x00", "a xz file"),
    (b"\x28\xb5\x2f\xfd", "a zstd file"),
    (b"SQLite format 3\x00", "a SQLite database"),
)
"""Kinds of files by how they begin; `BM` may begin a text too."""


class PathArguments(Arguments):
    """Arguments that name a file."""

    path: PathText = Field(description="path of the file, from the workspace or absolute")


class ReadFileArguments(PathArguments):
    """Arguments of `read_file`."""

    offset: int = Field(default=1, description="first line to read, counted from 1; negative: from the end")
    limit: int = Field(default=DEFAULT_LINES, ge=1, le=1_000_000, description="most lines to read")


class ReadFileTool(Tool):
    """Read a text file."""

    name = "read_file"
    description = (
        "Read a text file. Lines are numbered, as in '   12|text'; the numbers are no part of the file. "
        "Use offset and limit to read part of a long file."
    )
    arguments = ReadFileArguments
    toolsets = ("default", "file")
    read_only = True

    async def run(self, arguments: ReadFileArguments, scope: ToolScope) -> ToolResult:
        """Read the requested lines."""
        first = await fetch(scope, arguments.path, 0, CHUNK_BYTES)
        kind = file_kind(first.data)
        if kind is not None:
            return ToolResult.failure(
                f"{arguments.path} is not text but {kind} of {plural(first.size, 'byte')}; "
                "use the terminal (file, xxd, …) to examine it",
                data={"path": arguments.path, "size": first.size, "binary": True},
            )
        if first.size == 0 and not first.data:
            return ToolResult(success=True, output="[the file is empty]", data=_content(arguments.path, "", 0, 0))
        start, lines, more = await _lines(scope, arguments, first)
        return _numbered(arguments, first.size, start, lines, more, scope.limits.max_output_bytes)


def _numbered(
    arguments: ReadFileArguments, size: int, start: int, lines: list[str], more: str, most: int
) -> ToolResult:
    if not lines:
        return ToolResult.failure(
            f"{arguments.path} has no line {arguments.offset}; it has {plural(start - 1, 'line')}"
        )
    rows: list[str] = []
    used, cut = 0, False
    for number, line in enumerate(lines, start):
        shown = line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]}… [{len(line) - MAX_LINE:,} more characters]"
        row = f"{number:>6}|{shown}"
        used += len(row) + 1
        if used > most and rows:
            cut = True
            break
        rows.append(row)
    last = start + len(rows) - 1
    if cut or more:
        after = more or "more follow"
        rows.append(f"[lines {start} to {last}; {after}; continue with offset={last + 1}]")
    content = "\n".join(lines[: last - start + 1])
    return ToolResult(
        success=True,
        output="\n".join(rows),
        truncated=bool(cut or more),
        data=_content(arguments.path, content, start, size),
    )


def _content(path: str, content: str, first_line: int, size: int) -> dict[str, object]:
    return {"path": path, "content": content, "first_line": first_line, "size": size}


async def _lines(scope: ToolScope, arguments: ReadFileArguments, first: wire.FileResult) -> tuple[int, list[str], str]:
    """The number of the first line, the lines, and what follows them ('' at the end of the file)."""
    start = _first_line(arguments, first)
    skip, shown, shown_bytes = start - 1, list[bytes](), 0
    data, position = first.data, len(first.data)
    begun = b""  # the start of a line that the next chunk continues
    while True:
        at_end = position >= first.size or not data
        newlines = data.count(b"\n")
        if skip > newlines and not at_end:
            skip -= newlines  # the whole chunk is before the requested lines
        else:
            pieces = split_lines(begun + data) if at_end else (begun + data).split(b"\n")
            begun = b"" if at_end else pieces.pop()[:CHUNK_BYTES]  # only the start of a very long line is shown
            skip, pieces = max(skip - len(pieces), 0), pieces[skip:]
            for piece in pieces:
                if len(shown) == arguments.limit or shown_bytes > 2 * scope.limits.max_output_bytes:
                    return start, texts(shown), "more lines follow"
                shown.append(piece)
                shown_bytes += min(len(piece), MAX_LINE) + 1
        if at_end:
            return (start if shown else start - skip), texts(shown), ""
        if position >= SCAN_BYTES:
            if shown:
                return start, texts(shown), "the file is too large to be read further"
            raise ToolError(
                f"{arguments.path} is too large ({plural(first.size, 'byte')}) to find line {start} in; "
                f"use the terminal: sed -n '{start},{start + arguments.limit - 1}p' FILE"
            )
        chunk = await fetch(scope, arguments.path, position, CHUNK_BYTES)
        data, position = chunk.data, position + len(chunk.data)


def _first_line(arguments: ReadFileArguments, first: wire.FileResult) -> int:
    """The number of the first requested line, which may be counted from the end."""
    if arguments.offset >= 0:
        return max(arguments.offset, 1)
    if first.size > len(first.data):
        raise ToolError(
            f"{arguments.path} is too large ({plural(first.size, 'byte')}) to count its lines from the end; "
            f"use the terminal: tail -n {-arguments.offset} FILE"
        )
    return max(len(split_lines(first.data)) + 1 + arguments.offset, 1)


def texts(lines: list[bytes]) -> list[str]:
    """Lines as text, without the carriage return of a CRLF."""
    return [decode(line.removesuffix(b"\r")) for line in lines]


def split_lines(data: bytes) -> list[bytes]:
    """Lines without their line feeds; text after the last one is a line too."""
    lines = data.split(b"\n")
    return lines if lines[-1] else lines[:-1]


class WriteFileArguments(PathArguments):
    """Arguments of `write_file`."""

    content: str = Field(description="the whole text of the file")


class WriteFileTool(Tool):
    """Write a file."""

    name = "write_file"
    description = "Write a file: missing folders are created, and earlier content is replaced."
    arguments = WriteFileArguments
    toolsets = ("default", "file")

    async def run(self, arguments: WriteFileArguments, scope: ToolScope) -> ToolResult:
        """Write it."""
        data = arguments.content.encode("utf-8", "replace")
        if len(data) > wire.MAX_FILE_BYTES:
            raise ToolError(f"write_file: content is longer than {wire.MAX_FILE_BYTES:,} bytes; write it in parts")
        await scope.run(wire.WriteFile(path=arguments.path, data=data))
        lines = data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
        return ToolResult(
            success=True,
            output=f"wrote {arguments.path}: {plural(lines, 'line')}, {plural(len(data), 'byte')}",
            data={"path": arguments.path, "bytes": len(data)},
        )


async def fetch(scope: ToolScope, path: str, offset: int, max_bytes: int) -> wire.FileResult:
    """Part of a file.

    Raises:
        ToolError: it can't be read; the message for a missing file suggests similar names.
    """
    result = await scope.slot.run(wire.ReadFile(path=path, offset=offset, max_bytes=max_bytes))
    if isinstance(result, wire.FileResult):
        return result
    assert isinstance(result, wire.OpError)
    if result.error == "not_found":
        raise ToolError(f"{path}: no such file{await _suggestion(scope, path)}")
    if result.error == "is_directory":
        raise ToolError(f"{path} is a directory; list it with search_files (empty pattern) or ls in the terminal")
    raise ToolError(result.message, limit=result.limit)


async def _suggestion(scope: ToolScope, path: str) -> str:
    folder, name = posixpath.split(path)
    result = await scope.slot.run(
        wire.Search(pattern="", path=folder or ".", glob=f"*{posixpath.splitext(name)[1]}", max_matches=300)
    )
    if not isinstance(result, wire.SearchResult):
        return "; its folder does not exist" if folder else ""
    paths = [like_requested(match.path, path, scope.slot.profile.workdir) for match in result.matches]
    by_name = {posixpath.basename(one)[:_COMPARED]: one for one in reversed(paths)}
    close = difflib.get_close_matches(name[:_COMPARED], by_name, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(by_name[one] for one in close)}?" if close else ""


def like_requested(path: str, requested: str, workdir: str) -> str:
    """An absolute path of the slot, made relative to the working directory where the requested path was relative."""
    return path.removeprefix(f"{workdir.rstrip('/')}/") if not requested.startswith("/") else path


def file_kind(data: bytes) -> str | None:
    """The kind of a file that isn't text (`a PNG image, 640x480`); None for text."""
    for magic, kind in _KINDS:
        if data.startswith(magic) and (magic != b"BM" or is_binary(data)):
            return f"{kind}{_extent(data)}"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "a WebP image"
    if data[:2] in {b"\xff\xfe", b"\xfe\xff"} and b"\x00" in data[:64]:
        return "UTF-16 text (convert it: iconv -f utf-16 -t utf-8)"
    return "a binary file" if is_binary(data) else None


def _extent(data: bytes) -> str:
    """The width and height in an image's header."""
    try:
        if data.startswith(b"\x89PNG"):
            return ", {}x{}".format(*struct.unpack(">II", data[16:24]))
        if data.startswith(b"GIF"):
            return ", {}x{}".format(*struct.unpack("<HH", data[6:10]))
    except struct.error:
        pass
    return ""
