"""What every parser of a model's text gives, and the registry of them by name."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from atropos.errors import ConfigError
from atropos.tools.arguments import MAX_DEPTH, deeper_than
from atropos.tools.models import ToolCall

MAX_CALLS = 128
"""Calls, right or wrong, taken from one turn; more are reported as an error."""


@dataclass(frozen=True)
class ParseError:
    """A call that the model began and did not write rightly.

    Attributes:
        message: what is wrong and how it would be right, for the model.
        text: what it wrote, shortened.
        position: how many calls stand before it.
    """

    message: str
    text: str
    position: int


@dataclass(frozen=True)
class Parsed:
    """A model's turn, taken apart.

    Attributes:
        content: the text without the calls.
        calls: the calls in the order written.
        errors: what was meant to be a call and isn't one.
    """

    content: str
    calls: tuple[ToolCall, ...] = ()
    errors: tuple[ParseError, ...] = ()


class Parser(ABC):
    """A format in which a model writes calls.

    A parser never raises on a model's text, whatever it is, and takes time linear in its length.
    """

    name: str

    @abstractmethod
    def parse(self, text: str) -> Parsed:
        """The content and calls in a finished turn, or in one cut off by a length limit."""

    @abstractmethod
    def render(self, call: ToolCall) -> str:
        """The call as the model would write it: `parse` gives it back."""

    def render_turn(self, content: str, calls: Sequence[ToolCall]) -> str:
        """A whole assistant turn with its calls."""
        return "\n".join(part for part in [content, *(self.render(call) for call in calls)] if part)


class Collector:
    """Gathers a turn's pieces while a parser walks over it."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: list[ToolCall] = []
        self._errors: list[ParseError] = []
        self._over = False

    def text(self, piece: str) -> None:
        """Text outside any call."""
        if piece:
            self._content.append(piece)

    def call(self, name: object, arguments: object, written: str, call_id: str | None = None) -> None:
        """A call, if it is one."""
        if self.full(written):
            return
        if not isinstance(name, str) or not name.strip():
            self.error("the call has no name; name the tool to call", written)
            return
        if isinstance(arguments, str):
            arguments = whole_text(arguments)
        elif arguments is None:
            arguments = {}
        elif not isinstance(arguments, dict):
            self.error(f"the arguments of {name[:64]!r} must be an object with the arguments by name", written)
            return
        clean = whole_text(name.strip())
        given = cast("dict[str, object] | str", arguments)
        self._calls.append(
            ToolCall(name=clean, arguments=given, id=call_id) if call_id else ToolCall(name=clean, arguments=given)
        )

    def full(self, rest: str) -> bool:
        """Whether enough calls were found, right or wrong; then an error says that the rest is left out.

        The bound is also what keeps a parser's time linear: an attempt may look at the whole text.
        """
        if len(self._calls) + len(self._errors) < MAX_CALLS:
            return False
        if not self._over:
            self._over = True
            self._note(f"more than {MAX_CALLS} calls in one turn; the rest is left out", rest)
        return True

    def error(self, message: str, written: str) -> None:
        """Something that was meant to be a call."""
        if not self.full(written):
            self._note(message, written)

    def _note(self, message: str, written: str) -> None:
        self._errors.append(ParseError(message, whole_text(written[:500]), len(self._calls)))

    def done(self) -> Parsed:
        """Everything gathered."""
        return Parsed("".join(self._content).strip(), tuple(self._calls), tuple(self._errors))


def read_calls(text: str, opening: str, read: Callable[[str, int, Collector], int]) -> Parsed:
    """Take the calls out of a turn in which each begins with the same text.

    Args:
        text: the turn.
        opening: what each call begins with.
        read: reads the call whose opening ends at an index into the collector; returns where to go on.
    """
    found = Collector()
    at = 0
    while (begin := text.find(opening, at)) >= 0:
        found.text(text[at:begin])
        if found.full(text[begin : begin + 500]):
            return found.done()
        at = read(text, begin + len(opening), found)
    found.text(text[at:])
    return found.done()


def whole_text(text: str) -> str:
    """A text without lone surrogates, which JSON escapes can smuggle in and UTF-8 can't say."""
    return text.encode("utf-8", "replace").decode() if not text.isascii() else text


def first_json(text: str, start: int) -> tuple[object, int]:
    """The JSON value that begins at or after `start`, and where it ends.

    Raises:
        ValueError: none does.
    """
    try:
        value, end = _DECODER.raw_decode(text, _skip(text, start))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if deeper_than(value, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return value, end


def dump_json(value: object) -> str:
    """JSON as it is shown to models: UTF-8 as it is."""
    return json.dumps(value, ensure_ascii=False)


_DECODER = json.JSONDecoder(strict=False)


def _skip(text: str, start: int) -> int:
    while start < len(text) and text[start] in " \t\r\n":
        start += 1
    return start


_PARSERS: dict[str, Parser] = {}


def register_parser(parser: Parser, *names: str) -> None:
    """Make a parser known by its name, and by others."""
    for name in (parser.name, *names):
        _PARSERS[name] = parser


def get_parser(name: str) -> Parser:
    """The parser of that name.

    Raises:
        ConfigError: there is none; the message names those there are.
    """
    try:
        return _PARSERS[name]
    except KeyError:
        raise ConfigError(f"tool_call_parser: unknown {name!r}; known: {', '.join(sorted(_PARSERS))}") from None


def parser_names() -> tuple[str, ...]:
    """The names of all parsers."""
    return tuple(sorted(_PARSERS))
