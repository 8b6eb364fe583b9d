"""What models and programs wrote, where it is shown or logged: nothing in it acts on a terminal."""

from __future__ import annotations

import logging
import re

HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, those that turn the direction of what follows, scores included, and lone surrogates, which no
output takes."""


def visible(text: object) -> str:
    """Control characters as symbols, and what else is `HIDDEN` as escapes: a reader sees what was there."""
    return HIDDEN.sub(_symbol, str(text))


def _symbol(found: re.Match[str]) -> str:
    code = ord(found[0])
    return chr(0x2400 + code) if code < 0x20 else f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


class LogLines(logging.Formatter):
    """Records as visible text, a record's later lines indented: a program's output can't pass for a record."""

    def format(self, record: logging.LogRecord) -> str:
        """A record's lines."""
        return visible(super().format(record)).replace("\n", "\n    ")


def log_to_stderr() -> logging.Handler:
    """Log to stderr and nowhere else, each record with its local time: for what runs for weeks, with the date."""
    handler = logging.StreamHandler()
    handler.setFormatter(LogLines("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().handlers[:] = [handler]
    return handler
