"""What the conformance tests need to know of a backend."""

from __future__ import annotations

from abc import ABC, abstractmethod

from atropos.slots import SlotPool, SlotPoolConfig


class BackendHarness(ABC):
    """One backend under test: how a pool on it is configured, how a container is lost, and what a pool left behind."""

    @abstractmethod
    def config(self, **settings: object) -> SlotPoolConfig:
        """A pool's configuration, under a `job_id` that no other pool has.

        Args:
            settings: fields of `SlotPoolConfig` that the test decides; everything else is the harness's choice. The
                tests expect small limits (about 192 MiB of memory and 64 MiB of disk a slot) and a `start_timeout_s`
                in which the backend starts two containers.
        """

    @abstractmethod
    async def kill(self, pool: SlotPool, container: str) -> None:
        """End a container as an accident would (SIGKILL, a lost machine), behind the backend's back.

        Args:
            pool: a running pool.
            container: the id of one of its containers, as `Slot.container` gives it.
        """

    async def residue(self, config: SlotPoolConfig) -> list[str]:
        """Describe what is left of a pool that has stopped: processes, containers, jobs, mounts.

        It may wait a little for an engine to finish. The tests expect an empty list; this default finds nothing.
        """
        del config
        return []
