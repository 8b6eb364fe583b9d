"""What the numbers were taken on: cores, kernel, versions."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory_mib() -> int:
    first = Path("/proc/meminfo").read_text().splitlines()[0]
    return int(first.split()[1]) // 1024


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "absent"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except OSError as error:
        return str(error)
    return done.stdout.strip()


def describe() -> dict[str, Any]:
    """Machine and versions, as they go into the JSON."""
    versions = {}
    for name in ("atropos", "aiohttp", "pydantic", "websockets", "uvicorn", "httpx"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "absent"
    return {
        "time_utc": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": _memory_mib(),
        "kernel": platform.release(),
        "uid": os.getuid(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "bubblewrap": _output("bwrap", "--version"),
        "commit": _output("git", "rev-parse", "--short", "HEAD"),
        "versions": versions,
    }
