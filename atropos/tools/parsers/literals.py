"""A reader of Python calls with literal arguments that compiles nothing.

`ast.parse` may take exponential time or exhaust the stack on what a model writes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from atropos.tools.arguments import MAX_DEPTH

_SPACE = re.compile(r"(?:\s|\\\n|#[^\n]*\n)*")
_NAME = re.compile(r"[A-Za-z_][\w-]*(?:\.[A-Za-z_][\w-]*)*")
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*\.?\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?)")
_STRING = re.compile(
    r"""[rRuU]?(?:'''(?:[^\\]|\\.)*?'''|\"\"\"(?:[^\\]|\\.)*?\"\"\"|'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")""", re.DOTALL
)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\\'\"\n\rabfnrtvxuUN01234567")
_WORDS: dict[str, object] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}


class LiteralReader:
    """Reads calls and literals from a text at a position."""

    def __init__(self, text: str, at: int = 0) -> None:
        self.text, self.at = text, at

    def call(self) -> tuple[str, dict[str, object]]:
        """`name(key=value, …)`.

        Raises:
            ValueError: there is no such call.
        """
        name = self._match(_NAME, "a tool's name")
        self._expect("(")
        arguments: dict[str, object] = {}
        for _ in self._each_until(")"):
            key = self._match(_NAME, "an argument's name")
            if not self.peek("="):
                raise ValueError(f"argument {key!r} of {name} needs a name: write name=value")
            self._expect("=")
            if key in arguments:
                raise ValueError(f"argument {key!r} of {name} is given twice")
            arguments[key] = self.value(0)
        return name, arguments

    def value(self, depth: int) -> object:
        """A string, number, list, dict, tuple (as a list), True, False or None."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        self.space()
        first = self.text[self.at : self.at + 1]
        if first in {"[", "(", "{"}:
            self.at += 1
            if first == "{":
                return self._pairs(depth)
            return [self.value(depth + 1) for _ in self._each_until("]" if first == "[" else ")")]
        if string := _STRING.match(self.text, self.at):
            return self._strings(string)
        if number := _NUMBER.match(self.text, self.at):
            self.at = number.end()
            digits = number[0].replace("_", "")
            return float(digits) if any(mark in digits for mark in ".eE") else int(digits)
        word = _NAME.match(self.text, self.at)
        if word and word[0] in _WORDS:
            self.at = word.end()
            return _WORDS[word[0]]
        raise ValueError(f"expected a value at {self._here()}")

    def _strings(self, found: re.Match[str]) -> str:
        """A string and those directly after it, joined as Python does."""
        parts: list[str] = []
        match: re.Match[str] | None = found
        while match:
            self.at = match.end()
            parts.append(_string_value(match[0]))
            self.space()
            match = _STRING.match(self.text, self.at)
        return "".join(parts)

    def _pairs(self, depth: int) -> dict[str, object]:
        pairs: dict[str, object] = {}
        for _ in self._each_until("}"):
            key = self.value(depth + 1)
            if not isinstance(key, str):
                raise ValueError("the keys of a dict must be strings")  # noqa: TRY004 - one type for all
            self._expect(":")
            pairs[key] = self.value(depth + 1)
        return pairs

    def _each_until(self, end: str) -> Iterator[None]:
        """Once for each of the items, separated by commas, before an end sign, which is passed."""
        while not self.peek(end):
            yield
            if not self.peek(end):
                self._expect(",")
        self._expect(end)

    def space(self) -> None:
        """Skip white space and comments."""
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at

    def peek(self, sign: str) -> bool:
        """Whether a sign comes next, after white space."""
        self.space()
        return self.text.startswith(sign, self.at)

    def _expect(self, sign: str) -> None:
        if not self.peek(sign):
            raise ValueError(f"expected {sign!r} at {self._here()}")
        self.at += len(sign)

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        self.space()
        match = pattern.match(self.text, self.at)
        if not match:
            raise ValueError(f"expected {what} at {self._here()}")
        self.at = match.end()
        return match[0]

    def _here(self) -> str:
        rest = self.text[self.at : self.at + 20]
        return repr(rest) if rest else "the end of the text"


def _string_value(literal: str) -> str:
    """The value of a string literal.

    Raises:
        ValueError: it can't be read.
    """
    triple = literal.endswith(("'''", '"""'))
    if literal[0] in "rR":
        return literal[4:-3] if triple else literal[2:-1]
    # Python keeps the backslash of an unknown escape (`\d`), and warns of it on stderr.
    literal = _ESCAPE.sub(lambda one: one[0] if one[1] in _ESCAPES else f"\\{one[0]}", literal)
    if not triple:
        # Models write raw line breaks, which Python refuses.
        literal = literal.replace("\r", "\\r")
        literal = re.sub(r"(\\.)|\n", lambda one: one[1] or "\\n", literal, flags=re.DOTALL)
    try:
        return ast.literal_eval(literal)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"a string can't be read: {error}") from None
