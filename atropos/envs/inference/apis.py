"""The APIs in which inference servers take token ids and report those that they sample: requests and answers, no I/O.

Ids come from the answer, never from text. Every request says that tokens are drawn from the whole distribution: servers
otherwise take what their model's `generation_config` says, or defaults of their own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from atropos.agent.transcript import WeightSpan

PENALTIES: dict[str, object] = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
WHOLE: dict[str, object] = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, **PENALTIES}
"""Sampling from the whole distribution, in the words of vLLM and SGLang."""


class Completion(NamedTuple):
    """What a server sampled for one request.

    Attributes:
        top_logprob: the largest at the first position, where it was asked for.
        weights: versions of the weights, where the server tells.
    """

    ids: Sequence[object]
    logprobs: Sequence[float]
    finish_reason: object
    top_logprob: float = math.nan
    weights: Sequence[WeightSpan] = ()


class TokenApi(ABC):
    """One API. What a server answers may have any form: `read` raises KeyError, TypeError and the like."""

    path: ClassVar[str]
    """Below the server's root, without `/v1`."""

    @abstractmethod
    def body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int) -> dict[str, Any]:
        """The request.

        Args:
            model: the name that the server gives it.
            prompt: token ids.
            sampling: `n`, `max_tokens`, `temperature`, `seed`, `stop_token_ids` and the like, in vLLM's words.
            top: logprobs of so many likeliest tokens are reported too.
        """

    @abstractmethod
    def read(self, answer: Any) -> list[Completion]:
        """The completions of an answer."""

    def prompt(self, answer: Any) -> Sequence[int] | None:
        """The prompt's ids as the server took them, where it tells."""
        return answer.get("prompt_token_ids")


class VllmCompletions(TokenApi):
    """vLLM's OpenAI completions, with its `return_token_ids`."""

    path = "/v1/completions"

    def body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int) -> dict[str, Any]:
        """See `TokenApi.body`."""
        # Also with 0, vLLM reports the logprob of each sampled token itself.
        asked = {"model": model, "prompt": prompt, "logprobs": top, "return_token_ids": True}
        # `sampling` last, here and below: what an env sets comes before the defaults.
        return {**asked, "add_special_tokens": False, **WHOLE, **sampling}

    def read(self, answer: Any) -> list[Completion]:
        """The stop token is among the ids."""
        completions: list[Completion] = []
        for choice in answer["choices"]:
            logprobs = choice["logprobs"]
            # The first position is enough: it is what `InferenceServer.find` compares.
            tops = (logprobs.get("top_logprobs") or [None])[0] or {}
            completions.append(
                Completion(
                    choice["token_ids"],
                    logprobs["token_logprobs"],
                    choice["finish_reason"],
                    max(tops.values(), default=math.nan),
                    _spans(choice.get("weight_versions")),
                )
            )
        return completions

    def prompt(self, answer: Any) -> Sequence[int] | None:
        """Each choice has it."""
        return answer["choices"][0]["prompt_token_ids"]


class VllmGenerate(TokenApi):
    """vLLM's `/inference/v1/generate`, of servers with `--enable-scale-out`; it tells the versions of the weights."""

    path = "/inference/v1/generate"

    def body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int) -> dict[str, Any]:
        """See `TokenApi.body`."""
        parameters = {"logprobs": top, **WHOLE, **sampling}
        return {"model": model, "token_ids": prompt, "return_token_ids": True, "sampling_params": parameters}

    def read(self, answer: Any) -> list[Completion]:
        """Logprobs have the form of chat completions, with ids in place of text."""
        completions: list[Completion] = []
        for choice in answer["choices"]:
            content = choice["logprobs"]["content"]
            tops = [one["logprob"] for one in content[0].get("top_logprobs") or ()] if content else []
            completions.append(
                Completion(
                    choice["token_ids"],
                    [one["logprob"] for one in content],
                    choice["finish_reason"],
                    max(tops, default=math.nan),
                    _spans(choice.get("weight_versions")),
                )
            )
        return completions


class AtroposlibGenerate(TokenApi):
    """The `/generate` of atroposlib's own vLLM server (`example_trainer/vllm_api_server.py`)."""

    path = "/generate"

    def body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int) -> dict[str, Any]:
        """See `TokenApi.body`."""
        return {"prompt": {"prompt_token_ids": prompt}, "logprobs": top, **WHOLE, **sampling}

    def read(self, answer: Any) -> list[Completion]:
        """At each position the sampled token is the first of a dict."""
        completions: list[Completion] = []
        for positions, reason in zip(answer["logprobs"], answer["finish_reasons"], strict=True):
            # JSON has no numbers as keys, so the ids come as text.
            pairs = [next(iter(position[0].items())) for position in positions]
            tops = positions[0][0].values() if positions else ()
            completions.append(
                Completion([int(i) for i, _ in pairs], [lp for _, lp in pairs], reason, max(tops, default=math.nan))
            )
        return completions


class SglangGenerate(TokenApi):
    """SGLang's native API, by the source of 0.5.23: no server of it was run."""

    path = "/generate"
    names: ClassVar[Mapping[str, str]] = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
    """SGLang's names of what vLLM calls differently. It refuses names that it doesn't know."""

    def body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int) -> dict[str, Any]:
        """See `TokenApi.body`."""
        parameters = {**WHOLE, **{self.names.get(name, name): value for name, value in sampling.items()}}
        asked = {"return_logprob": True, "return_text_in_logprobs": False, "top_logprobs_num": top}
        return {"input_ids": prompt, "sampling_params": parameters, **asked}

    def read(self, answer: Any) -> list[Completion]:
        """One answer, or one for each of `n`."""
        completions: list[Completion] = []
        for one in answer if isinstance(answer, list) else [answer]:
            meta = one["meta_info"]
            entries = meta["output_token_logprobs"]
            tops = [entry[0] for entry in (meta.get("output_top_logprobs") or [None])[0] or ()]
            spans = meta.get("weight_versions")
            # Releases before the spans tell one version for the whole answer.
            if spans is None and (version := meta.get("weight_version")) is not None:
                spans = [{"version": version, "start": 0, "end": len(entries)}]
            completions.append(
                Completion(
                    [entry[1] for entry in entries],
                    [entry[0] for entry in entries],
                    meta["finish_reason"],
                    max(tops, default=math.nan),
                    _spans(spans),
                )
            )
        return completions

    def prompt(self, answer: Any) -> Sequence[int] | None:
        """Not told."""
        return None


class LlamaCompletion(TokenApi):
    """llama.cpp's native completion.

    With the temperature as its only sampler, the probabilities after sampling are the policy's.
    """

    path = "/completion"

    def body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, object], *, top: int) -> dict[str, Any]:
        """See `TokenApi.body`; it stops at its model's own end tokens, and has no names for others."""
        parameters = {name: value for name, value in sampling.items() if name not in {"max_tokens", "stop_token_ids"}}
        whole = {
            "samplers": ["temperature"],
            "mirostat": 0,  # which would take the samplers' place
            "dynatemp_range": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_penalty": 1.0,
            **PENALTIES,
        }
        asked = {"model": model, "prompt": prompt, "n_predict": sampling.get("max_tokens", -1), "return_tokens": True}
        # With 0 it reports no probabilities, not even that of the sampled token.
        return {**asked, "post_sampling_probs": True, "n_probs": max(top, 1), **whole, **parameters}

    def read(self, answer: Any) -> list[Completion]:
        """One answer, or one for each of `n`; the end token is among the probabilities."""
        completions: list[Completion] = []
        for one in answer if isinstance(answer, list) else [answer]:
            entries = one["completion_probabilities"]
            # A probability may be rounded to 0, of which there is no logarithm.
            tops = [math.log(entry["prob"]) for entry in entries[0]["top_probs"] if entry["prob"]] if entries else []
            completions.append(
                Completion(
                    [entry["id"] for entry in entries],
                    [math.log(entry["prob"]) for entry in entries],
                    "length" if one["stop_type"] == "limit" else "stop",
                    max(tops, default=math.nan),
                )
            )
        return completions

    def prompt(self, answer: Any) -> Sequence[int] | None:
        """Not told."""
        return None


APIS: dict[str, tuple[TokenApi, ...]] = {
    "vllm": (VllmGenerate(), VllmCompletions(), AtroposlibGenerate(), LlamaCompletion()),
    "sglang": (SglangGenerate(),),
}
"""By server type, in the order in which they are tried."""


def _spans(told: Any) -> list[WeightSpan]:
    return [WeightSpan(int(span["start"]), int(span["end"]), str(span["version"])) for span in told or ()]
