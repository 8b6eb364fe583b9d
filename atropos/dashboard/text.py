"""What models and programs wrote, made fit to be shown."""

from __future__ import annotations

import re

MAX_MESSAGE_CHARS = 20_000
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of what follows, scores included."""


def visible(text: object) -> str:
    """Control characters as symbols, and those that turn the direction of text as escapes: a page shows what was there."""
    return HIDDEN.sub(_symbol, str(text))


def _symbol(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def short(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Head and tail of a text that is too long."""
    text = text.strip("\n")
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
