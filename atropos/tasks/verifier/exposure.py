"""Whether a task's tests run code in the agent's folder, and as which user: such code can do what that user can.

As the user of the tests it can read them, end them, and write the reward; no mode of verification stops that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from atropos.tasks.format.task import Task
from atropos.tasks.verifier.texts import test_texts

_START = r"(?:^|[;&|(]|\b(?:then|do|else|exec|time|timeout \S+))\s*"
_BEFORE = " \t\n;&|("
_INTERPRETER = r"\b(?:python[\d.]*|node|deno run|bun|ruby|perl|php|java|Rscript|lua|bash|sh|source)\s+(?:-[\w=-]+\s+)*"
_BUILDS = (
    r"(?:make|npm (?:test|run|start|ci|install)|npx|yarn|pnpm|cargo (?:test|run|build|bench)|go (?:test|run|build)|mvn|"
    r"gradle|dotnet (?:test|run|build)|cmake|bundle exec|python[\d.]* -m (?:pytest|unittest)|pytest(?![^\n]*/tests))"
    r"(?![\w/-])"
)
_UNPICKLES = r"\b(?:pickle|dill|cloudpickle|joblib|torch|marshal)\.loads?\(|\ballow_pickle\s*=\s*True"
_EVALUATES = r"\b(?:eval|exec)\(\s*(?:compile\(\s*)?(?:open|(?:pathlib\.)?Path)\("
_CALLS = (
    r"\b(?:subprocess\.\w+|os\.(?:system|popen|exec\w+|spawn\w+)|Popen|check_output|check_call"
    r"|execSync|spawnSync|spawn)"
    r"\(\s*[\[(]?"
)


@dataclass(frozen=True)
class Exposure:
    """Code of the agent's that tests run.

    Attributes:
        where: the file and what it has, as found in its text.
        user: whom the tests run as.
    """

    where: str
    user: str

    def __str__(self) -> str:
        """For a report."""
        return f"{self.where}, as {self.user}"


def exposure(task: Task) -> Exposure | None:
    """What of the agent's the tests run; None where nothing shows that they do.

    Read from their text, so a program that puts its commands together is not found.
    """
    # Each step has its own tests, and its own user for them.
    for one in task.steps or (task,):
        runs = _pattern(one.recipe.workdir.rstrip("/"))
        for name, text in test_texts(one):
            if match := runs.search(text):
                command = " ".join(match[0].strip(_BEFORE).split())
                return Exposure(f"{name} has `{command[:60]}`", one.verifier_settings.user or "root")
    return None


def _pattern(workdir: str) -> re.Pattern[str]:
    """What runs code of a folder: a program there, a relative one, an interpreter on a file, a build, an import."""
    inside = rf"{re.escape(workdir)}/[\w./*-]+"
    program = rf"(?:{inside}|\./[\w./-]+)"
    return re.compile(
        rf"{_START}{program}|{_INTERPRETER}(?:{inside}|(?![/-])[\w./-]+\.\w+)|{_START}{_BUILDS}|"
        rf"{_UNPICKLES}|{_EVALUATES}|{_CALLS}\s*[^\n]*?(?:{inside}|[\"']\./)|"
        rf"sys\.path\.(?:insert|append)\([^\n]*{re.escape(workdir)}(?![\w-])|"
        rf"\bPYTHONPATH=[\"']?(?:{re.escape(workdir)}(?![\w-])|\.|\$\{{?PWD)",
        re.MULTILINE,
    )
