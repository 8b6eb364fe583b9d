"""What a Hermes env hands to the trainer is exactly what the inference server sampled, position by position.

The policy server logs every prompt it got and every token it sampled; random conversations run on real slots, with
unicode, several calls a turn, calls that can't be read, retries after failures and turns that are cut off.
"""

from __future__ import annotations

import json
import random

import pytest

from atropos.envs import HermesAgentBaseEnv
from examples.policy.truth import Truth
from tests.e2e.hermes_support import call, groups, make, running_policy, sampled, script

GROUPS, MEMBERS = 4, 3
TEXTS = ["fine", "grüße ☃ 🦊", "<|im_end|> is text here", "a\n\n  b\t", "<tool_call>\n{broken", "x" * 300, ""]


def conversation(rng):
    turns = []
    for _ in range(rng.randrange(1, 6)):
        printed = rng.choice(TEXTS)
        calls = [
            call(
                "terminal",
                command=f"printf %s {json.dumps(printed)} | head -c {rng.randrange(1, 400)}; exit {rng.randrange(2)}",
            ),
            call("write_file", path=f"f{rng.randrange(9)}", content=printed),
            call("nosuch", text=printed),
        ]
        turns.append({"text": rng.choice(TEXTS), "calls": rng.sample(calls, rng.randrange(1, 4))})
    return script(*turns, rng.choice([text for text in TEXTS if text]))


class Hermes(HermesAgentBaseEnv):
    name = "truth_hermes"

    async def get_next_item(self):
        self.rows = getattr(self, "rows", None) or self.load_rows()
        return next(self.rows, None)

    async def compute_reward(self, item, result, ctx):
        return ctx.terminal("ls | wc -l")["exit_code"] + random.random()


@pytest.mark.parametrize("server_type", ["vllm", "sglang"])
async def test_tokens_are_the_servers_log(tmp_path, server_type):
    rng = random.Random(server_type)
    rows = [{"name": f"r{n}", "prompt": conversation(rng)} for n in range(GROUPS)]
    common = {"group_size": MEMBERS, "slots_per_container": 8, "max_token_length": 6000, "seed": 5}
    async with running_policy(tmp_path, fault="503", fault_rate=0.1) as policy:
        env = make(Hermes, policy, tmp_path, rows, server_type=server_type, model_retries=8, **common)
        await env.process_manager()
    truth = Truth(policy[1])
    done = groups(tmp_path)
    assert len(done) == GROUPS
    turns = 0
    for group in done:
        assert len(group["scores"]) == len(group["tokens"]) == MEMBERS
        for index in range(MEMBERS):
            runs = sampled(group, index)
            assert runs, "nothing was sampled"
            assert all(run in truth for run in runs)
            turns += len(runs)
    assert turns > GROUPS * MEMBERS
