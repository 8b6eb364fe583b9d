"""`make serve-demo`: run-api, env processes in `serve` on sandbox slots, and a trainer process that checks its batches.

Five programs or more, as in a real run: atroposlib's run-api, the scripted policy behind a vLLM-style API, one or more
env processes (`python -m atropos.envs.task_env serve`, all on one pool with Docker and Nomad, each on its own
containers with the local backend), and the trainer. When one of them ends, all do; after Ctrl-C nothing is left.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from pathlib import Path
from typing import Any

from examples.policy.tokenizer import FOLDER
from examples.serve.processes import flags, how, policy, program, run, run_api

GROUP_SIZE = 4


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve", description=__doc__)
    parser.add_argument("--backend", choices=("local", "docker", "nomad"), default="local")
    parser.add_argument("--envs", type=int, default=2, help="env processes")
    parser.add_argument("--batches", type=int, default=6, help="batches of two groups that the trainer takes")
    parser.add_argument("--slots", type=int, default=8, help="slots in each container")
    parser.add_argument("--tasks", default="top-words,sqlite-report,merge-config,fix-ledger", help="names, or patterns")
    parser.add_argument("--job", default="atropos-serve-demo", help="name of the pool that the envs share")
    parser.add_argument("--out", type=Path, default=Path("runs/serve"), help="folder for the programs' output")
    args = parser.parse_args()
    if min(args.envs, args.batches, args.slots) < 1:
        parser.error("--envs, --batches and --slots must be at least 1")
    return args


def env_command(args: argparse.Namespace, api: str, policy: dict[str, Any]) -> list[str]:
    """An env process, as a user starts it."""
    env = {
        "tool_pool_mode": args.backend,
        "tokenizer_name": FOLDER,
        "rollout_server_url": api,
        "task_names": args.tasks,
        "group_size": GROUP_SIZE,
        "slots_per_container": args.slots,
        "max_containers": 1 if args.backend == "local" else 2,
        "sandbox_job_id": args.job,
        "slot_memory_mib": 256,
        "max_token_length": 30_000,
        "agent_max_steps": 12,
        "ensure_scores_are_not_same": "false",
        "allow_network": "false",
        "use_wandb": "false",
    }
    model = {"base_url": policy["base_url"], "server_type": "vllm", "model_name": policy["model"]}
    return ["-m", "atropos.envs.task_env", "serve", *flags("env", env), *flags("openai", model)]


async def demo(args: argparse.Namespace) -> int:
    """Start everything, wait for the trainer, end everything."""
    args.out.mkdir(parents=True, exist_ok=True)
    truth = args.out / "policy.jsonl"
    truth.unlink(missing_ok=True)
    started = time.monotonic()
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(policy(f"--log={truth.resolve()}"))
        api = await stack.enter_async_context(run_api())
        check = [f"--api={api.url}", f"--truth={truth.resolve()}", f"--batches={args.batches}", f"--envs={args.envs}"]
        trainer = await stack.enter_async_context(
            program("-m", "examples.serve.trainer", *check, output=asyncio.subprocess.PIPE)
        )
        envs: list[asyncio.subprocess.Process] = []
        for number in range(args.envs):
            log = stack.enter_context((args.out / f"env-{number}.log").open("wb"))
            envs.append(await stack.enter_async_context(program(*env_command(args, api.url, server.ready), output=log)))
        print(
            f"{args.envs} env(s) on {args.backend}, run-api at {api.url}; their output: {args.out}/env-*.log",
            flush=True,
        )
        others = {"the policy server": server.process, "run-api": api.process}
        others |= {f"env {n} (its output: {args.out}/env-{n}.log)": process for n, process in enumerate(envs)}
        code = await _watch(trainer, others)
    print(f"{time.monotonic() - started:.0f} s; everything was ended", flush=True)
    return code


async def _watch(trainer: asyncio.subprocess.Process, others: dict[str, asyncio.subprocess.Process]) -> int:
    """Print the trainer's output until it ends, or another program ends first."""
    told = asyncio.create_task(_tell(trainer))
    ends = {asyncio.create_task(process.wait()): name for name, process in others.items()}
    try:
        await asyncio.wait({told, *ends}, return_when=asyncio.FIRST_COMPLETED)
        if not told.done():
            task, name = next((task, name) for task, name in ends.items() if task.done())
            raise RuntimeError(f"{name} {how(task.result())} before the trainer had its batches")
        if told.result() < 0:
            raise RuntimeError(f"the trainer {how(told.result())} before it had its batches")
        return told.result()
    finally:
        for task in (told, *ends):
            task.cancel()


async def _tell(trainer: asyncio.subprocess.Process) -> int:
    assert trainer.stdout is not None
    async for line in trainer.stdout:
        print(line.decode().rstrip(), flush=True)
    return await trainer.wait()


def main() -> int:
    """0 if every batch had exactly the sampled tokens."""
    args = arguments()
    return run(lambda: demo(args))


if __name__ == "__main__":
    sys.exit(main())
