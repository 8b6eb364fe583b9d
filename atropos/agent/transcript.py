"""The append-only record of a trajectory: tokens exactly as they were given to and sampled by the inference server."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple, TypeVar

Message = dict[str, object]
"""A chat message as OpenAI's API has it."""
MASKED = -100
"""Mask of a position that is context; elsewhere the mask repeats the token (atroposlib's convention)."""
CONTEXT_LOGPROB = 1.0
"""Logprob of a position that was not sampled (atroposlib's convention: no real logprob is positive)."""

Number = TypeVar("Number", int, float)
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def numbers(values: Iterable[Number]) -> list[Number]:
    """A list of numbers that the garbage collector doesn't traverse; numbers can form no cycle.

    A full collection visits each element of every list: with 256 trajectories of 5,000 tokens it blocked the event loop
    for a sixth of a second.
    """
    result = list(values)
    _untrack(result)
    return result


class WeightSpan(NamedTuple):
    """Tokens that one version of the weights sampled, as the inference server says: from `begin` up to `end`."""

    begin: int
    end: int
    version: str


@dataclass
class Transcript:
    """Tokens, masks and logprobs of equal length, and their messages. History is never rewritten.

    Attributes:
        placeholder: whether the ids are tokenized here because the server doesn't report them; not to train on.
        temperature: with which every turn was sampled.
        raw_logprobs: whether the logprobs are of temperature 1, whatever sampled.
        weights: versions of the weights that sampled the tokens, by position; empty where the server doesn't say.
        model: what the server calls its model; empty where it has no name.
    """

    tokens: list[int] = field(default_factory=lambda: numbers(list[int]()))
    masks: list[int] = field(default_factory=lambda: numbers(list[int]()))
    logprobs: list[float] = field(default_factory=lambda: numbers(list[float]()))
    messages: list[Message] = field(default_factory=list[Message])
    placeholder: bool = False
    temperature: float = 1.0
    raw_logprobs: bool = False
    weights: list[WeightSpan] = field(default_factory=list[WeightSpan])
    model: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def add_context(self, ids: Sequence[int]) -> None:
        """Append ids that the model is given."""
        self.tokens.extend(ids)
        self.masks.extend([MASKED] * len(ids))
        self.logprobs.extend([CONTEXT_LOGPROB] * len(ids))

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], weights: Sequence[WeightSpan] = ()) -> None:
        """Append ids that the model sampled, exactly as the server reported them; `weights` by position in `ids`."""
        assert len(ids) == len(logprobs), (len(ids), len(logprobs))
        start, most = len(self.tokens), len(ids)
        self.weights += [WeightSpan(start + b, start + min(e, most), version) for b, e, version in weights if b < most]
        self.tokens.extend(ids)
        self.masks.extend(ids)
        self.logprobs.extend(logprobs)

    def check(self) -> None:
        """Assert what a trainer relies on: the three are of equal length (only the two methods above extend them)."""
        assert len(self.tokens) == len(self.masks) == len(self.logprobs), (
            f"tokens {len(self.tokens)}, masks {len(self.masks)}, logprobs {len(self.logprobs)}"
        )


def sampled_runs(masks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each run of sampled tokens: the turns, as a trainer sees them."""
    end = 0
    for masked, stretch in groupby(masks, lambda mask: mask == MASKED):
        begin, end = end, end + sum(1 for _ in stretch)
        if not masked:
            yield begin, end
