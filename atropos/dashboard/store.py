"""Finished trajectories in bounded memory: a small entry each for lists, and their messages compressed."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from atropos.dashboard.changes import Changes, changes_of
from atropos.dashboard.conversation import Message, conversation
from atropos.dashboard.ordering import Columns, Order
from atropos.dashboard.records import as_dict, as_list, finite

MAX_TRAJECTORIES = 20_000
MAX_BYTES = 256 * 1024 * 1024
"""Of compressed messages; the oldest trajectories go first."""


@dataclass(frozen=True)
class StoredTrajectory:
    """One trajectory in a list.

    Attributes:
        number: unique in its store, consecutive.
        group: of its group, unique in its store.
        began: when its first turn began, in Unix seconds; None: its record doesn't say.
        tools: names of the tools that were called.
        tool_errors: results that say that their call failed.
    """

    number: int
    group: int
    item: str
    trajectory_id: str
    score: float
    steps: int
    calls: int
    seconds: float
    attempts: int
    stop_reason: str
    tools: tuple[str, ...]
    tool_errors: int
    phases: dict[str, float]
    began: float | None


@dataclass(frozen=True)
class Details:
    """What a trajectory's own page shows besides its entry; `turns` are the seconds of each, empty in older files."""

    messages: list[Message]
    info: dict[str, object]
    turns: list[dict[str, object]]
    changes: Changes


@dataclass(frozen=True)
class Query:
    """Which trajectories are wanted; empty fields don't restrict.

    Attributes:
        text: found in messages, verifier output or id, whatever the case of ASCII letters.
        item: part of the item's name; its whole name with `whole_item`.
        error: a stop reason, or `tools` for any trajectory with a failed call.
        tool: name of a tool that was called.
        least / most: bounds of the score, inclusive.
    """

    text: str = ""
    item: str = ""
    error: str = ""
    tool: str = ""
    least: float | None = None
    most: float | None = None
    whole_item: bool = False

    def admits(self, entry: StoredTrajectory) -> bool:
        """Whether an entry matches all but the text."""
        return (
            (self.item == entry.item.strip() if self.whole_item else self.item.lower() in entry.item.lower())
            and (not self.tool or self.tool in entry.tools)
            and (not self.error or entry.stop_reason == self.error or (self.error == "tools" and entry.tool_errors > 0))
            and (self.least is None or entry.score >= self.least)
            and (self.most is None or entry.score <= self.most)
        )


COLUMNS: Columns[StoredTrajectory] = {
    "score": lambda entry: entry.score,
    "item": lambda entry: entry.item,
    "trajectory": lambda entry: entry.trajectory_id,
    "began": lambda entry: entry.began or 0.0,
    "steps": lambda entry: entry.steps,
    "calls": lambda entry: entry.calls,
    "failed": lambda entry: entry.tool_errors,
    "seconds": lambda entry: entry.seconds,
    "ended": lambda entry: entry.stop_reason,
}
LATEST_FIRST = Order.asked("", COLUMNS)


class TrajectoryStore:
    """The latest trajectories. Its methods may be called from any thread.

    Attributes:
        forgotten: trajectories that were dropped for want of room.
    """

    def __init__(self, max_trajectories: int = MAX_TRAJECTORIES, max_bytes: int = MAX_BYTES) -> None:
        self._max, self._max_bytes = max_trajectories, max_bytes
        self._rows: deque[tuple[StoredTrajectory, bytes]] = deque()
        self._bytes = self._next = self._groups = self.forgotten = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, group: Mapping[str, object]) -> None:
        """Keep a group as `scored_group` gives it, without tokens; of malformed parts, what can be read."""
        item = item_of(group)
        read = [(entry_of(trajectory, item=item)[0], _packed(trajectory)) for trajectory in members(group)]
        with self._lock:
            for entry, blob in read:
                numbered = replace(entry, number=self._next, group=self._groups)
                self._rows.append((numbered, blob))
                self._next += 1
                self._bytes += len(blob)
            self._groups += 1
            while self._rows and (len(self._rows) > self._max or self._bytes > self._max_bytes):
                self._bytes -= len(self._rows.popleft()[1])
                self.forgotten += 1

    def clear(self) -> None:
        """Drop all trajectories. Later ones get new numbers."""
        with self._lock:
            self._rows.clear()
            self._bytes = self.forgotten = 0

    def entries(self) -> list[StoredTrajectory]:
        """All, the oldest first."""
        with self._lock:
            return [entry for entry, _ in self._rows]

    def find(
        self, query: Query, *, first: int = 0, limit: int = 50, order: Order[StoredTrajectory] = LATEST_FIRST
    ) -> tuple[list[StoredTrajectory], int]:
        """A page of the matching entries, and how many match in all."""
        with self._lock:
            rows = list(self._rows)
        # As it stands in what is kept, which is JSON.
        needle = json.dumps(query.text, ensure_ascii=False)[1:-1].encode(errors="surrogatepass").lower()
        matching = [
            entry
            for entry, blob in reversed(rows)
            if query.admits(entry)
            and (
                not needle or needle in entry.trajectory_id.lower().encode() or needle in zlib.decompress(blob).lower()
            )
        ]
        return order.sorted(matching)[first : first + limit], len(matching)

    def get(self, number: int) -> tuple[StoredTrajectory, Details] | None:
        """A trajectory; None: there is none, or it is forgotten."""
        with self._lock:
            # Numbers are consecutive, and the oldest go first.
            at = number - self._rows[0][0].number if self._rows else -1
            row = self._rows[at] if 0 <= at < len(self._rows) else None
        return None if row is None else (row[0], _unpacked(row[1]))

    def group(self, number: int) -> list[tuple[StoredTrajectory, Details]]:
        """The trajectories of a group that are still kept."""
        with self._lock:
            rows = [row for row in self._rows if row[0].group == number]
        return [(entry, _unpacked(blob)) for entry, blob in rows]

    def facets(self) -> tuple[list[str], list[str]]:
        """The stop reasons and the tools there are, the most frequent first."""
        entries = self.entries()
        reasons = Counter(entry.stop_reason for entry in entries)
        tools = Counter(tool for entry in entries for tool in entry.tools)
        return [name for name, _ in reasons.most_common(30)], [name for name, _ in tools.most_common(50)]


class GroupFile:
    """A JSONL of groups that may still grow."""

    def __init__(self, path: Path, store: TrajectoryStore) -> None:
        self._path, self._store = path, store
        self._file, self._at = (0, 0), 0
        self._lock = threading.Lock()

    def refresh(self) -> None:
        """Read what was appended; a last line without its end stays for later.

        Of a file that shrank or is another one, all is read.

        While there is no file, as before a run that writes it anew, what was read stays.
        """
        with self._lock, contextlib.suppress(FileNotFoundError), self._path.open("rb") as lines:
            status = os.fstat(lines.fileno())
            if (status.st_dev, status.st_ino) != self._file or status.st_size < self._at:
                self._store.clear()
                self._file, self._at = (status.st_dev, status.st_ino), 0
            lines.seek(self._at)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._at += len(line)
                for group in groups_of(line):
                    self._store.add(group)


def read_groups(jsonl: Path, left_out: Callable[[int], object] = lambda _: None) -> Iterator[dict[str, object]]:
    """The groups of a file; lists of groups are flattened.

    Args:
        jsonl: the file.
        left_out: called with the number of each line that holds no group, as a half-written last one.
    """
    with jsonl.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            groups = list(groups_of(line))
            if not groups and line.strip():
                left_out(number)
            yield from groups


def groups_of(line: bytes) -> Iterator[dict[str, object]]:
    """The groups of one line."""
    try:
        value = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return
    for group in as_list(value) or [value]:
        if isinstance(group, dict):
            yield as_dict(group)


def item_of(group: Mapping[str, object]) -> str:
    """The name of a group's item."""
    return str(as_dict(group.get("atropos")).get("item") or "group")


def scores_of(group: Mapping[str, object]) -> list[float]:
    """The scores of a group's trajectories."""
    return [finite(score) for score in as_list(group.get("scores"))]


def members(group: Mapping[str, object]) -> Iterator[dict[str, object]]:
    """A group's trajectories: each one's summary, with its `score`, `messages`, and lists of tokens as in the group."""
    summaries = as_list(as_dict(group.get("atropos")).get("trajectories"))
    lists = {name: as_list(group.get(name)) for name in ("messages", "tokens", "masks", "inference_logprobs")}
    overrides = as_list(group.get("overrides"))
    for index, score in enumerate(scores_of(group)):
        summary = as_dict(summaries[index]) if index < len(summaries) else {}
        named = {"trajectory_id": f"trajectory {index}", **summary}
        own = {name: as_list(values[index]) if index < len(values) else [] for name, values in lists.items()}
        trainer = as_dict(overrides[index]) if index < len(overrides) else {}
        yield {**named, "score": score, **own, "trainer": {**as_dict(group.get("generation_params")), **trainer}}


def entry_of(trajectory: Mapping[str, object], *, item: str) -> tuple[StoredTrajectory, Details]:
    """A trajectory of `members`, parsed; the entry is not numbered yet."""
    details = _details(trajectory)
    parts = [part for message in details.messages for part in message.parts]
    entry = StoredTrajectory(
        number=0,
        group=0,
        item=item,
        trajectory_id=str(trajectory["trajectory_id"]),
        score=finite(trajectory["score"]),
        steps=int(finite(trajectory.get("steps"))),
        calls=int(finite(trajectory.get("calls"))),
        seconds=finite(trajectory.get("seconds")),
        attempts=int(finite(trajectory.get("attempts", 1))),
        stop_reason=str(trajectory.get("stop_reason") or "final"),
        tools=tuple(dict.fromkeys(part.name for part in parts if part.name)),
        tool_errors=sum(part.failed for part in parts),
        phases={str(name): finite(value) for name, value in as_dict(trajectory.get("phases")).items()},
        began=_moment(details.turns[0].get("started_at")) if details.turns else None,
    )
    return entry, details


def _moment(value: object) -> float | None:
    try:
        return datetime.fromisoformat(value).timestamp() if isinstance(value, str) else None
    except (ValueError, OverflowError):
        return None


def _details(trajectory: Mapping[str, object]) -> Details:
    return Details(
        conversation(trajectory.get("messages")),
        as_dict(trajectory.get("info")),
        [as_dict(turn) for turn in as_list(trajectory.get("turns"))],
        changes_of(as_dict(trajectory.get("changes"))),
    )


def _packed(trajectory: Mapping[str, object]) -> bytes:
    """What `_details` reads of a trajectory, compressed."""
    details = {name: trajectory.get(name) for name in ("messages", "info", "turns", "changes")}
    return zlib.compress(json.dumps(details, ensure_ascii=False, default=str).encode(errors="surrogatepass"), 1)


def _unpacked(blob: bytes) -> Details:
    return _details(as_dict(json.loads(zlib.decompress(blob).decode(errors="surrogatepass"))))
