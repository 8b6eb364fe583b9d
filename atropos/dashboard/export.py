"""Trajectories for other programs: ATIF files and messages for supervised fine-tuning.

ATIF is Harbor's Agent Trajectory Interchange Format; the fields used here are those of version 1.8 of its RFC.
"""

from __future__ import annotations

from typing import TypedDict

from atropos.dashboard.conversation import Message, Part
from atropos.dashboard.store import Details, Entry

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


def atif(entry: Entry, details: Details, *, agent: str, version: str) -> dict[str, object]:
    """A trajectory as an ATIF document. A message with results belongs to the step of the calls before it.

    Args:
        entry: the trajectory.
        details: its messages and verifier output.
        agent: name of the agent.
        version: its version.
    """
    steps: list[_Step] = []
    for message in details.messages:
        results = [part for part in message.parts if part.kind == "result"]
        if results and steps and steps[-1].get("source") == "agent":
            _observe(steps[-1], results)
            rest = tuple(part for part in message.parts if part.kind != "result")
        else:
            rest = message.parts
        if rest or not results:
            steps.append(_step(Message(message.role, rest), len(steps) + 1))
    facts = {"attempts": entry.attempts, "stop_reason": entry.stop_reason, "seconds_by_phase": entry.phases}
    return {
        "schema_version": ATIF_VERSION,
        "session_id": entry.trajectory_id,
        "agent": {"name": agent, "version": version},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {"item": entry.item, "score": entry.score, "seconds": entry.seconds, **facts, "info": details.info},
    }


def _step(message: Message, number: int) -> _Step:
    source = {"assistant": "agent", "system": "system"}.get(message.role, "user")
    step: _Step = {"step_id": number, "source": source, "message": _text(message, *_spoken(source))}
    if source != "agent":
        return step
    if thought := _text(message, "thought"):
        step["reasoning_content"] = thought
    named = (part for part in message.parts if part.kind == "call" and part.name)
    calls = [_call(part, f"call_{number}_{at}") for at, part in enumerate(named, 1)]
    if calls:
        step["tool_calls"] = calls
    return step


def _spoken(source: str) -> tuple[str, ...]:
    """The kinds of parts that are a message's text: an agent's calls have a field of their own, where they can be read."""
    return ("text", "unread") if source == "agent" else ("text", "result")


def _call(part: Part, call_id: str) -> _Call:
    arguments: object = part.arguments if isinstance(part.arguments, dict) else {"raw": part.arguments}
    return {"tool_call_id": part.call_id or call_id, "function_name": part.name, "arguments": arguments}


def _observe(step: _Step, results: list[Part]) -> None:
    """Add results to a step: each to the call that it names, else to the next one without a result."""
    found = step.setdefault("observation", {"results": []})["results"]
    calls = [call["tool_call_id"] for call in step.get("tool_calls", ())]
    for part in results:
        answered = {result.get("source_call_id") for result in found}
        call_id = part.call_id if part.call_id in calls else next((one for one in calls if one not in answered), None)
        found.append({"content": part.text, "source_call_id": call_id} if call_id else {"content": part.text})


def _text(message: Message, *kinds: str) -> str:
    return "\n".join(
        part.text.strip("\n")
        for part in message.parts
        if part.kind in kinds or ("unread" in kinds and part.kind == "call" and not part.name)
    )
