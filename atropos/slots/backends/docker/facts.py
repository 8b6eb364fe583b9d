"""What an engine says of itself, and what follows from it: plain data, no requests."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PODMAN_CDI = (5, 4)
"""First version of Podman whose API takes names of CDI devices; it doesn't report its folders."""
PODMAN_CDI_FOLDERS = frozenset(("/etc/cdi", "/var/run/cdi"))
LIMITS = {"MemoryLimit": "memory", "PidsLimit": "processes"}
"""Limits of a container that an engine may lack, by their names in its `info`."""
_DENIED = re.compile(
    r"\b(40[134]|unauthorized|authentication required|authorization failed|no basic auth credentials|denied|forbidden|"
    r"(manifest|name) unknown|not found)\b",
    re.IGNORECASE,
)
"""In what an engine says of a pull whose registry answered 401, 403 or 404."""


@dataclass(frozen=True)
class EngineFacts:
    """One engine.

    Attributes:
        name: `Docker` or `Podman`.
        rootless: an ordinary user runs it; its containers' own addresses can't be reached from outside of it.
        in_vm: it has another kernel than this machine, as that of Docker Desktop: nor can those.
        cdi_folders: where it looks for devices of the Container Device Interface; empty: it knows none.
        unlimited: what it can't limit.
    """

    name: str = "Docker"
    version: str = ""
    rootless: bool = False
    in_vm: bool = False
    cdi_folders: frozenset[str] = frozenset()
    unlimited: tuple[str, ...] = ()

    @classmethod
    def read(cls, version: Mapping[str, Any], info: Mapping[str, Any]) -> EngineFacts:
        """Read the answers to /version and /info."""
        podman = any(part.get("Name") == "Podman Engine" for part in version.get("Components") or ())
        options: list[str] = info.get("SecurityOptions") or []
        # Podman 4.3 says it by a field of its own alone
        rootless = any(option.split(",")[0] == "name=rootless" for option in options) or info.get("Rootless") is True
        number = str(version.get("Version", ""))
        reads = podman and tuple(map(int, re.findall(r"\d+", number)[:2])) >= PODMAN_CDI
        none = rootless and str(info.get("CgroupVersion")) == "1"  # whatever Podman reports for each
        return cls(
            name="Podman" if podman else "Docker",
            version=number,
            rootless=rootless,
            cdi_folders=PODMAN_CDI_FOLDERS if reads else frozenset(info.get("CDISpecDirs") or ()),
            in_vm=info.get("KernelVersion") not in {None, "", os.uname().release},
            unlimited=tuple(name for key, name in LIMITS.items() if none or info.get(key) is False),
        )

    def gaps(self) -> str:
        """What it can't do, as the end of a sentence; '' where nothing is missing."""
        gaps = [f"no limit of a container's {' or '.join(self.unlimited)}"] if self.unlimited else []
        if self.rootless or self.in_vm:
            gaps.append("containers are reached by ports of 127.0.0.1, not by their own addresses")
        return "".join(f"; {each}" for each in gaps)

    def __str__(self) -> str:
        where = ", in a virtual machine" * self.in_vm
        return f"{self.name} {self.version}{', rootless' * self.rootless}{where}"


def pull_is_denied(reason: str) -> bool:
    """Whether a registry answered that there is no such image or no access; engines report that with any status."""
    return _DENIED.search(reason) is not None
