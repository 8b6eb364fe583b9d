"""Thinking in `<think>` tags: it is no part of the answer, and no call in it is run."""

from __future__ import annotations

import re

_THINKING = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_OPENED = re.compile(r"<think>\s*\Z")


def opening_of(prompt: str) -> str:
    """The tag, with the white space after it, with which a template itself opens the thinking; else empty."""
    opened = _OPENED.search(prompt)
    return opened[0] if opened else ""


def tagged_thinking(text: str) -> str:
    """The thinking in a turn, tags included."""
    return "".join(match[0] for match in _THINKING.finditer(text))


def split_thinking(text: str) -> list[tuple[str, bool]]:
    """A turn in pieces without the tags, and which of them are thinking."""
    return [(piece, at % 2 == 1) for at, piece in enumerate(_THINKING.split(text))]


def thinking(text: str) -> str:
    """The thinking in a turn."""
    return "\n".join(part.strip() for part in _THINKING.findall(text))


def without_thinking(text: str) -> str:
    """A turn without its thinking."""
    return _THINKING.sub("", text).strip() if "<think>" in text else text
