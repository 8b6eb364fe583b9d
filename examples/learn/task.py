"""The task: open one of several notes in the slot, and write the word in it to the file `door`.

Everything is checked in the slot. The score is 1 when the right note was opened and its word was then written, 0.2 when
another word was, else 0. A policy that chooses at random gets about 0.02; one that looks first and copies what it saw
is always right.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

PLACES = ("garden", "harbor", "kitchen", "window")
WORDS = ("amber", "coral", "ivory", "lilac", "navy", "pearl", "scarlet", "violet")
PUPILS = ("amy", "ben", "cal", "dan", "eve")
WRONG_WORD = 0.2
"""Score of having opened the right note and written another word."""
OPEN = 'echo "$1" >> opened; rm -f door; cat "notes/$1"'
"""The program by which notes are opened: only a word that is written afterwards counts."""
CHECK = "cat opened; echo --; cat door 2> /dev/null"
"""The command that reports the result after the agent has ended."""


@dataclass(frozen=True)
class Door:
    """One item: the note to open, the text of each note, and the pupil."""

    number: int
    pupil: str
    place: str
    notes: dict[str, str]

    @property
    def name(self) -> str:
        """Unique in a run."""
        return f"{self.pupil}-{self.number}"

    def task(self) -> str:
        """The user's message."""
        return f"Pupil {self.pupil}: open the note {self.place}, then write the word in it to the file door"

    def prepare(self) -> str:
        """The command that fills the slot."""
        notes = "; ".join(f"echo {word} > notes/{place}" for place, word in self.notes.items())
        return f"mkdir notes; {notes}; echo '{OPEN}' > open; chmod +x open"

    def score(self, found: str) -> float:
        """The score of `CHECK`'s output."""
        opened, _, door = found.partition("--\n")
        if self.place not in opened.split() or not door:
            return 0.0
        return 1.0 if door.strip() == self.notes[self.place] else WRONG_WORD


def door(number: int, pupil: str, words: Sequence[str]) -> Door:
    """The item of that number, the same everywhere and for every pupil."""
    rng = random.Random(number)
    return Door(number, pupil, rng.choice(PLACES), {place: rng.choice(words) for place in PLACES})


def solved(conversation: str) -> bool:
    """Whether the right note was opened and then its word written, judged by the conversation's text alone."""
    _, _, rest = conversation.partition("open the note ")
    place = re.match(r"\w+", rest)
    _, opened, rest = rest.partition(f"./open {place[0]}" if place else "\0")
    word = re.search(r'"output": "(\w+)', rest) if opened else None
    if word is None:
        return False
    written = rest[word.end() :]
    return f"echo {word[1]} > door" in written or f'"content": "{word[1]}"' in written


def call(tool: str, **arguments: Any) -> str:
    """A turn with one call, in the hermes format."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


def turns(words: Sequence[str]) -> list[list[str]]:
    """The policy's possible texts: any of these calls in each of two turns, then the final answer."""
    calls = [call("terminal", command=f"./open {place}") for place in PLACES]
    calls += [call("terminal", command=f"echo {word} > door") for word in words]
    calls += [call("write_file", path="door", content=word) for word in words]
    return [calls, calls, ["done"]]
