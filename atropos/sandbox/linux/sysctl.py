"""The kernel's settings."""

from __future__ import annotations


def sysctl(name: str, default: int) -> int:
    """A setting, by its path below /proc/sys; the default where the kernel lacks or hides it."""
    try:
        with open(f"/proc/sys/{name}", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return default
