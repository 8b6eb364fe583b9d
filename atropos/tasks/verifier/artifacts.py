"""Artifacts on their way through this machine's disk, of which all trajectories have one."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator, Collection, Sequence
from pathlib import Path
from typing import TypeAlias
from weakref import WeakKeyDictionary

from atropos.slots import Slot
from atropos.tasks.verifier.carry import CarriedArtifact, TooLarge, carry_in, carry_out

MAX_BYTES = 2 << 30
"""Most that the artifacts of a trajectory may have together."""
SMALL_BYTES = 64 << 20
"""Most that they may have and need not wait for others."""
AT_ONCE = 2
"""How many trajectories have larger ones on this machine's disk."""
TURN_S = 60.0
"""Longest wait for those."""
Carried: TypeAlias = list[tuple[str, CarriedArtifact | None]]

# A semaphore belongs to one event loop; tests and notebooks have several, one after the other.
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


@contextlib.asynccontextmanager
async def taken_along(
    wanted: Sequence[tuple[Slot, str, Sequence[str]]], empty: Collection[str] = ()
) -> AsyncGenerator[Carried]:
    """Copies of files and folders, on this machine until the end of the body.

    Where they are large, this waits for trajectories that have some here, which may wait for a slot; not for ever,
    since who waits here may hold the room that they wait for.

    Args:
        wanted: where each is, its path, and patterns of what is left out.
        empty: paths of those that are known to be empty folders.

    Raises:
        VerifierFailed: they are too large together, or one can't be read.
        OSError: this machine's disk is full or broken.
    """
    async with contextlib.AsyncExitStack() as stack:
        try:
            # Tried small first: how large they are is known once they are here.
            carried = await _carry(stack, wanted, empty, SMALL_BYTES)
        except TooLarge:
            loop = asyncio.get_running_loop()
            # Without a turn it goes on: a disk that fills up fails one trajectory, a deadlock would stop all.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_S):
                    await stack.enter_async_context(_turns.setdefault(loop, asyncio.Semaphore(AT_ONCE)))
            carried = await _carry(stack, wanted, empty, MAX_BYTES)
        yield carried


async def _carry(
    stack: contextlib.AsyncExitStack,
    wanted: Sequence[tuple[Slot, str, Sequence[str]]],
    empty: Collection[str],
    budget: int,
) -> Carried:
    carried: Carried = []
    with contextlib.ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="atropos-artifacts-")))
        for number, (slot, path, exclude) in enumerate(wanted):
            to = folder / str(number)
            if path in empty:
                to.touch()
                artifact = CarriedArtifact(to, None)
            else:
                artifact = await carry_out(slot, path, to, exclude, max_bytes=max(1, budget))
            budget -= 0 if artifact is None else artifact.content.stat().st_size
            carried.append((path, artifact))
        # Only once all are here: a failed attempt removes its copies before the next one begins.
        stack.push(opened.pop_all())
    return carried


async def put_down(slot: Slot, carried: Carried) -> None:
    """Put artifacts in the places of what is there; each is then no longer on this machine.

    Raises:
        TaskBroken, VerifierFailed: the slot can't take one.
        OSError: this machine's disk is broken.
    """
    for path, artifact in carried:
        await carry_in(slot, path, artifact)
        if artifact is not None:
            await asyncio.to_thread(artifact.content.unlink)
