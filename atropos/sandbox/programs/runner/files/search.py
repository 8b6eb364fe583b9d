"""Searching files by content or by name, in a child."""

from __future__ import annotations

import fnmatch
import os
import re
from _json import encode_basestring_ascii as quote
from stat import S_ISREG
from typing import TYPE_CHECKING

from atropos.sandbox.programs.runner.failures import OpFailed, failure, text
from atropos.sandbox.programs.runner.opening import open_regular, read_all
from atropos.sandbox.programs.runner.paths import path_of
from atropos.sandbox.programs.runner.state import is_special
from atropos.sandbox.programs.runner.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterator

    from atropos.sandbox.programs.runner.work import Outcome

MAX_SEARCH_FILES = 100_000
MAX_SEARCH_BYTES = 512 << 20
MAX_SEARCH_FILE = 16 << 20
MAX_LINE_CHARS = 2000
LINE_ALONE = re.compile(r"\\[AZz]|\(\?(?!:)|[*+?}]\+|\[\^|\\[sDWnx0]|\n")
"""Of a pattern that is looked for in each line alone. It may match in a line and nowhere in a text with that line: ends
of the text, looks around, what gives nothing back. Or it may go on over many lines, from each anew: `[^#]*x`."""
CARRIAGE_RETURN = re.compile(r"\r|(?<!\\)(?:\\\\)*\\(?:r|x0[dD])")
"""Of a pattern that asks for the \\r of a \\r\\n."""
CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")
MAX_CHOICES = 100
"""So many globs are made of one, and then no more."""
MAX_FOUND_BYTES = 4 << 20
"""Most that the matches take as JSON, of which PID 1 has several copies at once."""


def op_search(
    call: int, path: str, pattern: str, glob: str | None, max_matches: int, context: int, ignore_case: bool
) -> None:
    """Answer with the lines that match, or the files of a name."""
    path = path_of(path).removesuffix("/.") or "/"

    def work() -> Outcome:
        query = Wanted(pattern, ignore_case=ignore_case) if pattern else None  # it may take long to compile
        return search(path, query, glob, max_matches, context)

    Work(call, work)


class Wanted:
    """A pattern that is looked for in each line by itself."""

    def __init__(self, pattern: str, *, ignore_case: bool) -> None:
        flags = re.IGNORECASE if ignore_case else 0
        try:
            self.line = re.compile(pattern, flags)
            self.keeps_crlf = CARRIAGE_RETURN.search(pattern) is not None
            # MULTILINE: `^` and `$` mean the ends of lines here, as they do where each line is searched alone.
            self.anywhere = None if LINE_ALONE.search(pattern) else re.compile(pattern, flags | re.MULTILINE)
        except (re.error, RecursionError, OverflowError) as error:
            raise OpFailed("bad_pattern", f"the pattern is not a regular expression: {error}") from None

    def may_match(self, lines: str) -> bool:
        """Whether a line of these may match: most files are done with one search."""
        return self.anywhere is None or self.anywhere.search(lines) is not None


def walk(top: str) -> Iterator[tuple[str, os.stat_result]]:
    """(path, stat) of the regular files under `top`, in order; follows no links, enters no /proc and the like."""
    try:
        status = os.lstat(top)
    except OSError as error:
        raise failure(error, top) from None
    if S_ISREG(status.st_mode):
        yield top, status
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
                status = entry.stat(follow_symlinks=False)
            except OSError:
                continue
            if is_special(status.st_dev):
                continue
            if entry.is_dir(follow_symlinks=False):
                # Its objects are compressed, and matches in its index and logs help nobody.
                if entry.name != ".git":
                    folders.append(entry.path)
            elif entry.is_file(follow_symlinks=False):
                yield entry.path, status
        pending += reversed(folders)


class Matches:
    """Matches in path and line order, up to a bound of their number and one of their size."""

    def __init__(self, max_matches: int) -> None:
        self.matches: list[dict[str, object]] = []
        self.max_matches = max_matches
        self.remaining_bytes = MAX_FOUND_BYTES

    def full(self) -> bool:
        """Whether a bound is reached."""
        return len(self.matches) >= self.max_matches or self.remaining_bytes <= 0

    def add(self, path: str, line: int, words: str, *, context: bool = False) -> None:
        """Add one."""
        self.matches.append({"path": path, "line": line, "text": words, "context": context})
        self.remaining_bytes -= len(quote(path)) + len(quote(words)) + 100


def files_of(glob: str) -> re.Pattern[str]:
    """What a glob's paths and names look like. `*.{c,h}` is `*.c` and `*.h`; `**/` is `*/`, of any depth, or none."""
    globs: list[str] = []
    # fnmatch's `*` crosses slashes, so that `**/` only has to allow for no folder at all.
    pending = [glob.removeprefix("./").replace("**/", "{*/,}")]
    while pending and len(globs) + len(pending) <= MAX_CHOICES:
        one = pending.pop()
        choice = CHOICE.search(one)
        if choice:
            pending += [one[: choice.start()] + part + one[choice.end() :] for part in choice[1].split(",")]
        else:
            globs.append(one)
    return re.compile("|".join(map(fnmatch.translate, globs + pending)))


def search(path: str, wanted: Wanted | None, glob: str | None, max_matches: int, context: int) -> Outcome:
    """The files of a name, or the lines of files that match."""
    if os.path.islink(path):
        # A named link is followed, those below are not.
        path = os.path.realpath(path)
    matches = Matches(max_matches)
    files, budget, cut = 0, MAX_SEARCH_BYTES, False
    named = files_of(glob) if glob else None
    for name, status in walk(path):
        shown = os.path.relpath(name, path) if name != path else name
        if named and not (named.match(shown) or named.match(os.path.basename(name))):
            continue
        files += 1
        if files > MAX_SEARCH_FILES or budget <= 0 or matches.full():
            cut = True
            break
        if wanted is None:
            matches.add(text(name), 0, "")
            continue
        data = searchable(name, status.st_size)
        budget -= len(data)
        # A NUL near the start means a binary file, by the rule of grep and git.
        if b"\0" not in data[:8192]:
            if not wanted.keeps_crlf:
                data = data.replace(b"\r\n", b"\n")  # as bytes: as text it may take four times as much
            bounded = search_lines(matches, text(name), text(data), wanted, context)
            cut = cut or bounded or status.st_size > MAX_SEARCH_FILE
    return "search_result", {"matches": matches.matches, "files": files, "truncated": cut}, {}


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


def search_lines(found: Matches, name: str, words: str, wanted: Wanted, context: int) -> bool:
    """Add a file's matching lines, and `context` lines around them; True when a bound was reached."""
    if not wanted.may_match(words):
        return False
    lines = words.split("\n")
    if not lines[-1]:
        lines.pop()
    shown: dict[int, bool] = {}
    for hit in [number for number, line in enumerate(lines) if wanted.line.search(line)]:
        for number in range(max(0, hit - context), min(len(lines), hit + context + 1)):
            shown.setdefault(number, True)
        shown[hit] = False
    for number in sorted(shown):
        if found.full():
            return True
        found.add(name, number + 1, lines[number].rstrip("\r")[:MAX_LINE_CHARS], context=shown[number])
    return False
