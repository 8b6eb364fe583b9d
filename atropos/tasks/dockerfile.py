"""The part of a Dockerfile that a slot can honour: FROM, WORKDIR, COPY, RUN and what has no effect there.

Everything else is refused by name: half a machine scores wrong in silence.
"""

from __future__ import annotations

import json
import posixpath
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from atropos.errors import ConfigError

DEFAULT_WORKDIR = "/workspace"
_WITHOUT_EFFECT = {"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"}
"""Instructions about how a container starts or is described; a slot is entered by commands alone."""
_CURES = {
    "ADD": "use COPY for files, and RUN for downloads and archives",
    "ARG": "write the value in place",
    "ENTRYPOINT": "start what the task needs in its instruction or with RUN",
    "ENV": "the agent's commands would not see it; write it to a file that the task names",
    "HEALTHCHECK": "check in tests/test.sh instead",
    "ONBUILD": "write the instruction itself",
    "SHELL": "call the other shell inside RUN",
    "USER": "a slot runs as its own root; use `su` or `setpriv` inside RUN",
    "VOLUME": "a slot's folders need no volume; remove the line",
}


@dataclass(frozen=True)
class Copy:
    """Files of the build context that go into the slot.

    Attributes:
        target: absolute; ends in `/` when it names a folder.
        mode: of the files; None keeps theirs.
        whole: a folder goes in under its own name; else, as Docker has it, its content does.
    """

    sources: tuple[str, ...]
    target: str
    mode: int | None = None
    whole: bool = False


@dataclass(frozen=True)
class Run:
    """A shell command of the build, run as the slot's root."""

    command: str
    workdir: str


@dataclass(frozen=True)
class Recipe:
    """How a workspace is made: from which image, in which folder, by which steps in order."""

    image: str | None
    workdir: str
    steps: tuple[Copy | Run, ...]


def parse(path: Path) -> Recipe:
    """Read a Dockerfile.

    Raises:
        ConfigError: an instruction that a slot can't honour, or one that can't be read; names file and line.
    """
    image: str | None = None
    workdir = ""
    steps: list[Copy | Run] = []
    for number, name, rest in _instructions(path):
        where = f"{path}:{number}: {name}"
        if name == "FROM":
            if image is not None:
                raise ConfigError(f"{where}: a second stage can't be honoured; keep one FROM")
            image = _from(rest, where)
        elif name == "WORKDIR":
            workdir = posixpath.normpath(posixpath.join(workdir or "/", _plain(rest, where)))
        elif name == "COPY":
            steps.append(_copy(rest, workdir or "/", where))
        elif name == "RUN":
            steps.append(_run(rest, workdir or "/", where))
        elif name not in _WITHOUT_EFFECT:
            cure = _CURES.get(name)
            if cure is None:
                raise ConfigError(f"{where}: not a Dockerfile instruction; see the Dockerfile reference")
            raise ConfigError(f"{where} can't be honoured in a slot: {cure}")
    if image is None:
        raise ConfigError(f"{path}: no FROM; begin with one, or replace the Dockerfile by setup.sh")
    return Recipe(image, workdir or DEFAULT_WORKDIR, tuple(steps))


def _instructions(path: Path) -> list[tuple[int, str, str]]:
    """(line, NAME, rest) of each instruction, continuation lines joined and comments dropped."""
    found: list[tuple[int, str, str]] = []
    held, began = "", 0
    for number, raw in enumerate(path.read_text().splitlines(), 1):
        line = raw.rstrip() if held else raw.strip()
        if not line or line.lstrip().startswith("#"):
            continue
        began = began or number
        if line.endswith("\\"):
            held += line[:-1]
            continue
        name, _, rest = (held + line).partition(" ")
        found.append((began, name.upper(), rest.strip()))
        held, began = "", 0
    if held:
        raise ConfigError(f"{path}:{began}: the last line ends in a backslash; finish the instruction")
    return found


def _plain(text: str, where: str) -> str:
    if "$" in text:
        raise ConfigError(f"{where} {text}: variables can't be honoured; write the value in place")
    return text.strip("\"'")


def _from(rest: str, where: str) -> str:
    words = rest.split()
    if len(words) != 1:
        raise ConfigError(f"{where} {rest}: only `FROM IMAGE` can be honoured, without options or a stage name")
    return _plain(words[0], where)


def _copy(rest: str, workdir: str, where: str) -> Copy:
    mode: int | None = None
    while match := re.match(r"--([a-z]+)(?:=(\S+))?\s+", rest):
        option, value = match[1], match[2] or ""
        if option == "chmod" and re.fullmatch(r"0?[0-7]{3,4}", value):
            mode = int(value, 8)
        elif not (option == "chown" and value in {"root", "root:root", "0", "0:0"}):
            raise ConfigError(f"{where} --{option}={value} can't be honoured; remove it, or use RUN after the COPY")
        rest = rest[match.end() :]
    if rest.startswith("<<"):
        raise ConfigError(f"{where}: a here-document can't be honoured; put the file into environment/")
    try:
        words = [str(word) for word in json.loads(rest)] if rest.startswith("[") else shlex.split(rest)
    except ValueError as error:
        raise ConfigError(f"{where} {rest}: {error}") from None
    if len(words) < 2:
        raise ConfigError(f"{where} {rest}: a source and a target are needed")
    sources = tuple(_plain(word, where).lstrip("/") or "." for word in words[:-1])
    for source in sources:
        if ".." in source.split("/"):
            raise ConfigError(f"{where} {source}: leads out of environment/; keep the build context's files there")
    wanted = _plain(words[-1], where)
    target = posixpath.normpath(posixpath.join(workdir, wanted))
    if wanted.endswith(("/", "/.")) or wanted == "." or len(sources) > 1:
        target = target.rstrip("/") + "/"
    return Copy(sources, target, mode)


def _run(rest: str, workdir: str, where: str) -> Run:
    if rest.startswith("--"):
        raise ConfigError(f"{where} {rest.split(maxsplit=1)[0]} can't be honoured; remove the option")
    if re.match(r"<<-?['\"]?\w", rest):
        raise ConfigError(f"{where}: a here-document can't be honoured; put the script into environment/ and run it")
    if rest.startswith("["):
        try:
            rest = shlex.join(str(word) for word in json.loads(rest))
        except (ValueError, TypeError):
            pass  # `[ -f x ] && ...` is a command as well
    return Run(rest, workdir)
