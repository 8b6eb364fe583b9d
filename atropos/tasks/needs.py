"""What a set of tasks stands on, and its builds and tests fetch, read from its files: nothing runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from atropos.errors import ConfigError
from atropos.images.reference import ImageSource
from atropos.tasks.format.recipe import Download, Run
from atropos.tasks.format.task import Task

_REQUIREMENT = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,.-]+\])?([=<>!~]=?=?[^$`]*)?")
_PACKAGE = re.compile(r"[a-z0-9][a-z0-9+.-]+(:[a-z0-9]+)?([=/][^$`]+)?")
"""Of Debian, with its architecture, and its version or release."""
_URL = re.compile(r"https?://[^\s\"'`$<>|;)]+")
_UV = re.compile(r"https://astral\.sh/uv/(?:([0-9][^/]*)/)?install\.sh")
_VALUED = {"-p", "--python", "-w", "--with", "--from", "-r", "--requirement", "-c", "--constraint"} | {
    *("-i", "--index-url", "--extra-index-url", "--default-index", "--index"),
    *("-f", "--find-links", "-t", "--target", "--prefix"),
}
"""Options of pip and uv that a value follows."""
_RELEASE = {"-t", "--target-release"}
"""Options of apt that a value follows."""
_BETWEEN = {"&&", "||", ";", "|", "&", "(", ")", "{", "}"}


@dataclass(frozen=True)
class SetNeeds:
    """What a set needs beside itself; each sorted.

    Attributes:
        images: of registries, by their full names.
        wheels: requirements that are installed together, with the Python (`3.13`; empty: any) that they are for.
        uv: versions of uv; empty text: any.
        debian: packages that apt installs.
        addresses: what else is fetched.
    """

    images: tuple[str, ...] = ()
    wheels: tuple[tuple[str, tuple[str, ...]], ...] = ()
    uv: tuple[str, ...] = ()
    debian: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def lines(self) -> Iterator[tuple[str, str]]:
        """All of it, each with its kind."""
        yield from (("image", each) for each in self.images)
        for python, requirements in self.wheels:
            yield "wheels", " ".join((*requirements, f"(Python {python})" if python else "")).strip()
        yield from (("uv", each or "any version") for each in self.uv)
        yield from (("debian", each) for each in self.debian)
        yield from (("address", each) for each in self.addresses)


def needs(tasks: Iterable[Task]) -> SetNeeds:
    """What these tasks need."""
    images: set[str] = set()
    addresses: set[str] = set()
    scripts: set[tuple[str, Path]] = set()
    """Texts, each with the folder in which files that it names may be."""
    for task in tasks:
        for one in (*task.machines, *task.steps):
            images.update(_images(one))
            scripts |= {(_text(path), path.parent) for path in _scripts(one.tests)}
            for step in (*one.recipe.steps, *(step for stage in one.recipe.stages for step in stage.steps)):
                if isinstance(step, Download):
                    addresses.add(step.address)
                elif isinstance(step, Run):
                    scripts.add((_shell_text(step.command), one.context))
    parts = [SetNeeds(addresses=tuple(addresses)), *(_fetched(text, near) for text, near in scripts)]
    return SetNeeds(
        images=tuple(sorted(images)),
        wheels=tuple(sorted({each for one in parts for each in one.wheels})),
        uv=tuple(sorted({each for one in parts for each in one.uv})),
        debian=tuple(sorted({each for one in parts for each in one.debian})),
        addresses=tuple(sorted({each for one in parts for each in one.addresses})),
    )


def _images(task: Task) -> Iterator[str]:
    for name in (task.image, *(stage.image for stage in task.recipe.stages)):
        try:
            source = ImageSource.parse(name or "")
        except ConfigError:  # another stage's name, or none
            continue
        if source.transport == "docker" and name != "scratch":
            yield source.name


def _scripts(tests: Sequence[Path]) -> Iterator[Path]:
    for path in tests:
        yield from sorted(path.rglob("*.sh")) if path.is_dir() else [path] if path.suffix == ".sh" else ()


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _shell_text(command: Sequence[str]) -> str:
    """A program and its arguments as a shell's script: a shell's own is its last argument."""
    of_shell = len(command) > 2 and command[0].endswith("sh") and re.fullmatch("-[a-z]*c", command[-2])
    return command[-1] if of_shell else shlex.join(command)


def _fetched(script: str, near: Path) -> SetNeeds:
    """What a shell script fetches, as far as its words say; `near`: where requirements files that it names may be."""
    wheels: set[tuple[str, tuple[str, ...]]] = set()
    debian: set[str] = set()
    for words in (_with_files(words, near) for words in _commands(script)):
        if (requirements := _installed(words)) is not None:
            wheels.add(requirements)
        elif words[0] in {"apt", "apt-get"} and "install" in words:
            options = pairwise(words[words.index("install") :])
            debian.update(each for before, each in options if before not in _RELEASE and _PACKAGE.fullmatch(each))
    addresses = {each.rstrip(".,") for each in _URL.findall(_uncommented(script))}
    uv = {match[1] or "" for each in addresses if (match := _UV.fullmatch(each))}
    rest = {each for each in addresses if not _UV.fullmatch(each)}
    return SetNeeds(wheels=tuple(wheels), uv=tuple(uv), debian=tuple(debian), addresses=tuple(rest))


def _uncommented(script: str) -> str:
    lines = script.replace("\\\n", " ").splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("#"))


def _commands(script: str) -> Iterator[list[str]]:
    """The commands of a script, as words; a line that is none by itself is left out."""
    for line in _uncommented(script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:  # quotes that end on another line
            continue
        command: list[str] = []
        for word in (*words, ";"):
            if word not in _BETWEEN:
                command.append(word)
                continue
            while command and ("=" in command[0] or command[0] in {"sudo", "env", "exec", "if", "then", "!"}):
                del command[0]
            if command:
                yield command
            command = []


def _with_files(words: Sequence[str], near: Path) -> list[str]:
    """Words with what requirements files list in the place of their options, as far as they are near."""
    expanded, rest = list[str](), iter(words)
    for word in rest:
        option, equals, name = word.partition("=")
        if option not in {"-r", "--requirement", "--requirements"}:
            expanded.append(word)
            continue
        file = near / Path(name if equals else next(rest, "")).name
        if file.is_file():
            lines = (re.split(r"\s*(?:#|;|\s-)", line, maxsplit=1)[0] for line in _text(file).splitlines())
            expanded.extend(re.sub(r"\s", "", line) for line in lines if line and not line.startswith("-"))
    return expanded


def _installed(words: Sequence[str]) -> tuple[str, tuple[str, ...]] | None:
    """The Python and the requirements of a command of uv or pip."""
    name = words[0].rpartition("/")[2]
    if name == "uvx" or words[:3] == ["uv", "tool", "run"]:
        return _parsed(words[1 if name == "uvx" else 3 :], one=True)
    if name == "uv" and "run" in words:
        return _parsed(words[words.index("run") + 1 :], one=True, named=False)
    if "pip" in name or "pip" in words[1:3] or words[:2] == ["uv", "add"] or words[:3] == ["uv", "tool", "install"]:
        verb = next((each for each in ("install", "add") if each in words), None)
        return None if verb is None else _parsed(words[words.index(verb) + 1 :])
    return None


def _parsed(words: Sequence[str], *, one: bool = False, named: bool = True) -> tuple[str, tuple[str, ...]] | None:
    """Requirements among words; `one`: the first word that is no option is the program, which is one if `named`."""
    python, requirements = "", list[str]()
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option in _VALUED and option.startswith("-"):
            value = value if equals else next(rest, "")
            if option in {"-p", "--python"}:
                python = value
            elif option in {"-w", "--with", "--from"}:
                requirements.extend(filter(_is_requirement, value.split(",")))
        elif not word.startswith("-"):
            if (named or not one) and _is_requirement(word):
                requirements.append(word)
            if one:
                break
    pinned = {_plain(each) for each in requirements if _plain(each) != each}
    chosen = tuple(sorted({each for each in requirements if each not in pinned}))
    return (python, chosen) if chosen else None


def _plain(requirement: str) -> str:
    return re.split(r"[\[=<>!~]", requirement, maxsplit=1)[0]


def _is_requirement(word: str) -> bool:
    return _REQUIREMENT.fullmatch(word) is not None
