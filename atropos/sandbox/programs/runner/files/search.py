"""Searching files by content or by name, in a child."""

from __future__ import annotations

import fnmatch
import os
import posixpath
import re
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed, failure, text
from atropos.sandbox.programs.runner.opening import open_regular, read_all
from atropos.sandbox.programs.runner.paths import path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterator
    from re import Pattern

    from atropos.sandbox.programs.runner.work import Outcome

MAX_SEARCH_FILES = 100_000
MAX_SEARCH_BYTES = 512 << 20
MAX_SEARCH_FILE = 16 << 20
MAX_LINE_CHARS = 2000


def op_search(
    call: int, path: str, pattern: str, glob: str | None, max_matches: int, context: int, ignore_case: bool
) -> None:
    """Answer with the lines that match, or the files of a name."""
    path = path_of(path).removesuffix("/.") or "/"

    def job() -> Outcome:
        return search(path, expression(pattern, ignore_case=ignore_case), glob, max_matches, context)

    Work(call, job)


def expression(pattern: str, *, ignore_case: bool) -> Pattern[bytes] | None:
    """A compiled pattern; None: of an empty one."""
    if not pattern:
        return None
    try:
        return re.compile(pattern.encode(), re.IGNORECASE if ignore_case else 0)
    except (re.error, RecursionError, OverflowError) as error:
        raise OpFailed("bad_pattern", f"the pattern is not a regular expression: {error}") from None


def walk(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path, stat) of the regular files under `top`, in order; links aren't followed, /proc and the like not entered."""
    try:
        found = os.lstat(top)
    except OSError as error:
        raise failure(error, top) from None
    if found.st_mode & 0o170000 == 0o100000:
        yield top, found
        return
    pending = [top]
    while pending:
        folder = pending.pop()
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            continue
        folders: list[str] = []
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if is_special(found.st_dev):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name != ".git":
                    folders.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path, found
        pending += reversed(folders)


def search(path: str, wanted: Pattern[bytes] | None, glob: str | None, max_matches: int, context: int) -> Outcome:
    """Matches in path and line order."""
    if posixpath.islink(path):
        path = posixpath.realpath(path)
    matches: list[dict[str, object]] = []
    files, budget, cut = 0, MAX_SEARCH_BYTES, False
    for name, found in walk(path):
        shown = posixpath.relpath(name, path) if name != path else name
        if glob and not (fnmatch.fnmatch(shown, glob) or fnmatch.fnmatch(posixpath.basename(name), glob)):
            continue
        files += 1
        if files > MAX_SEARCH_FILES or budget <= 0 or len(matches) >= max_matches:
            cut = True
            break
        if wanted is None:
            matches.append({"path": text(name), "line": 0, "text": ""})
            continue
        data = searchable(name, found.st_size)
        budget -= len(data)
        if b"\0" not in data[:8192]:
            cut = search_lines(matches, text(name), data, wanted, max_matches, context) or cut
    return "search_result", {"matches": matches, "files": files, "truncated": cut}, {}


def searchable(name: str, size: int) -> bytes:
    """What of a file is searched; nothing of one that can't be read."""
    try:
        fd, opened = open_regular(name)
    except (OSError, OpFailed):
        return b""
    try:
        return b"" if is_special(opened.st_dev) else read_all(fd, 0, min(size, MAX_SEARCH_FILE))
    except OSError:
        return b""
    finally:
        os.close(fd)


def search_lines(
    matches: list[dict[str, object]], name: str, data: bytes, wanted: Pattern[bytes], max_matches: int, context: int
) -> bool:
    """Add a file's matching lines, and `context` lines around them; True when the bound was reached."""
    if not wanted.search(data):
        return False
    lines = data.split(b"\n")
    if lines and not lines[-1]:
        lines.pop()
    shown: dict[int, bool] = {}
    for hit in [number for number, line in enumerate(lines) if wanted.search(line)]:
        for number in range(max(0, hit - context), min(len(lines), hit + context + 1)):
            shown.setdefault(number, True)
        shown[hit] = False
    for number in sorted(shown):
        if len(matches) >= max_matches:
            return True
        line = text(lines[number].rstrip(b"\r"))[:MAX_LINE_CHARS]
        matches.append({"path": name, "line": number + 1, "text": line, "context": shown[number]})
    return False
