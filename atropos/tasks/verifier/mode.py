"""Where a task's tests run, and why.

A task that says nothing is verified in a view: its folders and servers on a clean machine. Where its solution changes the
machine itself (packages, users, files of the system), a view would not show that, so the tests run in the agent's slot. So they
do where they rename or link files across the edge of the folders shown, which are a file system of their own in a view.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from atropos.tasks.format.task import Task

Mode = Literal["view", "shared", "separate"]
MAX_BYTES = 1 << 20
"""Most that is read of one file of a solution."""
_MACHINE = re.compile(
    r"\b(?:apt-get|apt|apk|dnf|yum|pip[\d.]*|npm|gem|conda|uv pip|cargo)\s+(?:-\S+\s+){,20}(?:install|add|i)\b"
    r"|\b(?:useradd|adduser|groupadd|usermod|chpasswd|systemctl|update-alternatives|ldconfig|crontab|locale-gen)\b"
    r"|(?<![\w.$}/-])(?:/(?:etc|usr|var|opt|root|home|tmp|run|bin|sbin|lib\w*|media)/[\w.-]+[\w./-]*|~/|\$\{?HOME\b"
    r"|/(?:etc|usr|var|opt|root|tmp)(?![\w-])/?)|\bcd\s+~"
)
_RENAMES = re.compile(
    r"\b(?:os\.(?:renames?|replace|link)|fs\.(?:rename|link)(?:Sync)?|File\.(?:rename|link)|Path\([^()\n]*\)\.(?:rename|replace|hardlink_to))"
    r"\s*\([^\n]*|(?:^|[;&|]\s*)\s*(?:ln|link)\s+(?!-\w*s)[^\n;&|]*",
    re.MULTILINE,
)
"""Calls and commands that fail between two file systems, to the end of the line; `mv` and `shutil.move` copy there."""
_WHOLE_PATH = re.compile(r"(?<![\w.$}/-])/[\w.-][\w./-]*")
_PROGRAM = re.compile(r"/(?:usr/)?(?:local/)?s?bin/[\w.-]+$")
"""A program of the system, which is only run."""


@dataclass(frozen=True)
class Choice:
    """Where tests run, and why there."""

    mode: Mode
    reason: str


def choose(task: Task, wanted: Literal["task"] | Mode = "task") -> Choice:
    """Where a task's tests run; `wanted`: what the operator says.

    After a view nobody comes back to the agent's slot, so steps are verified there.
    """
    verifier = task.config.verifier
    in_steps = bool(task.steps) or task.step is not None
    said = verifier.environment_mode if wanted == "task" else wanted
    if said is not None and not (said == "view" and in_steps):
        return Choice(said, "environment_mode says so" if wanted == "task" else "the operator says so")
    if said is None and verifier.environment is not None:
        return Choice("separate", "[verifier.environment] is set")
    if in_steps:
        return Choice("shared", "the task has several steps")
    if task.recipe.workdir == "/":
        return Choice("shared", "its working folder is /")
    shown = (task.recipe.workdir, *(artifact.source for artifact in task.artifacts))
    for name, text in _texts(task):
        for match in _MACHINE.finditer(text):
            found = match[0]
            inside = any(found == folder or found.startswith(f"{folder.rstrip('/')}/") for folder in shown)
            if not inside and not _PROGRAM.match(found):
                return Choice("shared", f"{name} has `{found[:60]}`, which a view may not show")
    for name, text in (file for tests in task.tests for file in _files(tests)):
        for match in _RENAMES.finditer(text):
            inside = {any(f"{path}/".startswith(f"{top}/") for top in shown) for path in _WHOLE_PATH.findall(match[0])}
            if inside == {True, False}:
                return Choice("shared", f"{name} has `{match[0].strip()[:60]}`, which leads out of a view's folders")
    return Choice("view", "nothing in its solution changes the machine itself")


def _texts(task: Task) -> list[tuple[str, str]]:
    """The files of the solution, which is one itself in terminal-bench 1; the instruction where there is none."""
    return [("the instruction", task.instruction)] if task.solution is None else _files(task.solution)


def _files(part: Path) -> list[tuple[str, str]]:
    """The files of a part of a task, which may be one itself.

    Links go into a slot as such, so what they name on this machine says nothing.
    """
    files = [part, *(path for path in sorted(part.rglob("*")) if not path.is_symlink())]
    return [(str(path.relative_to(part.parent)), _text(path)) for path in files if path.is_file()]


def _text(path: Path) -> str:
    with path.open("rb") as file:
        return file.read(MAX_BYTES).decode("utf-8", "replace")
