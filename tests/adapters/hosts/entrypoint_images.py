"""Images whose ENTRYPOINT says how it was started, once somebody reads /said. They have no /etc/passwd."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

from tests.images.making import entry, folder, layer, layout, link

PROGRAMS = ("sh", "cat", "chown", "echo", "mkdir", "sleep", "tail", "uname")


def image(at: Path, *more: tuple[tarfile.TarInfo, bytes], starts: str = "/start") -> str:
    """The source of one: with busybox, `more`, and an ENTRYPOINT, which is there where it is /start."""
    busybox = Path(shutil.which("busybox") or "/bin/busybox").read_bytes()
    start = entry("start", '#!/bin/sh\necho "$@" "$PWD" >/said\nexec "$@"\n', mode=0o755)
    files = [folder("bin"), entry("bin/busybox", busybox, mode=0o755), start, folder("srv")]
    files += [link(f"bin/{name}", "busybox") for name in PROGRAMS]
    files += [entry("said", kind=tarfile.FIFOTYPE, mode=0o666), *more]
    layout(at, layer(*files), config={"Entrypoint": [starts], "Cmd": ["false"], "WorkingDir": "/srv"})
    return f"oci:{at}"
