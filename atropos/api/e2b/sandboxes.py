"""Sandboxes: leases with an expiry, which clients may change."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, Protocol, cast

from starlette.requests import Request

from atropos.aio import Tasks, set_within
from atropos.api.accounts.account import Account
from atropos.api.e2b.recipes import SandboxStart
from atropos.api.e2b.roots import Root
from atropos.api.e2b.sandbox import E2bSandbox
from atropos.api.e2b.snapshots import NamedSnapshots
from atropos.api.e2b.templates import Templates
from atropos.api.executor.models import ExecutorServerSettings, Opened
from atropos.errors import ConfigError, PoolFull, QuotaReached, SandboxError, SlotLost, code_of
from atropos.slots.pool.stats import container_name
from atropos.wire import SlotLimits

if TYPE_CHECKING:
    from atropos.slots import Slot, SlotPool, Snapshot

_log = logging.getLogger(__name__)
MAX_TIMEOUT_S = 86_400


class Sandboxes:
    """All sandboxes of a key. Each ends by `kill`, at its end unless it is paused then, or with its slot."""

    def __init__(self, pool: SlotPool, settings: ExecutorServerSettings, account: Account) -> None:
        self._pool = pool
        self.account = account
        self._settings = settings
        self._open: dict[str, E2bSandbox] = {}
        self._paused: dict[str, E2bSandbox] = {}
        self._freezes = Tasks("pause of sandbox")
        self._starting = 0
        self._moved = asyncio.Event()
        self.snapshots = NamedSnapshots(account, pool.config.bases)
        self.templates = Templates(pool, account)
        self.draining = False

    def __repr__(self) -> str:
        return f"<Sandboxes open={len(self._open)} paused={len(self._paused)} starting={self._starting}>"

    @property
    def limits(self) -> SlotLimits:
        """What each of them has."""
        config, own = self._pool.config, self.account.key.limits
        return config.limits if own is None else config.limits_of(own)

    def list(self) -> list[E2bSandbox]:
        """All that run or are paused."""
        return [*(one for one in list(self._open.values()) if self.find(one.id) is not None), *self._paused.values()]

    def opened(self) -> list[Opened]:
        """All that run or are paused, as an admin sees them."""
        now = time.monotonic()
        return [
            Opened(
                key=self.account.name,
                id=each.id,
                image=each.template,
                state=each.state,
                age_s=now - each.began,
                calls=len(each.commands),
                container=container_name(self._pool.links, each.slot if each.state == "running" else None),
                latest=each.latest.line,
                latest_s=each.latest.age_s,
            )
            for each in self.list()
        ]

    def find(self, sandbox_id: str) -> E2bSandbox | None:
        """A running sandbox; None: it ended, is paused, lost its slot, or never existed."""
        sandbox = self._open.get(sandbox_id)
        if sandbox is not None and (sandbox.slot.lost is not None or sandbox.end <= time.monotonic()):
            self._moved.set()
            return None
        return sandbox

    def known(self, sandbox_id: str) -> E2bSandbox | None:
        """A running or a paused sandbox."""
        return self.find(sandbox_id) or self._paused.get(sandbox_id)

    async def awake(self, sandbox_id: str) -> E2bSandbox | None:
        """A running sandbox, or one that was paused and resumes by itself.

        Raises:
            SandboxError: no slot came free to resume it.
        """
        paused = self._paused.get(sandbox_id)
        return await self.resume(sandbox_id, None) if paused and paused.auto_resume else self.find(sandbox_id)

    # ------------------------------------------------------------------------------------------------------- start

    async def create(
        self,
        template: str,
        *,
        timeout_s: float | None,
        metadata: Mapping[str, str],
        env: Mapping[str, str],
        hosts: Sequence[str] | None,
        on_timeout: Literal["kill", "pause"] = "kill",
        auto_resume: bool = False,
        public: bool = True,
    ) -> E2bSandbox:
        """Lease a slot.

        Args:
            template: `base`, one of the pool's `bases`, a snapshot, a template, or an image's reference.
            timeout_s: seconds until it ends; None: the server's `ttl_s`.
            metadata: labels, by which clients filter.
            env: variables of all of its commands.
            hosts: what it reaches of what the pool allows; None: all of it.
            on_timeout: what becomes of it then.
            auto_resume: whether a request resumes it once it is paused.
            public: whether its servers' hosts are open to whoever knows them.

        Raises:
            PoolFull: the server has no room for it.
            ConfigError: the timeout, the template or a host is invalid.
            RpcError: the template is not built.
            NotSupported: hosts are named, and the pool's slots have no network.
            SandboxError: no slot came free, or the image is unavailable.
        """
        timeout_s = self._allowed(timeout_s)
        sandbox_id = _new_id()
        with self.account.noting_refusals("sandbox", sandbox_id, image=template):
            named = self.snapshots.get(template)
            root, start = self.templates.root_of(template) if named is None else (Root(named.snapshot), named.start)
            slot = await self._started(sandbox_id, root, hosts, start, env)
        self.account.note("sandbox.create", sandbox_id, image=template)
        return self._opened(
            E2bSandbox(
                sandbox_id,
                template,
                slot,
                metadata,
                hosts,
                time.monotonic() + timeout_s,
                self.account,
                start,
                on_timeout,
                auto_resume,
                None if public else secrets.token_hex(16),
            )
        )

    async def fork(self, sandbox: E2bSandbox, count: int, timeout_s: float | None) -> list[E2bSandbox | BaseException]:
        """Start copies of a sandbox's files as they are; its programs go on, and are not in the copies.

        Returns:
            The copies, or why one could not be started.

        Raises:
            ConfigError: the timeout is invalid.
            SandboxError: the sandbox can't be copied.
        """
        end = time.monotonic() + self._allowed(timeout_s)

        async def copy(snapshot: Snapshot) -> E2bSandbox:
            sandbox_id = _new_id()
            env = sandbox.slot.profile.env
            with self.account.noting_refusals("sandbox", sandbox_id, image=sandbox.template):
                slot = await self._started(sandbox_id, Root(snapshot), sandbox.hosts, sandbox.start, env)
            copied = replace(
                sandbox,
                id=sandbox_id,
                slot=slot,
                end=end,
                frozen=None,
                on_timeout="kill",
                auto_resume=False,
                started=round(time.time(), 6),
                began=time.monotonic(),
                moving=asyncio.Lock(),
            )
            self.account.note("sandbox.fork", sandbox_id, of=sandbox.id)
            return self._opened(copied)

        async with await sandbox.slot.snapshot(keep_running=True) as snapshot:
            return await asyncio.gather(*(copy(snapshot) for _ in range(count)), return_exceptions=True)

    def _opened(self, sandbox: E2bSandbox) -> E2bSandbox:
        self._open[sandbox.id] = sandbox
        self._moved.set()
        return sandbox

    async def _started(
        self, sandbox_id: str, root: Root, hosts: Sequence[str] | None, start: SandboxStart, env: Mapping[str, str]
    ) -> Slot:
        count = len(self._open) + len(self._paused) + self._starting
        if self.draining or count >= self._settings.max_trajectories:
            raise PoolFull("the server is shutting down" if self.draining else f"there are {count} sandboxes")
        self._starting += 1
        try:
            return await self._leased(sandbox_id, root, hosts, start, env)
        finally:
            self._starting -= 1

    async def _leased(
        self, sandbox_id: str, root: Root, hosts: Sequence[str] | None, start: SandboxStart, env: Mapping[str, str]
    ) -> Slot:
        network = None if hosts is None or hosts else False
        slot = await self._pool.acquire(
            sandbox_id,
            **root._replace(limits=root.limits or self.account.key.limits)._asdict(),
            network=network,
            share=self.account.share,
            timeout_s=self._settings.acquire_s,
        )
        try:
            if hosts:
                await slot.set_network(hosts)
            await slot.exec(["mkdir", "-p", start.workdir], user="0:0")
            await start.begin(slot, {**env, "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox_id})
            if self.draining:
                raise PoolFull("the server is shutting down")
        except BaseException:
            await slot.release()
            raise
        return slot

    def _allowed(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._settings.ttl_s
        if not 0 <= timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError(f"timeout: from 0 to {MAX_TIMEOUT_S} seconds, not {timeout_s:g}")
        return timeout_s

    def set_timeout(self, sandbox: E2bSandbox, timeout_s: float | None, *, later: bool = False) -> None:
        """Move a sandbox's end to this many seconds from now (None: the server's `ttl_s`); `later`: never earlier.

        Raises:
            ConfigError: it is too long.
        """
        end = time.monotonic() + self._allowed(timeout_s)
        sandbox.end = max(sandbox.end, end) if later else end
        self._moved.set()

    # --------------------------------------------------------------------------------------------- pause and resume

    async def pause(self, sandbox: E2bSandbox) -> None:
        """Keep a sandbox's files as a snapshot and give its slot back; its programs end.

        Raises:
            QuotaReached: the key keeps too much already; the sandbox goes on.
            SandboxError: it can't be kept, and is lost.
        """
        self.account.share.check_snapshot(stays=False)
        if self._open.pop(sandbox.id, None) is None:  # ended meanwhile
            return
        sandbox.stop("paused")
        self.account.note("sandbox.pause", sandbox.id)
        self._paused[sandbox.id] = sandbox
        sandbox.frozen = self._freezes.spawn(self._freeze(sandbox), sandbox.id, awaited=True)
        await asyncio.shield(sandbox.frozen)

    async def _freeze(self, sandbox: E2bSandbox) -> Snapshot:
        try:
            return await sandbox.slot.snapshot()
        except BaseException as error:
            self._paused.pop(sandbox.id, None)
            self.account.note("sandbox.end", sandbox.id, image=sandbox.template, outcome=code_of(error))
            raise
        finally:
            await sandbox.slot.release()

    async def resume(self, sandbox_id: str, timeout_s: float | None) -> E2bSandbox | None:
        """Continue a paused sandbox in another slot, for this many seconds (None: the server's `ttl_s`).

        Returns:
            None: there is none, or what was kept of it is lost.

        Raises:
            ConfigError: the timeout is invalid.
            SandboxError: no slot came free.
        """
        timeout_s = self._allowed(timeout_s)
        paused = self._paused.get(sandbox_id)
        if paused is None or paused.frozen is None:
            return self.find(sandbox_id)
        async with paused.moving:
            if self._paused.get(sandbox_id) is not paused:  # resumed, or ended, meanwhile
                return self.find(sandbox_id)
            try:
                snapshot = await asyncio.shield(paused.frozen)
                env = paused.slot.profile.env
                slot = await self._leased(sandbox_id, Root(snapshot), paused.hosts, paused.start, env)
            except SlotLost as error:
                if self._paused.pop(sandbox_id, None) is not None:  # `_freeze` has not noted it
                    self.account.note("sandbox.end", sandbox_id, image=paused.template, outcome=error.code)
                return None
            end = time.monotonic() + timeout_s
            fresh = replace(paused, slot=slot, end=end, frozen=None)
            del self._paused[sandbox_id]
            self._opened(fresh)
            self.account.note("sandbox.resume", sandbox_id)
            await snapshot.drop()
            return fresh

    # --------------------------------------------------------------------------------------------------------- end

    async def kill(self, sandbox_id: str, how: str = "killed") -> None:
        """End a sandbox, if there is one, with all that runs in it. `how`: as the audit log says."""
        paused = self._paused.get(sandbox_id)
        if paused is not None and paused.frozen is not None:
            async with paused.moving:
                now = self._paused.pop(sandbox_id, None)  # another one, if it was resumed and paused meanwhile
                if now is not None and now.frozen is not None:
                    with contextlib.suppress(SandboxError):
                        await (await asyncio.shield(now.frozen)).drop()
                    self.account.note("sandbox.end", sandbox_id, image=paused.template, outcome=how)
                    return
        sandbox = self._open.pop(sandbox_id, None)
        if sandbox is not None:
            sandbox.stop(how)
            self.account.note("sandbox.end", sandbox_id, image=sandbox.template, outcome=how)
            await sandbox.slot.release()

    async def reap(self) -> None:
        """End sandboxes whose time is over or whose slot is gone. Runs until cancelled."""
        while True:
            first = min((one.end for one in self._open.values()), default=time.monotonic() + 60)
            self._moved.clear()
            await set_within(self._moved, max(0.0, first - time.monotonic()))
            over = [one for one in list(self._open.values()) if self.find(one.id) is None]
            ends = await asyncio.gather(*map(self._end, over), return_exceptions=True)
            for error in ends:
                if isinstance(error, Exception):
                    _log.error("ending a sandbox failed", exc_info=error)

    async def _end(self, sandbox: E2bSandbox) -> None:
        """What becomes of a sandbox at its end."""
        lost = sandbox.slot.lost
        if sandbox.on_timeout == "pause" and lost is None:
            with contextlib.suppress(QuotaReached):
                await self.pause(sandbox)
                return
        await self.kill(sandbox.id, "expired" if lost is None else lost.code)

    async def aclose(self) -> None:
        """End all sandboxes."""
        self.draining = True
        ends = [self.kill(each, "server ended") for each in [*self._open, *self._paused]]
        await asyncio.gather(*ends, self.snapshots.aclose(), self.templates.aclose(), return_exceptions=True)


def _new_id() -> str:
    return f"i{secrets.token_hex(10)}"


def sandboxes_of(request: Request) -> Sandboxes:
    """Those of the key that a request has."""
    return cast("HasSandboxes", request.scope["atropos.tenant"]).sandboxes


class HasSandboxes(Protocol):
    """Whose request it is, as this API sees it."""

    @property
    def sandboxes(self) -> Sandboxes:
        """The sandboxes of its key."""
        ...
