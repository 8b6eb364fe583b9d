"""The `atropos` command."""

from __future__ import annotations

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def root() -> None:
    """Sandbox slots for agentic reinforcement learning."""


def main() -> None:
    """Run the command line."""
    app()
