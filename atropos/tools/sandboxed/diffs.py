"""Unified diffs as models write them: parsed leniently, applied exactly or not at all. Without I/O."""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_HUNK = re.compile(r"@@+ ?(?:-(\d{1,18})(?:,\d+)? \+\d+(?:,\d+)?)?")
_GIT_HEADER = re.compile(r'diff --git ("a/.*"|a/.*) ("b/.*"|b/.*)$')
_GIT_LINE = re.compile(r"(rename from|rename to|new file mode|deleted file mode|new mode) (.*)")
_MARK = "\ufeff"
"""The byte order mark, which models don't see."""
_NEAR = 0.6
"""Least similarity of a near miss."""
MAX_COMPARED = 4000
"""Lines of a file that are searched for a near miss."""
_CANDIDATES = 20
_COMPARED_CHARS = 200
"""How many of those lines are compared in full, and characters of each: the time is the cube of their number."""
MAX_HUNKS = 2000
"""Most hunks of one diff: each may search its whole file."""


class PatchError(Exception):
    """The change can't be applied; the message says why, and the cure."""


@dataclass
class Hunk:
    """One hunk: lines with their sign (' ', '-', '+', or '' for one without its blank), without line ends."""

    start: int | None
    lines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    no_newline_old: bool = False
    no_newline_new: bool = False

    @property
    def old(self) -> list[str]:
        """The lines before the change."""
        return [text for sign, text in self.lines if sign != "+"]

    @property
    def new(self) -> list[str]:
        """The lines after it."""
        return [text for sign, text in self.lines if sign != "-"]


@dataclass
class FileChange:
    """The change of one file. `old_path` None: it is created; `new_path` None: it is deleted.

    Where the names differ without a `rename`, the diff compares two files, and either may be the one to change.
    """

    old_path: str | None
    new_path: str | None
    hunks: list[Hunk] = field(default_factory=list[Hunk])
    mode: int | None = None
    rename: bool = False

    @property
    def path(self) -> str:
        """The file's name after the change, or before its deletion."""
        return self.new_path or self.old_path or ""

    def has(self, character: str) -> bool:
        """Whether its lines have a character."""
        return any(character in text for hunk in self.hunks for _, text in hunk.lines)


def parse(text: str) -> list[FileChange]:
    """Parse a unified diff of one or several files, as git or diff writes it.

    Line counts in the `@@` headers are ignored: models get them wrong, and the lines are enough.

    Raises:
        PatchError: it is no unified diff.
    """
    changes: list[FileChange] = []
    git: dict[str, str] = {}
    # Not `splitlines`, which also ends lines at form feeds and other characters that files have within lines.
    lines = text.replace("\r\n", "\n").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    index = 0
    while index < len(lines):
        line = lines[index]
        if line.startswith("diff --git "):
            _finish_git(git, changes)
            git = {"header": line}
        elif _names(lines, index):
            change = _named(line[4:], lines[index + 1][4:], git)
            git = {}
            index = _hunks(lines, index + 2, change)
            changes.append(change)
            continue
        elif (match := _GIT_LINE.match(line)) is not None:
            git[match[1]] = match[2].strip()
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise PatchError("the diff changes a binary file, which patch can't do; use the terminal")
        elif line.startswith("@@"):
            raise PatchError(f"line {index + 1} of the diff: a hunk without '--- a/FILE' and '+++ b/FILE' before it")
        index += 1
    _finish_git(git, changes)
    if not changes:
        raise PatchError("this is no unified diff: no '--- a/FILE' line followed by a '+++ b/FILE' line")
    return changes


def _finish_git(git: dict[str, str], changes: list[FileChange]) -> None:
    """A git header without hunks: a rename, a file that is made or deleted empty, another mode."""
    header = _GIT_HEADER.match(git.get("header", ""))
    if "rename from" in git and "rename to" in git:
        changes.append(FileChange(_path(git["rename from"]), _path(git["rename to"]), mode=_mode(git), rename=True))
    elif header is not None and git.keys() & {"new file mode", "deleted file mode", "new mode"}:
        change = _named(header[1], header[2], git)
        if "new file mode" in git:
            change.old_path = None
        elif "deleted file mode" in git:
            change.new_path = None
        changes.append(change)


def _named(old: str, new: str, git: dict[str, str]) -> FileChange:
    old_path, new_path = _path(old), _path(new)
    both = (old_path or "a/").startswith("a/") and (new_path or "b/").startswith("b/")
    if both:  # git's prefixes; a diff without them names the files as they are
        old_path = old_path and old_path[2:]
        new_path = new_path and new_path[2:]
    if old_path is None and new_path is None:
        raise PatchError("a file in the diff is /dev/null on both sides")
    return FileChange(old_path, new_path, mode=_mode(git), rename="rename from" in git)


def _mode(git: dict[str, str]) -> int | None:
    text = git.get("new file mode") or git.get("new mode")
    try:
        return int(text, 8) & 0o777 if text else None
    except ValueError:
        return None


def _path(text: str) -> str | None:
    name = text.split("\t", 1)[0].strip()
    if len(name) > 1 and name[0] == name[-1] == '"':
        name = _unquoted(name[1:-1])
    if not name:
        raise PatchError("a file in the diff has no name")
    return None if name == "/dev/null" else name


def _unquoted(name: str) -> str:
    r"""A name that git quoted: `\303\251` are bytes, `\t` is a tab."""
    try:
        return name.encode().decode("unicode_escape").encode("latin-1").decode()
    except UnicodeError:
        raise PatchError(f'the file name "{name}" in the diff is not UTF-8; change that file in the terminal') from None


def _hunks(lines: list[str], index: int, change: FileChange) -> int:
    """Parse the hunks after a file's header; returns the index after them."""
    while index < len(lines) and lines[index].startswith("@@"):
        hunk, index = _hunk(lines, index)
        if not hunk.lines:
            raise PatchError(f"a hunk of {change.path} is empty")
        if len(change.hunks) == MAX_HUNKS:
            raise PatchError(f"more than {MAX_HUNKS} hunks for {change.path}; split the diff")
        change.hunks.append(hunk)
    if not change.hunks and not change.rename:
        raise PatchError(f"the diff has no hunk ('@@ -1,3 +1,4 @@') for {change.path}")
    return index


def _hunk(lines: list[str], index: int) -> tuple[Hunk, int]:
    """The hunk that begins at an index, and the index after it."""
    match = _HUNK.match(lines[index])
    hunk = Hunk(int(match[1]) if match and match[1] else None)
    index += 1
    # By their signs, not by the header's counts.
    while not _between(lines, index) and not lines[index].startswith("@@"):
        line = lines[index]
        if line.startswith("\\"):
            _mark_end(hunk)
        elif line[:1] in {" ", "+", "-"}:
            hunk.lines.append((line[0], line[1:]))
        elif not line:
            hunk.lines.append(("", ""))  # editors and models drop the blank of an empty line
        else:
            break
        index += 1
    while hunk.lines and hunk.lines[-1] == ("", "") and _between(lines, index):
        hunk.lines.pop()  # blank lines between two files belong to neither
    return hunk, index


def _names(lines: list[str], index: int) -> bool:
    """Whether the names of a file are on this line and the next."""
    return lines[index].startswith("--- ") and index + 1 < len(lines) and lines[index + 1].startswith("+++ ")


def _between(lines: list[str], index: int) -> bool:
    """Whether a file's part ends before this line; two lines of a hunk may look like names."""
    if index >= len(lines) or lines[index].startswith("diff --git "):
        return True
    return _names(lines, index) and (index + 2 >= len(lines) or lines[index + 2].startswith("@@"))


def _mark_end(hunk: Hunk) -> None:
    if hunk.lines:
        sign = hunk.lines[-1][0]
        hunk.no_newline_old |= sign in {" ", "-"}
        hunk.no_newline_new |= sign in {" ", "+"}


def apply(text: str, change: FileChange) -> str:
    """A file's text after a change.

    A hunk's lines must be in the file exactly; of several places, the one nearest to its header's line number is used.
    A byte order mark that the diff doesn't have is no part of the first line, and stays.

    Raises:
        PatchError: a hunk's lines are not in the file; the message shows the most similar ones.
    """
    if text.startswith(_MARK) and not change.has(_MARK):
        # A file that becomes empty has no mark either.
        rest = apply(text.removeprefix(_MARK), change)
        return rest and f"{_MARK}{rest}"
    # Only where all lines end so: in a mixed file `\r` belongs to the lines, and a match must be exact.
    ends = "\r\n" if "\r\n" in text and "\n" not in text.replace("\r\n", "") else "\n"
    body = text.replace("\r\n", "\n") if ends == "\r\n" else text
    lines = body.split("\n")
    final_newline = not body or body.endswith("\n")
    if lines and not lines[-1]:
        lines.pop()
    # How far earlier hunks have moved the lines; and where the next may begin, since hunks come in the order of the
    # file.
    shift, floor = 0, 0
    for number, hunk in enumerate(change.hunks, 1):
        old, new = hunk.old, hunk.new
        guess = max((hunk.start or 1) - 1, 0) + shift if old else _insertion(hunk, len(lines), shift)
        at = _find(lines, old, guess, floor)
        if at is None:
            raise PatchError(_missed(change.path, number, len(change.hunks), lines, old))
        # "\ No newline at end of file" says something of the file's last line alone.
        reaches_end = at + len(old) == len(lines)
        lines[at : at + len(old)] = new
        shift, floor = shift + len(new) - len(old), at + len(new)
        if reaches_end and (hunk.no_newline_old or hunk.no_newline_new):
            final_newline = not hunk.no_newline_new
    result = "\n".join(lines) + ("\n" if final_newline and lines else "")
    return result.replace("\n", ends) if ends == "\r\n" else result


def _insertion(hunk: Hunk, count: int, shift: int) -> int:
    # `@@ -N,0 @@` inserts after line N.
    return count if hunk.start is None else min(max(hunk.start + shift, 0), count)


def _find(lines: list[str], old: list[str], guess: int, floor: int) -> int | None:
    if not old:
        return max(guess, floor)
    best: int | None = None
    for at in _places(lines, old, floor):
        if best is None or abs(at - guess) < abs(best - guess):
            best = at
        elif at > guess:
            break  # the rest is farther away
    return best


def _places(lines: list[str], wanted: list[str], floor: int = 0) -> Iterator[int]:
    """The indexes of the wanted lines from `floor` on, in linear time (Knuth, Morris and Pratt).

    Comparing at each of ten thousand equal lines, which are not unusual, takes minutes.
    """
    fallback, matched = [0] * len(wanted), 0
    for index in range(1, len(wanted)):
        while matched and wanted[index] != wanted[matched]:
            matched = fallback[matched - 1]
        matched += wanted[index] == wanted[matched]
        fallback[index] = matched
    matched, at = 0, floor
    while at < len(lines):
        if not matched:
            try:
                at = lines.index(wanted[0], at)
            except ValueError:
                return
        while matched and lines[at] != wanted[matched]:
            matched = fallback[matched - 1]
        matched += lines[at] == wanted[matched]
        at += 1
        if matched == len(wanted):
            yield at - matched
            matched = fallback[matched - 1]


def _missed(path: str, number: int, total: int, lines: list[str], old: list[str]) -> str:
    which = f"hunk {number} of {total} does not apply to {path}" if total > 1 else f"the hunk does not apply to {path}"
    return f"{which}: {near_miss(lines, old)}. Nothing was changed"


def near_miss(lines: list[str], wanted: list[str]) -> str:
    """How lines that are not in a file differ from the most similar ones that are."""
    if not lines:
        return "the file is empty"
    squeezed = [" ".join(one.split()) for one in lines]
    target = [" ".join(one.split()) for one in wanted]
    for at in _places(squeezed, target):
        shown = _show(lines, at, len(wanted))
        return f"lines {at + 1} to {at + len(wanted)} differ in white space only; the file has:\n{shown}"
    at, ratio = _closest(squeezed[:MAX_COMPARED], target)
    if ratio < _NEAR:
        return "the file has nothing similar; read it again, it may have changed"
    return f"the most similar lines begin at line {at + 1}:\n{_show(lines, at, len(wanted))}"


def _closest(lines: list[str], target: list[str]) -> tuple[int, float]:
    """The index of the lines that are most similar to the wanted ones, and their similarity."""
    target = target[:40]
    # The longest line is the one that says most of where they are.
    anchor = max(range(len(target)), key=lambda index: len(target[index]))
    # With `autojunk`, frequent characters of a line of 200 or more would not count.
    matcher = difflib.SequenceMatcher(autojunk=False)
    # difflib keeps what it computes of the second sequence, so that is the one which stays.
    matcher.set_seq2(target[anchor][:_COMPARED_CHARS])

    def at_most(index: int) -> float:
        matcher.set_seq1(lines[index][:_COMPARED_CHARS])
        return matcher.quick_ratio() if matcher.real_quick_ratio() >= _NEAR else 0.0

    best, best_ratio = 0, 0.0
    for index in heapq.nlargest(_CANDIDATES, range(len(lines)), key=at_most):
        # `quick_ratio` is an upper bound, and they come by it: no later one can be better.
        if at_most(index) <= best_ratio:
            break
        ratio = matcher.ratio()
        if ratio > best_ratio:
            best, best_ratio = max(index - anchor, 0), ratio
    return best, best_ratio


def _show(lines: list[str], at: int, count: int) -> str:
    shown = lines[at : at + min(count, 20)]
    return "\n".join(f"{number:>6}|{line[:300]}" for number, line in enumerate(shown, at + 1))
