"""What scripts that make a Debian share: its mirror, the cache, and how a part of it is made."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(
    os.environ.get("ATROPOS_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "atropos"
)
MIRROR = os.environ.get("ATROPOS_DEBIAN_MIRROR", "http://deb.debian.org/debian")
ALONE = ("unshare", "--mount", "--pid", "--fork", "--kill-child")
"""Before a command: in namespaces of its own, so that what it mounts and starts ends with it."""
IN_USE_S = 7200
"""So young a folder of the cache may be in use by another run."""


def quietly(*argv: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Run a command; what it printed is shown only when it fails."""
    done = subprocess.run(
        [str(part) for part in argv], cwd=cwd, env=env, capture_output=True, text=True, check=False, errors="replace"
    )
    if done.returncode:
        sys.exit(f"{shlex.join(map(str, argv))} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout


def made_once(target: Path, make: Callable[[Path], object]) -> None:
    """Have `make` fill a folder of the cache, KIND-CONTENT, unless it is there; older ones of its kind are removed."""
    if target.exists():
        return
    kind = target.name.rpartition("-")[0]
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{kind}-", dir=CACHE) as name:
        part = Path(name, "part")
        part.mkdir()
        make(part)
        with contextlib.suppress(OSError):  # somebody else was quicker
            part.rename(target)
    for old in CACHE.glob(f"{kind}-*"):
        if old != target and time.time() - old.stat().st_mtime > IN_USE_S:
            shutil.rmtree(old, ignore_errors=True)
