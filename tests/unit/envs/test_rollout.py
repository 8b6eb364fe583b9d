"""What a trainer is given of finished trajectories, number by number, and why a group would be left out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from atropos.agent.transcript import CONTEXT_LOGPROB, MASKED, Transcript, WeightSpan, sampled_runs
from atropos.envs.running.rollout import (
    GroupDropped,
    HookError,
    Rollout,
    checked_score,
    checked_text,
    drop_reason,
    scored_group,
    scored_item,
)


def transcript(**changes) -> Transcript:
    made = Transcript(messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}], **changes)
    made.add_context([1, 2])
    made.add_sampled([7, 8], [-0.5, -0.25], [WeightSpan(0, 1, "v1"), WeightSpan(1, 5, "v2"), WeightSpan(2, 3, "v3")])
    made.add_context([3])
    return made


def rollout(score=1.0, stop="final", **changes) -> Rollout:
    return Rollout(
        "t", transcript(**changes), score, 2, 3, stop, {"why": "x"}, {"tools": 0.12345678}, [], {}, 1.23456789, 4
    )


def test_masks_follow_the_turns():
    made = transcript()
    assert list(made.tokens) == [1, 2, 7, 8, 3]
    assert list(made.masks) == [MASKED, MASKED, 7, 8, MASKED]
    assert list(made.logprobs) == [CONTEXT_LOGPROB] * 2 + [-0.5, -0.25, CONTEXT_LOGPROB]
    assert made.weights == [WeightSpan(2, 3, "v1"), WeightSpan(3, 4, "v2")]  # no token was sampled by the third
    assert list(sampled_runs(made.masks)) == [(2, 4)]
    assert list(sampled_runs([7, MASKED, 8, 8])) == [(0, 1), (2, 4)]
    assert len(made) == 5
    made.check()
    made.logprobs.append(0.0)
    with pytest.raises(AssertionError, match="tokens 5, masks 5, logprobs 6"):
        made.check()


def test_a_group_has_what_was_sampled():
    group = scored_group([rollout(1.0), rollout(0.5, "max_steps")], name="item", include_messages=True)
    assert group["tokens"] == [[1, 2, 7, 8, 3]] * 2
    assert group["masks"] == [[MASKED, MASKED, 7, 8, MASKED]] * 2
    assert group["scores"] == [1.0, 0.5]
    assert group["inference_logprobs"] == [[CONTEXT_LOGPROB, CONTEXT_LOGPROB, -0.5, -0.25, CONTEXT_LOGPROB]] * 2
    assert group["messages"] == [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]] * 2
    assert group["generation_params"] == {"temperature": 1.0, "logprobs": "policy"}
    assert group["group_overrides"] == {}
    weights = [[2, 3, "v1"], [3, 4, "v2"]]
    assert group["overrides"] == [
        {"stop_reason": "final", "weight_versions": weights},
        {"stop_reason": "max_steps", "weight_versions": weights},
    ]
    assert group["atropos"]["item"] == "item"
    summary = group["atropos"]["trajectories"][0]
    assert (summary["seconds"], summary["phases"], summary["attempts"]) == (1.2346, {"tools": 0.1235}, 4)
    assert scored_group([rollout()], name="item", include_messages=False)["messages"] is None


def test_uneven_members_are_no_group():
    broken = rollout()
    broken.transcript.masks.append(9)
    with pytest.raises(AssertionError, match="tokens 5, masks 6"):
        scored_group([rollout(), broken], name="", include_messages=False)


def test_nothing_is_learned_from_cut_ones():
    rollouts = [rollout(1.0), rollout(0.0), rollout(0.75, "max_steps")]
    group = scored_group(rollouts, name="", include_messages=False, mask_cut=True)
    assert group["scores"] == [1.0, 0.0, 0.5]
    assert group["masks"][0] != group["masks"][2] == [MASKED] * 5
    assert group["inference_logprobs"][0] != group["inference_logprobs"][2] == [CONTEXT_LOGPROB] * 5
    assert [facts.get("set_advantage_to_zero") for facts in group["overrides"]] == [None, None, True]


def test_whose_logprobs_is_said():
    raw = scored_group([rollout(), rollout(raw_logprobs=True)], name="", include_messages=False)
    assert raw["generation_params"]["logprobs"] == "raw"
    both = [rollout(placeholder=True), rollout(raw_logprobs=True)]
    group = scored_group(both, name="", include_messages=False)
    assert group["generation_params"]["logprobs"] == "placeholder"
    assert group["group_overrides"] == {"placeholder_tokens": True}


def test_own_temperatures_are_told():
    group = scored_group([rollout(temperature=0.7), rollout(temperature=1.0)], name="", include_messages=False)
    assert group["generation_params"]["temperature"] == 0.7
    assert [facts["temperature"] for facts in group["overrides"]] == [0.7, 1.0]
    same = scored_group([rollout(temperature=0.7)] * 2, name="", include_messages=False)
    assert not any("temperature" in facts for facts in same["overrides"])


def test_an_item_is_a_group_of_one():
    item = scored_item(rollout(0.5, temperature=0.7))
    assert (item["scores"], item["tokens"], item["masks"]) == (0.5, [1, 2, 7, 8, 3], [MASKED, MASKED, 7, 8, MASKED])
    assert item["inference_logprobs"][2:4] == [-0.5, -0.25]
    assert item["messages"][1]["content"] == ""
    assert (item["overrides"]["temperature"], item["overrides"]["logprobs"]) == (0.7, "policy")


def test_phases_are_measured(monkeypatch):
    monkeypatch.setattr("time.perf_counter", lambda: 20.0)
    steps = [SimpleNamespace(model_s=1.0, tools_s=2.0, timing=lambda: "turn") for _ in range(2)]
    result = SimpleNamespace(trajectory_data=transcript(), steps=steps, total_tool_calls=5, stop_reason="final")
    made = Rollout.of("t", result, 1.0, (1.0, 4.0, 12.0), info={}, changes={})
    assert made.phases == {"setup": 3.0, "model": 2.0, "tools": 4.0, "agent": 8.0, "verify": 8.0}
    assert (made.steps, made.calls, made.turns, made.cut) == (2, 5, ["turn"] * 2, False)
    assert (made.attempts, made.seconds) == (1, 0)


@pytest.mark.parametrize("value", ["1", math.nan, math.inf, None, [1]])
def test_scores_are_finite_numbers(value):
    assert checked_score(True, "f") == 1.0
    with pytest.raises(HookError, match=r"^f must return a finite number, not "):
        checked_score(value, "f")


def test_prompts_are_text():
    assert checked_text("", "f") == ""
    with pytest.raises(HookError, match="f must return text, not bytes"):
        checked_text(b"x", "f")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"scores": [1.0]}, "bad_scores"),
        ({"scores": [1.0, math.nan]}, "bad_scores"),
        ({"scores": [1.0, None]}, "bad_scores"),
        ({"masks": [[1], [1, 2]]}, "bad_lengths"),
        ({"inference_logprobs": [[0.0], [0.0, 0.0]]}, "bad_lengths"),
        ({"inference_logprobs": None}, None),
        ({"group_overrides": {"group_size": 3}}, "wrong_size"),
        ({"group_overrides": None}, None),
        ({"scores": [0.5, 0.5]}, "same_scores"),
        ({"tokens": [[1, 2], [1, 2, 3]], "masks": None, "inference_logprobs": None}, "too_long"),
    ],
)
def test_groups_are_left_out_for_a_reason(changes, reason):
    group = {
        "tokens": [[1, 2], [1, 2]],
        "masks": [[1, 2], [1, 2]],
        "inference_logprobs": [[0.0, 0.0], [0.0, 0.0]],
        "scores": [1.0, 0.0],
        **changes,
    }
    assert drop_reason(group, group_size=2, same_scores_dropped=True, max_token_len=3) == reason
    if reason in {"same_scores", "too_long"}:
        assert drop_reason(group, group_size=2, same_scores_dropped=False, max_token_len=0) is None
    if reason is None:
        assert drop_reason(group, group_size=3, same_scores_dropped=True, max_token_len=3) == "wrong_size"


def test_a_dropped_group_says_why():
    dropped = GroupDropped("no slot", code="slot_lost")
    assert (str(dropped), dropped.code, dropped.hopeless) == ("no slot", "slot_lost", False)
