"""Sandboxes: leases with an expiry, which clients may change."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from atropos.aio import set_within
from atropos.api.e2b.sandbox import Sandbox
from atropos.api.executor.models import ExecutorServerSettings
from atropos.config import SlotLimits
from atropos.errors import ConfigError
from atropos.images.reference import ImageSource
from atropos.slots.slot.profile import Profile, UserAccount

if TYPE_CHECKING:
    from atropos.slots import Slot, SlotPool

_log = logging.getLogger(__name__)
HOME = "/home/user"
"""Where commands start and relative paths begin, as E2B's templates have it."""
_USER = UserAccount("root", 0, 0, HOME)
"""Whom commands run as that name no other user: not an image's own, to whom the home doesn't belong."""
MAX_TIMEOUT_S = 86_400


class NoCapacity(Exception):
    """The server is shutting down, or has as many sandboxes as it may."""


class Sandboxes:
    """All sandboxes of a server. Each ends by `kill`, at its end, or with its slot."""

    def __init__(self, pool: SlotPool, settings: ExecutorServerSettings) -> None:
        self._pool = pool
        self._settings = settings
        self._open: dict[str, Sandbox] = {}
        self._starting = 0
        self._moved = asyncio.Event()
        self.draining = False

    def __repr__(self) -> str:
        return f"<Sandboxes open={len(self._open)} starting={self._starting}>"

    @property
    def limits(self) -> SlotLimits:
        """What each of them has."""
        return self._pool.config.limits

    def list(self) -> list[Sandbox]:
        """All that run, oldest first."""
        return [one for one in list(self._open.values()) if self.find(one.id) is not None]

    def find(self, sandbox_id: str) -> Sandbox | None:
        """A running sandbox; None: it ended, lost its slot, or never existed."""
        found = self._open.get(sandbox_id)
        if found is not None and (found.slot.lost is not None or found.end <= time.monotonic()):
            self._moved.set()
            return None
        return found

    async def create(
        self,
        template: str,
        *,
        timeout_s: float | None,
        metadata: Mapping[str, str],
        env: Mapping[str, str],
        hosts: Sequence[str] | None,
    ) -> Sandbox:
        """Lease a slot.

        Args:
            template: `base`, one of the pool's `bases`, or an image's reference.
            timeout_s: seconds until it ends; None: the server's `ttl_s`.
            metadata: labels, by which clients filter.
            env: variables of all of its commands.
            hosts: what it reaches of what the pool allows; None: all of it.

        Raises:
            NoCapacity: the server has no room for it.
            ConfigError: the timeout, the template or a host is invalid.
            NotSupported: hosts are named, and the pool's slots have no network.
            SandboxError: no slot came free, or the image is unavailable.
        """
        timeout_s = self._allowed(timeout_s)
        if self.draining or len(self._open) + self._starting >= self._settings.max_trajectories:
            raise NoCapacity("the server is shutting down" if self.draining else f"{len(self._open)} sandboxes run")
        sandbox_id = f"i{secrets.token_hex(10)}"
        self._starting += 1
        try:
            slot = await self._leased(sandbox_id, template, hosts)
        finally:
            self._starting -= 1
        slot.profile = Profile(
            workdir=HOME, env={"E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox_id, **env}, user=_USER
        )
        made = self._open[sandbox_id] = Sandbox(sandbox_id, template, slot, metadata, time.monotonic() + timeout_s)
        self._moved.set()
        return made

    async def _leased(self, sandbox_id: str, template: str, hosts: Sequence[str] | None) -> Slot:
        base, image = self._source(template, self._pool.config.bases)
        network = None if hosts is None or hosts else False
        slot = await self._pool.acquire(
            sandbox_id, base=base, image=image, network=network, timeout_s=self._settings.acquire_s
        )
        try:
            if hosts:
                await slot.set_network(hosts)
            await slot.exec(["mkdir", "-p", HOME], user="0:0")
            if self.draining:
                raise NoCapacity("the server is shutting down")
        except BaseException:
            await slot.release()
            raise
        return slot

    @staticmethod
    def _source(template: str, bases: Mapping[str, object]) -> tuple[str | None, str | None]:
        """The base or the image that a template names."""
        if template == "base":
            return None, None
        if template in bases:
            return template, None
        if ImageSource.parse(template).transport != "docker":  # on the server's own machine: not for clients
            raise ConfigError(f"template {template!r}: name `base`, a base of the pool, or an image of a registry")
        return None, template

    def _allowed(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._settings.ttl_s
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"timeout: from 0 to {MAX_TIMEOUT_S} seconds, not {timeout_s:g}")
        return timeout_s

    def set_timeout(self, sandbox: Sandbox, timeout_s: float | None, *, later: bool = False) -> None:
        """Move a sandbox's end to so many seconds (None: the server's `ttl_s`) from now; `later`: only where that is later.

        Raises:
            ConfigError: it is too long.
        """
        end = time.monotonic() + self._allowed(timeout_s)
        sandbox.end = max(sandbox.end, end) if later else end
        self._moved.set()

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox, if there is one, with all that runs in it."""
        sandbox = self._open.pop(sandbox_id, None)
        if sandbox is not None:
            for task in sandbox.tasks:
                task.cancel()
            await sandbox.slot.release()

    async def reap(self) -> None:
        """End sandboxes whose time is over or whose slot is gone. Runs until cancelled."""
        while True:
            first = min((one.end for one in self._open.values()), default=time.monotonic() + 60)
            self._moved.clear()
            await set_within(self._moved, max(0.0, first - time.monotonic()))
            over = [one.id for one in list(self._open.values()) if self.find(one.id) is None]
            ends = await asyncio.gather(*(self.kill(one) for one in over), return_exceptions=True)
            for error in ends:
                if isinstance(error, Exception):
                    _log.error("ending a sandbox failed", exc_info=error)

    async def aclose(self) -> None:
        """End all sandboxes."""
        self.draining = True
        await asyncio.gather(*(self.kill(one) for one in list(self._open)), return_exceptions=True)


def sandboxes_of(request: Request) -> Sandboxes:
    """Those of the server that answers a request."""
    return request.app.state.sandboxes
