"""Links of an agent's to places of the image that the tests name: they may write there what they expect.

Each is replaced with a copy of what it leads to, as that is before the tests start.
"""

from __future__ import annotations

from collections.abc import Sequence

from atropos.slots import Slot
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.verifier.elsewhere import with_links

MAX_PLACES = 256
"""Most places that are looked at."""
_ELSEWHERE = ("/usr", "/bin", "/sbin", "/lib", "/proc", "/dev", "/sys", "/tests", "/logs", "/solution", "/tmp", "/run")
"""Programs, which links may lead to, and where they lead nowhere anyway."""
_CUT = r"""
for link, end in ends.items():
    program = os.path.isfile(end) and os.access(end, os.X_OK)
    if not program and (below(end, others) or any(below(place, [end]) for place in others)):
        replace(link, end, files(end) or {}, copy)
"""


async def cut_links(slot: Slot, folders: Sequence[str], places: Sequence[str]) -> None:
    """Replace links in folders that lead to places with copies; for a view or a slot of the verifier's own.

    Args:
        slot: where the tests will run.
        folders: what the agent wrote.
        places: absolute paths that the tests name.

    Raises:
        VerifierFailed: there is no room.
    """
    tops = tuple(f"{top}/" for top in (*_ELSEWHERE, *folders))
    outside = sorted(path for path in places if not f"{path}/".startswith(tops))
    if not folders or not outside:
        return
    done = await with_links(slot, _CUT, folders, outside[:MAX_PLACES])
    if done.exit_code != 0:
        raise VerifierFailed(f"links to {', '.join(outside)[:200]} can't be replaced: {done.output[-300:].strip()}")
