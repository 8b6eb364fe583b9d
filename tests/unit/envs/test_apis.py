"""Requests and answers of inference servers' APIs, field by field: ids and logprobs of which training is made."""

from __future__ import annotations

import math

import pytest

from atropos.agent.transcript import WeightSpan
from atropos.envs.inference import apis

SAMPLING = {"n": 2, "max_tokens": 3, "temperature": 0.5, "seed": 7}
PENALTIES = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, **PENALTIES}


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (
            apis.VllmCompletions(),
            {"model": "m", "prompt": [1], "logprobs": 2, "return_token_ids": True, "add_special_tokens": False, **WHOLE}
            | SAMPLING,
        ),
        (
            apis.VllmGenerate(),
            {
                "model": "m",
                "token_ids": [1],
                "return_token_ids": True,
                "sampling_params": {"logprobs": 2, **WHOLE, **SAMPLING},
            },
        ),
        (apis.AtroposlibGenerate(), {"prompt": {"prompt_token_ids": [1]}, "logprobs": 2, **WHOLE, **SAMPLING}),
        (
            apis.SglangGenerate(),
            {
                "input_ids": [1],
                "sampling_params": {**WHOLE, "n": 2, "max_new_tokens": 3, "temperature": 0.5, "sampling_seed": 7},
                "return_logprob": True,
                "return_text_in_logprobs": False,
                "top_logprobs_num": 2,
            },
        ),
        (
            apis.LlamaCompletion(),
            {
                "model": "m",
                "prompt": [1],
                "n_predict": 3,
                "return_tokens": True,
                "post_sampling_probs": True,
                "n_probs": 2,
                "samplers": ["temperature"],
                "mirostat": 0,
                "dynatemp_range": 0.0,
                "top_k": 0,
                "top_p": 1.0,
                "min_p": 0.0,
                "repeat_penalty": 1.0,
                **PENALTIES,
                **{name: value for name, value in SAMPLING.items() if name != "max_tokens"},
            },
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_requests_ask_for_ids(api, body):
    assert api.body("m", [1], SAMPLING, top=2) == body


def test_llama_cpp_always_gives_probabilities():
    body = apis.LlamaCompletion().body("m", [1], {"stop_token_ids": [9]}, top=0)
    assert (body["n_probs"], body["n_predict"], "stop_token_ids" in body) == (1, -1, False)


def completion(ids, logprobs, reason, top, weights=()) -> apis.Completion:
    return apis.Completion(ids, logprobs, reason, top, list(weights))


VLLM = {"token_ids": [5, 6], "finish_reason": "stop", "weight_versions": [{"version": 7, "start": 0, "end": 2}]}
SPANS = [WeightSpan(0, 2, "7")]
PAIR = [[-0.5, 5, None], [-0.25, 6, None]]


@pytest.mark.parametrize(
    ("api", "answer", "read"),
    [
        (
            apis.VllmCompletions(),
            {
                "choices": [
                    VLLM | {"logprobs": {"token_logprobs": [-0.5, -0.25], "top_logprobs": [{"a": -0.5, "b": -0.1}]}}
                ]
            },
            [completion([5, 6], [-0.5, -0.25], "stop", -0.1, SPANS)],
        ),
        (
            apis.VllmCompletions(),
            {"choices": [{"token_ids": [], "finish_reason": "abort", "logprobs": {"token_logprobs": []}}]},
            [completion([], [], "abort", None)],
        ),
        (
            apis.VllmGenerate(),
            {
                "choices": [
                    VLLM
                    | {
                        "logprobs": {
                            "content": [{"logprob": -0.5, "top_logprobs": [{"logprob": -0.1}]}, {"logprob": -0.25}]
                        }
                    }
                ]
            },
            [completion([5, 6], [-0.5, -0.25], "stop", -0.1, SPANS)],
        ),
        (
            apis.VllmGenerate(),
            {"choices": [{"token_ids": [5], "finish_reason": "stop", "logprobs": {"content": [{"logprob": -1.0}]}}]},
            [completion([5], [-1.0], "stop", None)],
        ),
        (
            apis.AtroposlibGenerate(),
            {"logprobs": [[[{"5": -0.5, "6": -0.1}], [{"6": -0.25}]], []], "finish_reasons": ["stop", "length"]},
            [completion([5, 6], [-0.5, -0.25], "stop", -0.1), completion([], [], "length", None)],
        ),
        (
            apis.SglangGenerate(),
            {"meta_info": {"output_token_logprobs": PAIR, "finish_reason": "stop", "weight_version": "7"}},
            [completion([5, 6], [-0.5, -0.25], "stop", None, SPANS)],
        ),
        (
            apis.SglangGenerate(),
            [
                {
                    "meta_info": {
                        "output_token_logprobs": PAIR[:1],
                        "output_top_logprobs": [[[-0.1, 9, None]]],
                        "finish_reason": "stop",
                    }
                },
                {"meta_info": {"output_token_logprobs": [], "output_top_logprobs": [None], "finish_reason": "abort"}},
            ],
            [completion([5], [-0.5], "stop", -0.1), completion([], [], "abort", None)],
        ),
        (
            apis.LlamaCompletion(),
            [
                {
                    "completion_probabilities": [{"id": 5, "prob": 0.25, "top_probs": [{"prob": 0.5}, {"prob": 0}]}],
                    "stop_type": "limit",
                },
                {"completion_probabilities": [], "stop_type": "eos"},
            ],
            [completion([5], [math.log(0.25)], "length", math.log(0.5)), completion([], [], "stop", None)],
        ),
    ],
)
def test_answers_are_read_as_sampled(api, answer, read):
    found = [each._replace(weights=list(each.weights)) for each in api.read(answer)]
    assert [
        each._replace(top_logprob=None if math.isnan(each.top_logprob) else each.top_logprob) for each in found
    ] == read


def test_each_completion_has_a_reason():
    with pytest.raises(ValueError, match="shorter"):
        apis.AtroposlibGenerate().read({"logprobs": [[], []], "finish_reasons": ["stop"]})


def test_the_prompt_that_was_used():
    assert apis.VllmCompletions().prompt({"choices": [{"prompt_token_ids": [1, 2]}]}) == [1, 2]
    assert apis.VllmGenerate().prompt({"prompt_token_ids": [1, 2]}) == [1, 2]
    assert apis.AtroposlibGenerate().prompt({}) is None
    for api in (apis.SglangGenerate(), apis.LlamaCompletion()):
        assert api.prompt({"prompt_token_ids": [3]}) is None
