"""`atropos bench`: the benchmarks of a checkout, in a process of their own."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from atropos.errors import ConfigError


def bench(context: typer.Context) -> None:
    """Measure atropos beside its peers; takes the options of `python -m benchmarks` (try --help after --)."""
    sys.path.insert(0, os.getcwd())
    if importlib.util.find_spec("benchmarks") is None:
        raise ConfigError("bench: the benchmarks are not part of the package; run this in a checkout of the project")
    os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *context.args])  # noqa: S606 - no shell is wanted
