"""The command line of an env: `serve`, `process`, `evaluate`, each with `--env.*`, `--openai.*` and a YAML file.

Every foreseeable failure is one line and an exit code; atroposlib's own shows tracebacks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

import click

from atropos.envs.command_line.flags import (
    CommandLine,
    EnvClass,
    SettingsCommand,
    build_config,
    build_servers,
    command_defaults,
)
from atropos.errors import ConfigError, InferenceError, IsolationUnavailable, SandboxError
from atropos.terminal import log_to_stderr, visible

if TYPE_CHECKING:
    from atropos.envs.adapter import APIServerConfig
    from atropos.envs.config import SandboxEnvConfig
    from atropos.envs.running.lifecycle import Lifetime
    from atropos.envs.running.metrics import EnvMetrics

COMMANDS = {
    "serve": "run groups for a trainer, through the trajectory API (run-api)",
    "process": "run groups and write them to a JSONL file and a page to look at",
    "evaluate": "run the env's own evaluation",
}
EXIT_FAILED, EXIT_USAGE, EXIT_ISOLATION = 1, 2, 3

_log = logging.getLogger(__name__)


class CommandEnv(Protocol):
    """An env as its commands run it."""

    config: SandboxEnvConfig
    lifetime: Lifetime
    metrics: EnvMetrics

    async def process_manager(self) -> None:
        """Run `process`."""
        ...

    async def env_manager(self) -> None:
        """Run `serve`."""
        ...

    async def _run_evaluate(self) -> None:
        """Run `evaluate`."""
        ...

    def close_files(self) -> None:
        """Close the JSONL and write its page."""
        ...


class EnvProgram(EnvClass, Protocol):
    """An env's class: default settings, and a constructor."""

    def config_init(self) -> object:
        """Default settings of the env and of its servers, if its author returns them."""
        ...

    def __call__(
        self, *, config: SandboxEnvConfig, server_configs: list[APIServerConfig], slurm: bool, testing: bool
    ) -> CommandEnv:
        """Make an env."""
        ...


def main(cls: EnvProgram) -> NoReturn:
    """Run a command and end the process with its exit code: 0, 1 failed, 2 usage, 3 no isolation, 128+N signal N."""
    sys.exit(run(cls, sys.argv[1:]))


def run(cls: EnvProgram, argv: list[str]) -> int:
    """Run a command; every foreseeable failure is one line on stderr."""
    try:
        return command_line(cls).main(argv, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message())
        return _fail(f"a command is needed: {', '.join(COMMANDS)}", EXIT_USAGE)
    except click.UsageError as error:
        return _fail(error.format_message(), EXIT_USAGE)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", 130)


def command_line(cls: EnvProgram) -> click.Group:
    """The commands of an env class, over what its `config_init` gives.

    Raises:
        ConfigError: `config_init` gives no usable settings.
    """
    default_env, default_servers = _defaults(cls)
    summary = next(iter((cls.__doc__ or "").strip().splitlines()), "")
    group = click.Group(cls.__name__, help=summary, no_args_is_help=True)
    for name, text in COMMANDS.items():
        defaults = command_defaults(cls, name, default_env)
        start = partial(_start, cls, defaults, default_servers)
        group.add_command(SettingsCommand(name, text, defaults, default_servers[0], start))
    return group


def _start(
    cls: EnvProgram, defaults: SandboxEnvConfig, default_servers: list[APIServerConfig], given: CommandLine
) -> int:
    _logging()
    config, servers = build_config(defaults, given), build_servers(given, default_servers)
    target = config.data_path_to_save_groups
    env = cls(config=config, server_configs=servers, slurm=given.slurm, testing=given.testing)
    if (path := env.config.data_path_to_save_groups) != target:  # atroposlib overwrites no file
        _log.info("%s is there already: the groups go to %s", target, path)
    return _drive(env, given.command)


def _defaults(cls: EnvProgram) -> tuple[SandboxEnvConfig, list[APIServerConfig]]:
    """What `config_init` gives; where it names no server, one with defaults alone."""
    from atropos.envs.adapter import APIServerConfig
    from atropos.envs.config import SandboxEnvConfig

    match defaults := cls.config_init():
        case (SandboxEnvConfig() as config, APIServerConfig() as server):
            return config, [server]
        case (SandboxEnvConfig() as config, [APIServerConfig(), *_] as servers):
            return config, [*cast("Sequence[APIServerConfig]", servers)]
        case (SandboxEnvConfig() as config, _):
            return config, [APIServerConfig()]
        case _:
            kind = type(defaults).__name__
            raise ConfigError(f"{cls.__name__}.config_init must return (config, [APIServerConfig(...)]), not a {kind}")


def _drive(env: CommandEnv, command: str) -> int:
    from atropos.agent.model import innermost
    from atropos.envs.reporting.run_api import TrajectoryApiLost
    from atropos.envs.running.rollout import GroupsDropped, HookError

    code, line = 0, ""
    try:
        evaluate = env._run_evaluate  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] (atroposlib's name)
        managers = {"process": env.process_manager, "serve": env.env_manager, "evaluate": evaluate}
        asyncio.run(managers[command]())
    except (GroupsDropped, HookError, TrajectoryApiLost) as error:
        code, line = EXIT_FAILED, str(error)
    except ConfigError as error:
        code, line = EXIT_USAGE, str(error)
    except IsolationUnavailable as error:
        code, line = EXIT_ISOLATION, str(error)
    except (InferenceError, SandboxError) as error:
        code, line = EXIT_FAILED, f"{type(error).__name__}: {error}"
    except (asyncio.CancelledError, KeyboardInterrupt):
        number = env.lifetime.signal
        name = number.name if number is not None else "SIGINT"
        code, line = 128 + int(number or 2), f"ended by {name}; everything was shut down"
    except Exception as error:
        inner = innermost(error)
        _log.debug("failed", exc_info=error)
        code, line = EXIT_FAILED, f"{type(inner).__name__}: {str(inner) or 'no detail'}"
        if os.environ.get("ATROPOS_TRACEBACK"):
            raise
        line += "  (ATROPOS_TRACEBACK=1 shows where)"
    finally:
        env.close_files()
    if command != "evaluate" and (env.metrics.groups or not code):
        _report(env)
    return _fail(line, code) if code else 0


def _report(env: CommandEnv) -> None:
    metrics = env.metrics
    mean = "" if metrics.mean_score is None else f", mean score {metrics.mean_score:.3f}"
    lines = [f"{metrics.groups} groups, {metrics.trajectories} trajectories, {metrics.calls} calls{mean}"]
    path = env.config.data_path_to_save_groups
    if path and Path(path).exists():
        lines.append(f"groups: {path}")
        page = Path(path).with_suffix(".html")
        if page.exists() and page.stat().st_mtime_ns >= Path(path).stat().st_mtime_ns:  # not one of an earlier run
            lines.append(f"page:   {page}")
    print(*lines, sep="\n", flush=True)  # an error comes after it, also where both go into one pipe


def _fail(line: str, code: int) -> int:
    print(visible(f"error: {line}" if code < 128 else line), file=sys.stderr)
    return code


def _logging() -> None:
    """Log warnings and atropos's own progress to stderr, and never atroposlib's DEBUG output of whole items."""
    log_to_stderr().setLevel(logging.INFO)
    logging.getLogger().setLevel(logging.WARNING)
    level = os.environ.get("ATROPOS_LOG_LEVEL") or "INFO"
    try:
        logging.getLogger("atropos").setLevel(level.upper())
    except ValueError:
        raise ConfigError(f"ATROPOS_LOG_LEVEL: {level!r} is none of INFO, WARNING, ERROR") from None
