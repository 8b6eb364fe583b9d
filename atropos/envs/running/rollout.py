"""A finished trajectory, and the scored group that a trainer gets of them. Plain data in, plain data out."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Required, SupportsFloat, TypedDict, TypeVar

from atropos.agent import AgentResult, Message, Transcript
from atropos.agent.config import TurnTiming
from atropos.agent.transcript import CONTEXT_LOGPROB, MASKED
from atropos.errors import AcquireTimeout

Value = TypeVar("Value", int, float)


class GroupDropped(Exception):
    """A group can't be completed and is dropped whole; nothing of it is scored or sent.

    Attributes:
        code: the failure's stable name, for metrics.
        hopeless: another slot would not have helped.
    """

    def __init__(self, message: str, *, code: str, hopeless: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.hopeless = hopeless


class ItemLeftOut(Exception):
    """No trajectory on an item could score, whatever the agent did: the item is left out, and the run goes on."""


class WorkspaceLost(Exception):
    """The snapshot that a group's trajectories start from went with its container."""

    code = "workspace_lost"


class NoSlotYet(AcquireTimeout):
    """A trajectory waits for one of the slots in use: its own was retired, or a container is being replaced."""


class GroupsDropped(Exception):
    """A run ended and wrote its files, which lack some groups."""


class HookError(Exception):
    """A hook of the env raised, or returned a wrong type. The trajectory is dropped, never scored 0."""

    code = "hook_error"


class TaskFault(HookError):
    """A workspace could not be prepared: the task is at fault, and no trajectory of it is scored."""

    code = "task_fault"


class VerifierError(HookError):
    """A verifier gave no reward, which may be the agent's own doing."""

    code = "verifier_failed"


@dataclass
class Rollout:
    """One scored trajectory.

    Attributes:
        trajectory_id: of the attempt that was scored.
        info: what the verifying hook returned beside the score; kept in the JSONL.
        phases: seconds by phase: setup, model, tools, verify, reset; `acquire` is the wait for the slot, within
            whichever of setup, tools and verify used it first, and `agent` is model, tools and what is between them.
        turns: when each began, its tokens and seconds, as `AgentStep.timing` gives them.
        changes: files that the agent changed, as `WorkspaceChanges.since_start` gives them; empty: they were not
            recorded.
    """

    trajectory_id: str
    transcript: Transcript
    score: float
    steps: int
    calls: int
    stop_reason: str
    info: dict[str, object]
    phases: dict[str, float]
    turns: list[TurnTiming]
    changes: dict[str, object]
    seconds: float = 0.0
    attempts: int = 1

    @classmethod
    def of(
        cls,
        trajectory_id: str,
        result: AgentResult,
        score: float,
        times: tuple[float, float, float],
        *,
        info: dict[str, object],
        changes: dict[str, object],
    ) -> Rollout:
        """What an agent did, scored just now; `times`: when set-up began, the agent began, and it ended."""
        started, set_up, acted = times
        return cls(
            trajectory_id,
            result.trajectory_data,
            score,
            steps=len(result.steps),
            calls=result.total_tool_calls,
            stop_reason=result.stop_reason,
            info=info,
            phases={
                "setup": set_up - started,
                "model": sum(step.model_s for step in result.steps),
                "tools": sum(step.tools_s for step in result.steps),
                "agent": acted - set_up,
                "verify": time.perf_counter() - acted,
            },
            turns=[step.timing() for step in result.steps],
            changes=changes,
        )

    @property
    def cut(self) -> bool:
        """Whether a bound ended it, and not the model's answer."""
        return self.stop_reason != "final"

    def summary(self) -> dict[str, object]:
        """The fields of the JSONL and the pages other than tokens and messages."""
        return {
            "trajectory_id": self.trajectory_id,
            "model": self.transcript.model,
            "score": self.score,
            "steps": self.steps,
            "calls": self.calls,
            "seconds": round(self.seconds, 4),
            "attempts": self.attempts,
            "stop_reason": self.stop_reason,
            "phases": {name: round(value, 4) for name, value in self.phases.items()},
            "turns": self.turns,
            "changes": self.changes,
            "info": self.info,
        }


def checked_score(value: object, hook: str) -> float:
    """A score as a finite float.

    Raises:
        HookError: the hook returned something else.
    """
    # `numpy.str_` is both.
    if isinstance(value, SupportsFloat) and not isinstance(value, str):
        score = float(value)
        # One NaN makes the whole group's baseline NaN.
        if math.isfinite(score):
            return score
    raise HookError(f"{hook} must return a finite number, not {value!r:.100}")


def checked_text(value: object, hook: str) -> str:
    """A prompt. Many templates render what is no text as an empty message.

    Raises:
        HookError: the hook returned something else.
    """
    if not isinstance(value, str):
        raise HookError(f"{hook} must return text, not {type(value).__name__}")
    return value


class ScoredGroup(TypedDict, total=False):
    """atroposlib's `ScoredDataGroup`; `group_overrides` is always a dict.

    `generation_params` has the temperature, by which a trainer divides its logits, and whose the logprobs are: `policy`
    (of the policy that sampled), `raw` (of temperature 1) or `placeholder`. `overrides` has for each member its
    `stop_reason`, the `weight_versions` that sampled it where the server tells them, as [begin, end, version],
    `set_advantage_to_zero` where it is masked, and its own temperature where those differ, which comes first in
    atroposlib's trainer.

    The key `atropos`, its item and its trajectories' summaries, is for people and files; the trajectory API ignores it.
    """

    tokens: Required[list[list[int]]]
    masks: Required[list[list[int]]]
    scores: Required[list[float]]
    inference_logprobs: Required[list[list[float]] | None]
    messages: list[list[Message]] | None
    group_overrides: Required[dict[str, object]]
    advantages: object
    ref_logprobs: object
    generation_params: Required[dict[str, object]]
    overrides: Required[list[dict[str, object]]]
    images: object
    distill_token_ids: object
    distill_logprobs: object
    atropos: dict[str, object]


def scored_group(
    rollouts: Sequence[Rollout], *, name: str, include_messages: bool, mask_cut: bool = False
) -> ScoredGroup:
    """The scored group of complete rollouts.

    With `mask_cut`, nothing is learned from one that a bound ended: its labels are masked, and its score is the mean of
    the others', so that it counts in no baseline; at least one must be whole.
    """
    for rollout in rollouts:
        # The last place where a transcript of unequal lengths fails here, and not in the trainer.
        rollout.transcript.check()
    whole = [rollout.score for rollout in rollouts if not rollout.cut]
    masked = [mask_cut and rollout.cut for rollout in rollouts]
    transcripts = [rollout.transcript for rollout in rollouts]
    placeholder = any(transcript.placeholder for transcript in transcripts)
    temperatures = [transcript.temperature for transcript in transcripts]
    raw = any(transcript.raw_logprobs for transcript in transcripts)
    logprobs = "placeholder" if placeholder else "raw" if raw else "policy"
    return {
        "tokens": [list(r.transcript.tokens) for r in rollouts],
        "masks": [_labels(r.transcript.masks, MASKED, masked=hide) for r, hide in zip(rollouts, masked, strict=True)],
        "scores": [mean(whole) if hide else r.score for r, hide in zip(rollouts, masked, strict=True)],
        "advantages": None,
        "ref_logprobs": None,
        "messages": [messages_of(r.transcript) for r in rollouts] if include_messages else None,
        "generation_params": {"temperature": temperatures[0], "logprobs": logprobs},
        "inference_logprobs": [
            _labels(r.transcript.logprobs, CONTEXT_LOGPROB, masked=hide)
            for r, hide in zip(rollouts, masked, strict=True)
        ],
        "group_overrides": {"placeholder_tokens": True} if placeholder else {},
        "overrides": [
            _facts(r, masked=hide, own_temperature=len({*temperatures}) > 1)
            for r, hide in zip(rollouts, masked, strict=True)
        ],
        "images": None,
        "atropos": {"item": name, "trajectories": [r.summary() for r in rollouts]},
    }


def _labels(values: Sequence[Value], hidden: Value, *, masked: bool) -> list[Value]:
    return [hidden] * len(values) if masked else list(values)


def _facts(rollout: Rollout, *, masked: bool, own_temperature: bool) -> dict[str, object]:
    """What a trainer gets of a member."""
    facts: dict[str, object] = {"stop_reason": rollout.stop_reason}
    if rollout.transcript.weights:
        facts["weight_versions"] = [list(span) for span in rollout.transcript.weights]
    if masked:
        facts["set_advantage_to_zero"] = True
    if own_temperature:
        facts["temperature"] = rollout.transcript.temperature
    return facts


def scored_item(rollout: Rollout) -> dict[str, object]:
    """A single rollout as atroposlib's `ScoredDataItem`."""
    group = scored_group([rollout], name="", include_messages=False)
    return {
        "tokens": group["tokens"][0],
        "masks": group["masks"][0],
        "scores": group["scores"][0],
        "messages": messages_of(rollout.transcript),
        "inference_logprobs": list(rollout.transcript.logprobs),
        "group_overrides": group["group_overrides"],
        "overrides": group["overrides"][0] | group["generation_params"],
    }


def messages_of(transcript: Transcript) -> list[Message]:
    """Messages with what the trajectory API insists on: a role and a text."""
    return [{**message, "content": message.get("content") or ""} for message in transcript.messages]


def _is_finite(score: object) -> bool:
    return isinstance(score, SupportsFloat) and math.isfinite(score)


def drop_reason(group: ScoredGroup, *, group_size: int, same_scores_dropped: bool, max_token_len: int) -> str | None:
    """The reason, for a counter, why atroposlib would leave a group out; None: it sends it."""
    if len(group["scores"]) != len(group["tokens"]) or not all(map(_is_finite, group["scores"])):
        return "bad_scores"
    lengths = [*map(len, group["tokens"])]
    beside = (group.get("masks"), group.get("inference_logprobs"))
    if any(each is not None and [*map(len, each)] != lengths for each in beside):
        return "bad_lengths"
    size = (group.get("group_overrides") or {}).get("group_size", group_size)
    if len(lengths) != size:
        return "wrong_size"
    # With equal scores all advantages are zero: nothing could be learned from it.
    if same_scores_dropped and len(set(group["scores"])) == 1:
        return "same_scores"
    if max_token_len > 0 and any(length >= max_token_len for length in lengths):
        return "too_long"
    return None
