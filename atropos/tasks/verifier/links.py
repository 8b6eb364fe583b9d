"""Links of an agent's to what tests write: to places of the image that they name, and to files in its own folders.

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
count, names, since, others = int(others[0]), set(others[1].split()), others[2], others[3:]
outside, own = others[:count], others[count:]
if since:
    since = os.stat(since).st_ctime
    every = {link: end for link, end in every.items() if os.lstat(link).st_ctime <= since}
    ends = {link: end for link, end in ends.items() if link in every}
def named(path):
    top = max((each for each in folders if below(path, [each])), key=len)
    return not names.isdisjoint(path[len(top):].split("/"))
written = {*own, *map(os.path.realpath, own)}
for link, end in ends.items():
    program = os.path.isfile(end) and os.access(end, os.X_OK)
    if not program and (below(end, outside) or any(below(place, [end]) for place in outside)):
        replace(link, end, files(end) or {}, copy)
for link, end in every.items():
    if link in ends or "/node_modules/" in link or not below(end, folders) or not os.path.islink(link):
        continue
    # In a copy of its folder, a relative link may lead to a file of the tests' by the name that it says.
    text = os.readlink(link)
    said = text[:1] != "/" and not names.isdisjoint(part for part in text.split("/") if part.strip("."))
    loop, holds = below(link, [end]), any(below(path, [end]) for path in written)
    if any(below(path, [link]) for path in own) or not loop and (holds or said or named(link) or named(end)):
        by_name = {} if loop else files(end)
        if by_name is not None:
            replace(link, end, by_name, copy)
"""


async def cut_links(
    slot: Slot, folders: Sequence[str], places: Sequence[str], own: Sequence[str], names: str, since: str = ""
) -> None:
    """Replace links in folders with copies; for a view or a slot of the verifier's own.

    Args:
        slot: where the tests will run.
        folders: what the agent wrote.
        places: absolute paths that the tests name.
        own: files in these that the tests write, of which nobody speaks to the agent.
        names: other names that the tests know and nobody speaks of: a link with one in its path, or in that of what it
            leads to, may be where they write.
        since: a path; links that are younger stay.

    Raises:
        VerifierFailed: there is no room.
    """
    tops = tuple(f"{top}/" for top in (*_ELSEWHERE, *folders))
    # Sorted, so that the bound leaves out the same ones each time.
    outside = sorted(path for path in places if not f"{path}/".startswith(tops))[:MAX_PLACES]
    if not folders or not (outside or own or names):
        return
    done = await with_links(slot, _CUT, folders, (str(len(outside)), names, since, *outside, *own[:MAX_PLACES]))
    if done.exit_code != 0:
        raise VerifierFailed(f"links to what tests write can't be replaced: {done.output[-300:].strip()}")
