"""Virtual environments that tests make: one that the agent left in such a place is removed, with its packages."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Iterator, Sequence

from atropos.slots import Slot
from atropos.tasks.builder.transfer import exec_plain
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.texts import TaskTexts

_MAKES = re.compile(
    r"^(?:[^\n#'\"`|\[]*?[;&(])??[ \t]*(?:[\w./-]{0,200}\bpython[\d.]{0,9}[ \t]+-m[ \t]+venv|virtualenv|uv[ \t]+venv)"
    r"(?:[ \t]+(?:--(?:clear|copies|quiet|relocatable|seed|symlinks|system-site-packages|upgrade-deps|without-pip)|-q"
    r"|(?:-p|--python|--prompt)[ \t=][\w./-]+))*"
    r"[ \t]+((?!-)[\w./-]+)[ \t]*(?=[\n;&|)>#]|\Z)",
    re.MULTILINE,
)
"""Commands of the shell that can mean one place alone, each the first of its line."""
_SHELL = re.compile(r"#![^\n]*\b(?:ba|da|z)?sh\b")
_MOVE = re.compile(r"\b(?:cd|pushd|popd)\b[ \t]*[\"']?([^\s;&|)\"']*)")
_USUAL = {"venv", ".venv", "env", ".env"}
"""Names that an agent's own environment may have, which its programs need."""
_REMOVE = """
for path; do
  for sign in "$path"/pyvenv.cfg "$path"/bin/python* "$path"/lib*/python*; do
    [ -e "$sign" ] || [ -L "$sign" ] || continue
    rm -rf -- "$path" || [ -z "$(ls -A -- "$path")" ] || exit
    break
  done
done
"""
"""For sh: what is no environment stays; a folder that is mounted is emptied."""


def venvs_made(texts: TaskTexts, workdir: str) -> tuple[str, ...]:
    """Where tests surely make virtual environments, by names that nobody speaks of to the agent, and few would use."""
    # Up to the first here-document: what follows may be a text and no commands.
    scripts = [test.partition("<<")[0] for test in texts.tests if _SHELL.match(test)]
    paths = {path for script in scripts for path in _made(script, workdir)}
    return tuple(sorted(path for path in paths if _is_theirs(path, texts, workdir)))


def _made(script: str, workdir: str) -> Iterator[str]:
    moves = (match.start() for match in _MOVE.finditer(script) if match[1].rstrip("/") != workdir)
    moved_at = next(moves, len(script))  # relative paths are of another folder from here on
    for match in _MAKES.finditer(script):
        if match[1].startswith("/") or match.start(1) < moved_at:
            yield posixpath.normpath(posixpath.join(workdir, match[1]))


def _is_theirs(path: str, texts: TaskTexts, workdir: str) -> bool:
    name = posixpath.basename(path)
    # Never one that the working folder lies in: that is where the work is.
    return name not in _USUAL and name not in texts.asked and not f"{workdir}/".startswith(f"{path.rstrip('/')}/")


async def remove_venvs(slot: Slot, paths: Sequence[str]) -> None:
    """Remove those of these paths at which there are virtual environments.

    Raises:
        VerifierFailed: one can't be removed.
    """
    if not paths:
        return
    done = await exec_plain(slot, f"set -- {' '.join(map(shlex.quote, paths))}; {_REMOVE}")
    if done.exit_code != 0:
        raise VerifierFailed(
            f"an environment in the place of the tests' can't be removed: {done.output[-300:].strip()}"
        )
