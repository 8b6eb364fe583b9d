"""Groups of real trajectories in the own functions of TRL, verl, SkyRL and tinker: `make test-trainers`.

No part of `make test`: the packages want torch, and gigabytes. Trajectories are played by the scripted policy, in no
slots.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import typing

import pytest
import torch
import typing_extensions
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from atropos.envs import bridges
from examples.policy.tokenizer import FOLDER
from tests.unit.envs.conftest import running_policy
from tests.unit.envs.support import ScriptEnv, call, items, make

SCRIPT = [{"text": "look", "calls": [call("ls"), call("pwd")]}, {"calls": [call("id")]}, "this is the answer"]


class Lengths(ScriptEnv):
    """Scores differ within a group."""

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        return float(trajectory_id[-1]), {}


@pytest.fixture(scope="module")
def policy_url(tmp_path_factory):
    """The scripted policy in a thread of its own, for programs that block."""
    ready, over, found = threading.Event(), threading.Event(), []

    async def serve():
        async with running_policy(tmp_path_factory.mktemp("policy")) as running:
            found.append(running.url)
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    ready.wait()
    yield found[0]
    over.set()
    thread.join()


def env(url, count=9, **settings):
    made = make(Lengths, url, None, group_size=4, **settings)
    made.items = items(count, *SCRIPT)
    return made


@pytest.fixture(scope="module")
def groups(policy_url):
    with bridges.collecting(env(policy_url)) as next_groups:
        return next_groups(2)


def tiny_model(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, max_position_embeddings=8192))


def test_trl_learns_beside_an_env(policy_url, tmp_path):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.pad_token = tokenizer.eos_token = "<|im_end|>"
    model = tiny_model(tokenizer)
    before = model.lm_head.weight.detach().clone()
    args = GRPOConfig(
        str(tmp_path), num_generations=4, per_device_train_batch_size=8, max_steps=2, temperature=0.7, learning_rate=1e-3,
        use_cpu=True, bf16=False, logging_steps=1, report_to=[], save_strategy="no",
    )  # fmt: skip
    seen = []

    def rollout(prompts, trainer):
        seen.append(next_groups(len(prompts) // 4))
        return bridges.trl(seen[-1])

    with bridges.collecting(env(policy_url)) as next_groups:
        trainer = GRPOTrainer(
            model=model, reward_funcs=bridges.trl_reward, rollout_func=rollout, args=args, processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": ["the env chooses"] * 64}),
        )  # fmt: skip
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == len(seen) == 2
    assert [entry["reward"] for entry in logged] == [pytest.approx(1.5)] * 2
    sampled = [sum(one.mask) for one in bridges.samples(seen[0])]
    assert logged[0]["completions/mean_length"] == pytest.approx(sum(sampled) / len(sampled))
    assert not torch.equal(before, model.lm_head.weight.detach().cpu())


def test_verl_takes_trajectories(groups):
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    for made, one in zip(bridges.verl(groups), bridges.samples(groups), strict=True):
        fields = AgentLoopOutput(**made).as_dict()
        assert fields["prompts"].tolist() + fields["responses"].tolist() == [*one.prompt_ids, *one.response_ids]
        assert fields["response_mask"].tolist() == one.mask
        assert fields["rollout_log_probs"].tolist() == pytest.approx(one.logprobs)
        assert float(fields["rm_scores"].sum()) == one.reward


def test_skyrl_takes_groups(groups, monkeypatch):
    if sys.version_info < (3, 12):  # which SkyRL wants for this alone
        monkeypatch.setattr(typing, "TypedDict", typing_extensions.TypedDict)
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
    from skyrl.train.utils.trainer_utils import validate_generator_output

    output, found = bridges.skyrl(groups), bridges.samples(groups)
    validate_generator_output(len(found), output)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rewards = [[0.0] * (len(one.mask) - 1) + [one.reward] for one in found]
    sequences, attention, _, rewarded, masks, logprobs, *_ = convert_prompts_responses_to_batch_tensors(
        tokenizer, output["prompt_token_ids"], output["response_ids"], rewards, output["loss_masks"],
        output["rollout_logprobs"],
    )  # fmt: skip
    for row, one in enumerate(found):
        assert sequences[row][attention[row].bool()].tolist() == [*one.prompt_ids, *one.response_ids]
        assert int(masks[row].sum()) == sum(one.mask)
        assert float(logprobs[row].sum()) == pytest.approx(sum(one.logprobs), abs=1e-3)
        assert float(rewarded[row].sum()) == one.reward


def test_tinkers_data_are_its_own(groups):
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.types import Trajectory, Transition

    made = bridges.tinker(groups)
    for at, one in enumerate(bridges.samples(groups)):
        transitions, given, begin = [], list(one.prompt_ids), 0
        while begin < len(one.mask):
            end = begin + one.mask[begin:].index(0) if 0 in one.mask[begin:] else len(one.mask)
            action = TokensWithLogprobs(tokens=one.response_ids[begin:end], maybe_logprobs=one.logprobs[begin:end])
            transitions.append(
                Transition(ob=tinker.ModelInput.from_ints(list(given)), ac=action, reward=0.0, episode_done=False)
            )
            begin = end + one.mask[end:].index(1) if 1 in one.mask[end:] else len(one.mask)
            given = [*one.prompt_ids, *one.response_ids[:begin]]
        [theirs] = trajectory_to_data(
            Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty()),
            one.reward - 1.5,
            include_provenance=False,
        )
        assert made[at].model_input.to_ints() == theirs.model_input.to_ints()
        for name, values in made[at].loss_fn_inputs.items():
            assert values.tolist() == pytest.approx(theirs.loss_fn_inputs[name].tolist()), name
