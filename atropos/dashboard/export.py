"""Trajectories as ATIF documents, for other programs.

ATIF is Harbor's Agent Trajectory Interchange Format; the fields used here are those of version 1.8 of its RFC.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from atropos.dashboard.conversation import MessagePart
from atropos.dashboard.sampled import Sampled, SampledTurn
from atropos.dashboard.store import Details, StoredTrajectory

ATIF_VERSION = "ATIF-v1.8"


class _Call(TypedDict):
    tool_call_id: str
    function_name: str
    arguments: object


class _Result(TypedDict, total=False):
    content: str
    source_call_id: str


class _Observation(TypedDict):
    results: list[_Result]


class _Step(TypedDict, total=False):
    step_id: int
    source: str
    message: str
    reasoning_content: str
    tool_calls: list[_Call]
    observation: _Observation
    timestamp: str
    metrics: dict[str, object]
    llm_call_count: int


def atif(entry: StoredTrajectory, details: Details, sampled: Sampled, *, agent: str, version: str) -> dict[str, object]:
    """A trajectory as an ATIF document. A message with results belongs to the step of the calls before it.

    The prompt of a step is the first `prompt_tokens` of the ids in `extra`, which has the whole sequence once.
    """
    steps: list[_Step] = []
    call_ids: list[str | None] = []
    for message in details.messages:
        parts = message.parts
        results = [part for part in parts if part.kind == "result"]
        if results and steps and steps[-1].get("source") == "agent":
            _observe(steps[-1], call_ids, results)
            parts = tuple(part for part in parts if part.kind != "result")
        if parts or not results:
            call_ids = _call_ids(parts, len(steps) + 1)
            steps.append(_step(message.role, parts, len(steps) + 1, call_ids))
    answers = [step for step in steps if step.get("source") == "agent"][-len(sampled.turns) :]
    if len(answers) == len(sampled.turns):  # an opening may hold answers that nobody sampled
        for step, turn in zip(answers, sampled.turns, strict=True):
            _measure(step, turn, sampled)
    facts = {"attempts": entry.attempts, "stop_reason": entry.stop_reason, "seconds_by_phase": entry.phases}
    extra = {"token_ids": sampled.tokens, "trainer": sampled.trainer, "changes": sampled.changes}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": entry.trajectory_id,
        "trajectory_id": entry.trajectory_id,
        "agent": {"name": agent, "version": version, **({"model_name": sampled.model} if sampled.model else {})},
        "steps": steps,
        "final_metrics": _totals(steps, sampled.turns),
        "extra": {
            "item": entry.item,
            "score": entry.score,
            "seconds": entry.seconds,
            **facts,
            "info": details.info,
            **{name: value for name, value in extra.items() if value},
        },
    }


def _measure(step: _Step, turn: SampledTurn, sampled: Sampled) -> None:
    """Add to a step what its generation was."""
    facts = dict(turn.facts)
    started_at, tokens = facts.pop("started_at", None), facts.pop("tokens", None)
    metrics: dict[str, object] = {"extra": facts} if facts else {}
    if turn.span is not None:
        begin, end = turn.span
        metrics |= {"prompt_tokens": begin, "completion_tokens": end - begin}
        metrics["completion_token_ids"] = sampled.tokens[begin:end]
        if sampled.logprobs:
            metrics["logprobs"] = sampled.logprobs[begin:end]
    elif sampled.tokens and isinstance(tokens, int):
        metrics["completion_tokens"] = tokens
    if isinstance(started_at, str):
        step["timestamp"] = started_at
    if metrics:
        step["metrics"] = metrics
    step["llm_call_count"] = 1


def _totals(steps: Sequence[_Step], turns: Sequence[SampledTurn]) -> dict[str, object]:
    totals: dict[str, object] = {"total_steps": len(steps)}
    if spans := [turn.span for turn in turns if turn.span is not None]:
        totals["total_prompt_tokens"] = sum(begin for begin, _ in spans)
        totals["total_completion_tokens"] = sum(end - begin for begin, end in spans)
    return totals


def _call_ids(parts: Sequence[MessagePart], number: int) -> list[str | None]:
    """The id of each call of a step; None where it could not be read: then its text belongs to the step's message."""
    calls = [part for part in parts if part.kind == "call"]
    return [(part.call_id or f"call_{number}_{at}") if part.name else None for at, part in enumerate(calls, 1)]


def _step(role: str, parts: Sequence[MessagePart], number: int, call_ids: Sequence[str | None]) -> _Step:
    if role != "assistant":
        text = _text(part for part in parts if part.kind in {"text", "result"})
        return {"step_id": number, "source": "system" if role == "system" else "user", "message": text}
    text = _text(part for part in parts if part.kind == "text" or (part.kind == "call" and not part.name))
    step: _Step = {"step_id": number, "source": "agent", "message": text}
    if thought := _text(part for part in parts if part.kind == "thought"):
        step["reasoning_content"] = thought
    asked = zip((part for part in parts if part.kind == "call"), call_ids, strict=True)
    if calls := [_call(part, call_id) for part, call_id in asked if call_id]:
        step["tool_calls"] = calls
    return step


def _call(part: MessagePart, call_id: str) -> _Call:
    arguments: object = part.arguments if isinstance(part.arguments, dict) else {"raw": part.arguments}
    return {"tool_call_id": call_id, "function_name": part.name, "arguments": arguments}


def _observe(step: _Step, call_ids: Sequence[str | None], results: Sequence[MessagePart]) -> None:
    """Add results to a step: each to the call that it names, else to the call at its place."""
    written = step.setdefault("observation", {"results": []})["results"]
    for part in results:
        at = len(written)
        call_id = part.call_id if part.call_id in call_ids else call_ids[at] if at < len(call_ids) else None
        written.append({"content": part.text, "source_call_id": call_id} if call_id else {"content": part.text})


def _text(parts: Iterable[MessagePart]) -> str:
    return "\n".join(part.text.strip("\n") for part in parts)
