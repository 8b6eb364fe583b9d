"""The command line of an env: `serve`, `process`, `evaluate`, each with `--env.*`, `--openai.*` and a YAML file.

Every foreseeable failure is one line and an exit code; atroposlib's own shows tracebacks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from atropos.envs.command_line.flags import build_config, build_servers, nearest, parse, server_class
from atropos.envs.command_line.helptext import COMMANDS, command_help, usage
from atropos.errors import ConfigError, InferenceError, IsolationUnavailable, SandboxError

EXIT_FAILED, EXIT_USAGE, EXIT_ISOLATION = 1, 2, 3


def main(cls: Any, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code: 0, 1 failed, 2 usage, 3 no isolation, 128+N signal N."""
    sys.exit(run(cls, list(sys.argv[1:] if argv is None else argv)))


def run(cls: Any, argv: list[str]) -> int:
    """Run a command; every foreseeable failure is one line on stderr."""
    try:
        default_env, default_servers = cls.config_init()
        if not argv or argv[0] in {"-h", "--help", "help"}:
            print(usage(cls))
            return 0 if argv else _fail(f"a command is needed: {', '.join(COMMANDS)}", EXIT_USAGE)
        if argv[0] not in COMMANDS:
            return _fail(f"unknown command {argv[0]!r}; {nearest(argv[0], COMMANDS)}", EXIT_USAGE)
        if any(word in {"-h", "--help"} for word in argv[1:]):
            print(command_help(cls, argv[0], default_env, default_servers))
            return 0
        _logging()
        settings = parse(argv, type(default_env), server_class(default_servers))
        config = build_config(cls, settings, default_env)
        servers = build_servers(settings, default_servers)
        env = cls(config=config, server_configs=servers, slurm=settings.slurm, testing=settings.testing)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return _drive(env, settings.command)


def _drive(env: Any, command: str) -> int:
    from atropos.envs.running.rollout import GroupsDropped, HookError
    from atropos.envs.running.run_api import TrajectoryApiLost

    code, line = 0, ""
    try:
        asyncio.run(_manager(env, command))
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
        inner = _innermost(error)
        logging.getLogger(__name__).debug("failed", exc_info=error)
        code, line = EXIT_FAILED, f"{type(inner).__name__}: {str(inner) or 'no detail'}"
        if not os.environ.get("ATROPOS_TRACEBACK"):
            line += "  (ATROPOS_TRACEBACK=1 shows where)"
        else:
            raise
    finally:
        env.close_files()
    if command != "evaluate" and env.metrics.groups:
        _report(env)
    return _fail(line, code) if code else 0


async def _manager(env: Any, command: str) -> None:
    if command == "process":
        env.n_groups_to_process = env.config.total_steps
        env.group_size_to_process = env.config.group_size
        await env.process_manager()
    elif command == "serve":
        await env.env_manager()
    else:
        await env._run_evaluate()  # noqa: SLF001 (atroposlib's name)


def _report(env: Any) -> None:
    metrics = env.metrics
    scores = list(metrics.scores)
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    print(f"{metrics.groups} groups, {metrics.trajectories} trajectories, {metrics.calls} calls{mean}")
    path = env.config.data_path_to_save_groups
    if path and Path(path).exists():
        print(f"groups: {path}\npage:   {Path(path).with_suffix('.html')}")


def _innermost(error: BaseException) -> BaseException:
    """Through tenacity's RetryError, which says nothing, to what happened."""
    for _ in range(5):
        attempt = getattr(error, "last_attempt", None)
        cause = attempt.exception() if attempt is not None else None
        if cause is None:
            return error
        error = cause
    return error


def _fail(line: str, code: int) -> int:
    print(f"error: {line}" if code < 128 else line, file=sys.stderr)
    return code


def _logging() -> None:
    """Warnings and our own progress to stderr; atroposlib's DEBUG output of whole items never."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.setLevel(logging.INFO)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("atropos").setLevel(os.environ.get("ATROPOS_LOG_LEVEL", "INFO").upper())
