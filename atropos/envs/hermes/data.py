"""Rows for a Hermes env: from a file, from the flag itself, or from a dataset: a folder, or a name on the hub."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from atropos.errors import ConfigError

HOW = "give a .jsonl or .parquet file, a folder of data files, a JSON list of objects, or a dataset's name on the hub"


def load_rows(name: str, split: str = "train") -> list[dict[str, object]]:
    """The rows of a dataset.

    Args:
        name: see `HOW`.
        split: of a folder, or a dataset on the hub; files and lists have none.

    Raises:
        ConfigError: it can't be found or read.
    """
    text = name.strip()
    if text.startswith("["):
        rows = _parsed(text, "the list")
        if not isinstance(rows, list):
            raise ConfigError(f"dataset_name: not a list; {HOW}")
        return _checked(cast("list[object]", rows), "the list")
    path = Path(os.path.expanduser(text))
    if os.path.isdir(path):  # False for what can't be a path
        return _from_library(str(path), split)
    if path.suffix in {".jsonl", ".json", ".parquet"} or os.path.exists(path):
        return _from_file(path)
    return _from_library(text, split)


def _from_file(path: Path) -> list[dict[str, object]]:
    if not path.is_file():
        raise ConfigError(f"dataset_name: there is no file {path}; {HOW}")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            return _checked(pyarrow.parquet.read_table(path).to_pylist(), str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"dataset_name: {path} is no Parquet file: {error}") from None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_name: {path} can't be read: {error}") from None
    if path.suffix == ".json":
        rows = _parsed(text, str(path))
        return _checked(cast("list[object]", rows) if isinstance(rows, list) else [rows], str(path))
    lines = enumerate(text.split("\n"), 1)  # JSON's strings may hold what else `splitlines` ends a line at
    return _checked([_parsed(line, f"{path}, line {number}") for number, line in lines if line.strip()], str(path))


def _from_library(name: str, split: str) -> list[dict[str, object]]:
    from datasets import load_dataset

    try:
        return [dict(row) for row in load_dataset(name, split=split)]
    except Exception as error:  # the library raises anything, from network errors to ValueError
        detail = str(error).partition("\n")[0]
        raise ConfigError(
            f"dataset_name: {name!r:.200} (split {split!r}) can't be loaded: {type(error).__name__}: {detail[:300]}; "
            f"{HOW}"
        ) from error


def _parsed(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"dataset_name: {where}: not JSON: {error}") from None


def _checked(rows: Sequence[object], where: str) -> list[dict[str, object]]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ConfigError(f"dataset_name: {where}, row {number}: not an object")
    if not rows:
        raise ConfigError(f"dataset_name: {where}: no rows; {HOW}")
    return cast("list[dict[str, object]]", rows)
