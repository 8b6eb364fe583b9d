"""What hosts ask of a slot's folders beside reading and writing files; needs no more of its image than a shell."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from atropos.adapters.sharing import HeldSlot, time_limit

_FAILED = 100
"""Added to the `errno` that a script ends with: shells and programs end with small codes of their own."""
_PATH = f"""
fail() {{ exit $(({_FAILED} + $1)); }}
present() {{ [ -e "$1" ] || [ -L "$1" ]; }}
"""
_LIST = f"""
[ -d "$1" ] || {{ present "$1" && fail {errno.ENOTDIR}; fail {errno.ENOENT}; }}
cd -- "$1" 2>/dev/null && [ -r . ] || fail {errno.EACCES}
for name in * .*; do
  case $name in .|..) continue;; esac
  present "$name" || continue
  [ -d "$name" ] && printf 'd%s\\0' "$name" || printf -- '-%s\\0' "$name"
done
"""
_STAT = f"""
[ -d "$1" ] && {{ echo d; exit 0; }}
[ -f "$1" ] && {{ echo "-$(wc -c <"$1" 2>/dev/null)"; exit 0; }}
present "$1" && fail {errno.EINVAL}
fail {errno.ENOENT}
"""
_MAKE = f"""
present "$1" && {{ [ -d "$1" ] && exit 0; fail {errno.EEXIST}; }}
above=${{1%/*}}
until [ -d "$above/" ]; do present "$above" && fail {errno.ENOTDIR}; above=${{above%/*}}; done
[ -w "$above/" ] || fail {errno.EACCES}
mkdir -p -- "$1"
"""
_REMOVE = f"""
present "$1" || fail {errno.ENOENT}
above=$(cd -P -- "${{1%/*}}/" && pwd -P) || fail {errno.EACCES}
found=${{above%/}}/${{1##*/}}
case $2/ in "${{found%/}}"/*) fail {errno.EBUSY};; esac
[ -w "$above" ] || fail {errno.EACCES}
rm -rf -- "$1"
"""


@dataclass(frozen=True)
class Entry:
    """What has a name in a folder.

    Attributes:
        name: its last part.
        path: absolute.
        is_dir: whether it is a folder, or a link to one.
        size: bytes of a regular file, where they are known.
    """

    name: str
    path: str
    is_dir: bool
    size: int | None = None


async def list_folder(held: HeldSlot, path: str) -> list[Entry]:
    """What is in a folder, by name. Raises `OSError` and `SandboxError`."""
    listed = (await _run(held, _LIST, path)).split("\0")[:-1]
    return [
        Entry(line[1:], f"{path.rstrip('/')}/{line[1:]}", is_dir=line[0] == "d")
        for line in sorted(listed, key=lambda line: line[1:])
    ]


async def stat(held: HeldSlot, path: str) -> Entry:
    """A file or folder; links are followed. Raises `OSError` and `SandboxError`."""
    kind_and_size = (await _run(held, _STAT, path)).strip()
    size = kind_and_size[1:].strip()
    return Entry(path.rstrip("/").rpartition("/")[2], path, kind_and_size[0] == "d", int(size) if size else None)


async def exists(held: HeldSlot, path: str) -> bool:
    """Whether there is something; a link to nothing is nothing. Raises `SandboxError`."""
    try:
        await _run(held, '[ -e "$1" ] || fail 2', path)
    except FileNotFoundError:
        return False
    return True


async def make_folder(held: HeldSlot, path: str) -> None:
    """Make a folder with its parents, unless it is there. Raises `OSError` and `SandboxError`."""
    await _run(held, _MAKE, path)


async def remove(held: HeldSlot, path: str) -> None:
    """Remove a file, a link or a folder with all in it.

    Raises:
        OSError: it isn't there or can't be removed; with `errno.EBUSY` where the slot's working folder is in it.
        SandboxError: the infrastructure failed.
    """
    await _run(held, _REMOVE, path, held.folder)


async def _run(held: HeldSlot, script: str, path: str, *more: str) -> str:
    """What a script prints, as the slot's user."""
    argv = ["/bin/sh", "-c", _PATH + script, "sh", path, *more]
    result = await held.slot.exec(argv, workdir="/", user=held.user, split=True, concurrent=True)
    if result.timed_out:
        raise TimeoutError(errno.ETIMEDOUT, f"took longer than {time_limit(result, None)}", path)
    if result.truncated:
        raise OSError(
            errno.EFBIG, f"more is listed than the slot's limits.output_bytes ({result.dropped_bytes} bytes)", path
        )
    if result.exit_code == 0:
        return (result.stdout_bytes or b"").decode(errors="surrogateescape")
    number = (result.exit_code or 0) - _FAILED
    if number in errno.errorcode:
        raise OSError(number, os.strerror(number), path)
    raise OSError(errno.EIO, result.output.strip() or f"exit code {result.exit_code}", path)
