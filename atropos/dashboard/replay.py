"""A trajectory's calls as a terminal session: what was called, what came back and when, as asciicast v2.

Made from the messages, so it shows what the model read. Source of the format: the asciicast v2 page of asciinema's
docs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from atropos.dashboard.conversation import Message, MessagePart
from atropos.dashboard.records import as_dict, as_list
from atropos.dashboard.store import Details, StoredTrajectory
from atropos.dashboard.text import MAX_MESSAGE_CHARS, short
from atropos.terminal import visible

COLUMNS, ROWS = 100, 30
MAX_TEXT_CHARS = 500
"""Of what the model says beside its calls."""
MAX_CHARS = 4_000_000
"""Length of a whole replay; the rest is left out, with a note."""
UNKNOWN_S = 1.0
"""Of a turn, and of its calls, where the record has no times."""
KEPT = re.compile("\x1b\\[[0-9;]{0,40}m|\x1b\\[[0-2]?K|[\t\n\r\b]")
"""What a replay keeps of a program's control sequences: colours, the line's erasure, and plain movement."""
COLOURS = re.compile("\x1b\\[[0-9;]*m|\r$")
"""What a line without colours leaves out, its end among it."""
MOVES = re.compile("[\r\b\t](?!$)|\x1b\\[[0-2]?K")
PIECES = re.compile("\x1b\\[[0-2]?K|.")
ROWS_KEPT = 2000
"""Lines that the player's screen keeps; see `replay.js`."""
BOLD, DIM, RED, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[31m", "\x1b[0m"

Event = tuple[float, str]


def events(details: Details, *, most: int = MAX_MESSAGE_CHARS) -> list[Event]:
    """What is printed, and at how many seconds from the first turn's start; a call's output in `most` characters."""
    result: list[Event] = []
    chars = 0
    for at, text in _events(details, most):
        chars += len(text)
        if chars > MAX_CHARS:
            result.append((at, f"{DIM}[the rest is left out]{PLAIN}\r\n"))
            break
        result.append((round(at, 3), text))
    return result


def asciicast(entry: StoredTrajectory, details: Details) -> str:
    """A file that asciinema plays; it holds no control sequences but colours and the erasure of lines."""
    title = visible(f"{entry.trajectory_id} ({entry.score:.2f})")
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "idle_time_limit": 2.0, "title": title}
    lines = [json.dumps(header), *(json.dumps([at, "o", text]) for at, text in events(details))]
    return "".join(f"{line}\n" for line in lines)


def screen(events: Sequence[Event]) -> str:
    """What the player's screen shows at the end, as plain text."""
    lines = "".join(text for _, text in events).split("\n")[-ROWS_KEPT:]
    return "\n".join(_row(line) if MOVES.search(line) else COLOURS.sub("", line) for line in lines).strip("\n")


def _row(line: str) -> str:
    """A line on which a program moved, as a terminal shows it in the end."""
    cells: list[str] = []
    column = 0
    for piece in PIECES.findall(COLOURS.sub("", line)):
        if piece == "\r":
            column = 0
        elif piece == "\b":
            column = max(0, column - 1)
        elif len(piece) > 1:  # erase in line (ECMA-48): 1 up to here, 2 all of it, else the rest
            if piece[2] == "1":
                cells[: column + 1] = " " * min(len(cells), column + 1)
            else:
                del cells[0 if piece[2] == "2" else column :]
        else:
            text = " " * (8 - column % 8) if piece == "\t" else piece
            cells += " " * (column - len(cells))
            cells[column : column + len(text)] = text
            column += len(text)
    return "".join(cells)


def _events(details: Details, most: int) -> Iterator[Event]:
    started, turns = 0.0, iter(details.turns)
    for message, results in _turns(details.messages):
        turn = next(turns, {})
        model_s, tools_s = _seconds(turn.get("model_s")), _seconds(turn.get("tools_s"))
        asked = started + model_s
        text = "".join(part.text for part in message.parts if part.kind == "text").strip()
        if text:
            yield asked, _lines(f"{DIM}# ", text, MAX_TEXT_CHARS)
        calls = [part for part in message.parts if part.kind == "call"]
        took = turn.get("calls_s")
        if isinstance(took, list):
            each_s = [_seconds(one) for one in as_list(took)]
        else:
            each_s = [tools_s / max(1, len(calls))] * len(calls)
        at = asked
        for number, call in enumerate(calls):
            yield at, _called(call)
            result = results.get(call.call_id) or results.get(str(number))
            # Calls that ran side by side took longer, added up, than their turn.
            at = min(at + (each_s[number] if number < len(each_s) else 0.0), asked + tools_s)
            if result is not None:
                yield at, _lines(RED if result.failed else "", result.text, most)
        started = asked + (tools_s if calls else 0.0)


def _turns(messages: Sequence[Message]) -> Iterator[tuple[Message, dict[str, MessagePart]]]:
    """Each message of the model, and the results that follow it by their call's id, else by their place."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if message.role != "assistant":
            continue
        results: list[MessagePart] = []
        while at < len(messages) and messages[at].role != "assistant":
            results += [part for part in messages[at].parts if part.kind == "result"]
            at += 1
        yield message, {part.call_id or str(number): part for number, part in enumerate(results)}


def _called(call: MessagePart) -> str:
    command = as_dict(call.arguments).get("command")
    if call.name == "terminal" and isinstance(command, str):
        return _lines(f"{BOLD}$ ", command, MAX_MESSAGE_CHARS)
    return _lines(f"{BOLD}» ", f"{call.name} {call.text}".strip(), MAX_TEXT_CHARS)


def _lines(before: str, text: str, most: int) -> str:
    """A text as a terminal gets it: whole lines, and nothing in it that acts on more than its own line."""
    text = short(text, most)
    shown, at = "", 0
    for match in KEPT.finditer(text):
        shown += visible(text[at : match.start()]) + match[0]
        at = match.end()
    shown += visible(text[at:])
    return f"{before}{shown}{PLAIN}\n".replace("\r\n", "\n").replace("\n", "\r\n")


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e7 else UNKNOWN_S
