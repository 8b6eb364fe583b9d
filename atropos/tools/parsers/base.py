"""The interface of parsers, what they share, and their registry."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

from atropos.errors import ConfigError
from atropos.tools.arguments import replace_surrogates, too_deep
from atropos.tools.models import ToolCall, call_with_id
from atropos.tools.parsers.shapes import call_shaped

MAX_CALLS = 128
"""Most calls, valid or not, of one turn; more are reported as an error."""
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class ParseError:
    """A malformed call.

    Attributes:
        message: what is wrong and what would be right, for the model.
        text: the start of what the model wrote.
        position: how many calls precede it.
    """

    message: str
    text: str
    position: int


@dataclass(frozen=True)
class Parsed:
    """A model's turn.

    Attributes:
        content: the text without the calls.
        calls: the calls in the order written.
        errors: the malformed calls.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()


class Parser(ABC):
    """A format of calls in a model's text. Parsing never raises, and takes time linear in the text's length."""

    name: str

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """The content and calls of a complete turn, or of one that a length limit cut off."""

    @abstractmethod
    def render(self, call: ToolCall) -> str:
        """The call as the model would write it; the inverse of `parse`."""

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """A whole assistant turn with its calls."""
        return "\n".join(part for part in [content, *(self.render(call) for call in calls)] if part)


class Format(Parser):
    """A built-in format: what looks like a call and is none in it is a malformed call, and not the model's answer.

    Attributes:
        vllm_name: vLLM's name of it; None: it has none.
        tools: names of the tools that are offered; empty: they are not known.
    """

    vllm_name: str | None = None
    tools: frozenset[str] = frozenset()

    def for_tools(self, tools: frozenset[str]) -> Self:
        """The format where those tools are offered."""
        own = copy.copy(self)
        own.tools = tools
        return own

    def parse(self, text: str) -> Parsed:
        """See `Parser`."""
        parsed = self.read(text)
        if parsed.calls or parsed.errors or not (written := call_shaped(text, self.tools)):
            return parsed
        right = self.render_turn("", [ToolCall(name="tool", arguments={"name": "value"})])
        message = f"this looks like a tool call and was not run: write {right} to call a tool, or the answer without it"
        return replace(parsed, errors=(ParseError(message, replace_surrogates(written[:500]), 0),))

    @abstractmethod
    def read(self, text: str) -> Parsed:
        """The turn's calls in this format."""


class Collector:
    """Collects the parts of a turn."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._errors: list[ParseError] = []

    def text(self, piece: str) -> None:
        """Text outside any call."""
        self._content.append(piece)

    def call(self, name: object, arguments: object, written: str, identity: str = "") -> None:
        """Add a call, under the id that the model gave it if it gave one, or an error where it isn't one."""
        if self.full(written):
            return
        if not isinstance(name, str) or not name.strip():
            self.error("the call has no name; name the tool to call", written)
            return
        if isinstance(arguments, str):
            arguments = replace_surrogates(arguments)
        elif arguments is None:
            arguments = {}
        elif not isinstance(arguments, dict):
            self.error(f"the arguments of {name[:64]!r} must be an object with the arguments by name", written)
            return
        parsed = cast("dict[str, object] | str", arguments)
        self._calls.append(call_with_id(identity, replace_surrogates(name.strip()), parsed))

    def json_calls(self, value: object, written: str, cure: str) -> None:
        """Add the calls of a JSON value: one object or a list, plain or in OpenAI's nesting. `cure` ends an error."""
        for one in cast("list[object]", value) if isinstance(value, list) else [value]:
            fields: dict[str, object] = cast("dict[str, object]", one) if isinstance(one, dict) else {}
            inner = fields.get("function")
            if isinstance(inner, dict):
                fields = cast("dict[str, object]", inner)
            elif isinstance(inner, str):
                fields = {"name": inner, **fields}
            if "name" in fields:
                self.call(fields["name"], fields.get("arguments", fields.get("parameters")), written)
            else:
                self.error(f"the tool call has no name; {cure}", written)

    def full(self, rest: str) -> bool:
        """Whether `MAX_CALLS` were found; the first time, an error then says that the rest is left out.

        The bound also keeps a parser's time linear, as each attempt may read the whole text.
        """
        count = len(self._calls) + len(self._errors)
        if count == MAX_CALLS:
            self._note(f"more than {MAX_CALLS} calls in one turn; the rest is left out", rest)
        return count >= MAX_CALLS

    def error(self, message: str, written: str) -> None:
        """Add a malformed call."""
        if not self.full(written):
            self._note(message, written)

    def _note(self, message: str, written: str) -> None:
        self._errors.append(ParseError(message, replace_surrogates(written[:500]), len(self._calls)))

    def done(self) -> Parsed:
        """The turn."""
        return Parsed("".join(self._content).strip(), tuple(self._calls), tuple(self._errors))


def read_calls(text: str, opening: str, read: Callable[[str, int, Collector], int]) -> Parsed:
    """Parse a turn whose calls all begin with the same text.

    Args:
        text: the turn.
        opening: the text that each call begins with.
        read: called with the text, the index after an opening, and the collector; returns the index after the call.
    """
    collector = Collector()
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        collector.text(text[at:begin])
        if collector.full(text[begin : begin + 500]):
            return collector.done()
        at = read(text, begin + len(opening), collector)
    collector.text(text[at:])
    return collector.done()


def index_after(text: str, at: int, opening: str, end: str) -> int:
    """Where to continue after a malformed call: after its end, at the next opening, or at the end of the text."""
    stop, following = text.find(end, at), text.find(opening, at)
    if stop >= 0 and (following < 0 or stop < following):
        return stop + len(end)
    return following if following >= 0 else len(text)


def first_json(text: str, start: int) -> tuple[object, int]:
    """The JSON value that begins at or after `start`, and where it ends.

    Raises:
        ValueError: none does.
    """
    try:
        value, end = _DECODER.raw_decode(text, skip(text, start))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if too_deep(value):
        raise ValueError("nested too deeply")
    return value, end


def dump_json(value: object) -> str:
    """JSON without escapes of characters beyond ASCII."""
    return json.dumps(value, ensure_ascii=False)


def skip(text: str, start: int, skipped: str = " \t\r\n") -> int:
    """The first index from `start` whose character is none of those to skip."""
    while start < len(text) and text[start] in skipped:
        start += 1
    return start


_PARSERS: dict[str, Parser] = {}


def register_parser(parser: Parser) -> None:
    """Register a parser by its name."""
    _PARSERS[parser.name] = parser


def get_parser(name: str) -> Parser:
    """The parser of that name.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    try:
        return _PARSERS[name]
    except KeyError:
        raise ConfigError(f"parser of tool calls: unknown {name!r}; known: {', '.join(sorted(_PARSERS))}") from None


def parser_names() -> tuple[str, ...]:
    """The names of all parsers."""
    return tuple(sorted(_PARSERS))
