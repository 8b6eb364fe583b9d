"""Options that several commands have."""

from __future__ import annotations

import os
from typing import Annotated

import typer


def full_path(given: str | None) -> str | None:
    """A path of the command's own folder as a server finds it, which works in another."""
    return None if given is None else os.path.abspath(given)


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Base = Annotated[str | None, typer.Option(help="A root file system to start from (local backend).", callback=full_path)]
