"""Cgroups of a test's own."""

from __future__ import annotations

from pathlib import Path


def make(folder: Path) -> None:
    """Make a cgroup that processes may enter: on cgroup v1, one of cpuset has no CPUs of its own at first."""
    folder.mkdir()
    for name in ("cpuset.cpus", "cpuset.mems"):
        if (folder / name).exists() and not (folder / "cgroup.controllers").exists():
            (folder / name).write_text((folder.parent / name).read_text())
