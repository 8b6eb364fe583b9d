"""What `atropos tasks check` found: a line for each task as it comes, a page, and what all have in common."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from atropos.tasks.check import Attempt, TaskFinding
from atropos.tasks.folder import TaskSet
from atropos.terminal import visible

STYLE = {"sound": "green", "unsound": "red", "broken": "red", "refused": "yellow"}
_WIDTHS = {"task": 4, "status": 7, "image": 5, "prepared": 9, "size": 10, "verifier": 17}
"""The columns of a line, with the agents' rewards after the status, and how wide they are at least."""
_BASE = "the slots' base"
_CURES = {
    "images": " (--pull pulls it)",
    "network": " (--network gives them filtered egress)",
    "egress": " (--egress-allow adds it)",
    None: "",
}
"""What to pass, by the setting that a note names."""
_PAGE_PAUSE = 20
"""Times that writing the page took, for which it isn't written again: it has all findings, and takes longer with
each."""


class TaskReport:
    """What was found so far.

    Args:
        tasks: what is checked.
        agents: whose rewards are shown.
        page: written anew as findings come, and at the end; None: there is none.
        as_json: whether stdout gets JSON at the end, instead of lines.
    """

    def __init__(self, tasks: TaskSet, agents: Sequence[str], *, page: Path | None, as_json: bool) -> None:
        self.findings: list[TaskFinding] = []
        self.total = len(tasks.tasks) + len(tasks.refused)
        self.as_json = as_json
        # in a file or a pipe nothing is cut or wrapped
        narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
        self.console = Console(emoji=False, highlight=False, width=None if narrow else 1 << 16)
        self._agents = agents
        self._page = page
        self._page_due = 0.0
        names = [*(task.name for task in tasks.tasks), *tasks.refused]
        images = [visible(task.image or _BASE) for task in tasks.tasks]
        self._widths = self._fitting(names, images or [_BASE])

    def _fitting(self, names: Sequence[str], images: Sequence[str]) -> dict[str, int]:
        """How wide each column is: names and images share what the others leave, and are cut where it isn't enough."""
        widths = {name: max(len(name), 4) for name in self._agents}
        widths = {"task": 0, "status": _WIDTHS["status"], **widths, **_WIDTHS}
        widths["task"] = max(_WIDTHS["task"], *map(cell_len, map(visible, names)))
        widths["image"] = max(_WIDTHS["image"], *map(cell_len, images))
        room = self.console.width - sum(widths.values()) - len(widths) + 1 + widths["task"] + widths["image"]
        widths["image"] = min(widths["image"], max(room // 2, room - widths["task"], _WIDTHS["image"]))
        widths["task"] = min(widths["task"], max(room - widths["image"], _WIDTHS["task"]))
        return widths

    def add(self, finding: TaskFinding) -> None:
        """Show and keep what was found of a task."""
        if not self.findings and not self.as_json:
            self._line(list(self._widths))
        self.findings.append(finding)
        if time.monotonic() >= self._page_due:
            self._write_page()
        if self.as_json:
            return
        self._line(self._cells(finding), STYLE[finding.status])
        for line in _remarks(finding):
            named = line if line.startswith(f"{finding.name}:") else f"{finding.name}: {line}"
            self.console.print(visible(named), markup=False)

    def _line(self, cells: Sequence[str], style: str = "") -> None:
        text = Text(no_wrap=True)
        for at, (cell, width) in enumerate(zip(cells, self._widths.values(), strict=True)):
            cut = cell if cell_len(cell) <= width else f"{set_cell_size(cell, width - 1)}…"
            text.append(set_cell_size(cut, width), style if at == 1 else "")
            text.append(" ")
        text.rstrip()
        self.console.print(text, overflow="ellipsis")

    def finish(self) -> None:
        """Show what was found of all."""
        self.findings.sort(key=lambda finding: finding.name)
        self._write_page()
        if self.as_json:
            typer.echo(json.dumps([finding.json() for finding in self.findings], indent=2))
            return
        for line in (*_notes(self.findings), _summary(self.findings)):
            self.console.print(visible(line), markup=False)

    def _write_page(self) -> None:
        if self._page is None:
            return
        began = time.monotonic()
        self._page.write_text(self._html(), encoding="utf-8")
        ended = time.monotonic()
        self._page_due = ended + _PAGE_PAUSE * (ended - began)

    def _cells(self, finding: TaskFinding) -> list[str]:
        attempts = finding.attempts or {}
        prepared = [one.prepared_s for one in attempts.values() if one.prepared_s is not None]
        sizes = [one.size_bytes for one in attempts.values() if one.size_bytes is not None]
        verifier = [one.verifier_s for one in attempts.values() if one.verifier_s is not None]
        cells = [
            finding.name,
            finding.status,
            *(_reward(attempts.get(agent)) for agent in self._agents),
            finding.image or _BASE,
            f"{max(prepared):.2f} s" if prepared else "",
            f"{max(sizes) / (1 << 20):.1f} MiB" if sizes else "",
            ", ".join(filter(None, [_mode(finding), f"{max(verifier):.2f} s" if verifier else ""])),
        ]
        return [visible(cell) for cell in cells]

    def _html(self) -> str:
        from atropos.dashboard.render import STYLE as PAGE_STYLE
        from atropos.dashboard.render import render

        headings, colours = [*self._widths, "remarks"], {"green": "good", "red": "bad", "yellow": "mid"}
        rows = [
            (
                colours[STYLE[finding.status]],
                list(zip(headings, [*self._cells(finding), visible("\n".join(_all_remarks(finding)))], strict=True)),
            )
            for finding in self.findings
        ]
        summary, notes = _summary(self.findings), _notes(self.findings)
        return render("tasks.html", style=PAGE_STYLE, headings=headings, rows=rows, summary=summary, notes=notes)


def _remarks(finding: TaskFinding) -> list[str]:
    runs = [] if finding.runs is None else [f"its tests run the agent's code: {finding.runs}"]
    return [*finding.problems, *(f"lowered: {text}" for text in finding.clamped), *runs]


def _all_remarks(finding: TaskFinding) -> list[str]:
    why = [] if finding.verifier is None else [f"{finding.verifier.mode}: {finding.verifier.reason}"]
    return [*_remarks(finding), *why]


def _mode(finding: TaskFinding) -> str:
    return "" if finding.verifier is None else finding.verifier.mode


def _reward(attempt: Attempt | None) -> str:
    return "" if attempt is None else "none" if attempt.reward is None else f"{attempt.reward:g}"


def _summary(findings: Sequence[TaskFinding]) -> str:
    counts = {status: sum(finding.status == status for finding in findings) for status in STYLE}
    lowered = sum(len(finding.clamped) for finding in findings)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    summary = f"{len(findings)} task{'s' * (len(findings) != 1)}: {', '.join(parts)}"
    shared = sum(_mode(finding) == "shared" for finding in findings)
    if shared:
        share = f"{shared / len(findings):.0%}"
        summary += f"; {shared} ({share}) judged in the agent's slot (shared), where a reward can be rigged"
    return f"{summary}; {lowered} limits lowered" if lowered else summary


def _notes(findings: Sequence[TaskFinding]) -> list[str]:
    """What is different here, once for all the tasks that it concerns."""
    counts = Counter(("note", f"{note.text}{_CURES[note.setting]}") for finding in findings for note in finding.notes)
    counts.update((one.verifier.mode, one.verifier.reason) for one in findings if one.verifier is not None)
    return [f"{kind}, {count} task{'s' * (count > 1)}: {note}" for (kind, note), count in counts.most_common()]
