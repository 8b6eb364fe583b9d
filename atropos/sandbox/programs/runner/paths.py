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


def exists(path: str) -> bool:
    """Whether the path exists, after following links."""
    try:
        os.stat(path)
    except (OSError, ValueError):
        return False
    return True


def is_folder(path: str) -> bool:
    """Whether the path is a folder, after following links."""
    try:
        return os.stat(path).st_mode & 0o170000 == 0o040000
    except (OSError, ValueError):
        return False


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
        if not is_folder(path):
            raise
