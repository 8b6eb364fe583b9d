"""The real Apptainer or Singularity where it is installed with an image; else a program in its place.

The stand-in checks its arguments and starts the server with this Python, in no image.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REAL = os.environ.get("ATROPOS_SIF") if shutil.which("apptainer") or shutil.which("singularity") else None
"""The image to run in; None: a stand-in runs."""
STAND_IN = f"""#!{sys.executable}
import os, sys
command, *words = sys.argv[1:]
binds = []
while words[0].startswith("--"):
    option = words.pop(0)
    if option in ("--bind", "--drop-caps"):
        binds += [words.pop(0)] if option == "--bind" else words.pop(0) and []
    elif option not in ("--cleanenv", "--no-home", "--userns"):
        sys.exit(f"unknown option {{option}}")
image, python, *arguments = words
assert (command, python) == ("exec", "python3") and os.path.exists(image) and all(map(os.path.isdir, binds))
os.environ["PYTHONPATH"] = {str(Path(__file__).parents[1])!r}
os.execv({sys.executable!r}, [{sys.executable!r}, *arguments])
"""


@contextlib.contextmanager
def apptainer(folder: Path) -> Iterator[str]:
    """Have one on PATH; gives the image to name."""
    if REAL is not None:
        yield REAL
        return
    program = folder / "apptainer"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    (folder / "atropos-sandbox.sif").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        yield str(folder / "atropos-sandbox.sif")
