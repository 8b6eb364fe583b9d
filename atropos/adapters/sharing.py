"""One pool for all environments of a process that ask for the same settings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from atropos.slots import SlotPool, SlotPoolConfig


@dataclass
class SharedPool:
    """A pool of one event loop, started for its first user and stopped with its last."""

    config: SlotPoolConfig
    users: int = 0
    _pool: SlotPool | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def enter(self) -> SlotPool:
        """The running pool, until the matching `leave`.

        Raises:
            SandboxError: it can't be started.
        """
        self.users += 1
        try:
            async with self._lock:
                if self._pool is None:
                    pool = SlotPool(self.config)
                    await pool.start()
                    self._pool = pool
                return self._pool
        except BaseException:
            self.users -= 1
            raise

    async def leave(self) -> None:
        """One user fewer; after the last one nothing of the pool is left."""
        self.users -= 1
        async with self._lock:
            if not self.users and self._pool is not None:
                pool, self._pool = self._pool, None
                await pool.stop()


_shared: dict[tuple[asyncio.AbstractEventLoop, str], SharedPool] = {}


def shared_pool(config: SlotPoolConfig) -> SharedPool:
    """The pool of this event loop for these settings."""
    loop = asyncio.get_running_loop()
    for key in [key for key in _shared if key[0].is_closed()]:
        del _shared[key]
    return _shared.setdefault((loop, config.model_dump_json()), SharedPool(config))
