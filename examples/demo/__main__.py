"""`make demo`, or `python -m examples.demo`: a policy server, two containers of eight slots, and all example tasks."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import logging
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--backend", choices=("local", "docker", "nomad"), default="local")
    parser.add_argument("--tasks", type=Path, default=ROOT / "examples" / "tasks", help="folder of tasks")
    parser.add_argument("--names", default="", help="patterns of the tasks to run, comma-separated; empty: all")
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--containers", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="slots in each container")
    parser.add_argument("--mistakes", type=float, default=0.4, help="part of the trajectories that err, 0 to 1")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same scores")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for the JSONL and the page")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON instead of the table")
    args = parser.parse_args()
    if not 0 <= args.mistakes <= 1:
        parser.error(f"--mistakes: must be from 0 to 1, not {args.mistakes:g}")
    if not args.tasks.is_dir():
        parser.error(f"--tasks: there is no folder {args.tasks}")
    return args


def main() -> int:
    """Run the demo; 0 when every group on a task that can be solved here was completed."""
    for number in SIGNALS:  # while modules are loaded: nothing is held, and an exception in an import may be lost
        signal.signal(number, signal.SIG_DFL)
    args = arguments()
    try:
        return run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    finally:
        ignore_signals()


def ignore_signals() -> None:
    """Nothing is held any more, and a signal would break off Python's own end."""
    for number in SIGNALS:
        signal.signal(number, _ending)


def run(args: argparse.Namespace) -> int:
    """Import the slow modules, then run."""
    from rich.console import Console

    console = Console(stderr=args.json)
    if console.is_terminal:
        console.print("[dim]loading atroposlib and transformers …[/dim]")
    importlib.import_module("atropos.envs.task_env")  # the slowest, which `build` uses
    from atropos.envs.running.rollout import GroupsDropped
    from atropos.errors import ConfigError, InferenceError, IsolationUnavailable, SandboxError

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminated)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    lifetimes: list[Any] = []
    try:
        return asyncio.run(demo(args, console, lifetimes))
    except GroupsDropped as error:
        return fail(str(error), 1)
    except ConfigError as error:
        return fail(str(error), 2)
    except IsolationUnavailable as error:
        return fail(f"{error}\n`atropos doctor` tells what this host can isolate, and the fix for each gap", 3)
    except (InferenceError, SandboxError) as error:
        return fail(f"{type(error).__name__}: {error}", 1)
    except asyncio.CancelledError:
        number = lifetimes[0].signal if lifetimes else None
        print("ended by a signal; everything was shut down", file=sys.stderr)
        return 128 + int(number or 2)


def fail(line: str, code: int) -> int:
    """Print one line and return the exit code."""
    print(f"error: {line}", file=sys.stderr)
    return code


async def demo(args: argparse.Namespace, console: Any, lifetimes: list[Any]) -> int:
    """Play, and ignore signals from then on: an exception of one could be lost in a destructor."""
    try:
        return await play(args, console, lifetimes)
    finally:
        ignore_signals()


async def play(args: argparse.Namespace, console: Any, lifetimes: list[Any]) -> int:
    """Run the policy server, the env and the display."""
    from examples.demo.display import Display, show, summary
    from examples.serve.processes import policy

    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return fail(f"--out: {error}", 2)
    jsonl = args.out / "groups.jsonl"
    for old in (jsonl, jsonl.with_suffix(".html")):
        old.unlink(missing_ok=True)
    async with policy(f"--mistakes={args.mistakes}", f"--tasks={args.tasks.resolve()}") as server:
        env = build(args, server.ready, jsonl)
        lifetimes.append(env.lifetime)
        display = Display(console, env)
        env.observers.append(display.see)
        try:
            with display:
                await env.process_manager()
        finally:
            numbers = summary(display, jsonl if jsonl.exists() else None)
            if args.json:
                print(json.dumps(numbers, indent=1))
            elif display.rollouts:
                show(console, numbers, args.mistakes)
    return 0


def build(args: argparse.Namespace, server: dict[str, Any], jsonl: Path) -> Any:
    """The task env, with the settings that flags of `python -m atropos.envs.task_env process` would give."""
    from atropos.envs.adapter import APIServerConfig
    from atropos.envs.task_env import TaskEnv
    from atropos.envs.task_settings import TaskEnvConfig

    config = TaskEnvConfig(
        tokenizer_name=server["tokenizer"],
        tool_pool_mode=args.backend,
        tasks_path=str(args.tasks),
        task_names=args.names,
        group_size=args.group_size,
        slots_per_container=args.slots,
        min_containers=args.containers,
        max_containers=args.containers,
        sandbox_job_id="atropos-demo",
        agent_max_steps=12,
        max_token_length=65_536,
        check_tasks="all",
        slot_memory_mib=512,
        include_messages=True,
        ensure_scores_are_not_same=False,
        use_wandb=False,
        seed=args.seed,
        data_path_to_save_groups=str(jsonl),
    )
    inference = APIServerConfig(
        base_url=server["base_url"], model_name=server["model"], api_key="demo", server_type="vllm"
    )
    env = TaskEnv(config, [inference])
    config.total_steps = len(env.items)
    return env


def _terminated(_number: int, _frame: Any) -> NoReturn:
    signal.signal(signal.SIGTERM, _ending)  # a second one would break off the end
    raise SystemExit(143)


def _ending(_number: int, _frame: Any) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
