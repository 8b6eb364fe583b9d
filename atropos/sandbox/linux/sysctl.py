"""The kernel's settings."""

from __future__ import annotations

import os


def sysctl(name: str, default: int) -> int:
    """A setting, by its path below /proc/sys; the default where the kernel lacks or hides it."""
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default


def tell_kernel(path: str, value: str) -> None:
    """Write to a file of the kernel's; the built-in `open` would write to many more pages (docs/decisions/0013)."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
