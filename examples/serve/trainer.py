"""A trainer that trains nothing and checks everything: `python -m examples.serve.trainer --api URL --truth LOG`.

It registers, fetches batches, and compares each sequence with the inference server's log, position by position: what
the masks call sampled must be an entry of the log, tokens and logprobs, under exactly the prompt that stands before it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.policy.truth import Truth, claims
from examples.serve.processes import Trainer, run


@dataclass
class Found:
    """Counts of the batches, and the errors in them."""

    batches: int = 0
    groups: int = 0
    sequences: int = 0
    turns: int = 0
    sampled_tokens: int = 0
    scores: Counter[float] = field(default_factory=Counter[float])
    envs: Counter[int] = field(default_factory=Counter[int])
    wrong: list[str] = field(default_factory=list[str])

    def check(self, batch: list[dict[str, Any]], truth: Truth, group_size: int) -> None:
        """Count one batch, and record its errors."""
        self.batches += 1
        for group in batch:
            self.groups += 1
            self.envs[int(group["env_id"])] += 1
            parts = [group[name] for name in ("tokens", "masks", "inference_logprobs", "scores")]
            if [len(part) for part in parts] != [group_size] * 4:
                self.wrong.append(f"a group of {[len(part) for part in parts]}, not of {group_size}")
                continue
            if group["group_overrides"] != {}:
                self.wrong.append(f"group_overrides {group['group_overrides']}")
            for tokens, masks, logprobs, score in zip(*parts, strict=True):
                self.scores[round(score, 3)] += 1
                self._sequence(tokens, masks, logprobs, truth)

    def _sequence(self, tokens: list[int], masks: list[int], logprobs: list[float], truth: Truth) -> None:
        self.sequences += 1
        turns = 0
        try:
            for entry in claims(tokens, masks, logprobs):
                turns += 1
                self.sampled_tokens += len(entry[1])
                if entry not in truth:
                    begin = len(entry[0])
                    self.wrong.append(f"positions {begin} to {begin + len(entry[1])} are not what the server sampled")
        except ValueError as error:
            self.wrong.append(str(error))
            return
        self.turns += turns
        if not turns:
            self.wrong.append("a sequence in which nothing was sampled")

    def as_dict(self) -> dict[str, Any]:
        """For people and for `--json`."""
        counted = {name: getattr(self, name) for name in ("batches", "groups", "sequences", "turns", "sampled_tokens")}
        scores = {str(score): count for score, count in sorted(self.scores.items())}
        return {**counted, "scores": scores, "groups_by_env": dict(self.envs), "wrong": self.wrong[:20]}


async def train(args: argparse.Namespace) -> int:
    """Fetch and check; one JSON line a batch, and one at the end."""
    found, truth = Found(), Truth(args.truth)
    async with Trainer(args.api, batch_size=args.batch_size, steps=args.batches) as trainer:
        print(json.dumps({"registered": True}), flush=True)
        async for batch in trainer.batches():
            found.check(batch, truth, args.group_size)
            print(json.dumps(found.as_dict()), flush=True)
            enough = found.batches >= args.batches and len(found.envs) >= args.envs
            if enough or found.wrong:
                break
    return 1 if found.wrong else 0


def main() -> int:
    """Exit code 1 when a batch was wrong."""
    parser = argparse.ArgumentParser(prog="python -m examples.serve.trainer", description=__doc__)
    parser.add_argument("--api", required=True, help="URL of run-api")
    parser.add_argument("--truth", type=Path, required=True, help="the policy server's --log")
    parser.add_argument("--batches", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--envs", type=int, default=1, help="continue until so many envs have sent something")
    args = parser.parse_args()
    return run(lambda: train(args))


if __name__ == "__main__":
    sys.exit(main())
