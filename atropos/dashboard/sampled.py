"""What a file holds of a trajectory's generation, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from atropos.dashboard.records import as_dict, as_list

MASKED = -100
"""The label of tokens that the model was given; see `atropos.agent.transcript`."""


@dataclass(frozen=True)
class SampledTurn:
    """One turn of the model.

    Attributes:
        span: where what it sampled is in its trajectory's tokens, from and to; None: unknown.
        facts: when it began, how many tokens it sampled, and seconds; see `TurnTiming`.
    """

    span: tuple[int, int] | None
    facts: Mapping[str, object]


@dataclass(frozen=True)
class Sampled:
    """The tokens of a trajectory.

    Attributes:
        model: what the server calls its model; empty: unknown.
        tokens: as the server had and gave them; empty where it gives none, or the file has none.
        logprobs: of the sampled ones, in the place of each.
        turns: in order; empty where the file doesn't have them.
        trainer: what a trainer gets beside the tokens: temperature, whose the logprobs are, versions of weights.
        changes: files that the agent changed.
    """

    model: str
    tokens: Sequence[object]
    logprobs: Sequence[object]
    turns: Sequence[SampledTurn]
    trainer: Mapping[str, object]
    changes: Mapping[str, object]


def sampled_of(trajectory: Mapping[str, object]) -> Sampled:
    """Of a trajectory of `members`."""
    trainer = as_dict(trajectory.get("trainer"))
    tokens = as_list(trajectory.get("tokens")) if trainer.get("logprobs") != "placeholder" else []
    masks, logprobs = as_list(trajectory.get("masks")), as_list(trajectory.get("inference_logprobs"))
    facts = [as_dict(turn) for turn in as_list(trajectory.get("turns"))]
    spans = _spans(masks) if len(masks) == len(tokens) else []
    return Sampled(
        model=str(trajectory.get("model") or ""),
        tokens=tokens,
        logprobs=logprobs if len(logprobs) == len(tokens) else [],
        turns=_turns(spans, facts),
        trainer=trainer,
        changes=as_dict(trajectory.get("changes")),
    )


def _turns(spans: Sequence[tuple[int, int]], facts: Sequence[Mapping[str, object]]) -> list[SampledTurn]:
    """Of a member whose labels are hidden from the trainer there are facts alone, of older files spans alone."""
    if len(spans) == len(facts):
        return [SampledTurn(span, fact) for span, fact in zip(spans, facts, strict=True)]
    return [SampledTurn(span, {}) for span in spans] or [SampledTurn(None, fact) for fact in facts]


def _spans(masks: Sequence[object]) -> list[tuple[int, int]]:
    """Begin and end of each stretch that was sampled."""
    spans: list[tuple[int, int]] = []
    at = 0
    for masked, run in groupby(masks, lambda label: label == MASKED):
        length = sum(1 for _ in run)
        if not masked:
            spans.append((at, at + length))
        at += length
    return spans
