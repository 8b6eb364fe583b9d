"""Puts the sub-commands together, and turns every expected failure into one line and an exit code."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from atropos.api.cli import executor_server, tool_server
from atropos.api.mcp_server import mcp
from atropos.cli.bench import bench
from atropos.cli.dashboard import dashboard
from atropos.cli.doctor import doctor
from atropos.cli.execute import execute
from atropos.cli.image import image_app
from atropos.cli.pool import pool_app
from atropos.cli.tasks import tasks_app
from atropos.cli.top import top
from atropos.cli.trajectories import trajectories_app
from atropos.errors import ConfigError, IsolationUnavailable, SandboxError
from atropos.tasks.errors import TaskBroken

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
app.command("doctor")(doctor)
app.command("exec")(execute)
app.command("bench", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(bench)
app.command("dashboard")(dashboard)
app.command("top")(top)
app.command("tool-server")(tool_server)
app.command("executor-server")(executor_server)
app.command("mcp")(mcp)
app.add_typer(pool_app, name="pool")
app.add_typer(image_app, name="image")
app.add_typer(tasks_app, name="tasks")
app.add_typer(trajectories_app, name="trajectories")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"atropos {version('atropos')}")
        raise typer.Exit


@app.callback()
def root(
    _version_wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Sandbox slots for agentic reinforcement learning."""


EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ValidationError, 2),
    (ConfigError, 2),
    (TaskBroken, 1),
    (IsolationUnavailable, 3),
    (SandboxError, 70),
)
"""What an expected failure ends with; the first that fits."""


def describe(error: Exception) -> str:
    """An expected failure in one line."""
    if isinstance(error, ValidationError):
        fields = ((".".join(str(part) for part in item["loc"]) or "value", item["msg"]) for item in error.errors())
        return "; ".join(f"{field}: {what}" for field, what in fields)
    if isinstance(error, SandboxError) and not isinstance(error, IsolationUnavailable):
        return f"{error} ({error.code})"
    return str(error)


def main() -> None:
    """Run the command line; the exit codes are this package's."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        stderr = Console(stderr=True, highlight=False)
        stderr.print(f"atropos: {describe(error)}", markup=False, soft_wrap=True)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))
