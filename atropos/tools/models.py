"""A tool call, its result, and a tool's schema as a model is given it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from typing import Any

from pydantic import Field
from pydantic_core import to_jsonable_python

from atropos.tools.arguments import FrozenModel, has_lone_surrogate, replace_surrogates, too_deep
from atropos.wire import Limit
from atropos.wire.base import MadeByUsers

_FRAMING = re.compile(r"<(?=[|\uff5c]|/?tool_(?:call|response))")
"""The start of a tag that frames calls or results, or of a chat template's special token.

DeepSeek's have a wide bar (U+FF5C), and its tokenizers don't mark those that open a turn as special.
"""


MAX_CALL_ID = 200
"""Longest id of a call."""
LINE_CHARS = 200
"""Of what a list shows of a call or command."""


def escape_framing(text: str) -> str:
    r"""Escape JSON text for a frame: `<` becomes `\u003c` before `|` (also wide), `tool_call` and `tool_response`."""
    return _FRAMING.sub(lambda _: "\\u003c", text)


def new_call_id() -> str:
    """A fresh id for a tool call: unique, and short enough for any wire."""
    return f"call_{os.urandom(12).hex()}"


def fingerprint(name: str, arguments: dict[str, object] | str) -> bytes:
    """A digest of what a call does: equal for equal calls, and small for a call of any size."""
    return hashlib.sha256(json.dumps([name, arguments], sort_keys=True, default=repr).encode()).digest()


class ToolCall(MadeByUsers, FrozenModel):
    """One call that a model asked for.

    Raises:
        ConfigError: a field is of another type.

    Attributes:
        name: the tool's name as the model wrote it; it need not exist.
        arguments: an object, or the text that the model wrote in its place. The executor parses text; where it isn't a
            JSON object, the result is an error that the model can read.
        id: what the model, its server or a log calls it. A call that is given twice is run twice.
    """

    name: str
    arguments: dict[str, object] | str = Field(default_factory=dict)
    id: str = Field(default_factory=new_call_id, min_length=1, max_length=MAX_CALL_ID)

    def line(self) -> str:
        """The call in a line, for people; long arguments are cut."""
        return f"{self.name} {json.dumps(self.arguments, default=str)[:LINE_CHARS]}"


def call_with_id(identity: str, name: str, arguments: dict[str, object] | str) -> ToolCall:
    """A call under the id that a model or its server gave it; under a new one where that is empty or too long."""
    own = {"id": identity} if 0 < len(identity) <= MAX_CALL_ID else {}
    return ToolCall(name=name, arguments=arguments, **own)


class ToolResult(FrozenModel):
    """How a call ended, as a value: what the program did, or what was wrong with the call.

    Attributes:
        success: whether the tool succeeded; for a command, whether it exited with 0.
        output: the text for the model; undecodable bytes are replaced.
        error: what went wrong, and what would be right; None on success.
        exit_code: of a command; -N when signal N ended it; None for other tools.
        timed_out: the time ran out; `output` is what came before.
        truncated: `output` is head and tail; `dropped_bytes` were left out between them.
        limit: the slot's limit that stopped or truncated the program.
        duration_s: seconds spent in the tool, as measured where it ran.
        data: the same answer for programs, where the tool has one; never shown to the model.
    """

    success: bool
    output: str = ""
    error: str | None = None
    exit_code: int | None = None
    timed_out: bool = False
    truncated: bool = False
    dropped_bytes: int = Field(default=0, ge=0)
    limit: Limit | None = None
    duration_s: float = Field(default=0, ge=0)
    data: dict[str, object] | None = None

    @classmethod
    def failure(cls, error: str, **fields: Any) -> ToolResult:
        """A result without success."""
        return cls(success=False, error=error, **fields)

    def size_bytes(self) -> int:
        """Its length as JSON, `data` included."""
        return len(self.__pydantic_serializer__.to_json(self))

    def encodable(self) -> ToolResult:
        """The result as UTF-8 JSON can hold it: '?' for lone surrogates, and no data that is nested too deeply.

        Bytes in `data` become base64, and what else JSON has no type for becomes text.
        """
        data = None if too_deep(self.data) else self.data
        shown = {"output": self.output, "error": self.error, "data": data}
        if has_lone_surrogate(shown):
            shown = replace_surrogates(shown)
        elif self.data is None:
            return self
        data = to_jsonable_python(shown["data"], bytes_mode="base64", fallback=str)
        return self.model_copy(update={**shown, "data": data})

    def for_model(self) -> dict[str, object]:
        """What the model reads: empty fields are left out."""
        shown: dict[str, object] = {"success": self.success}
        if self.output or self.error is None:
            shown["output"] = self.output
        if self.error is not None:
            shown["error"] = self.error
        if self.exit_code is not None:
            shown["exit_code"] = self.exit_code
        if self.timed_out:
            shown["timed_out"] = True
        if self.truncated:
            shown["truncated"] = True
            shown["dropped_bytes"] = self.dropped_bytes
        if self.limit is not None:
            shown["limit"] = self.limit
        return shown

    def to_json(self) -> str:
        """What the model reads, as one JSON object: the content of an OpenAI tool message."""
        return json.dumps(self.for_model(), ensure_ascii=False)

    def to_xml(self, *, name: str | None = None) -> str:
        r"""What the model reads in the Hermes format: a JSON object in a `<tool_response>` element.

        Nothing that a program prints can end the element or write a chat template's special token: see
        `escape_framing`.
        """
        shown = self.for_model() if name is None else {"name": name, **self.for_model()}
        text = json.dumps(shown, ensure_ascii=False)
        return f"<tool_response>\n{escape_framing(text)}\n</tool_response>"


class ToolSchema(FrozenModel):
    """A tool as OpenAI's function calling describes it."""

    name: str
    description: str
    parameters: dict[str, Any]

    def to_openai(self) -> dict[str, object]:
        """The entry of a request's `tools` list."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }
