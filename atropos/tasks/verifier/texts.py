"""What a task says in its own files: its instruction, its solution and its tests."""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from atropos.tasks.format.task import Task

MAX_BYTES = 1 << 20
"""Most that is read of one file."""
MAX_NAMED = 255
"""Most folders that a view is asked for, beside that of packages."""
MAX_NAME_CHARS = 100_000
"""Most that the names take together which tests alone know: what one argument of a program may have."""
MAX_WRITTEN = 1000
"""Most files of which it is known that tests write them."""
_RENAMES = re.compile(
    r"\b(?:os\.(?:renames?|replace|link)|fs\.(?:rename|link)(?:Sync)?|File\.(?:rename|link)"
    r"|Path\([^()\n]*\)\.(?:rename|replace|hardlink_to))"
    r"\s*\([^\n]*|(?:^|[;&|])[ \t]*(?:ln|link)\s+(?!-\w*s)[^\n;&|]*",
    re.MULTILINE,
)
"""Calls and commands that fail between two file systems, to the end of the line; `mv` and `shutil.move` copy there."""
_LINKS = re.compile(
    r"\b(?:uv\s+(?:run|sync|add|init|venv[ \t]*(?=[\n;&|)]|$))"
    r"|(?:npm|pnpm|yarn)\s+(?:-\S+\s+){,20}(?:ci|i|install|add)|symlink(?:_to|Sync)?)(?!\w)"
    r"|(?:\bln\s+-\w*s\w*|\s-m\s+venv|\bvirtualenv|\buv\s+venv)\b([^\n;&|)]*)"
)
"""Calls and commands that make links, as to a venv's Python; with the words after one whose last is their place."""
_LITERAL = r"[\"'`]([\w./-]{1,300})[\"'`]"
_WRITES = re.compile(
    r"(?<![^\s)}\"'])>{1,2}[ \t]*[\"']?([\w./-]{1,300})|\btee[ \t]+(?:-a[ \t]+)?[\"']?([\w./-]{1,300})"
    rf"|\bopen\(\s*{_LITERAL}\s*,\s*(?:mode\s*=\s*)?[\"'][wax]|\bPath\(\s*{_LITERAL}\s*\)\.write_"
    r"|\b(?:shutil\.(?:copy\w*|move)|os\.(?:rename|replace)|(?:copyFile|rename)(?:Sync)?)"
    rf"\([^,\n]{{1,300}},\s*{_LITERAL}|\bwriteFile(?:Sync)?\(\s*{_LITERAL}"
)
"""Commands and calls that write a file, with its path where that is written out."""
_COPIES = re.compile(r"(?:^|[;&|(]|\b(?:then|do|else|sudo)\b)[ \t]*(?:cp|mv|install)\b([^\n;&|)]*)", re.MULTILINE)
_MAKES = re.compile(r"(?:\b(?:mkdir|makedirs|venv|clone|target|prefix)\b|>)[^\n;&|]{,300}")
"""Commands that make a folder, with the words after them."""
_MOVES = re.compile(r"\b(?:cd|pushd)[ \t]+[\"']?([\w./-]{1,300})")
_WHOLE_PATH = re.compile(r"(?<![\w.$}/-])/[\w.-][\w./-]*")
_NAME = re.compile(r"[\w.-]+")
_VENV = re.compile(r"(?<![\w.$}/-])((?:\.?/)?(?:[\w.-]+/){,20}[\w.-]+)/bin/[\w.-]")
_TOP = re.compile(r"(?<![\w.$}/~-])/(\w[\w.-]*)")


def solution_texts(task: Task) -> list[tuple[str, str]]:
    """The files of the solution, which is one itself in terminal-bench 1; the instruction where there is none."""
    if task.solution is None:
        return [("the instruction", task.instruction)]
    return [(str(path.relative_to(task.solution.parent)), _text(path)) for path in _files(task.solution)]


def test_texts(task: Task) -> list[tuple[str, str]]:
    """The files of the tests, by name."""
    files = [(source, path) for source in task.tests for path in _files(source)]
    return [(str(path.relative_to(source.parent)), _text(path)) for source, path in files]


class TaskTexts(NamedTuple):
    """What a task's instruction and solution say, what its tests do, and the names of their files in /tests."""

    asked: str
    tests: tuple[str, ...]
    names: tuple[str, ...] = ()

    @property
    def whole(self) -> str:
        """All that the task says."""
        return "\n".join([self.asked, *self.tests])


def read_texts(task: Task) -> TaskTexts:
    """Read a task's own files, which takes as long as they are large."""
    tests = tuple(text for _, text in test_texts(task))
    names = (str(path.relative_to(top if top.is_dir() else top.parent)) for top in task.tests for path in _files(top))
    return TaskTexts("\n".join([task.instruction, *(text for _, text in solution_texts(task))]), tests, tuple(names))


def folder_texts(path: Path) -> list[str]:
    """The files of a folder, or a file."""
    return [_text(file) for file in _files(path)]


def paths_in(text: str) -> list[str]:
    """Absolute paths in a text."""
    return _WHOLE_PATH.findall(text)


def without_paths(text: str, folder: str) -> str:
    """A text without the absolute paths in it that aren't in a folder."""
    top = f"{folder.rstrip('/')}/"
    return _WHOLE_PATH.sub(lambda match: match[0] if f"{match[0]}/".startswith(top) else " ", text)


def named_folders(text: str) -> list[str]:
    """Folders at the top, as `/data`, that a text may name."""
    return sorted({f"/{name}" for name in _TOP.findall(text)})[:MAX_NAMED]


def folders_made(texts: TaskTexts) -> set[str]:
    """Folders at the top that tests make, and nobody speaks of to the agent."""
    made = {f"/{name}" for text in texts.tests for match in _MAKES.findall(text) for name in _TOP.findall(match)}
    return made - {f"/{name}" for name in _TOP.findall(texts.asked)}


def venvs_of_tests(texts: TaskTexts, workdir: str) -> list[str]:
    """Virtual environments that tests run programs of, and that nobody speaks of to the agent."""
    named = {match for text in texts.tests for match in _VENV.findall(text)}
    paths = {posixpath.normpath(posixpath.join(workdir, name)) for name in named}
    # One that the agent was told of may be its own work.
    own = (path for path in paths if posixpath.basename(path) not in texts.asked)
    return sorted(path for path in own if not f"{path}/".startswith("/usr/"))


class Written(NamedTuple):
    """Paths that tests write to; `files` are those of them that can't be meant as folders."""

    paths: tuple[str, ...]
    files: tuple[str, ...]


def written(texts: TaskTexts, workdir: str) -> Written:
    """What tests write, as far as their texts say so; a relative name is looked at in each folder they enter."""
    paths: dict[str, bool] = {}
    for text in texts.tests:
        # Where a script is at each line is not followed: each folder that it enters anywhere counts.
        folders = [posixpath.join(workdir, name) for name in ("", *_MOVES.findall(text))]
        for name, is_file in _names_written(text, texts.names):
            for folder in folders:
                path = posixpath.normpath(posixpath.join(folder, name))
                paths[path] = is_file or paths.get(path, False)
    chosen = sorted(paths)[:MAX_WRITTEN]
    return Written(tuple(chosen), tuple(path for path in chosen if paths[path]))


def _names_written(text: str, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Names as a text has them, and whether they are surely of files."""
    for *files, moved, last in _WRITES.findall(text):
        yield from ((name, True) for name in (*files, last) if name)
        if moved:
            yield moved, False
    for match in _COPIES.findall(text):
        *sources, target = [word.strip("\"'") for word in match.split() if not word.startswith("-")] or [""]
        yield target, False
        for source in sources:
            yield posixpath.join(target, posixpath.basename(source)), False
            yield from ((posixpath.join(target, name), True) for name in _copies(source, names))


def _copies(source: str, names: Iterable[str]) -> Iterator[str]:
    """What a copy of a file, folder or pattern in /tests has below its target, of the files that are there."""
    path = posixpath.normpath(source)
    if not f"{path}/".startswith("/tests/"):
        return
    wanted = path.split("/")[1:]
    for parts in (["tests", *name.split("/")] for name in names):
        if len(parts) >= len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
            yield "/".join(parts[len(wanted) - 1 :])
            yield "/".join(parts[len(wanted) :])


def unspoken_names(texts: TaskTexts) -> str:
    """Names that tests have in their texts, or their files bear, and that nobody says to the agent."""
    said = {form for name in _NAME.findall(texts.asked) for form in (name, name.rstrip("."))}
    known = {name for text in (*texts.tests, *texts.names) for name in _NAME.findall(text)}
    return " ".join(sorted(known - said))[:MAX_NAME_CHARS]


def is_spoken_of(path: str, folder: str, asked: str) -> bool:
    """Whether a text names each part of a path below a folder."""
    parts = path.removeprefix(f"{folder.rstrip('/')}/").split("/")
    return all(re.search(rf"(?<![\w-]){re.escape(part)}(?![\w-])", asked) for part in parts)


def renames_across(tests: Iterable[str], folders: Sequence[str]) -> bool:
    """Whether texts of tests rename or link files between these folders and others."""
    for text in tests:
        for match in _RENAMES.finditer(text):
            paths = paths_in(match[0])
            if {any(f"{path}/".startswith(f"{top}/") for top in folders) for path in paths} == {True, False}:
                return True
    return False


def makes_links(tests: Iterable[str], folders: Sequence[str]) -> bool:
    """Whether texts of tests make links that may be in these folders."""
    for text in tests:
        for match in _LINKS.finditer(text):
            place = "." if match[1] is None else _last_word(match[1])
            if place and (not place.startswith("/") or any(f"{place}/".startswith(f"{top}/") for top in folders)):
                return True
    return False


def _last_word(text: str) -> str:
    """The last word of a command, if it is a plain path; else empty."""
    word = "".join(text.split()[-1:]).strip("\"'")
    return word if re.fullmatch(r"[\w./-]+", word) else ""


def _files(source: Path) -> list[Path]:
    """Files of a folder, or a file. Links go into a slot as such, so what they name on this machine says nothing."""
    files = [source, *(path for path in sorted(source.rglob("*")) if not path.is_symlink())]
    return [path for path in files if path.is_file()]


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", "replace")
