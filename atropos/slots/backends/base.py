"""What makes containers exist. A backend knows nothing of slots or leases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Container:
    """One running (or coming) sandbox server.

    Attributes:
        id: the backend's own name: a pid and start time, a container id, an allocation id.
        index: its place in the scaling order; shrinking takes the highest first.
        url: `http://host:port` of the server, or `https://` with a `certificate`; None until known.
        token: the bearer token.
        state: `starting` until its process runs, then `running`; `ending` while it stops; `dead` when gone.
        detail: why it is not running, in the backend's own words.
        certificate: in PEM, the only one that the server may show.
    """

    id: str
    index: int
    url: str | None
    token: str
    state: Literal["starting", "running", "ending", "dead"]
    detail: str = ""
    certificate: str | None = None


class Backend(ABC):
    """The contract that `tests/conformance` holds every backend to."""

    name: str
    client_id: str = ""
    """What the pool calls itself towards servers: a server's clients of other names are somebody else's."""

    @abstractmethod
    async def start(self) -> None:
        """Connect, check what can be checked, adopt or remove what an earlier run left.

        Raises:
            ConfigError: a setting is wrong; the message names it.
            BackendUnavailable: the engine can't be reached.
            IsolationUnavailable: the host can't do it.
        """

    @abstractmethod
    async def scale(self, count: int) -> None:
        """Ask for `count` containers. Returns when asked, not when they run; shrinking ends the highest index first.

        Raises:
            BackendUnavailable: the engine refused; the message carries its own reason.
        """

    @abstractmethod
    def containers(self) -> Sequence[Container]:
        """The last known containers, dead ones not among them. Never blocks; a failed poll changes nothing."""

    @abstractmethod
    async def changed(self) -> None:
        """Wait until `containers()` may answer differently."""

    @abstractmethod
    def trouble(self) -> str:
        """Why containers are not coming, in the engine's own words; empty when nothing is wrong."""

    def outage(self) -> str:
        """Why the engine itself gives no answer, in its own words; empty while it answers, or where there is none."""
        return ""

    def failure(self) -> Exception | None:
        """Why no container will ever come (a `SandboxError` or `ConfigError`); None while trying again makes sense."""
        return None

    async def retire(self, container: Container) -> None:
        """Replace a container that is alive but not to be used again (too many retired slots, no answer).

        Raises:
            BackendUnavailable: the engine refused.
        """
        raise NotImplementedError

    @abstractmethod
    async def aclose(self, *, purge: bool) -> None:
        """Let go. With `purge`, nothing of this backend's own containers, jobs or secrets is left."""
