"""Compares training sequences with the tokens that the policy server logged (`--log`)."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from atropos.agent import sampled_runs

Entry = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""A prompt with the ids and logprobs that were sampled for it."""
Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and logprobs."""


class Truth:
    """The server's log, read as it grows: `entry in truth`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._answers: defaultdict[tuple[int, ...], set[Answer]] = defaultdict(set)

    def __contains__(self, entry: Entry) -> bool:
        if not self._holds(*entry):
            self._read_on()
        return self._holds(*entry)

    def _holds(self, prompt: tuple[int, ...], ids: tuple[int, ...], logprobs: tuple[float, ...]) -> bool:
        """Whether the tokens answer the prompt; or were broken off, and answer it together with those before."""
        return any(
            (ids[: len(had)], logprobs[: len(had)]) == (had, told)
            and (had == ids or self._holds(prompt + had, ids[len(had) :], logprobs[len(had) :]))
            for had, told in self._answers.get(prompt, ())
        )

    def _read_on(self) -> None:
        with self._path.open("rb") as log:
            log.seek(self._read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._read += len(line)
                entry = json.loads(line)
                self._answers[tuple(entry["prompt"])].add((tuple(entry["ids"]), tuple(entry["logprobs"])))


def claims(tokens: Sequence[int], masks: Sequence[int], logprobs: Sequence[float]) -> Iterator[Entry]:
    """The sampled tokens of a sequence, turn by turn, as entries of the log.

    Raises:
        ValueError: the lengths differ, or a label is not the token that stands there.
    """
    if not len(tokens) == len(masks) == len(logprobs):
        raise ValueError(f"{len(tokens)} tokens, {len(masks)} masks, {len(logprobs)} logprobs")
    for begin, end in sampled_runs(masks):
        if list(masks[begin:end]) != list(tokens[begin:end]):
            raise ValueError(f"masks {begin} to {end} are not the tokens")
        yield tuple(tokens[:begin]), tuple(tokens[begin:end]), tuple(logprobs[begin:end])
