"""The pool and the executor that an env's trajectories run on, from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator

from atropos.envs.config import SandboxEnvConfig, own_field_names
from atropos.envs.running.lifecycle import bounded
from atropos.envs.running.rollout import NoSlotYet
from atropos.errors import AcquireTimeout, ConfigError, NotSupported
from atropos.slots import SlotPool, Snapshot
from atropos.tools import ToolExecutor, ToolRegistry

_log = logging.getLogger(__name__)


class ToolBackend:
    """Pool, executor, and the admission of trajectories.

    Attributes:
        pool: None unless it runs.
        admission: admits as many trajectories as there may be slots.
    """

    def __init__(self, config: SandboxEnvConfig) -> None:
        self._config = config
        self._executor: ToolExecutor | None = None
        self.pool: SlotPool | None = None
        self.admission = asyncio.Semaphore(config.capacity)

    @property
    def running(self) -> bool:
        """Whether there is an executor."""
        return self._executor is not None

    @property
    def executor(self) -> ToolExecutor:
        """The tool executor; there from `start` to `stop`."""
        if self._executor is None:
            raise RuntimeError("the tool backend is not running; call start_tool_backend() first")
        return self._executor

    @executor.setter
    def executor(self, executor: ToolExecutor) -> None:
        self._executor = executor

    async def start(self, tools: ToolRegistry) -> None:
        """Start pool and executor.

        Raises:
            SandboxError: no container could be started.
            ConfigError: a setting is wrong or not available.
        """
        config = self._config.executor_config()
        # The pool's and the executor's errors then name fields as the env's user has set them.
        with own_field_names(self._config):
            self.pool = SlotPool(self._config.pool_config())
            await self.pool.start()
            if config.allow_network:
                # Found out once, before any trajectory: else each of them would fail at its first lease.
                config = config.model_copy(update={"allow_network": await self._network(self.pool)})
            executor = ToolExecutor(pool=self.pool, tools=tools, config=config)
            await executor.start()
        # Last: `running` says that trajectories may begin.
        self._executor = executor

    async def _network(self, pool: SlotPool) -> bool:
        """Whether slots get egress. A backend without it is refused only if `allow_network` was set.

        Raises:
            ConfigError: `allow_network` was set and is not available.
        """
        try:
            # A lease, as only a container's server knows whether its machine can give egress.
            async with pool.lease("network-probe", network=True):
                return True
        except NotSupported as error:
            if "allow_network" in self._config.model_fields_set:
                raise ConfigError(f"env.allow_network: {error}; set --env.allow_network false") from error
            _log.warning("programs in slots have no network: %s", error)
            return False

    async def stop(self) -> None:
        """Release every trajectory and stop the containers. Idempotent."""
        # Both at once, before the first await: a second `stop` finds nothing, and a new call no executor.
        executor, self._executor = self._executor, None
        pool, self.pool = self.pool, None
        if executor is not None:
            # The executor first: it gives slots back to the pool.
            await bounded("the tool executor", executor.close(), 20)
        if pool is not None:
            await bounded("the slot pool", pool.stop(purge_job=self._config.purge_job_on_shutdown), 60)

    async def release(self, trajectory_id: str) -> None:
        """Give a trajectory's slot back, where the backend still runs."""
        if self._executor is not None:
            await self._executor.release_trajectory(trajectory_id, reset_workspace=True)

    async def freeze(self, trajectory_id: str) -> Snapshot:
        """Snapshot a trajectory's workspace and release its slot. A cancellation leaves neither."""
        slot = await self.executor.slot(trajectory_id)
        snapshot = await slot.snapshot()
        try:
            # The slot is of no more use, and others wait for one; the snapshot stands by itself.
            await self.executor.release_trajectory(trajectory_id)
        except BaseException:
            await snapshot.drop()
            raise
        return snapshot

    @contextlib.contextmanager
    def awaiting_slot(self, trajectory_id: str) -> Generator[None]:
        """Around work in a trajectory's slot.

        Raises:
            NoSlotYet: it got none, and slots are at work, so that one comes free.
        """
        try:
            yield
        except AcquireTimeout as error:
            # With no slot leased, nothing will come free: that is a failure, which counts against the retries.
            at_work = self.pool is not None and self.pool.stats().leased > 0
            if at_work and not self.executor.has_slot(trajectory_id):
                raise NoSlotYet(str(error)) from error
            raise

    def outage(self) -> str:
        """Why Nomad or Docker is away with no container left; empty if it isn't."""
        return "" if self.pool is None else self.pool.outage()

    async def wait_for_engine(self) -> None:
        """Wait until the engine answers again.

        Raises:
            BackendUnavailable: it stayed away for `outage_s`.
        """
        if self.pool is not None:
            await self.pool.wait_for_engine()
