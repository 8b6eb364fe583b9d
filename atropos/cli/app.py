"""Puts the sub-commands together, and turns every expected failure into one line and an exit code."""

from __future__ import annotations

import errno
import io
import logging
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console

from atropos.errors import ConfigError, IsolationUnavailable, SandboxError
from atropos.tasks.errors import TaskBroken
from atropos.terminal import LogLines, visible

COMMANDS = {
    "doctor": "atropos.cli.doctor:doctor",
    "exec": "atropos.cli.execute:execute",
    "bench": "atropos.cli.bench:bench",
    "dashboard": "atropos.cli.dashboard:dashboard",
    "top": "atropos.cli.top:top",
    "tool-server": "atropos.api.cli:tool_server",
    "executor-server": "atropos.api.cli:executor_server",
    "keys": "atropos.cli.keys:keys_app",
    "usage": "atropos.cli.keys:usage",
    "shell": "atropos.cli.shell:shell",
    "mcp": "atropos.api.cli:mcp",
    "pool": "atropos.cli.pool:pool_app",
    "image": "atropos.cli.image:image_app",
    "tasks": "atropos.cli.tasks:tasks_app",
    "trajectories": "atropos.cli.trajectories:trajectories_app",
}
"""Where each sub-command is, in the order of the help."""
SETTINGS = {"bench": {"allow_extra_args": True, "ignore_unknown_options": True}}
"""Settings of sub-commands, as `typer.Typer.command` takes them."""


def _version(shown: bool) -> None:
    if shown:
        from importlib.metadata import version

        typer.echo(f"atropos {version('atropos')}")
        raise typer.Exit


def root(
    _version_wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Sandbox slots for agentic reinforcement learning."""


def command_line(*names: str) -> typer.Typer:
    """The command with these of its sub-commands, or with all; only their modules are imported."""
    app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(root)
    for name in names or COMMANDS:
        module, _, attribute = COMMANDS[name].partition(":")
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name, context_settings=SETTINGS.get(name))(command)
    return app


EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ValidationError, 2),
    (ConfigError, 2),
    (TaskBroken, 1),
    (IsolationUnavailable, 3),
    (SandboxError, 70),
)
"""What an expected failure ends with; the first that fits."""


def describe(error: Exception) -> str:
    """An expected failure in one line, or in those that a program wrote."""
    if isinstance(error, ValidationError):
        from atropos.wire.base import one_line

        return one_line(error)
    if isinstance(error, SandboxError) and not isinstance(error, IsolationUnavailable):
        return f"{error} ({error.code})"
    return str(error)


def main() -> None:
    """Run the command line; the exit codes are this package's. SIGTERM ends it as Ctrl-C does, with 143."""
    terminated = False

    def terminate(_number: int, _frame: FrameType | None) -> None:
        nonlocal terminated
        if not terminated:  # a second one would interrupt the clean-up
            terminated = True
            signal.raise_signal(signal.SIGINT)

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the terminal's encoding lacks, as on stderr
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(LogLines())
    try:
        _run(terminate)
    finally:
        if terminated:
            sys.exit(128 + signal.SIGTERM)


def _run(terminate: Callable[[int, FrameType | None], None]) -> None:
    try:
        command = command_line(*(name for name in sys.argv[1:2] if name in COMMANDS))
        signal.signal(signal.SIGTERM, terminate)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a script's background job
        command()
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        if error.errno not in {errno.ENOSPC, errno.EDQUOT}:
            raise
        sys.stdout = None  # the rest of the output is not written at exit either
        print(f"atropos: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except tuple(kind for kind, _ in EXIT_CODES) as error:
        stderr = Console(stderr=True, highlight=False, emoji=False)
        stderr.print(f"atropos: {visible(describe(error))}", markup=False, soft_wrap=True)
        sys.exit(next(code for kind, code in EXIT_CODES if isinstance(error, kind)))
