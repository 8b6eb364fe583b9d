"""Messages as parts: text, thinking, calls and results, out of Hermes' tags or OpenAI's fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from atropos.dashboard.records import as_dict, as_list, as_text
from atropos.thinking import split_thinking

CALL, RESULT = "tool_call", "tool_response"
"""Hermes' tags."""


@dataclass(frozen=True)
class MessagePart:
    """A piece of a message.

    Attributes:
        kind: text, thought, call or result.
        text: as the model or the program wrote it, lines as lines.
        name: of the tool, for a call that could be read.
        arguments: of a call; the raw text where they are no object.
        call_id: of a call, or of the call that a result answers; empty where the format has none.
        failed: whether a result says that its call did not succeed.
    """

    kind: str
    text: str
    name: str = ""
    arguments: object = None
    call_id: str = ""
    failed: bool = False


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    parts: tuple[MessagePart, ...]


def conversation(messages: object) -> list[Message]:
    """Every message that is one; what is of another shape is shown as its JSON."""
    readable: list[Message] = []
    for value in as_list(messages):
        message = as_dict(value) if isinstance(value, dict) else {"content": value}
        role = str(message.get("role", ""))
        readable.append(Message(role, tuple(part for part in _parts(role, message) if part.text.strip() or part.name)))
    return readable


def plain(value: object) -> str:
    """A value of a call or a result; a text of several lines as these lines."""
    text = as_text(value)
    return f"\n{text}" if "\n" in text.rstrip("\n") else text


def _parts(role: str, message: Mapping[str, object]) -> Iterator[MessagePart]:
    content = message.get("content")
    text = "" if content is None else as_text(content)  # none: the message is its calls
    thought = message.get("reasoning_content")
    if thought:
        yield MessagePart("thought", str(thought))
    if role == "tool":
        yield _result("".join(piece for piece, _ in _pieces(text, RESULT)), str(message.get("tool_call_id") or ""))
    else:
        yield from _tagged(role, text)
    for call in as_list(message.get("tool_calls")):
        yield _openai_call(call)


def _tagged(role: str, text: str) -> Iterator[MessagePart]:
    if role == "assistant":
        for stretch, thought in split_thinking(text):
            if thought:
                yield MessagePart("thought", stretch)
            else:
                for piece, tagged in _pieces(stretch, CALL):
                    yield _hermes_call(piece) if tagged else MessagePart("text", piece)
    elif role == "user":
        for piece, tagged in _pieces(text, RESULT):
            yield _result(piece) if tagged else MessagePart("text", piece)
    else:
        yield MessagePart("text", text)


def _pieces(text: str, tag: str) -> Iterator[tuple[str, bool]]:
    """A text cut at its tags, which are left out, and which pieces were between two.

    A regular expression would look through the whole rest for each opening tag without an end.
    """
    opening, closing = f"<{tag}>", f"</{tag}>"
    at = 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start + len(opening))) >= 0:
        yield text[at:start], False
        yield text[start + len(opening) : end], True
        at = end + len(closing)
    yield text[at:], False


def _hermes_call(block: str) -> MessagePart:
    value = _object(block) or {}
    arguments = value.get("arguments")
    if not isinstance(arguments, dict):
        return MessagePart("call", block.strip())
    return _call(str(value.get("name")), as_dict(arguments))


def _openai_call(call: object) -> MessagePart:
    """Arguments that are no object, and calls that are none, as they are."""
    value = as_dict(call)
    function = as_dict(value.get("function"))
    raw = function.get("arguments")
    if not isinstance(raw, str):
        return MessagePart("call", json.dumps(call, indent=1, ensure_ascii=False, default=str))
    name, call_id = str(function.get("name")), str(value.get("id") or "")
    arguments = _object(raw)
    if arguments is None:
        return MessagePart("call", raw, name, raw, call_id)
    return _call(name, arguments, call_id)


def _call(name: str, arguments: dict[str, object], call_id: str = "") -> MessagePart:
    return MessagePart(
        "call", "\n".join(f"{key}: {plain(item)}" for key, item in arguments.items()), name, arguments, call_id
    )


def _result(block: str, call_id: str = "") -> MessagePart:
    """The output as the program wrote it, then what else there is to say."""
    value = _object(block)
    if value is None:
        return MessagePart("result", block.strip(), call_id=call_id)
    rest = {key: item for key, item in value.items() if key not in {"output", "success"}}
    facts = "  ".join(f"{key}: {plain(item)}" for key, item in rest.items())
    shown = (str(value.get("output", "")).rstrip("\n"), f"[{facts}]" if facts else "")
    text = "\n".join(part for part in shown if part)
    return MessagePart(
        "result", text, call_id=call_id, failed=value.get("success") is False or bool(value.get("exit_code"))
    )


def _object(block: str) -> dict[str, object] | None:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    return as_dict(value) if isinstance(value, dict) else None
