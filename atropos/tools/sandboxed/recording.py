"""A terminal session as asciinema v2: a header line, then one JSON array an event.

Source: the asciicast v2 format as asciinema describes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path


class Recording:
    """Events of a terminal with the seconds since the start at which they were read."""

    def __init__(self, *, rows: int, cols: int, started: float, most_bytes: int, command: str, term: str) -> None:
        header = {
            "version": 2,
            "width": cols,
            "height": rows,
            "timestamp": int(started),
            "command": command[:500],
            "env": {"TERM": term},
        }
        self._lines = [json.dumps(header)]
        self._bytes = len(self._lines[0])
        self._most = most_bytes
        self._full = False

    def event(self, at_s: float, kind: str, data: str) -> None:
        """Add an event: `o` output, `i` input, `r` a new size, `m` a mark."""
        if self._full or not data:
            return
        line = json.dumps([round(at_s, 6), kind, data])
        if self._bytes + len(line) > self._most:
            self._full = True
            line = json.dumps([round(at_s, 6), "m", "the recording's bound was reached"])
        self._lines.append(line)
        self._bytes += len(line) + 1

    def text(self) -> str:
        """The whole file."""
        return "\n".join(self._lines) + "\n"


def write_recordings(folder: str, trajectory_id: str, recordings: Mapping[str, str]) -> None:
    """Write each session's recording as `TRAJECTORY-SESSION.cast`. Blocks."""
    for session_id, text in recordings.items():
        name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{trajectory_id[:150]}-{session_id[:50]}")
        path = Path(folder) / f"{name.lstrip('.') or 'session'}.cast"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
