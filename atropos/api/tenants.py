"""Tenants of an executor server: each key has trajectories, sandboxes and images of its own, and finds no others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, cast

from starlette.requests import Request
from starlette.types import Scope

from atropos.aio import Tasks
from atropos.api.accounts.account import Account
from atropos.api.accounts.audit import AuditLog
from atropos.api.accounts.keys import KeySettings, digest, read_keys
from atropos.api.accounts.secrets import read_secrets
from atropos.api.e2b.sandboxes import Sandboxes
from atropos.api.executor.images import PreparedImages
from atropos.api.executor.models import ExecutorServerSettings, KeyQuota, KeyUsage, ServerStatus, UsageReport
from atropos.api.executor.trajectories import Trajectories
from atropos.api.http import NO_TOKEN, Refusal
from atropos.errors import ConfigError
from atropos.metrics import Family
from atropos.slots import EgressSecret, Share, Slot
from atropos.slots.pool.stats import occupancy

if TYPE_CHECKING:
    from atropos.tools import ToolExecutor

_log = logging.getLogger(__name__)
TOKEN_NAME = "token"
"""Name of the key that the server's own token is: an admin's, without quotas."""
RELOAD_S = 1.0
"""Interval of looks at the keys file."""


class Tenant:
    """Everything that belongs to one key."""

    def __init__(self, account: Account, executor: ToolExecutor, settings: ExecutorServerSettings) -> None:
        self.account = account
        self.trajectories = Trajectories(executor, settings, account)
        self.sandboxes = Sandboxes(executor.pool, settings, account)
        self.images = PreparedImages(executor.pool, account)
        self._reapers = Tasks(f"key {account.name}")
        self._reapers.spawn(self.trajectories.reap(), "idle trajectories")
        self._reapers.spawn(self.sandboxes.reap(), "ends of sandboxes")

    def slot_of(self, subject: str) -> Slot | None:
        """The slot of its running sandbox or open trajectory of this id; None: it has none."""
        if (sandbox := self.sandboxes.find(subject)) is not None:
            return sandbox.slot
        return self.trajectories.slot_of(subject)

    def refuse_new(self) -> None:
        """Take no new work."""
        self.trajectories.draining = self.sandboxes.draining = True

    async def aclose(self) -> None:
        """End all that it has."""
        await self._reapers.cancel()
        await asyncio.gather(self.trajectories.aclose(), self.sandboxes.aclose(), self.images.aclose())


class Tenants:
    """The tenants of a server, by the keys of its file and its own token.

    Raises:
        ConfigError: the keys file or the audit log can't be opened.
    """

    def __init__(self, settings: ExecutorServerSettings) -> None:
        self._settings = settings
        self._file = None if settings.keys_file is None else Path(settings.keys_file)
        self._audit = AuditLog(settings.audit_file)
        self._executor: ToolExecutor | None = None
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, KeySettings] = {}
        self._secrets: dict[str, tuple[EgressSecret, ...]] = {}
        self._names: dict[str, str] = {}
        """Names by digest: a digest says nothing of how far a guess is off, so that it can be looked up."""
        self._closing = Tasks("end of key")
        self._draining = False
        self._seen = self._state_of_files()
        self._adopt(self._read())

    def __repr__(self) -> str:
        return f"<Tenants {len(self._keys)} keys, {len(self._tenants)} seen>"

    # --------------------------------------------------------------------------------------------------------- keys

    def _read(self) -> dict[str, KeySettings]:
        keys = {} if self._file is None else read_keys(self._file, self._settings.pool)
        if self._settings.token is not None:
            if TOKEN_NAME in keys:
                raise ConfigError(f"keys_file: {self._file}: {TOKEN_NAME!r} is the name of the server's own token")
            own = self._settings.token.get_secret_value().encode()
            keys[TOKEN_NAME] = KeySettings(sha256=(digest(own),), admin=True)
        return keys

    def _adopt(self, keys: dict[str, KeySettings]) -> None:
        self._secrets = {name: read_secrets(key.secrets, f"keys_file: {name}") for name, key in keys.items()}
        self._keys = keys
        self._names = {each: name for name, key in keys.items() for each in key.sha256}
        for name, tenant in list(self._tenants.items()):
            if name in keys:
                tenant.account.change(keys[name], self._secrets[name])
            else:
                del self._tenants[name]
                self._close(tenant)

    def _close(self, tenant: Tenant) -> None:
        tenant.refuse_new()
        self._closing.spawn(tenant.aclose(), tenant.account.name)

    def _state_of_files(self) -> dict[str, tuple[int, int, int]]:
        """Of the keys file, and those that the keys' secrets are in."""
        files = [] if self._file is None else [str(self._file)]
        states: dict[str, tuple[int, int, int]] = {}
        for path in [*files, *(each.file for key in self._keys.values() for each in key.secrets.values())]:
            with contextlib.suppress(OSError):
                status = os.stat(path)
                states[path] = status.st_ino, status.st_size, status.st_mtime_ns
        return states

    async def reload(self) -> None:
        """Follow the keys file until cancelled: a key that is gone is refused at once, and what it had ends.

        A file that is missing or wrong changes nothing, and is an error in the log. It is read again until it is
        right, since a secret's file may come after the keys file that names it.
        """
        wrong = ""
        while True:
            await asyncio.sleep(RELOAD_S)
            now = self._state_of_files()
            if now == self._seen:
                continue
            try:
                self._adopt(self._read())
            except ConfigError as error:
                if str(error) != wrong:
                    wrong = str(error)
                    _log.error("the keys stay as they were: %s", wrong)
            else:
                self._seen, wrong = now, ""
                _log.info("%s: %d keys", self._file, len(self._keys))

    # -------------------------------------------------------------------------------------------------------- doors

    def holder(self, value: bytes) -> str | None:
        """The name of a key, or of the server's token; None: it is neither. A key may have `.ID` after it."""
        return self._names.get(digest(value)) or self._names.get(digest(value.rpartition(b".")[0]))

    def enter(self, scope: Scope, given: bytes) -> Refusal | None:
        """Let a request in as its tenant's, which `tenant_of` finds; or say why not."""
        name = self.holder(given)
        if name is None:
            return NO_TOKEN
        tenant = self._tenants.get(name) or self._made(name)
        scope["atropos.tenant"], scope["atropos.bodies"] = tenant, tenant.account.bodies
        return tenant.account.refused()

    def _made(self, name: str) -> Tenant:
        assert self._executor is not None
        share = self._executor.pool.share if name == TOKEN_NAME else Share()
        account = Account(name, self._keys[name], self._secrets[name], share, self._audit)
        tenant = self._tenants[name] = Tenant(account, self._executor, self._settings)
        if self._draining:
            tenant.refuse_new()
        return tenant

    # --------------------------------------------------------------------------------------------------------- life

    def open(self, executor: ToolExecutor) -> None:
        """Tenants have slots of this executor's pool from now on."""
        self._executor = executor

    def all(self) -> Iterable[Tenant]:
        """Those that have sent a request."""
        return self._tenants.values()

    @property
    def draining(self) -> bool:
        """Whether nothing new is taken."""
        return self._draining

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work, wait for running calls up to the timeout, then end the rest; clients get an answer."""
        self._draining = True
        for tenant in self.all():
            tenant.refuse_new()
        await asyncio.gather(*(tenant.trajectories.drain(timeout_s) for tenant in self.all()))
        await asyncio.gather(*(each.aclose() for tenant in self.all() for each in (tenant.trajectories, tenant.images)))

    async def aclose(self) -> None:
        """End all that tenants have."""
        self._draining = True
        await asyncio.gather(*(tenant.aclose() for tenant in self.all()), self._closing.settle(None))
        self._audit.close()

    # -------------------------------------------------------------------------------------------------------- looks

    def status(self) -> ServerStatus:
        """The pool, and what all tenants have open."""
        assert self._executor is not None
        stats = self._executor.pool.stats()
        opened = [each for tenant in self.all() for each in [*tenant.trajectories.opened(), *tenant.sandboxes.opened()]]
        return ServerStatus(
            containers=stats.containers,
            slots=stats.slots,
            free=stats.free,
            leased=stats.leased,
            retired=stats.retired,
            waiting=stats.waiting,
            trouble=stats.trouble,
            occupancy=tuple(occupancy(self._executor.pool.links.values())),
            opened=tuple(opened),
        )

    def usage(self, of: Tenant | None = None) -> UsageReport:
        """What tenants have used since the server's start, by key and image, and their quotas; of one, or of all."""
        now = asyncio.get_running_loop().time()
        chosen = [*self.all()] if of is None else [of]
        usage = (
            KeyUsage(key=tenant.account.name, image=image, **asdict(used))
            for tenant in chosen
            for image, used in sorted(tenant.account.share.usage(now).items())
        )
        quotas = (
            KeyQuota(key=tenant.account.name, **asdict(each))
            for tenant in chosen
            for each in tenant.account.share.quota_use()
        )
        return UsageReport(usage=tuple(usage), quotas=tuple(quotas))

    def metrics(self) -> list[Family]:
        """The usage for Prometheus."""
        rows = self.usage().usage

        def family(name: str, text: str, values: Iterable[float]) -> Family:
            labels: Iterable[Mapping[str, str]] = ({"key": row.key, "image": row.image} for row in rows)
            return Family(
                name, "counter", text, tuple(("", each, value) for each, value in zip(labels, values, strict=True))
            )

        return [
            family("atropos_key_leases_total", "Leases of a key.", (row.leases for row in rows)),
            family("atropos_key_slot_seconds_total", "Seconds that they held slots.", (row.slot_s for row in rows)),
            family("atropos_key_cpu_seconds_total", "CPU time of those given back.", (row.cpu_s for row in rows)),
            family("atropos_key_egress_bytes_total", "Egress of those given back.", (row.egress_bytes for row in rows)),
        ]


def tenant_of(request: Request) -> Tenant:
    """Whose request it is."""
    return cast("Tenant", request.scope["atropos.tenant"])


def admin_of(request: Request) -> Tenant:
    """Whose request it is, of those that may see the whole server.

    Raises:
        Refusal: 403, it is none of them.
    """
    tenant = tenant_of(request)
    if not tenant.account.key.admin:
        raise Refusal(403, "forbidden", "this is for admin keys: set admin in the key's settings")
    return tenant
