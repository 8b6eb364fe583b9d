"""A container, as backends tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Container:
    """One sandbox server, running or starting.

    Attributes:
        id: the backend's own name: a pid and start time, a container id, an allocation id.
        index: its place in the scaling order; shrinking takes the highest first.
        url: `http://host:port` of the server, or `https://` with a `certificate`; None until known.
        token: the bearer token.
        state: `starting` until its process runs, then `running`; `ending` while it stops; `dead` when gone.
        detail: the backend's reason why it is not running.
        certificate: the only certificate that is accepted from the server, in PEM.
        place: what an operator finds it by: a pid, a host, a node with its allocation; empty: its id.
    """

    id: str
    index: int
    url: str | None
    token: str
    state: Literal["starting", "running", "ending", "dead"]
    detail: str = ""
    certificate: str | None = None
    place: str = ""

    @property
    def name(self) -> str:
        """What pages and terminals call it."""
        return f"{self.index} {self.place or self.id}"
