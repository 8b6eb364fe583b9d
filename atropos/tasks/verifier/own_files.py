"""Files of the agent's by which a verifier's own programs would do something else: they are removed where tests run.

Some programs run what a file of a fixed name in the working folder says, and have no variable against it. And where
tests make a virtual environment, its packages may lie there already.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterable, Sequence

from atropos.slots import Slot
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.texts import TaskTexts

_READ = {
    ".proverc": (r"\bprove\b", r"proverc"),
    ".Rprofile": (r"\b(?:R|Rscript)\b", r"Rprofile|\brenv\b"),
    ".Renviron": (r"\b(?:R|Rscript)\b", r"Renviron"),
    ".octaverc": (r"\boctave", r"octaverc"),
}
"""What programs read in the working folder; the programs; and what shows that a task is about the file."""
_MAKES_VENV = re.compile(r"(?:\s-m\s+venv|\bvirtualenv|\buv\s+venv)\s+(?:-[^\s;&|]+\s+(?:[\d.]+\s+)?)*([\w./-]+)")


def settings_read(texts: TaskTexts | str) -> tuple[str, ...]:
    """Names of files that tests would have programs read; by a prompt alone, all that it doesn't speak of."""
    if isinstance(texts, str):
        return tuple(name for name, (_, word) in _READ.items() if not re.search(word, texts))
    return tuple(
        name
        for name, (program, word) in _READ.items()
        if any(re.search(program, test) for test in texts.tests) and not re.search(word, texts.whole)
    )


def venvs_made(texts: TaskTexts, workdir: str) -> tuple[str, ...]:
    """Where tests make virtual environments that nobody speaks of to the agent."""
    named = {match for test in texts.tests for match in _MAKES_VENV.findall(test)}
    paths = {posixpath.normpath(posixpath.join(workdir, name)) for name in named}
    return tuple(sorted(path for path in paths if posixpath.basename(path) not in texts.asked))


async def remove(slot: Slot, folders: Iterable[str], names: Sequence[str], paths: Sequence[str] = ()) -> None:
    """Remove files by their names in folders, and paths.

    Raises:
        VerifierFailed: one can't be removed.
    """
    every = [*(f"{folder.rstrip('/')}/{name}" for folder in folders for name in names), *paths]
    if not every:
        return
    done = await exec_plain(slot, f"rm -rf -- {' '.join(map(shlex.quote, every))}")
    if done.exit_code != 0:
        raise VerifierFailed(f"files in the place of a verifier's own can't be removed: {done.output[-300:].strip()}")
