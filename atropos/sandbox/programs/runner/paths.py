"""Paths as the wire gives them, and folders."""

from __future__ import annotations

import os

from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.state import WORKSPACE


def path_of(path: str) -> str:
    """An absolute path; relative ones are in the workspace, `~` is root's home."""
    if path == "~" or path.startswith("~/"):
        path = "/root" + path[1:]
    if "\0" in path or not path:
        raise OpFailed("bad_path", "a path must not be empty or contain NUL")
    return path if path.startswith("/") else f"{WORKSPACE}/{path}"


def make_folders(path: str) -> None:
    """Make a folder and its parents, unless they exist."""
    try:
        os.mkdir(path, 0o755)
    except FileNotFoundError:
        parent = path.rstrip("/").rpartition("/")[0]
        if not parent:
            raise
        make_folders(parent)
        make_folders(path)
    except OSError:
        if not os.path.isdir(path):
            raise
