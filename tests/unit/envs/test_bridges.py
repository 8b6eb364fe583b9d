"""What trainers beside atroposlib's get of a group.

The packages' own functions take it in tests/trainers/packages.py.
"""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import pytest

from atropos.agent.transcript import MASKED
from atropos.envs import bridges
from atropos.errors import ConfigError
from tests.unit.envs.support import ScriptEnv, call, items, make

pytestmark = pytest.mark.waits

P, A, B = MASKED, 7, 8
GROUP = {
    "tokens": [[1, 2, 7, 8, 3, 7], [1, 2, 8, 3]],
    "masks": [[P, P, A, B, P, A], [P, P, B, P]],
    "inference_logprobs": [[1.0, 1.0, -0.1, -0.2, 1.0, -0.3], [1.0, 1.0, -0.4, 1.0]],
    "scores": [1.0, 0.0],
    "overrides": [{"stop_reason": "final", "weight_versions": [[2, 4, "v1"]]}, {"stop_reason": "max_steps"}],
    "group_overrides": {},
}


def test_prompt_then_response():
    first, second = bridges.samples([GROUP])
    assert (first.prompt_ids, first.response_ids, first.mask) == ([1, 2], [7, 8, 3, 7], [1, 1, 0, 1])
    assert (first.logprobs, first.reward, first.turns) == ([-0.1, -0.2, 0.0, -0.3], 1.0, 2)
    assert (second.response_ids, second.mask, second.logprobs) == ([8, 3], [1, 0], [-0.4, 0.0])


def test_trainers_get_all_in_order():
    trl = bridges.trl([GROUP, GROUP])
    assert {len(values) for values in trl.values()} == {4}
    assert (trl["prompt_ids"][1], trl["completion_ids"][1]) == ([1, 2], [8, 3])
    assert (trl["env_mask"][1], trl["logprobs"][1], trl["stop_reason"][1]) == ([1, 0], [-0.4, 0.0], "max_steps")
    assert bridges.trl_reward(prompts=[], completions=[], **trl) == [1.0, 0.0, 1.0, 0.0]
    one, other = bridges.verl([GROUP])
    assert (one["num_turns"], one["reward_score"], one["extra_fields"]["weight_versions"]) == (4, 1.0, [[2, 4, "v1"]])
    assert (other["prompt_ids"], other["response_ids"], other["response_mask"]) == ([1, 2], [8, 3], [1, 0])
    assert other["response_logprobs"] == [-0.4, 0.0]
    skyrl = bridges.skyrl([GROUP])
    assert (skyrl["stop_reasons"], skyrl["rewards"]) == (["stop", "length"], [1.0, 0.0])
    assert (skyrl["prompt_token_ids"][1], skyrl["response_ids"][1]) == ([1, 2], [8, 3])
    assert (skyrl["loss_masks"][1], skyrl["rollout_logprobs"][1]) == ([1, 0], [-0.4, 0.0])


def test_bare_groups_have_defaults():
    bare = {name: GROUP[name] for name in ("tokens", "masks", "inference_logprobs", "scores")}
    assert [(one.stop_reason, one.facts) for one in bridges.samples([bare])] == [("final", {})] * 2


def test_unlearned_is_one_token():
    group = {**GROUP, "masks": [[MASKED] * 6, GROUP["masks"][1]]}
    first, _ = bridges.samples([group])
    assert (first.prompt_ids, first.response_ids, first.mask, first.logprobs) == ([1, 2, 7, 8, 3], [7], [0], [0.0])


def test_placeholders_are_refused():
    with pytest.raises(ConfigError, match="placeholders: use an inference server of type vllm or sglang"):
        bridges.trl([{**GROUP, "group_overrides": {"placeholder_tokens": True}}])


async def test_groups_without_event_loop(policy, tmp_path):
    def train():
        env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl")
        env.items = items(5, {"calls": [call("ls")]}, "done")
        with bridges.collecting(env) as next_groups:
            two, one = next_groups(2), next_groups(1)
            with pytest.raises(EOFError):
                next_groups(3)
            with pytest.raises(RuntimeError, match="has ended"):
                next_groups(1)
        assert env.stand_in.closed
        return [*two, *one]

    groups = await asyncio.to_thread(train)
    assert [len(group["tokens"]) for group in groups] == [3] * 3
    assert len(bridges.samples(groups)) == 9
    written = [json.loads(line) for line in (tmp_path / "g.jsonl").read_text().splitlines()]
    assert [one["tokens"] for one in written[:3]] == [group["tokens"] for group in groups] or len(written) >= 3


def test_ctrl_c_ends_the_env():
    class Env(ScriptEnv):
        async def setup(self):
            await self.start_tool_backend()

        async def process_group(self, _item):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.Event().wait()

    env = make(Env, "http://127.0.0.1:9/v1", None)
    with bridges.collecting(env) as next_groups:
        with pytest.raises(KeyboardInterrupt):
            next_groups(1)
        with pytest.raises(RuntimeError, match="the env has ended"):
            next_groups(1)
    assert env.stand_in.closed


async def test_a_failed_start_shows_at_its_groups(tmp_path):
    def train():
        with bridges.collecting(make(ScriptEnv, "http://127.0.0.1:9/v1", None)):
            raise AssertionError

    with pytest.raises(Exception, match=r"openai\.base_url"):
        await asyncio.to_thread(train)
