"""What tests need beyond an ordinary user; where it is missing they are skipped, and say so."""

from __future__ import annotations

import os
import re

import pytest


def _root(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(os.geteuid() != 0, reason=reason)


owners = _root("owners of files need root")
cgroups = _root("limits of memory and processes need cgroups: root, or delegation")
device_nodes = _root("device nodes are made as root")
mounts = _root("needs root to mount")
processes = _root("servers of an ordinary user have ids of their own: root alone sees what they hold")
volumes_on_disk = _root("a limit of volumes on disk needs root")


def without_gaps(said: str) -> str:
    """Less the line that says what an ordinary user's slots lack."""
    return re.sub(r"(?m)^slots of container \S+ lack .*\n", "", said)
