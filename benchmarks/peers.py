"""The floor: what a call costs with no server at all. Blocking on purpose, but for shells together."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import Callable

COMMAND = "echo hi"
"""What every subject runs, through a shell, reading its output."""

_BWRAP = [
    "bwrap",
    *("--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/bin", "/bin"),
    *("--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64"),
    *("--proc", "/proc"),
    *("--dev", "/dev"),
    *("--tmpfs", "/tmp"),
    "--unshare-all",
    "--die-with-parent",
    "--new-session",
    "--",
]


def _run(path: str, argv: list[str]) -> None:
    """posix_spawn with one pipe: the cheapest way that Python has to run a program and read its output."""
    reader, writer = os.pipe()
    try:
        actions = [(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_DUP2, writer, 2)]
        pid = os.posix_spawn(path, argv, os.environ, file_actions=actions)
    finally:
        os.close(writer)
    output = b""
    while chunk := os.read(reader, 65536):
        output += chunk
    os.close(reader)
    _, status = os.waitpid(pid, 0)
    if output != b"hi\n" or status != 0:
        raise RuntimeError(f"{path} printed {output!r} and ended with {status}")


def fork_exec() -> None:
    """One fork and exec of bash, the shell that slots run: no isolation, no server."""
    _run("/bin/bash", ["/bin/bash", "-c", COMMAND])


def fork_exec_sh() -> None:
    """The same with /bin/sh (dash on Debian), which is what SWE-ReX starts."""
    _run("/bin/sh", ["/bin/sh", "-c", COMMAND])


async def shells_together(count: int) -> list[float]:
    """Seconds until each of so many bashes that are started at once has answered."""
    start = time.perf_counter()

    async def answer() -> float:
        process = await asyncio.create_subprocess_exec("/bin/bash", "-c", COMMAND, stdout=asyncio.subprocess.PIPE)
        await process.communicate()
        return time.perf_counter() - start

    return await asyncio.gather(*(answer() for _ in range(count)))


def fresh_bwrap() -> None:
    """One bubblewrap a call: isolated, but nothing kept between calls and no limits."""
    _run(shutil.which("bwrap") or "bwrap", [*_BWRAP, "/bin/bash", "-c", COMMAND])


def bwrap_works() -> bool:
    """Whether bubblewrap is there and may make namespaces."""
    if shutil.which("bwrap") is None:
        return False
    return subprocess.run([*_BWRAP, "/bin/true"], capture_output=True, check=False).returncode == 0


def timed(function: Callable[[], None], n: int) -> list[float]:
    """Seconds of each of `n` calls, after ten that aren't measured."""
    samples: list[float] = []
    for _ in range(10 + n):
        start = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start)
    return samples[10:]
