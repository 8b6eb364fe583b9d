"""Bytes as text that a model can read, within a bound."""

from __future__ import annotations

import re

from atropos import wire
from atropos.tools.models import ToolResult

_BINARY_SAMPLE = 8192
_BINARY_SHOWN = 600
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_=>78]|[()][0-9A-B])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f]")


def is_binary(data: bytes) -> bool:
    """Whether bytes are no text: a NUL near the start, as git and grep judge it."""
    return b"\x00" in data[:_BINARY_SAMPLE]


def decode(data: bytes) -> str:
    """Bytes as text: UTF-8, what can't be decoded replaced."""
    return data.decode("utf-8", "replace")


def without_escapes(text: str) -> str:
    """What was written to a terminal as plain text: colours and cursor movements taken out, line ends as everywhere."""
    return _ESCAPES.sub("", text).replace("\r\n", "\n")


def shown(data: bytes) -> str:
    """Output as a model reads it: text as it is; of long binary data the start, and that it is binary."""
    if is_binary(data) and len(data) > _BINARY_SHOWN:
        start = _CONTROL.sub(".", decode(data[:_BINARY_SHOWN]))
        return f"[binary output, {len(data):,} bytes; it starts with:]\n{start}\n[… pipe it through xxd or file to see more]"
    return decode(data)


def clip(text: str, most: int) -> tuple[str, int]:
    """A text's head and tail in at most about `most` characters, and how many characters were left out."""
    if len(text) <= most:
        return text, 0
    head, tail = most * 2 // 5, most - most * 2 // 5
    dropped = len(text) - head - tail
    return f"{text[:head]}\n[… {dropped:,} characters left out …]\n{text[-tail:]}", dropped


def command_result(
    result: wire.CommandResult, *, timeout_s: float | None, note: str = "", most: int = 50_000
) -> ToolResult:
    """What a command did, as a model reads it.

    Args:
        result: from the slot.
        timeout_s: the time it had, for the message.
        note: something about the arguments that the model should know.
        most: characters of output that the model is shown.
    """
    # A little more than asked for: the slot has cut to the same number of bytes and may have put a mark at the cut.
    text, dropped = clip(shown(result.output), most + 2000)
    error = _trouble(result, timeout_s)
    if note:
        error = f"{error}; {note}" if error else None
        text = text if error else f"{text}{'' if text.endswith(chr(10)) or not text else chr(10)}[{note}]"
    return ToolResult(
        success=result.exit_code == 0 and not result.timed_out and not result.cancelled,
        output=text,
        error=error,
        exit_code=result.exit_code,
        timed_out=result.timed_out,
        truncated=result.truncated or bool(dropped),
        dropped_bytes=result.dropped_bytes + dropped,
        limit=result.limit,
        duration_s=result.duration_s,
    )


_LIMITS: dict[str, str] = {
    "memory": "it used more memory than the slot has",
    "pids": "the slot's limit of processes was reached",
    "disk": "the slot's disk space is used up",
    "inodes": "the slot's limit of files is used up",
    "time": "the longest time that a command may run is over",
    "files": "too many open files",
    "cpu": "its CPU time is used up",
}


def _trouble(result: wire.CommandResult, timeout_s: float | None) -> str | None:
    if result.cancelled:
        return "the command was cancelled"
    if result.timed_out:
        after = f" after {timeout_s:g} s" if timeout_s is not None else ""
        return f"timed out{after} and was killed; the output is what it printed until then"
    if result.limit is not None and result.limit != "output" and result.exit_code != 0:
        return f"stopped by the {result.limit} limit: {_LIMITS.get(result.limit, result.limit)}"
    if result.exit_code is None:
        return "the command could not be started"
    if result.exit_code < 0:
        return f"killed by signal {-result.exit_code}"
    return f"exit code {result.exit_code}" if result.exit_code else None


def plural(count: int, noun: str) -> str:
    """`1 line`, `2 lines`, `2 matches`."""
    ending = "" if count == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{count:,} {noun}{ending}"
