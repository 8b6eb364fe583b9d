"""Snapshots of a key's sandboxes that new ones name as their template."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Container, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.api.accounts.account import Account
from atropos.api.e2b.connect import Json
from atropos.api.e2b.recipes import SandboxStart
from atropos.api.e2b.roots import is_base
from atropos.api.e2b.sandbox import E2bSandbox
from atropos.errors import ConfigError

if TYPE_CHECKING:
    from atropos.slots import Snapshot


@dataclass(frozen=True)
class NamedSnapshot:
    """One of them."""

    id: str
    names: tuple[str, ...]
    sandbox_id: str
    snapshot: Snapshot
    start: SandboxStart

    def info(self) -> Json:
        """As clients see it."""
        return {"snapshotID": self.id, "names": [*self.names]}


class NamedSnapshots:
    """All of a key."""

    def __init__(self, account: Account, bases: Container[str]) -> None:
        self._account = account
        self._bases = bases
        self._all: dict[str, NamedSnapshot] = {}

    def all(self) -> Iterable[NamedSnapshot]:
        """In the order in which they were made."""
        return self._all.values()

    def get(self, snapshot_id: str) -> NamedSnapshot | None:
        """One by its name or id."""
        return self._all.get(snapshot_id)

    async def keep(self, sandbox: E2bSandbox, name: str | None) -> NamedSnapshot:
        """Keep a sandbox's files as they are; its programs go on. A name that is taken moves to the new one.

        Raises:
            ConfigError: the name is a base's.
            SandboxError: it can't be kept.
        """
        with self._account.noting_refusals("snapshot", name or "", of=sandbox.id):
            if name and is_base(name, self._bases):
                raise ConfigError(f"name: {name!r} is a base of the pool")
            snapshot = await sandbox.slot.snapshot(keep_running=True)
        names = (name,) if name else ()
        named = NamedSnapshot(name or f"s{secrets.token_hex(10)}", names, sandbox.id, snapshot, sandbox.start)
        before, self._all[named.id] = self._all.get(named.id), named
        self._account.note("snapshot.keep", named.id, of=sandbox.id)
        if before is not None:
            await before.snapshot.drop()
        return named

    async def drop(self, snapshot_id: str) -> bool:
        """Forget a snapshot; sandboxes that started from it go on. Whether there was one."""
        named = self._all.pop(snapshot_id, None)
        if named is not None:
            await named.snapshot.drop()
            self._account.note("snapshot.drop", snapshot_id)
        return named is not None

    async def aclose(self) -> None:
        """Forget all."""
        await asyncio.gather(*map(self.drop, [*self._all]), return_exceptions=True)
