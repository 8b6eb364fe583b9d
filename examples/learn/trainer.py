"""GRPO from a batch's tokens, masks, scores, inference logprobs and temperature; knows nothing else of the env.

`masks` are the labels, as atroposlib means them: -100 where nothing was sampled, else the token that was. For each
label the policy's probability now is compared with the one the server drew it with. Labels for which the two differ by
more than `MATCH` are left out (masked importance sampling, as IcePop and others do it against engines that disagree);
the others move the weights along the group's advantages, clipped as PPO clips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from examples.learn.policy import Policy, rows

MASKED, CONTEXT_LOGPROB = -100, 1.0
RATE = 4.0
CLIP = 0.3
ENTROPY = 0.05
MATCH = (0.5, 5.0)
"""Bounds of the ratio between the probability now and then; IcePop's (Ling team, 2025)."""
SHIFTS = {"as sent": (0, 0), "masks +1": (1, 0), "masks -1": (-1, 0), "logprobs +1": (0, 1), "logprobs -1": (0, -1)}
"""Shifts of a group before an update, in positions: of its masks and of its logprobs."""


@dataclass
class Step:
    """The record of an update.

    Attributes:
        score: mean of the group.
        spoken: positions at which the policy chose a token, as the tokens alone show; that of a turn's lost end
        included. labels / used: positions that count, and those whose two probabilities agree.
    """

    score: float
    spoken: int = 0
    labels: int = 0
    used: int = 0


def shifted(values: Sequence[Any], by: int, fill: Any) -> list[Any]:
    """The values moved to the right (or to the left, where negative), the gap filled."""
    if by >= 0:
        return [*[fill] * by, *values[: len(values) - by]]
    return [*values[-by:], *[fill] * -by]


def temperature_of(group: dict[str, Any]) -> float:
    """By which the trainer divides its logits; 1 where the group doesn't say, as atroposlib's own trainer takes it."""
    return float((group.get("generation_params") or {}).get("temperature", 1.0))


def learn(policy: Policy, group: dict[str, Any], shift: str = "as sent") -> Step:
    """One update from one group.

    Args:
        policy: changed in place.
        group: as the trajectory API hands it out.
        shift: one of `SHIFTS`; other than "as sent" it shows what a wrong position does.
    """
    scores = np.array(group["scores"])
    step = Step(float(scores.mean()))
    advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
    move_masks, move_logprobs = SHIFTS[shift]
    temperature = temperature_of(group)
    gradient: dict[int, float] = {}
    members = zip(group["tokens"], group["masks"], group["inference_logprobs"], advantages, strict=True)
    for tokens, masks, logprobs, advantage in members:
        if not len(tokens) == len(masks) == len(logprobs):
            raise ValueError(f"{len(tokens)} tokens, {len(masks)} masks, {len(logprobs)} logprobs")
        _member(
            policy,
            tokens,
            shifted(masks, move_masks, MASKED),
            shifted(logprobs, move_logprobs, CONTEXT_LOGPROB),
            float(advantage),
            temperature,
            gradient,
            step,
        )
    for index, value in gradient.items():
        policy.weights[index] += RATE * value / len(scores)
    return step


def _member(
    policy: Policy,
    tokens: Sequence[int],
    labels: Sequence[int],
    logprobs: Sequence[float],
    advantage: float,
    temperature: float,
    gradient: dict[int, float],
    step: Step,
) -> None:
    *places, following = policy.places(tokens)
    step.spoken += sum(place is not None for place in [*places, following])
    for place, label, logprob in zip(places, labels, logprobs, strict=True):
        if label == MASKED:
            continue
        step.labels += 1
        if place is None or label not in place.choices:
            continue  # the policy could not have said this here
        chosen = place.choices.index(label)
        chances = policy.probabilities(place, temperature) if len(place.choices) > 1 else np.ones(1)
        ratio = float(chances[chosen]) / math.exp(logprob)
        if not MATCH[0] < ratio < MATCH[1]:
            continue
        step.used += 1
        outside = ratio > 1 + CLIP if advantage > 0 else ratio < 1 - CLIP
        if len(place.choices) == 1:
            continue
        logs = np.log(chances + 1e-12)
        slopes = -ENTROPY * chances * (logs - chances @ logs)
        if not outside:
            slopes -= advantage * ratio * chances
            slopes[chosen] += advantage * ratio
        for row, slope in zip(rows(place).tolist(), slopes.tolist(), strict=True):
            for index in filter(None, row):
                gradient[index] = gradient.get(index, 0.0) + slope / temperature
