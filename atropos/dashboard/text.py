"""What models and programs wrote, made fit to be shown."""

from __future__ import annotations

import math

MAX_MESSAGE_CHARS = 20_000


def short(text: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Head and tail of a text that is too long."""
    text = text.strip("\n")
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def duration(seconds: float) -> str:
    """Seconds as people say them: `2.5 s`, `45 s`, `12 min`, `3 h 5 min`, `11 d 13 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 120:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def figure(value: float) -> str:
    """A number in three digits or more, without an exponent: `0.0312`, `4.5`, `1,234`; 0 below a millionth."""
    if abs(value) < 1e-6:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def number(count: int, noun: str, nouns: str = "") -> str:
    """A count with its noun: `1 call`, `1,200 calls`."""
    return f"{count:,} {noun if count == 1 else nouns or f'{noun}s'}"
