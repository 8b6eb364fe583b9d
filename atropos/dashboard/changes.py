"""Files that a trajectory changed: two archives of a folder compared, and the record of it."""

from __future__ import annotations

import difflib
import io
import itertools
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from atropos.archives import WholeTar
from atropos.dashboard.records import as_dict, as_list, finite

MAX_FILES = 50
MAX_DIFF_CHARS = 10_000
"""Of one file's diff."""
MAX_CHARS = 100_000
"""Of a trajectory's diffs together; files after that are listed without."""
MAX_TEXT_BYTES = 1 << 18
"""Longest file that is compared line by line."""
MAX_PAIRS = 250_000
"""Pairs of lines that a trajectory's comparisons may look at; beyond, a changed region is shown as removed and added
whole."""
CONTEXT = 3
"""Unchanged lines around a change."""
SKIPPED = re.compile(r"(^|/)\.git(/|$)")
"""Git's own files, which change with every command."""


@dataclass(frozen=True)
class FileState:
    """A file or symbolic link at one moment; a link's content is its target."""

    data: bytes
    mode: int
    link: bool = False


@dataclass(frozen=True)
class ChangedFile:
    """One file that differs.

    Attributes:
        change: added, changed or removed.
        added / removed: lines.
        note: what a diff can't show: binary contents, a mode, a link.
        diff: hunks of a unified diff; one that is too long ends with a line that says so.
    """

    path: str
    change: str
    added: int = 0
    removed: int = 0
    note: str = ""
    diff: str = ""


@dataclass(frozen=True)
class Changes:
    """The files of a folder that differ from its start.

    Attributes:
        folder: empty: none was looked at.
        more: files that differ as well and are not listed.
        note: why it isn't known what differs; empty: it is.
    """

    folder: str = ""
    files: tuple[ChangedFile, ...] = ()
    more: int = 0
    note: str = ""


def changes_of(record: Mapping[str, object]) -> Changes:
    """`Changes` as a JSONL has it; what is malformed is left out."""
    return Changes(
        _word(record, "folder"),
        tuple(_change_of(as_dict(each)) for each in as_list(record.get("files")) if isinstance(each, dict)),
        _count(record, "more"),
        _word(record, "note"),
    )


def _change_of(record: Mapping[str, object]) -> ChangedFile:
    path, change, note, diff = (_word(record, name) for name in ("path", "change", "note", "diff"))
    return ChangedFile(path, change, _count(record, "added"), _count(record, "removed"), note, diff)


def _word(record: Mapping[str, object], name: str) -> str:
    value = record.get(name)
    return value if isinstance(value, str) else ""


def _count(record: Mapping[str, object], name: str) -> int:
    return int(finite(record.get(name)))


def compare(folder: str, before: bytes, after: bytes) -> Changes:
    """What differs between two tar archives of a folder, by path.

    Raises:
        ValueError: one of them is no such archive.
    """
    try:
        old, new = _files(before), _files(after)
    except (tarfile.TarError, OSError, EOFError, ArithmeticError, RecursionError) as error:
        raise ValueError(str(error)) from error
    paths = sorted(path for path in old.keys() | new.keys() if old.get(path) != new.get(path))
    changed: list[ChangedFile] = []
    chars, pairs = MAX_CHARS, MAX_PAIRS
    for path in paths[:MAX_FILES]:
        change, used = _change(path, old.get(path), new.get(path), pairs, min(chars, MAX_DIFF_CHARS))
        chars, pairs = chars - len(change.diff), pairs - used
        changed.append(change)
    return Changes(folder, tuple(changed), more=len(paths) - len(changed))


def _files(archive: bytes) -> dict[str, FileState]:
    files: dict[str, FileState] = {}
    if not archive:
        return files
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:", tarinfo=WholeTar) as tar:
        for member in tar:
            name = _text(member.name.removeprefix("./"))
            if SKIPPED.search(name):
                continue
            if member.type in {tarfile.REGTYPE, tarfile.AREGTYPE} and member.sparse is None:
                content = tar.extractfile(member)
                files[name] = FileState(content.read() if content else b"", member.mode & 0o7777)
            elif member.issym():
                files[name] = FileState(member.linkname.encode(errors="surrogateescape"), 0, link=True)
            elif member.islnk() and (first := files.get(_text(member.linkname.removeprefix("./")))):
                files[name] = first
    return files


def _text(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="backslashreplace")


def _change(path: str, old: FileState | None, new: FileState | None, pairs: int, chars: int) -> tuple[ChangedFile, int]:
    """One file's change, and the pairs of lines that finding it looked at."""
    kind = "added" if old is None else "removed" if new is None else "changed"
    there = [state for state in (old, new) if state is not None]
    notes = ["symbolic link"] if any(state.link for state in there) else []
    if not notes and len({state.mode for state in there}) > 1:
        notes.append("mode " + " to ".join(f"{state.mode:o}" for state in there))
    before, after = _lines(old), _lines(new)
    if before is None or after is None:
        size = len(there[-1].data)
        notes.append(f"{'too long to compare' if size > MAX_TEXT_BYTES else 'binary'}, {size:,} bytes")
        return ChangedFile(path, kind, note=", ".join(notes)), 0
    lines, used = _unified(before, after, pairs)
    added = sum(line.startswith("+") for line in lines)
    removed = sum(line.startswith("-") for line in lines)
    return ChangedFile(path, kind, added, removed, ", ".join(notes), _cut(lines, chars)), used


def _lines(state: FileState | None) -> list[str] | None:
    """A text's lines; None: it is no text, or too long a one."""
    data = b"" if state is None else state.data
    if b"\0" in data or len(data) > MAX_TEXT_BYTES:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return text.removesuffix("\n").split("\n") if text else []


def _unified(old: Sequence[str], new: Sequence[str], pairs: int) -> tuple[list[str], int]:
    """The hunks that make `old` to `new`, and the pairs of lines that were looked at."""
    # What both begin and end with is left out first: difflib's time can grow with the product of the lines.
    shortest = min(len(old), len(new))
    head = next((at for at in range(shortest) if old[at] != new[at]), shortest)
    tail = next((at for at in range(shortest - head) if old[-1 - at] != new[-1 - at]), shortest - head)
    first, last = max(0, head - CONTEXT), max(0, tail - CONTEXT)
    old, new = old[first : len(old) - last], new[first : len(new) - last]
    if len(old) * len(new) > pairs:
        return [
            f"@@ -{first + 1},{len(old)} +{first + 1},{len(new)} @@",
            *(f"-{x}" for x in old),
            *(f"+{x}" for x in new),
        ], 0
    # The first two lines name files.
    hunks = itertools.islice(difflib.unified_diff(old, new, lineterm="", n=CONTEXT), 2, None)
    return list(_shifted(hunks, first)), len(old) * len(new)


def _shifted(hunks: Iterator[str], by: int) -> Iterator[str]:
    """Hunks whose line numbers begin `by` lines later."""
    for line in hunks:
        yield re.sub(r"(?<=[-+])\d+", lambda at: str(int(at[0]) + by), line, count=2) if line.startswith("@@") else line


def _cut(lines: Sequence[str], chars: int) -> str:
    """As many whole lines as fit, and how many are left out."""
    remaining, shown = chars, 0
    for line in lines:
        remaining -= len(line) + 1
        if remaining < 0:
            break
        shown += 1
    text = "\n".join(lines[:shown])
    if shown == len(lines):
        return text
    return f"{text}\n[… {len(lines) - shown} more lines of the diff]".strip("\n")
