"""Searching the files of the trajectory's slot by content or by name, except those that git ignores."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from atropos import wire
from atropos.aio import off_loop
from atropos.tools.arguments import NO_NUL, Arguments, Text
from atropos.tools.base import Tool, ToolError, ToolScope
from atropos.tools.models import ToolResult
from atropos.tools.sandboxed.files import PathText, like_requested
from atropos.tools.sandboxed.text import clip, decode, plural

MAX_LINE = 500
"""Characters of a matching line that are shown."""
SEARCH_S = 20.0
"""Longest search in seconds."""
NO_RIPGREP = 97
"""Our script's exit code where the slot has no ripgrep."""
ON_LOOP_BYTES = 262_144
"""Output of up to this size is parsed on the event loop, more in a thread."""
NESTED = 8
"""Most repositories below the searched folder whose ignore rules are applied."""
_ROW = re.compile(r"([0-9]{1,18})([:-])(.*)", re.DOTALL)
"""After its path: a line's number, whether it matches or is context, and the line."""
CARRIAGE_RETURN = re.compile(r"\r|(?<!\\)(?:\\\\)*\\(?:r|x0[dD])")
"""Of a pattern that asks for the \\r of a \\r\\n: the same as the runner's, which imports nothing of ours."""


class SearchArguments(Arguments):
    """Arguments of `search_files`."""

    pattern: Text = Field(max_length=10_000, description="regular expression to look for in lines; empty: list files")
    path: PathText = Field(default=".", description="folder or file to search")
    glob: Annotated[str, Field(max_length=1000), NO_NUL] | None = Field(
        default=None, description="only files whose name matches, such as *.py"
    )
    ignore_case: bool = Field(default=False, description="whether A and a are the same")
    context: int = Field(default=0, ge=0, le=20, description="lines to show around each match")
    limit: int = Field(default=100, ge=1, le=2000, description="most matches")


@dataclass(frozen=True)
class _Found:
    """The rows of a search, context included, and whether there are more."""

    rows: list[wire.Match]
    truncated: bool


class SearchTool(Tool):
    """Search files."""

    name = "search_files"
    description = (
        "Search file contents by regular expression, or list files by a glob when the pattern is empty. "
        "Files that git ignores are left out. Answers lines of the form path:line:text."
    )
    arguments = SearchArguments
    toolsets = ("default", "file")
    read_only = True

    async def run(self, arguments: SearchArguments, scope: ToolScope) -> ToolResult:
        """Search with ripgrep where the slot has it, else with the runner's own search."""
        arguments = arguments.model_copy(update={"path": scope.slot.profile.expanded(arguments.path)})
        result = await _ripgrep(arguments, scope)
        if result is None:
            result = await _search(arguments, scope)
        return _answer(arguments, result, scope.limits.max_output_bytes)


def _answer(arguments: SearchArguments, result: _Found, most: int) -> ToolResult:
    rows: list[str] = []
    last: tuple[str, int] | None = None
    for one in result.rows:
        text = one.text if len(one.text) <= MAX_LINE else f"{one.text[:MAX_LINE]}… [the line goes on]"
        if not one.line:
            rows.append(one.path)
            continue
        if arguments.context and last is not None and last != (one.path, one.line - 1):
            rows.append("--")
        last = (one.path, one.line)
        mark = "-" if one.context else ":"
        rows.append(f"{one.path}{mark}{one.line}{mark}{text}")
    matches = [one for one in result.rows if not one.context]
    files = len({one.path for one in matches})
    noun = "match" if arguments.pattern else "file"
    if not matches:
        where = f" in {arguments.path}" + (f" ({arguments.glob})" if arguments.glob else "")
        rest = "; not all was searched: narrow the search, or use grep in the terminal" if result.truncated else ""
        output = f"no {noun} found{where}{rest}"
        return ToolResult(success=True, output=output, truncated=result.truncated, data=_data([], result))
    total = f"{plural(len(matches), noun)}" + (f" in {plural(files, 'file')}" if arguments.pattern else "")
    more = "; there may be more: narrow the search or raise limit" if result.truncated else ""
    text, dropped = clip("\n".join(rows), most)
    return ToolResult(
        success=True,
        output=f"{text}\n[{total}{more}]",
        truncated=result.truncated or bool(dropped),
        dropped_bytes=dropped,
        data=_data(matches, result),
    )


def _data(matches: list[wire.Match], result: _Found) -> dict[str, object]:
    rows = [{"path": one.path, "line": one.line, "text": one.text[:MAX_LINE]} for one in matches]
    return {"matches": rows, "truncated": result.truncated}


# ------------------------------------------------------------------------------------------------------------- ripgrep


async def _ripgrep(arguments: SearchArguments, scope: ToolScope) -> _Found | None:
    """The search by the slot's ripgrep; None where it has none, or where ripgrep refuses the pattern."""
    if scope.state.get("search.no_ripgrep"):
        return None
    # NUL after the path (--null), as paths may have colons. Sorted, which takes one thread, so that a search can be
    # repeated.
    flags = ["--color=never", "--no-config", "--hidden", "--glob=!.git", "--sort=path", "--null"]
    if arguments.glob is not None:
        flags.append(f"--glob={arguments.glob}")
    if arguments.pattern:
        flags += ["--line-number", "--with-filename", "--no-heading", "--engine=auto", "--max-columns=4000"]
        # So that `$` matches before the \r of a \r\n, unless the pattern itself asks for it.
        flags += [] if CARRIAGE_RETURN.search(arguments.pattern) else ["--crlf"]
        flags += ["--ignore-case"] if arguments.ignore_case else []
        flags += [f"--context={arguments.context}"] if arguments.context else []
        flags += ["-e", arguments.pattern]
    else:
        flags.append("--files")
    most = _most_rows(arguments)
    search = " ".join(shlex.quote(flag) for flag in [*flags, "--", arguments.path])
    rows = f"tr '\\0' '\\n' | head -n {most}" if not arguments.pattern else f"head -n {most}"
    command = (
        f"command -v rg >/dev/null 2>&1 || exit {NO_RIPGREP}; rg {search} 2>/dev/null | {rows}; exit ${{PIPESTATUS[0]}}"
    )
    result = await scope.slot.run(wire.Exec(command=command, timeout_s=SEARCH_S, max_output_bytes=4_000_000))
    if not isinstance(result, wire.CommandResult) or result.exit_code == NO_RIPGREP:
        scope.state["search.no_ripgrep"] = True
        return None
    if result.timed_out:
        raise ToolError(f"search_files: not done after {SEARCH_S:g} s; search a smaller folder")
    if result.exit_code == 2 and not result.output:
        return None  # ripgrep refuses the pattern or path: the runner's search says why
    parse = partial(_parsed, arguments, truncated=result.truncated)
    return await off_loop(len(result.output), ON_LOOP_BYTES, parse, decode(result.output))


def _most_rows(arguments: SearchArguments) -> int:
    # With one match more, by which it is known that there are more; and for each a line that parts it from the last.
    return (arguments.limit + 1) * (2 * arguments.context + 2)


def _parsed(arguments: SearchArguments, text: str, *, truncated: bool) -> _Found:
    most = _most_rows(arguments)
    lines = text.split("\n", most)[:most]  # the slot's rg and head may be anything
    if arguments.pattern:
        rows = (row for line in lines if (row := _parsed_row(line)) is not None)
    else:
        rows = (wire.Match(path=line.removeprefix("./"), line=0, text="") for line in lines if line)
    return _limited(rows, arguments.limit, truncated=truncated)


def _parsed_row(line: str) -> wire.Match | None:
    path, _, rest = line.partition("\0")
    row = _ROW.match(rest)
    if row is None:
        return None
    number, mark, text = row.groups()
    return wire.Match(path=path.removeprefix("./"), line=int(number), text=text.rstrip("\r"), context=mark == "-")


def _limited(rows: Iterable[wire.Match], limit: int, *, truncated: bool) -> _Found:
    """The first matches, with their context; `truncated` says whether there are more than the rows."""
    first: list[wire.Match] = []
    matches = 0
    for row in rows:
        matches += not row.context
        if matches > limit:
            return _Found(first, truncated=True)
        first.append(row)
    return _Found(first, truncated)


# ------------------------------------------------------------------------------------------------- the runner's search


async def _search(arguments: SearchArguments, scope: ToolScope) -> _Found:
    """The runner's search, without what git ignores."""
    workdir = scope.slot.profile.workdir
    most = min(arguments.limit * 4, 10_000)
    while True:
        result = await scope.slot.run(
            wire.Search(
                pattern=arguments.pattern,
                path=arguments.path,
                glob=arguments.glob,
                max_matches=most,
                context=arguments.context,
                ignore_case=arguments.ignore_case,
            )
        )
        if isinstance(result, wire.OpError):
            raise ToolError(f"search_files: {result.message}", limit=result.limit)
        assert isinstance(result, wire.SearchResult)
        every = [
            one.model_copy(update={"path": like_requested(one.path, arguments.path, workdir).removeprefix("./")})
            for one in result.matches
        ]
        ignored = await _ignored(arguments.path, sorted({one.path for one in every}), scope) if every else ()
        visible = [one for one in every if one.path not in ignored and "/.git/" not in f"/{one.path}"]
        matches = sum(not one.context for one in visible)
        if matches >= arguments.limit or not result.truncated or most == 10_000:
            return _limited(visible, arguments.limit, truncated=result.truncated)
        most = 10_000  # most matches are ignored: search once more for others


async def _ignored(root: str, paths: list[str], scope: ToolScope) -> set[str]:
    """The paths that git ignores, by the rules of the repository of `root`, or of those directly below it."""
    # `root` may be a file: git then runs in its folder.
    script = (
        f'd={shlex.quote(root)}; [ -d "$d" ] || d=$(dirname -- "$d"); '
        'git -C "$d" rev-parse --is-inside-work-tree >/dev/null 2>&1 && echo . && exit; '
        f'cd -- "$d" && for g in */.git; do [ -e "$g" ] && dirname -- "$g"; done | head -n {NESTED}'
    )
    result = await scope.slot.run(wire.Exec(command=script, timeout_s=10, max_output_bytes=20_000))
    if not isinstance(result, wire.CommandResult) or not result.output:
        return set()
    ignored: set[str] = set()
    workdir = scope.slot.profile.workdir
    for repository in decode(result.output).splitlines()[:NESTED]:  # the slot's head may be anything
        folder = posixpath.normpath(posixpath.join(root, repository))
        names = {path: _below(path, folder, workdir) for path in paths}
        seen = {name: path for path, name in names.items() if name}
        if not seen:
            continue
        asked = "\0".join(seen).encode("utf-8", "surrogateescape")
        answer = await scope.slot.run(
            wire.Exec(
                command=f"git -C {shlex.quote(folder)} check-ignore -z --stdin",
                stdin=asked,
                timeout_s=10,
                max_output_bytes=len(asked) + 1,  # all of them; the slot's git may be anything
            )
        )
        if isinstance(answer, wire.CommandResult) and answer.exit_code == 0:
            ignored |= {seen[one] for one in decode(answer.output).split("\0") if one in seen}
    return ignored


def _below(path: str, folder: str, workdir: str) -> str:
    """A path relative to a folder; empty when it is not below it."""
    path, folder = (posixpath.normpath(posixpath.join(workdir, one)) for one in (path, folder))
    return path[len(folder) :].lstrip("/") if path.startswith(f"{folder.rstrip('/')}/") else ""
