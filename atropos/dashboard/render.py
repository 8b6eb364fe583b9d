"""Templates to HTML. All values are escaped; characters that control a terminal or reverse text are made visible."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO, cast

import jinja2

from atropos.dashboard.changes import ChangedFile, Changes
from atropos.dashboard.conversation import Message
from atropos.dashboard.records import as_text
from atropos.dashboard.replay import events, screen
from atropos.dashboard.scores import PASSING, RatesTable, ScoreHistory
from atropos.dashboard.store import Details, StoredTrajectory, entry_of, item_of, members, read_groups, scores_of
from atropos.dashboard.text import duration, figure, number, short
from atropos.terminal import visible

PAGE_TRAJECTORIES = 1000
"""Shown on a static page; the JSONL has all of them."""
MAX_CELL_CHARS = 2_000
"""Of a message beside its siblings', and of a call's output in a page's replay."""
LINE_CHARS = 100
SPARK_POINTS = 120
KINDS = frozenset({"user", "assistant", "tool", "system"})
PHASES = ("acquire", "setup", "model", "tools", "verify", "reset")
HERE = Path(__file__).parent
STYLE = (HERE / "static" / "style.css").read_text()
PLAYER = (HERE / "static" / "replay.js").read_text()
SCRIPT = (HERE / "static" / "script.js").read_text()


def colour(score: float) -> str:
    """The style class of a score."""
    return "good" if score >= 0.999 else "bad" if score <= 0.001 else "mid"


def facts(entry: StoredTrajectory) -> str:
    """What there is to say about a trajectory in a line."""
    parts = [number(entry.steps, "step"), number(entry.calls, "call"), duration(entry.seconds)]
    parts += [number(entry.tool_errors, "failed call")] if entry.tool_errors else []
    parts += [entry.stop_reason] if entry.stop_reason != "final" else []
    parts += [f"attempt {entry.attempts}"] if entry.attempts > 1 else []
    parts += [", ".join(f"{name} {entry.phases[name]:.1f}" for name in PHASES if entry.phases.get(name, 0) >= 0.05)]
    return " · ".join(part for part in parts if part)


def dumped(value: object) -> str:
    """A verifier's value, as JSON where it is no text: in one line where that is short."""
    line = as_text(value)
    if isinstance(value, str) or len(line) <= LINE_CHARS:
        return line
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def digest(text: str) -> str:
    """How a Content-Security-Policy names a style or script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def clock(seconds: float) -> str:
    """A local time from Unix seconds, with its date where that is not today's."""
    at = time.localtime(seconds)
    return time.strftime("%H:%M:%S" if at[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M:%S", at)


def spark(values: Sequence[float]) -> str:
    """The points of a polyline from 0, or the smallest value below it, to the largest; 240 wide and 40 high."""
    values = values[:: -max(1, -(-len(values) // SPARK_POINTS))][::-1]
    low = min([*values, 0.0])
    height = max([*values, low + 1e-9]) - low
    step = 240 / max(1, len(values) - 1)
    return " ".join(f"{at * step:.1f},{39 - (value - low) / height * 38:.1f}" for at, value in enumerate(values))


def bars(entry: StoredTrajectory) -> list[tuple[str, float, float, float]]:
    """A trajectory's phases as (name, seconds, offset, width), the last two as shares of 100."""
    total = sum(entry.phases.get(name, 0.0) for name in PHASES) or 1.0
    result: list[tuple[str, float, float, float]] = []
    at = 0.0
    for name in PHASES:
        seconds = entry.phases.get(name, 0.0)
        result.append((name, seconds, at, 100 * seconds / total))
        at += 100 * seconds / total
    return result


def aligned(siblings: Sequence[tuple[StoredTrajectory, Details]]) -> list[tuple[bool, list[Message | None]]]:
    """Siblings' messages row by row; whether a row is the same in all of them."""
    longest = max((len(details.messages) for _, details in siblings), default=0)
    rows = [[d.messages[at] if at < len(d.messages) else None for _, d in siblings] for at in range(longest)]
    return [(len(row) > 1 and all(_without_ids(cell) == _without_ids(row[0]) for cell in row), row) for row in rows]


def _without_ids(message: Message | None) -> Message | None:
    """A message without the ids of its calls, which differ in all trajectories."""
    return message and Message(message.role, tuple(replace(part, call_id="") for part in message.parts))


def verdicts(siblings: Sequence[tuple[StoredTrajectory, Details]]) -> list[tuple[str, bool, list[str]]]:
    """What the siblings' verifiers said, key by key, and the files that they changed; and whether these differ."""
    keys = dict.fromkeys(key for _, details in siblings for key in details.info)
    rows = [("files changed", [files_changed(d.changes) for _, d in siblings])]
    rows += [(key, [dumped(d.info[key]) if key in d.info else "" for _, d in siblings]) for key in keys]
    return [(key, len(set(values)) > 1, values) for key, values in rows]


def files_changed(changes: Changes) -> str:
    """A line for each file that a trajectory changed."""
    lines = [f"{each.path} ({lines_changed(each)})" for each in changes.files]
    lines += [f"and {changes.more} more"] if changes.more else []
    return "\n".join(lines) or changes.note or ("none" if changes.folder else "not recorded")


def lines_changed(change: ChangedFile) -> str:
    """How a file changed, in a few words."""
    counts = [f"+{change.added}"] * bool(change.added) + [f"\u2212{change.removed}"] * bool(change.removed)
    return ", ".join(part for part in (change.change, " ".join(counts), change.note) if part)


def diff_lines(diff: str, most: int) -> list[tuple[str, str]]:
    """The style class and text of each line of a diff."""
    kinds = {"+": "add", "-": "del", "@": "at"}
    return [(kinds.get(line[:1], ""), line) for line in short(diff, most).split("\n")]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        autoescape=True, loader=jinja2.FileSystemLoader(HERE / "templates"), trim_blocks=True
    )
    added: dict[str, Callable[..., object]] = {
        "visible": visible,
        "short": short,
        "colour": colour,
        "facts": facts,
        "dumped": dumped,
        "spark": spark,
        "bars": bars,
        "clock": clock,
        "duration": duration,
        "figure": figure,
        "number": number,
        "digest": digest,
        "lines_changed": lines_changed,
        "diff_lines": diff_lines,
        "replay": functools.partial(events, most=MAX_CELL_CHARS),
        "screen": screen,
    }
    environment.filters.update(added)
    globals_ = cast("dict[str, object]", environment.globals)
    globals_ |= {"kinds": KINDS, "cell_chars": MAX_CELL_CHARS}
    return environment


_templates = _environment()


def render(template: str, **values: object) -> str:
    """A page, or a fragment of one."""
    return _templates.get_template(template).render(**values)


def write_page(jsonl: Path, *, title: str = "") -> Path:
    """Render the groups of a JSONL file as one file beside it, whose only script is the player; skips invalid lines.

    Args:
        jsonl: as `process` writes it.
        title: empty: the file's name.

    Returns:
        The page's path.
    """
    html = jsonl.with_suffix(".html")
    temporary = html.with_name(html.name + ".part")
    try:
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", errors="backslashreplace", dir=html.parent) as body,
            temporary.open("w", encoding="utf-8", errors="backslashreplace") as out,
        ):
            sizes = _write_groups(jsonl, body)
            out.write(render("static_head.html", title=title or jsonl.stem, style=STYLE, player=PLAYER, **sizes))
            body.seek(0)
            shutil.copyfileobj(body, out)
            out.write(f"</main><script>{PLAYER}</script></body></html>\n")
        temporary.replace(html)
    finally:
        temporary.unlink(missing_ok=True)
    return html


def _write_groups(jsonl: Path, body: TextIO) -> dict[str, object]:
    """Write the groups that a page has room for; what its head says of them.

    A file of weeks holds many times as many, and reading them all would keep an env from ending for as long.
    """
    groups, entries, more = 0, list[StoredTrajectory](), False
    for group in read_groups(jsonl):
        if more := len(entries) >= PAGE_TRAJECTORIES:
            break
        item, room = item_of(group), PAGE_TRAJECTORIES - len(entries)
        siblings = [entry_of(one, item=item) for one in itertools.islice(members(group), room)]
        own = [entry for entry, _ in siblings]
        body.write(render("static_group.html", name=item, siblings=siblings, mean=_mean(own)))
        groups, entries = groups + 1, entries + own
        if more := len(scores_of(group)) > room:
            break
    return {
        "groups": groups,
        "trajectories": len(entries),
        "mean": _mean(entries),
        "more": more,
        "scores": ScoreHistory.of(entries),
        "table": RatesTable.of(entries, PASSING),
    }


def _mean(entries: Sequence[StoredTrajectory]) -> float:
    return sum(entry.score for entry in entries) / max(1, len(entries))
