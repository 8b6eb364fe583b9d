"""`make learn`: pupils that know nothing learn a task in sandbox slots, from what the trajectory API hands out.

One process holds the policies, their inference server and the trainer; run-api and the env in `serve` are two more. All
pupils get the same items from the same env. The first is trained on its groups as they are sent. The others, for
comparison, on theirs with the masks or the logprobs moved by one position: they must not learn anything. What must hold
stands in `examples/learn/school.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from examples.learn.curve import draw
from examples.learn.school import START, WINDOW, School, mean
from examples.learn.trainer import SHIFTS
from examples.policy.tokenizer import FOLDER
from examples.serve.processes import Trainer, flags, program, run, run_api


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn", description=__doc__)
    parser.add_argument("--backend", choices=("local", "docker", "nomad"), default="local")
    parser.add_argument("--updates", type=int, default=60, help="groups that each pupil learns from")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument(
        "--shifts", default=",".join(SHIFTS), help=f"pupils, by how their groups are moved: {', '.join(SHIFTS)}"
    )
    parser.add_argument("--temperature", type=float, default=0.7, help="with which the pupils' turns are sampled")
    parser.add_argument("--stop-when-learned", action="store_true", help="end when the first pupil's mean is over 0.9")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/learn"), help="folder for curve.png, .svg and .json")
    args = parser.parse_args()
    args.shifts = [name.strip() for name in args.shifts.split(",")]
    for name in args.shifts:
        if name not in SHIFTS:
            parser.error(f"--shifts: {name!r} is none of {', '.join(SHIFTS)}")
    if args.updates < 2 * WINDOW or args.group_size < 2:
        parser.error(f"--updates must be at least {2 * WINDOW}, --group-size at least 2")
    return args


async def lesson(args: argparse.Namespace, school: School) -> None:
    """Run everything until the school is finished."""
    args.out.mkdir(parents=True, exist_ok=True)
    batch = args.group_size * len(school.shift)
    with (args.out / "env.log").open("wb") as log:
        async with school.server.running() as base_url, run_api() as api, Trainer(api.url, batch_size=batch) as trainer:
            env = {
                "tool_pool_mode": args.backend,
                "tokenizer_name": FOLDER,
                "rollout_server_url": api.url,
                "pupils": ",".join(school.shift),
                "group_size": args.group_size,
                "slots_per_container": args.slots,
                "max_containers": 1,
                "max_token_length": 4096,
                "max_batches_offpolicy": 2,
                "ensure_scores_are_not_same": "false",
                "agent_temperature": args.temperature,
                "agent_max_steps": 3,
                "allow_network": "false",
                "slot_memory_mib": 128,
                "verifier_mode": "shared",  # the grammar has no cheat, and a view is a second sandbox
                "sandbox_job_id": "atropos-learn",
                "use_wandb": "false",
            }
            model = {"base_url": base_url, "server_type": "vllm", "model_name": "pupils"}
            argv = ("-m", "examples.learn.env", "serve", *flags("env", env), *flags("openai", model))
            async with program(*argv, output=log) as process:
                said = time.monotonic()
                async for groups in trainer.batches(process):
                    for group in groups:
                        school.take(group)
                    if time.monotonic() - said > 5:
                        said = time.monotonic()
                        print(school.line(), flush=True)
                    if school.finished(when_learned=args.stop_when_learned):
                        return


def report(args: argparse.Namespace, school: School, seconds: float) -> int:
    """Write the picture and the numbers; 0 when the proof holds."""
    curves = {name: school.scores(pupil) for pupil, name in school.shift.items()}
    draw(curves, args.out / "curve", window=WINDOW, group_size=args.group_size)
    rows: dict[str, dict[str, float]] = {}
    for pupil, name in school.shift.items():
        seen = school.totals(pupil)
        rows[name] = {
            "updates": len(school.steps[pupil]),
            "first": round(mean(curves[name][:START]), 3),
            "last": round(school.last(pupil), 3),
            "tokens_chosen": seen.spoken,
            "labels": seen.labels,
            "positions_used": round(seen.used / max(1, seen.labels), 3),
        }
    wrong = school.wrong()
    facts = {"seconds": round(seconds, 1), "as_expected": not wrong, "wrong": wrong, "rows": rows, "curves": curves}
    (args.out / "curve.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(
        f"{'trained on':<14}{'updates':>8}{'reward: first ' + str(START):>18}{'last ' + str(WINDOW):>10}"
        f"{'positions used':>16}"
    )
    for name, row in rows.items():
        print(f"{name:<14}{row['updates']:>8}{row['first']:>18.2f}{row['last']:>10.2f}{row['positions_used']:>16.0%}")
    print(f"{seconds:.0f} s; the picture: {args.out / 'curve.png'}; the env's own output: {args.out / 'env.log'}")
    for what in wrong:
        print(f"not as expected: {what}", file=sys.stderr)
    return 1 if wrong else 0


async def teach(args: argparse.Namespace) -> int:
    """Run the lesson and write its report."""
    school, started = School(args), time.monotonic()
    try:
        await lesson(args, school)
    except RuntimeError as error:
        raise RuntimeError(f"{error} ({args.out / 'env.log'})") from error
    return report(args, school, time.monotonic() - started)


def main() -> int:
    """Exit with 1 if the proof fails."""
    args = arguments()
    return run(lambda: teach(args))


if __name__ == "__main__":
    sys.exit(main())
