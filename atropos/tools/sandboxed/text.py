"""Bytes as bounded text for a model."""

from __future__ import annotations

import codecs
import re

from atropos import wire
from atropos.tools.models import ToolResult

_BINARY_SAMPLE = 8192
_BINARY_SHOWN = 600
_TEXT_PER_ODD = 10
"""A text has at least so many characters for each that no text should have, such as a NUL."""
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"
    r"|[\]PX^_](?:[^\x07\x1b]*(?:\x07|\x1b\\)|[^\x07\x1b\n]*)"  # without its end, it ends with the line
    r"|[@-Z\\^_=>78]|[()][0-9A-B])"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")


def is_binary(data: bytes) -> bool:
    """Whether bytes are binary: a NUL near the start, the rule of git and grep."""
    return b"\x00" in data[:_BINARY_SAMPLE]


def decode(data: bytes) -> str:
    """Decode UTF-8; invalid bytes are replaced."""
    return data.decode("utf-8", "replace")


def unfinished(data: bytes) -> int:
    """Bytes at the end that begin a character, of which the rest has not come."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def with_line_ends(text: str, old: str, new: str) -> tuple[str, str]:
    """`old` and `new` of an edit, with the line ends of its text: a model is shown no CR of a CRLF, and writes LF.

    Where `old` is in the text as it is, both stay so if it has a CRLF itself (line ends can be changed, too), or if
    some lines end with LF.
    """
    if "\r\n" not in text:
        return old, new
    mixed = text.count("\r\n") < text.count("\n")
    if old in text and (mixed or "\r\n" in old):
        return old, new
    old, new = (part.replace("\r\n", "\n").replace("\n", "\r\n") for part in (old, new))
    return old, new


def without_escapes(text: str) -> str:
    """A terminal's output as plain text: without colours and cursor movements, lines end with LF."""
    return _ESCAPES.sub("", text).replace("\r\n", "\n")


def shown(data: bytes) -> tuple[str, int]:
    """Output as text, and how many bytes were left out: of long binary data only the start is shown, with a note."""
    if len(data) <= _BINARY_SHOWN or not _is_mostly_binary(data):
        return decode(data), 0
    start = _CONTROL.sub(".", decode(data[:_BINARY_SHOWN]))
    text = (
        f"[binary output, {len(data):,} bytes; it starts with:]\n{start}\n[… pipe it through xxd or file to see more]"
    )
    return text, len(data) - _BINARY_SHOWN


def _is_mostly_binary(data: bytes) -> bool:
    """Whether output is no text: a test's report in which one NUL was printed is one."""
    sample = decode(data[:_BINARY_SAMPLE])
    odd = len(_CONTROL.findall(sample)) + sample.count("\ufffd")
    return is_binary(data) and odd * _TEXT_PER_ODD > len(sample)


def clip(text: str, most: int, why: str = "") -> tuple[str, int]:
    """A text's head and tail in about `most` characters, with how many were left out between them, and that number.

    A text that this would not shorten stays whole. `why` stands beside the number.
    """
    head, tail = most * 2 // 5, most - most * 2 // 5
    dropped = len(text) - head - tail
    note = f"\n[… {dropped:,} characters left out{why} …]\n"
    if dropped <= len(note):
        return text, 0
    return f"{text[:head]}{note}{text[len(text) - tail :]}", dropped


def clip_result(result: ToolResult, most: int, why: str = "") -> ToolResult:
    """A result whose output and error are each clipped to about `most` characters."""
    output, dropped = clip(result.output, most, why)
    error, of_error = clip(result.error or "", most, why)
    if not dropped + of_error:
        return result
    total = result.dropped_bytes + dropped + of_error
    return result.model_copy(
        update={"output": output, "error": error or None, "truncated": True, "dropped_bytes": total}
    )


def command_result(result: wire.CommandResult, *, timeout_s: float, note: str) -> ToolResult:
    """A command's result for a model, its output as the slot kept it.

    Args:
        result: from the slot.
        timeout_s: the command's time limit, for the message.
        note: a remark on the arguments.
    """
    text, left_out = shown(result.output)
    error = _describe_failure(result, timeout_s)
    if note and error:
        error = f"{error}; {note}"
    elif note:
        text += f"[{note}]" if not text or text.endswith("\n") else f"\n[{note}]"
    return ToolResult(
        success=result.exit_code == 0 and not result.timed_out and not result.cancelled,
        output=text,
        error=error,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        truncated=result.truncated or left_out > 0,
        dropped_bytes=result.dropped_bytes + left_out,
        limit=result.limit,
        duration_s=result.duration_s,
    )


def _describe_failure(result: wire.CommandResult, timeout_s: float) -> str | None:
    if result.cancelled:
        return "the command was cancelled"
    if result.timed_out:
        return f"timed out after {timeout_s:g} s and was killed; the output is what it printed before"
    if result.limit is not None and result.limit in wire.LIMIT_REACHED and result.exit_code != 0:
        return f"stopped by the {result.limit} limit: {wire.LIMIT_REACHED[result.limit]}"
    if result.exit_code is None:
        return "the command could not be started"
    if result.exit_code < 0:
        return f"killed by signal {-result.exit_code}"
    return f"exit code {result.exit_code}" if result.exit_code else None


def bounded_s(what: str, asked_s: float, most_s: float) -> tuple[float, str]:
    """The time that a model asked for, or the longest allowed; and a note where that is less."""
    if asked_s <= most_s:
        return asked_s, ""
    return most_s, f"{what} {asked_s:g} s was shortened to {most_s:g} s, the longest allowed"


def plural(count: int, noun: str) -> str:
    """`1 line`, `2 lines`, `2 matches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{ending}"
