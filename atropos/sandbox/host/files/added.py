"""What a container's runtime adds to an image: this machine's names in /etc, unless the image has its own.

They are a layer of their own above the image's: nothing is written when a slot starts, and no snapshot or built image
holds them.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Sequence

from atropos.images import stack
from atropos.sandbox.host.files import view_layers
from atropos.sandbox.programs import gateway

HOSTS = (
    "127.0.0.1\tlocalhost\n"
    "::1\tlocalhost ip6-localhost ip6-loopback\n"
    "ff02::1\tip6-allnodes\n"
    "ff02::2\tip6-allrouters\n"
    f"127.0.1.1\t{gateway.HOSTNAME}\n"
)
"""The own name has an address of its own, as Debian's installer gives it: the name of 127.0.0.1 is `localhost`
alone."""
FILES = {"hosts": HOSTS, "hostname": f"{gateway.HOSTNAME}\n", "resolv.conf": f"nameserver {gateway.ADDRESS}\n"}
MTAB = "/proc/mounts"
_MAX_BYTES = 1 << 20
_NAME_SERVER = re.compile(r"^nameserver\s+(?!127\.|::1\b)", re.MULTILINE)
"""Any that isn't on the loopback, where a slot has none: the gateway answers for all others."""


def build(folder: str, lower: Sequence[str]) -> bool:
    """Make the layer for an image in `folder`, which its owner removes; whether the image lacks anything.

    Args:
        folder: a new folder.
        lower: the image's layers, topmost first.

    Raises:
        OSError: it could not be made.
    """
    with contextlib.ExitStack() as opened:
        return _build(folder, [part.fd for part in stack.find(lower, "/etc", opened).parts])


def _build(folder: str, fds: Sequence[int]) -> bool:
    """As `build`; `fds`: /etc in each layer that shows it, topmost first."""
    etcs = [f"/proc/self/fd/{fd}" for fd in fds]
    texts = {name: text for name, default in FILES.items() if (text := _missing(etcs, name, default))}
    needs_mtab = _find(etcs, "mtab") is None
    if not (texts or needs_mtab):
        return False
    etc = f"{folder}/etc"
    for path in (folder, etc):
        os.mkdir(path, 0o755)
        os.chown(path, 0, 0)
    if fds:
        # Overlay shows the topmost folder's owner and mode: without this, those of the image's /etc would be lost.
        view_layers.copy_attributes(fds[0], etc)
    for name, text in texts.items():
        # surrogateescape: an image's own lines in /etc/hosts are kept as they are, whatever their bytes.
        with open(f"{etc}/{name}", "x", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            os.fchown(file.fileno(), 0, 0)
    if needs_mtab:
        os.symlink(MTAB, f"{etc}/mtab")
        os.chown(f"{etc}/mtab", 0, 0, follow_symlinks=False)
    return True


def _find(etcs: Sequence[str], name: str) -> os.stat_result | None:
    """What an image has under a name in /etc; nothing where a layer removed it."""
    for etc in etcs:
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(f"{etc}/{name}")
            return None if stack.is_whiteout(status) else status
    return None


def _missing(etcs: Sequence[str], name: str, default: str) -> str:
    """What a file of /etc is to hold instead of what the image has; empty: what it has will do."""
    status = _find(etcs, name)
    # `docker export` leaves empty files where Docker mounts its own.
    if status is None or (stat.S_ISREG(status.st_mode) and status.st_size == 0):
        return default
    if name == "hostname":
        return ""
    if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
        # a link leads to what a service would write, which no slot runs
        return default if name == "resolv.conf" and stat.S_ISLNK(status.st_mode) else ""
    etc = next(etc for etc in etcs if os.path.lexists(f"{etc}/{name}"))
    with open(
        os.open(f"{etc}/{name}", os.O_RDONLY | os.O_NOFOLLOW), encoding="utf-8", errors="surrogateescape"
    ) as file:
        text = file.read()
    if name == "resolv.conf":
        return "" if _NAME_SERVER.search(text) else default
    # Only names that it lacks: the first line that has a name wins (hosts(5)), and the image's are its own choice.
    names = {word for line in text.splitlines() for word in line.partition("#")[0].split()[1:]}
    more = [
        line for line in HOSTS.splitlines(keepends=True) if line.startswith("127.") and line.split()[1] not in names
    ]
    return "".join((text, "" if text.endswith("\n") else "\n", *more)) if more else ""
