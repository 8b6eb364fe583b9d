"""Changing files in the trajectory's slot: one exact replacement, or a unified diff of several files."""

from __future__ import annotations

import hashlib
import posixpath
import shlex
from dataclasses import dataclass
from functools import partial

from pydantic import Field

from atropos import wire
from atropos.aio import off_loop
from atropos.tools.arguments import Arguments
from atropos.tools.base import Tool, ToolError, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed import diffs
from atropos.tools.sandboxed.files import PathText, fetch, split_lines, texts
from atropos.tools.sandboxed.text import is_binary, plural, with_line_ends

ON_LOOP_BYTES = 32_768
"""Texts of up to this size are processed on the event loop, longer ones in a thread."""
MAX_FILES = 200
"""Most files that one diff may change."""


class PatchArguments(Arguments):
    """Arguments of `patch`: path, old and new; or diff."""

    path: PathText | None = Field(default=None, description="the file, with old and new")
    old: str | None = Field(default=None, description="the exact text to replace; it must be there exactly once")
    new: str | None = Field(default=None, description="the text to put in its place")
    replace_all: bool = Field(default=False, description="replace every occurrence of old")
    diff: str | None = Field(
        default=None, description="instead of path, old and new: a unified diff, also of several files"
    )


@dataclass
class _Edit:
    """The change of one file's bytes; None where there is no file."""

    path: str
    before: bytes | None
    after: bytes | None
    mode: int | None = None
    old_mode: int | None = None


class PatchTool(Tool):
    """Change files by exact text or by a diff."""

    name = "patch"
    description = (
        "Change files. Either replace one exact piece of text (path, old, new; old must be there exactly once unless "
        "replace_all is true), or apply a unified diff of one or several files (diff): all of it or, if any part "
        "does not apply, nothing."
    )
    arguments = PatchArguments
    toolsets = ("default", "file")

    async def run(self, arguments: PatchArguments, scope: ToolScope) -> ToolResult:
        """Compute every change, then write them."""
        edits = await self._edits(arguments, scope)
        await _write(edits, scope)
        size = sum(len(edit.before or b"") + len(edit.after or b"") for edit in edits)
        output = await off_loop(size, ON_LOOP_BYTES, _summary, edits)
        return ToolResult(
            success=True, output=output, data={"files": [edit.path for edit in edits], "changed": len(edits)}
        )

    async def _edits(self, arguments: PatchArguments, scope: ToolScope) -> list[_Edit]:
        if arguments.diff is not None:
            if arguments.old is not None or arguments.new is not None:
                raise ToolError("patch: give either diff, or path, old and new; not both")
            try:
                return await _from_diff(arguments.diff, scope)
            except diffs.PatchError as error:
                raise ToolError(f"patch: {error}") from None
        path, old, new = arguments.path, arguments.old, arguments.new
        if path is None or old is None or new is None:
            missing = next(name for name in ("path", "old", "new") if getattr(arguments, name) is None)
            raise ToolError(f"patch: {missing!r} is missing; give path, old and new, or diff")
        if not old:
            raise ToolError("patch: old is empty; give the text to replace, or use write_file to write the whole file")
        if old == new:
            raise ToolError("patch: old and new are the same; nothing would change")
        file = await _whole(scope, path)
        replaced = partial(_replaced, path, old, new, replace_all=arguments.replace_all)
        after = await off_loop(len(file.data), ON_LOOP_BYTES, replaced, file.data)
        return [_Edit(path, file.data, after, file.mode, file.mode)]


def _replaced(path: str, old: str, new: str, before: bytes, *, replace_all: bool) -> bytes:
    old, new = with_line_ends(before.decode("utf-8", "surrogateescape"), old, new)
    old_bytes, new_bytes = old.encode("utf-8", "replace"), new.encode("utf-8", "replace")
    count = before.count(old_bytes)
    if count == 0:
        near_miss = diffs.near_miss(texts(split_lines(before)), texts(split_lines(old_bytes)))
        raise ToolError(f"patch: old is not in {path}: {near_miss}")
    if count > 1 and not replace_all:
        places = _places(before, old_bytes)
        raise ToolError(
            f"patch: old is in {path} {count} times (lines {places}); add lines around it until it is there once, "
            "or set replace_all"
        )
    return before.replace(old_bytes, new_bytes)


def _places(text: bytes, piece: bytes) -> str:
    places: list[str] = []
    at = text.find(piece)
    while at >= 0 and len(places) < 10:
        places.append(str(text.count(b"\n", 0, at) + 1))
        at = text.find(piece, at + len(piece))
    return ", ".join(places) + (", …" if at >= 0 else "")


async def _from_diff(text: str, scope: ToolScope) -> list[_Edit]:
    if len(text) > wire.MAX_FILE_BYTES:
        raise ToolError(f"patch: the diff is longer than {wire.MAX_FILE_BYTES:,} characters")
    changes = await off_loop(len(text), ON_LOOP_BYTES, diffs.parse, text)
    if len(changes) > MAX_FILES:
        raise ToolError(f"patch: the diff changes {len(changes)} files; at most {MAX_FILES} at once")
    edits: dict[str, _Edit] = {}
    for change in changes:
        if "\x00" in f"{change.old_path}{change.new_path}":
            raise diffs.PatchError("a file name in the diff has a NUL character")
        await _plan(change, edits, scope)
    return list(edits.values())


def _applied(before: bytes, change: diffs.FileChange) -> bytes:
    """A file's bytes after a change; bytes that aren't UTF-8 are kept."""
    return diffs.apply(before.decode("utf-8", "surrogateescape"), change).encode("utf-8", "surrogateescape")


async def _plan(change: diffs.FileChange, edits: dict[str, _Edit], scope: ToolScope) -> None:
    """Add a file's change to the edits; a file that is named twice is changed twice."""
    if change.old_path is None:
        target = change.new_path or ""
        known = edits.get(target)
        if await _exists(scope, target) if known is None else known.after is not None:
            raise diffs.PatchError(f"{target} is to be created and exists already. Nothing was changed")
        before, old_mode = (None, None) if known is None else (known.before, known.old_mode)
        edits[target] = _Edit(target, before, diffs.apply("", change).encode(), change.mode, old_mode)
        return
    if change.new_path is not None and change.new_path != change.old_path and not change.rename:
        named = change.new_path in edits or await _exists(scope, change.new_path)
        change.old_path = change.new_path = change.new_path if named else change.old_path
    known = await _known(change.old_path, edits, scope)
    assert known.after is not None
    searched = len(known.after) * max(len(change.hunks), 1)
    after = await off_loop(searched, ON_LOOP_BYTES, _applied, known.after, change)
    mode = known.mode if change.mode is None else change.mode
    gone = _Edit(change.old_path, known.before, None, None, known.old_mode)
    if change.new_path is None:
        if after:
            raise diffs.PatchError(
                f"{change.old_path} is to be deleted and has lines that the diff lacks. Nothing was changed"
            )
        edits[change.old_path] = gone
    elif change.new_path == change.old_path:
        edits[change.old_path] = _Edit(change.old_path, known.before, after, mode, known.old_mode)
    else:
        if change.new_path in edits or await _exists(scope, change.new_path):
            raise diffs.PatchError(
                f"{change.old_path} is to be renamed to {change.new_path}, which exists. Nothing was changed"
            )
        edits[change.old_path] = gone
        edits[change.new_path] = _Edit(change.new_path, None, after, mode)


async def _known(path: str, edits: dict[str, _Edit], scope: ToolScope) -> _Edit:
    """What a file that is there will be after the edits so far."""
    known = edits.get(path)
    if known is None:
        file = await _whole(scope, path)
        return _Edit(path, file.data, file.data, file.mode, file.mode)
    if known.after is None:
        raise diffs.PatchError(f"{path} is deleted earlier in the same diff. Nothing was changed")
    return known


async def _write(edits: list[_Edit], scope: ToolScope) -> None:
    """Write the edits; if one fails, undo those before it."""
    done: list[_Edit] = []
    try:
        for edit in edits:
            await _put(edit.path, edit.before, edit.after, edit.mode, scope)  # each write is atomic
            done.append(edit)
    except ToolError as error:
        failed: list[str] = []
        for edit in reversed(done):
            try:
                await _put(edit.path, edit.after, edit.before, edit.old_mode, scope)
            except ToolError:
                failed.append(edit.path)
        rest = f"; {', '.join(failed)} could not be restored" if failed else "; nothing was changed"
        raise ToolError(f"patch: {error}{rest}", limit=error.limit) from None


async def _put(path: str, before: bytes | None, after: bytes | None, mode: int | None, scope: ToolScope) -> None:
    if after is None:
        command = f"rm -- {shlex.quote(scope.slot.profile.expanded(path))}"
        # As root, as files are written: whoever commands run as, a change is made and undone as a whole.
        result: wire.CommandResult = await scope.run(wire.Exec(command=command, timeout_s=30, user="0:0"))
        if result.exit_code != 0:
            raise ToolError(f"{path} can't be deleted: {result.output.decode('utf-8', 'replace').strip()}")
        return
    unchanged = None if before is None else hashlib.sha256(before).hexdigest()
    await scope.run(wire.WriteFile(path=path, data=after, mode=mode, if_sha256=unchanged))


async def _whole(scope: ToolScope, path: str) -> wire.FileResult:
    result = await fetch(scope, path, 0, wire.MAX_FILE_BYTES)
    if result.size > len(result.data):
        raise ToolError(f"patch: {path} is larger than {wire.MAX_FILE_BYTES:,} bytes; change it by a command")
    if is_binary(result.data):
        raise ToolError(f"patch: {path} is a binary file; change it by a command")
    return result


async def _exists(scope: ToolScope, path: str) -> bool:
    result = await scope.slot.run(wire.ReadFile(path=path, max_bytes=1))
    if not isinstance(result, wire.OpError) or result.error in {"is_directory", "not_regular"}:
        return True
    if result.error in {"not_found", "not_directory"}:
        return False
    raise ToolError(result.message, limit=result.limit)


def _summary(edits: list[_Edit]) -> str:
    rows: list[str] = []
    for edit in edits:
        name = posixpath.normpath(edit.path)
        if edit.after is None:
            rows.append(f"deleted {name}")
        elif edit.before is None:
            rows.append(f"created {name} ({plural(len(split_lines(edit.after)), 'line')})")
        elif edit.before == edit.after and edit.mode != edit.old_mode:
            rows.append(f"changed the mode of {name}")
        else:
            rows.append(f"changed {name} ({_changed(split_lines(edit.before), split_lines(edit.after))})")
    return "\n".join(rows)


def _changed(old: list[bytes], new: list[bytes]) -> str:
    """The changed lines: those between the common start and the common end."""
    start = 0
    while start < min(len(old), len(new)) and old[start] == new[start]:
        start += 1
    end = 0
    while end < min(len(old), len(new)) - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return f"lines {start + 1} to {max(len(new) - end, start + 1)}, {len(old)} before and {len(new)} now"
