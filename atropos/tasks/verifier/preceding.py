"""What programs take in the place of a file that a verifier wrote among an agent's.

Python takes bytecode, libraries and packages for a module, Node a file without the ending, make another file of rules.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterable, Sequence

from atropos.slots import Slot
from atropos.tasks.builder.transfer import exec_plain

_MAX_BESIDE = 500
"""Most files of one upload that are looked at: as many as fit into a command."""
RULES = ("GNUmakefile", "makefile", "Makefile")
"""Files of rules in the order in which make looks for them."""
_LOADED_FIRST = re.compile(r"(.*/[^/.]+)(?:(?:\.[^/]*)?\.so|/__init__\.[^/]*)")
"""Paths of what Python loads before a module `*.py`."""
_MAKE_WAY = """
for path; do
  case ${path##*/} in
    Makefile) rm -rf -- "${path%Makefile}GNUmakefile" "${path%Makefile}makefile" || exit; continue ;;
    makefile) rm -rf -- "${path%makefile}GNUmakefile" || exit; continue ;;
    *.js) [ ! -f "${path%.js}" ] || rm -f -- "${path%.js}" || exit; continue ;;
  esac
  stem=${path%.py}; folder=$(dirname -- "$path")
  rm -rf -- "$folder/__pycache__/${stem##*/}".*.pyc "$stem.pyc" "$stem.so" "$stem".*.so || exit
  for package in "$stem"/__init__.*; do
    [ ! -e "$package" ] || { echo "$package is imported in its place"; exit 1; }
  done
done
"""
"""For sh: removes what was compiled before, and files of rules; fails where there is a package."""
_TAKE_PLACES = """
for path; do
  if [ -L "$path" ]; then continue
  elif [ -d "$path" ]; then rm -rf -- "$path" || exit
  elif [ -f "$path" ]; then chmod a+w -- "$path" || exit
  fi
done
"""


def preceded(paths: Iterable[str], own: Collection[str]) -> list[str]:
    """Modules and files of rules for make that another file would be taken for, unless that is one's own.

    Args:
        paths: absolute ones.
        own: all that one brought.
    """
    # A package that was brought itself beside the module is meant to be taken.
    covered = {f"{match[1]}.py" for path in own if (match := _LOADED_FIRST.fullmatch(path))}
    covered |= {f"{path}.js" for path in own}
    for folder in {posixpath.dirname(path) for path in own if posixpath.basename(path) in RULES}:
        rules = [posixpath.join(folder, name) for name in RULES]
        first = next(number for number, path in enumerate(rules) if path in own)
        # Of the file that make takes, what comes after it is never read; GNUmakefile has nothing before it.
        covered |= {rules[0], *rules[first + 1 :]}
    kinds = (".py", ".js", *(f"/{name}" for name in RULES))
    return [path for path in paths if path not in covered and path.endswith(kinds)]


async def make_way(slot: Slot, paths: Sequence[str]) -> str:
    """Remove what would be taken for such files; the reason where one will not be what runs, else nothing."""
    if not paths:
        return ""
    done = await exec_plain(slot, ("sh", "-c", _MAKE_WAY, "sh", *paths[:_MAX_BESIDE]))
    return "" if done.exit_code == 0 else f"{paths[0]} would not be what runs: {done.output.strip()[-600:]}"


async def take_places(slot: Slot, files: Sequence[str]) -> str:
    """Have tests able to write files: a folder that is in the place of one is removed. The reason where it can't be."""
    if not files:
        return ""
    done = await exec_plain(slot, ("sh", "-c", _TAKE_PLACES, "sh", *files))
    return (
        "" if done.exit_code == 0 else f"what is in the place of a file can't be removed: {done.output.strip()[-600:]}"
    )
