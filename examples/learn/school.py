"""The pupils, the groups that each learns from, and the checks of the proof.

Two things must hold of what is trained on as it was sent. The trainer can use it: every token that the policy chose is
a label, nothing else is, nearly every label has the probability that the server drew it with, and exactly that one by
the weights and the temperature that the group names, and the scores follow from what the tokens show. And the policy
learns. A wrong mask, logprob or score breaks the first at once.
"""

from __future__ import annotations

import argparse
from typing import Any

from examples.learn.policy import Grammar, Policy
from examples.learn.server import Server
from examples.learn.task import PLACES, PUPILS, WORDS, solved, turns
from examples.learn.trainer import Step, learn, temperature_of

WINDOW = 10
"""Number of groups in a mean."""
START = 3
"""Groups at the beginning, when next to nothing is learned yet."""
CLIMBED, FAILED = 0.9, 0.3
USABLE = 0.98
"""Least share of the labels whose probability is still what it was when they were drawn. Not all: a group in flight
while the policy is updated is a little off-policy."""
AS_SENT = "as sent"


class School:
    """The pupils, the shift of each one's groups, and the record of updates."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.grammar = Grammar(turns(WORDS), [*PLACES, *WORDS])
        self.shift = dict(zip(PUPILS, args.shifts, strict=False))
        self.policies: dict[str, Policy] = {}
        self.versions: dict[str, int] = {}
        self.server = Server(self.grammar, self.policies, self.versions, args.seed)
        self.restart(args.updates)

    def restart(self, updates: int) -> None:
        """Reset every pupil, and give each so many updates."""
        self.policies.update({pupil: Policy(self.grammar) for pupil in self.shift})
        self.server.sampled = dict.fromkeys(self.shift, 0)
        self.steps: dict[str, list[Step]] = {pupil: [] for pupil in self.shift}
        self.versions.update(dict.fromkeys(self.shift, 0))
        self._earlier = {pupil: {"0": Policy(self.grammar)} for pupil in self.shift}
        self.unlike = dict.fromkeys(self.shift, 0)
        """Labels without the logprob that the named weights give them at the named temperature."""
        self.misjudged = dict.fromkeys(self.shift, 0)
        """Scores that differ from those that the conversation's text gives."""
        self.updates = updates

    def take(self, group: dict[str, Any]) -> None:
        """Let the pupil whose group it is learn from it."""
        pupil = self.server.pupil(group["tokens"][0])
        if pupil is not None and len(self.steps[pupil]) < self.updates:
            said = (self.server.text(tokens) for tokens in group["tokens"])
            self.misjudged[pupil] += sum(
                (score == 1.0) != solved(text) for score, text in zip(group["scores"], said, strict=True)
            )
            policy = self.policies[pupil]
            if self.shift[pupil] == AS_SENT:
                self.unlike[pupil] += self._unlike(pupil, group)
            self.steps[pupil].append(learn(policy, group, self.shift[pupil]))
            self.versions[pupil] = len(self.steps[pupil])
            if self.shift[pupil] == AS_SENT:
                self._earlier[pupil][str(self.versions[pupil])] = policy.copy()

    def _unlike(self, pupil: str, group: dict[str, Any]) -> int:
        temperature, wrong = temperature_of(group), 0
        for tokens, logprobs, facts in zip(
            group["tokens"], group["inference_logprobs"], group["overrides"], strict=True
        ):
            places = list(self.policies[pupil].places(tokens))
            for begin, end, version in facts["weight_versions"]:
                policy = self._earlier[pupil][version]
                wrong += sum(
                    not policy.drew(places[at], tokens[at], logprobs[at], temperature) for at in range(begin, end)
                )
        return wrong

    def scores(self, pupil: str) -> list[float]:
        """Mean of each group."""
        return [step.score for step in self.steps[pupil]]

    def last(self, pupil: str) -> float:
        """Mean of the last groups."""
        return mean(self.scores(pupil)[-WINDOW:])

    def finished(self, *, when_learned: bool) -> bool:
        """Whether everyone has had all updates, or as many as the first pupil needed."""
        first = next(iter(self.steps))
        if when_learned and len(self.steps[first]) >= 2 * WINDOW and self.last(first) > CLIMBED:
            return all(len(steps) >= len(self.steps[first]) - WINDOW for steps in self.steps.values())
        return all(len(steps) >= self.updates for steps in self.steps.values())

    def line(self) -> str:
        """Every pupil's current mean."""
        return "   ".join(f"{self.shift[p]} {self.last(p):.2f} ({len(s)})" for p, s in self.steps.items() if s)

    def totals(self, pupil: str) -> Step:
        """All updates together."""
        steps = self.steps[pupil]
        return Step(
            mean(self.scores(pupil)), *(sum(getattr(s, name) for s in steps) for name in ("spoken", "labels", "used"))
        )

    def groups_wrong(self, pupil: str) -> list[str]:
        """Errors in the masks, logprobs and scores of this pupil's groups, as they were sent."""
        found: list[str] = []
        seen = self.totals(pupil)
        if seen.labels != seen.spoken:
            found.append(f"{seen.labels} labels for {seen.spoken} tokens that the policy chose")
        if seen.used < USABLE * seen.labels:
            found.append(f"only {seen.used} of {seen.labels} labels have the probability that they were drawn with")
        if seen.labels > self.server.sampled[pupil]:
            found.append(f"{seen.labels} labels for {self.server.sampled[pupil]} tokens that the server sampled")
        if self.unlike[pupil]:
            found.append(f"{self.unlike[pupil]} labels lack the logprob that their weights and temperature give them")
        if self.misjudged[pupil]:
            found.append(f"{self.misjudged[pupil]} scores do not follow from what was done")
        return found

    def wrong(self) -> list[str]:
        """All failed checks; empty if the proof holds."""
        found: list[str] = []
        for pupil, name in self.shift.items():
            if name == AS_SENT:
                found += [f"{name}: {what}" for what in self.groups_wrong(pupil)]
                if self.last(pupil) <= CLIMBED:
                    found.append(f"{name}: ends at {self.last(pupil):.2f}, not over {CLIMBED}")
            elif self.last(pupil) >= FAILED:
                found.append(f"{name}: ends at {self.last(pupil):.2f}, not under {FAILED}")
        return found


def mean(values: list[float]) -> float:
    """0 of nothing."""
    return sum(values) / len(values) if values else 0.0
