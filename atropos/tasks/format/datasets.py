"""Data sets in a local clone: Harbor's registry.json and dataset.toml. Nothing is fetched; what is there is checked."""

from __future__ import annotations

import fnmatch
import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from atropos.errors import ConfigError
from atropos.tasks.format.config import explained
from atropos.tasks.format.context import walk
from atropos.tasks.format.files import read_text, read_toml

_log = logging.getLogger(__name__)


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class _RegistryTask(_Row):
    path: str


class _RegistryRow(_Row):
    name: str
    version: str = "head"
    tasks: tuple[_RegistryTask, ...]


class _Digest(_Row):
    name: str
    digest: str | None = Field(default=None, pattern=r"^sha256:[0-9a-f]{64}$")


class _DatasetTable(_Row):
    name: str
    version: str | None = None


class _Dataset(_Row):
    dataset: _DatasetTable
    tasks: tuple[_Digest, ...]


_FILES = ("task.toml", "instruction.md", "README.md", "trajectory.json")
_FOLDERS = ("environment", "tests", "solution", "steps")
_LEFT_OUT = ("*.pyc", "*.swp", "*.swo", "*~")
_REGISTRY = TypeAdapter(tuple[_RegistryRow, ...])


def dataset_folders(path: str | Path, wanted: str, names: Sequence[str] = ()) -> list[Path]:
    """The task folders of a data set.

    Args:
        path: the clone that holds registry.json or dataset.toml, and the tasks.
        wanted: `name` or `name@version`.
        names: patterns; only tasks that match one. Empty: all.

    Raises:
        ConfigError: no such data set, a task that isn't in the clone, or one whose digest differs.
    """
    root = Path(path)
    if (root / "dataset.toml").is_file():
        folders = _of_manifest(root / "dataset.toml", wanted)
    elif (root / "registry.json").is_file():
        folders = _of_registry(root / "registry.json", wanted)
    else:
        raise ConfigError(f"dataset_path: {root} holds neither registry.json nor dataset.toml; give a clone that does")
    chosen = [one for one in folders if not names or any(fnmatch.fnmatch(one.name, pattern) for pattern in names)]
    if not chosen:
        raise ConfigError(f"task_names: no task of {wanted} matches {', '.join(names) or 'anything'}")
    return chosen


def _of_registry(path: Path, wanted: str) -> list[Path]:
    try:
        rows = _REGISTRY.validate_json(read_text(path, "give a clone that has it"))
    except ValidationError as error:
        raise ConfigError(explained(path, error)) from None
    name, _, version = wanted.partition("@")
    matching = [row for row in rows if row.name == name and version in {"", row.version}]
    if not matching:
        known = ", ".join(f"{row.name}@{row.version}" for row in rows)
        raise ConfigError(f"dataset: {wanted} is not in {path}; there is {known or 'none'}")
    if len(matching) > 1:
        raise ConfigError(f"dataset: {name} has the versions {', '.join(row.version for row in matching)}; name one")
    return [_inside(path.parent, task.path, path) for task in matching[0].tasks]


def _of_manifest(path: Path, wanted: str) -> list[Path]:
    try:
        dataset = _Dataset.model_validate(read_toml(path, "give a clone that has it"))
    except ValidationError as error:
        raise ConfigError(explained(path, error)) from None
    name, _, version = wanted.partition("@")
    if name != dataset.dataset.name or version not in {"", dataset.dataset.version}:
        have = dataset.dataset.name + (f"@{dataset.dataset.version}" if dataset.dataset.version else "")
        raise ConfigError(f"dataset: {wanted} is not in {path}; it is {have}")
    folders: list[Path] = []
    for task in dataset.tasks:
        short = task.name.rpartition("/")[2]
        nested = os.path.isdir(path.parent / "tasks" / short)
        folder = _inside(path.parent, f"tasks/{short}" if nested else short, path)
        actual = task_digest(folder)
        if actual is None:
            _log.warning("%s: the digest of %s isn't checked: it has ignore files of its own", path, task.name)
        elif task.digest is not None and actual != task.digest:
            raise ConfigError(f"{path}: tasks: {task.name} is not what the digest says: {actual}; fetch it again")
        folders.append(folder)
    return folders


def _inside(root: Path, path: str, named_by: Path) -> Path:
    missing = ConfigError(f"{named_by}: tasks: {path!r:.200} is not in this clone; fetch it")
    try:
        folder = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):  # a null byte, or a link to itself
        raise missing from None
    if not folder.is_relative_to(root.resolve()):
        raise ConfigError(f"{named_by}: tasks: {path!r:.200} leads out of the clone")
    if not os.path.isdir(folder):
        raise missing
    return folder


def task_digest(folder: Path) -> str | None:
    """The digest of a task folder as Harbor's publisher makes it: sha256 over names and digests of its files, in order.

    None where the folder's own ignore files say which files count: they are git's rules, which are not read here.
    """
    if any((folder / name).exists() for name in (".gitignore", ".harborignore")):
        return None
    files = [(name, folder / name) for name in _FILES]
    files += [(f"{part}/{name}", path) for part in _FOLDERS for name, path in walk(folder / part)]
    whole = hashlib.sha256()
    for name, path in sorted(files):
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in _LEFT_OUT):
            whole.update(f"{name}\0{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"sha256:{whole.hexdigest()}"
