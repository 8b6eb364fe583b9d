"""The interface of backends, which make containers and know nothing of slots or leases."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from atropos.errors import ConfigError

if TYPE_CHECKING:
    from atropos.slots.backends.container import Container
    from atropos.slots.backends.survey import Survey


class Backend(ABC):
    """A backend; the tests of `atropos.testing` check each."""

    name: str
    client_id: str = ""
    """The pool's id as a client of its servers: clients with other ids belong to other pools."""

    @classmethod
    async def survey(cls, job_id: str, address: str | None) -> Survey:
        """What an operator sees of a pool's containers, for `atropos pool` and `atropos top`.

        Args:
            job_id: the pool's.
            address: of the engine; None: the usual place.

        Raises:
            ConfigError: they can't be found from another process than the pool's.
            BackendUnavailable: the engine does not answer.
        """
        del job_id, address
        raise ConfigError(f"--backend {cls.name!r}: its containers are known to their pool's own process alone")

    @abstractmethod
    async def start(self) -> None:
        """Connect, check the settings, adopt or remove containers of an earlier run.

        Raises:
            ConfigError: a setting is wrong; the message names it.
            BackendUnavailable: the engine can't be reached.
            IsolationUnavailable: the host can't isolate slots.
        """

    def note_base(self) -> None:
        """Log what a slot without an image lacks, where it lacks something: a lease has named none."""
        return

    @abstractmethod
    async def scale(self, count: int) -> None:
        """Request `count` containers. Returns before they run; shrinking ends the highest index first.

        Raises:
            BackendUnavailable: the engine refused; the message has its reason.
        """

    @abstractmethod
    def containers(self) -> Sequence[Container]:
        """The last known containers, without dead ones. Never blocks; a failed poll changes nothing."""

    @abstractmethod
    async def changed(self) -> None:
        """Wait until `containers()` may have changed."""

    @abstractmethod
    def trouble(self) -> str:
        """The engine's reason why containers don't start; empty when all is well."""

    def outage(self) -> str:
        """Why the engine doesn't answer; empty while it answers, or without an engine."""
        return ""

    def failure(self) -> Exception | None:
        """Why no container will ever start (a `SandboxError` or `ConfigError`); None while a retry may help."""
        return None

    async def retire(self, container: Container) -> None:
        """Replace a live container that must not be used again (too many retired slots, no answer).

        Raises:
            BackendUnavailable: the engine refused.
        """
        raise NotImplementedError

    @abstractmethod
    async def aclose(self, *, purge: bool) -> None:
        """Disconnect. With `purge`, remove this backend's containers, jobs and secrets."""
