"""The settings of the backend in `processes.py`, which any pool and env has where this is installed."""

from __future__ import annotations

import sys

from pydantic import Field

from atropos.slots.plugins import BackendSettings


class ProcessSettings(BackendSettings):
    """A module of its own, without the backend: every process that imports `atropos.slots` reads it."""

    takes_image = False

    processes_python: str = Field(
        default=sys.executable, description="processes: the Python that runs the servers, with atropos in it"
    )
