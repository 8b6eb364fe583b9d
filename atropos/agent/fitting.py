"""A turn's results in the room that the context has left: shortened together where they would not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atropos.agent.config import Outcome
from atropos.agent.transcript import Message
from atropos.tools.sandboxed.text import clip_result

MIN_TURN_TOKENS = 16
"""Least room in the context for another turn."""
NEXT_TURN_TOKENS = 1024
"""Room that shortened results leave for the next turn, or a quarter of what there is where that is less."""
TRIES = 8
"""Most lengths tried before only notes are left."""
NOTE_CHARS = 100
"""More than a note has, so that a shortened text isn't shortened again."""
WHY = ": the context is nearly full"

Written = tuple[list[Message], list[int]]
"""Messages, and their token ids up to where the next turn begins."""


def fitting(
    outcomes: Sequence[Outcome], write: Callable[[Sequence[Outcome]], Written], *, room: int, most: int
) -> Written | None:
    """What a turn's calls gave, written so that the context has room for it and for another turn.

    Args:
        outcomes: of the turn's calls.
        write: renders them; called once where they fit.
        room: tokens that the context has left.
        most: most characters of each text.

    Returns:
        None: there is no room even where of each long text only a note is left.
    """
    longest = room - min(NEXT_TURN_TOKENS, max(room // 4, MIN_TURN_TOKENS))
    written = write(outcomes)
    if len(written[1]) <= longest:
        return written
    # The least that they can take, from which the rest is shared out.
    notes = write(_clipped(outcomes, 0))
    limit = most
    lengths = [min(len(text), most) for _, result in outcomes for text in (result.output, result.error or "")]
    for _ in range(TRIES):
        if len(notes[1]) >= longest:
            break
        share = (longest - len(notes[1])) / (len(written[1]) - len(notes[1]))
        total = sum(min(length, limit) for length in lengths)
        # Characters, while the room is in tokens: by the ratio of the last try, and somewhat less, as it varies over a
        # text.
        limit = max(0, min(level(lengths, int(total * share * 0.95)), most - NOTE_CHARS))
        # Rendered anew, as only the whole says how many tokens it has.
        written = write(_clipped(outcomes, limit))
        if len(written[1]) <= longest:
            return written
    return notes if len(notes[1]) + MIN_TURN_TOKENS <= room else None


def level(lengths: Sequence[int], total: int) -> int:
    """The limit to which lengths must be cut to have that total: short ones stay whole, long ones become equal."""
    remaining = total
    for index, length in enumerate(sorted(lengths)):
        share = remaining // (len(lengths) - index)
        if length > share:
            return share
        remaining -= length
    return max(lengths, default=0)


def _clipped(outcomes: Sequence[Outcome], most: int) -> list[Outcome]:
    return [outcome._replace(result=clip_result(outcome.result, most, WHY)) for outcome in outcomes]
