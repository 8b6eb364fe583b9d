"""Templates to HTML. Everything is escaped, and characters that act on a terminal or turn text around are made visible."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from atropos.dashboard.conversation import Message
from atropos.dashboard.store import Details, Entry, members, read_groups
from atropos.dashboard.store import entry_of as parsed

PAGE_TRAJECTORIES = 1000
"""Shown on a static page; the JSONL has all of them."""
MAX_MESSAGE_CHARS = 20_000
MAX_CELL_CHARS = 2_000
"""Of a message that stands beside its siblings'."""
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and those that turn the direction of what follows, scores included."""
SPARK_POINTS = 120
KINDS = frozenset({"user", "assistant", "tool", "system"})
PHASES = ("acquire", "setup", "model", "tools", "verify", "reset")
HERE = Path(__file__).parent
STYLE = (HERE / "static" / "style.css").read_text()
SCRIPT = (HERE / "static" / "script.js").read_text()


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


def colour(score: float) -> str:
    """The style class of a score."""
    return "good" if score >= 0.999 else "bad" if score <= 0.001 else "mid"


def facts(entry: Entry) -> str:
    """What there is to say about a trajectory in a line."""
    found = [f"{entry.steps} steps", f"{entry.calls} calls", f"{entry.seconds:.1f} s"]
    found += [f"{entry.tool_errors} failed calls"] if entry.tool_errors else []
    found += [entry.stop_reason] if entry.stop_reason != "final" else []
    found += [f"attempt {entry.attempts}"] if entry.attempts > 1 else []
    found += [", ".join(f"{name} {entry.phases[name]:.1f}" for name in PHASES if entry.phases.get(name, 0) >= 0.05)]
    return " · ".join(part for part in found if part)


def dumped(value: object) -> str:
    """A verifier's value, as JSON where it is no text."""
    return value if isinstance(value, str) else json.dumps(value, indent=1, ensure_ascii=False, default=str)


def clock(seconds: float) -> str:
    """A time of the day, local, from Unix seconds."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def spark(values: Sequence[float], width: int = 240, height: int = 40) -> str:
    """The points of a polyline from 0 to the largest value."""
    values = values[:: -max(1, -(-len(values) // SPARK_POINTS))][::-1]
    top = max([*values, 1e-9])
    step = width / max(1, len(values) - 1)
    return " ".join(f"{at * step:.1f},{height - 1 - value / top * (height - 2):.1f}" for at, value in enumerate(values))


def bars(entry: Entry) -> list[tuple[str, float, float, float]]:
    """A trajectory's phases as (name, seconds, offset, width), the last two as shares of 100."""
    total = sum(entry.phases.get(name, 0.0) for name in PHASES) or 1.0
    found: list[tuple[str, float, float, float]] = []
    at = 0.0
    for name in PHASES:
        seconds = entry.phases.get(name, 0.0)
        found.append((name, seconds, at, 100 * seconds / total))
        at += 100 * seconds / total
    return found


def aligned(siblings: Sequence[tuple[Entry, Details]]) -> list[tuple[bool, list[Message | None]]]:
    """Siblings' messages row by row; whether a row is the same in all of them."""
    longest = max((len(details.messages) for _, details in siblings), default=0)
    rows = [[d.messages[at] if at < len(d.messages) else None for _, d in siblings] for at in range(longest)]
    return [(len(row) > 1 and all(cell == row[0] for cell in row), row) for row in rows]


def verdicts(siblings: Sequence[tuple[Entry, Details]]) -> list[tuple[str, bool, list[str]]]:
    """Each key of the siblings' verifier output with their values, and whether these differ."""
    keys = dict.fromkeys(key for _, details in siblings for key in details.info)
    rows = [(key, [dumped(d.info[key]) if key in d.info else "" for _, d in siblings]) for key in keys]
    return [(key, len(set(values)) > 1, values) for key, values in rows]


def _environment() -> jinja2.Environment:
    found = jinja2.Environment(autoescape=True, loader=jinja2.FileSystemLoader(HERE / "templates"), trim_blocks=True)
    added: dict[str, Any] = {
        "visible": visible,
        "short": short,
        "colour": colour,
        "facts": facts,
        "dumped": dumped,
        "spark": spark,
        "bars": bars,
        "clock": clock,
    }
    found.filters.update(added)
    shared: dict[str, Any] = {"kinds": KINDS, "cell_chars": MAX_CELL_CHARS}
    found.globals.update(shared)
    return found


_templates = _environment()


def render(template: str, **values: Any) -> str:
    """A page, or a fragment of one."""
    return _templates.get_template(template).render(**values)


def write_page(jsonl: Path, html: Path | None = None, *, title: str = "") -> Path:
    """Render the groups of a JSONL file into one file without scripts; a damaged last line (a killed run) is left out.

    Args:
        jsonl: as `process` writes it.
        html: None: beside it, with the ending .html.
        title: None: the file's name.

    Returns:
        The page's path.
    """
    html = html or jsonl.with_suffix(".html")
    groups = trajectories = 0
    total = 0.0
    for group in read_groups(jsonl):
        groups += 1
        scores = [member["score"] for member in members(group)]
        trajectories += len(scores)
        total += sum(scores)
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    mean = total / trajectories if trajectories else 0.0
    shown = 0
    temporary = html.with_name(html.name + ".part")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as out:
        out.write(
            render(
                "static_head.html",
                title=title or jsonl.stem,
                style=STYLE,
                digest=digest,
                groups=groups,
                trajectories=trajectories,
                mean=mean,
                shown=min(trajectories, PAGE_TRAJECTORIES),
            )
        )
        for group in read_groups(jsonl):
            if shown >= PAGE_TRAJECTORIES:
                break
            item = str((group.get("atropos") or {}).get("item") or "group")
            siblings = [parsed(one, item=item) for one in members(group)][: PAGE_TRAJECTORIES - shown]
            shown += len(siblings)
            scores = [entry.score for entry, _ in siblings]
            out.write(render("static_group.html", name=item, siblings=siblings, mean=sum(scores) / max(1, len(scores))))
        out.write("</main></body></html>\n")
    temporary.replace(html)
    return html
