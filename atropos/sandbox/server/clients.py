"""The clients of a server: their journals, their live connections, and the calls that come from them."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from atropos.errors import LeaseExpired, OutcomeUnknown, SandboxError
from atropos.sandbox.server.journal import Journal, JournalEntry
from atropos.sandbox.server.leases import EndedLease, HeldLease
from atropos.wire import (
    Call,
    CallRequest,
    Draining,
    Fault,
    Hello,
    LeaseEnded,
    Reply,
    ServerMessage,
)

if TYPE_CHECKING:
    from atropos.sandbox.server.core import Core

MAX_OPEN = 20_000
"""Calls of one client that may wait or run; one more is refused, not run."""
FORGET_S = 300.0
"""A client without leases, connection and signs of life is forgotten after this many seconds, its snapshots too."""
ALIVE_S = 60.0
"""Until then, what it left is not given up for others' sake."""


class Connection(Protocol):
    """A client's live stream, as far as the calls need it."""

    number: int

    def push(self, entry: JournalEntry) -> None:
        """Send the answer of a finished call."""
        ...

    def tell(self, message: ServerMessage) -> None:
        """Send a message."""
        ...

    def abort(self, reason: str) -> None:
        """Cut the connection now."""
        ...


@dataclass(slots=True, eq=False)
class ClientState:
    """One client: its journal, and where its answers go."""

    client_id: str
    since: float
    journal: Journal = field(default_factory=Journal)
    connection: Connection | None = None
    number: int = -1
    acked: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, entry: JournalEntry) -> None:
        """A call has its answer: send it, if there is a connection; else it waits in the journal."""
        if self.connection is not None:
            self.connection.push(entry)

    def eased(self) -> None:
        """Answers were acknowledged or forgotten: calls that waited for that may go on."""
        if not self.journal.congested:
            self.acked.set()

    async def room(self) -> None:
        """Wait until the client has acknowledged enough."""
        while self.journal.congested:
            self.acked.clear()
            await self.acked.wait()


class ClientTable:
    """All clients that the server remembers.

    Args:
        core: the leases.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._all: dict[str, ClientState] = {}
        self._deadline: float | None = None

    def of(self, client_id: str) -> ClientState:
        """A client by its id, made when new."""
        client = self._all.get(client_id)
        if client is None:
            client = self._all[client_id] = ClientState(client_id, self._core.now())
        return client

    def __len__(self) -> int:
        return len(self._all)

    def connected(self) -> tuple[str, ...]:
        """Ids of the clients whose stream is open."""
        return tuple(client_id for client_id, client in self._all.items() if client.connection is not None)

    def hears(self, client_id: str) -> bool:
        """Whether a client's stream is open."""
        client = self._all.get(client_id)
        return client is not None and client.connection is not None

    def live(self, now: float) -> tuple[str, ...]:
        """Ids of the clients that are connected, or hold leases and were heard of within two heartbeats."""
        table, since = self._core.table, now - 2 * self._core.config.heartbeat_s
        holding = {held.client_id for held in table.held.values()}
        return tuple(
            client_id
            for client_id, client in self._all.items()
            if client.connection is not None or (client_id in holding and (table.last_seen(client_id) or 0.0) > since)
        )

    def alive(self, client_id: str) -> bool:
        """Whether a client is connected, holds a lease, or gave a sign of life not long ago."""
        client = self._all.get(client_id)
        if client is None:
            return False
        if client.connection is not None or any(h.client_id == client_id for h in self._core.table.held.values()):
            return True
        return self._core.now() - (self._core.table.last_seen(client_id) or client.since) < ALIVE_S

    @property
    def journal_bytes(self) -> int:
        """What all journals hold together."""
        return sum(client.journal.bytes for client in self._all.values())

    # ------------------------------------------------------------------------------------------------------- streams

    def connect(self, hello: Hello, connection: Connection) -> ClientState | None:
        """A stream said hello. It replaces an older one of the same client; None: it is the older one itself.

        What a replaced connection still delivers must be ignored: its calls were sent again on the newer one.
        """
        client_id = hello.client_id
        client = self.of(client_id)
        if connection.number < client.number:
            return None
        old, client.connection, client.number = client.connection, connection, connection.number
        if old is not None:
            old.abort("replaced by a newer connection of the same client")
        self._core.table.seen(client_id, self._core.now())
        for each in self._core.table.untold(client_id):
            message = each.message
            connection.tell(LeaseEnded(lease_id=each.lease_id, epoch=each.epoch, code=each.code, message=message))
        if hello.holds is not None:
            self._end_unheld(client, frozenset(hello.holds))
        if self._core.table.draining:
            connection.tell(Draining(deadline_s=self._deadline))
        return client

    def _end_unheld(self, client: ClientState, holds: frozenset[str]) -> None:
        """End the leases whose client doesn't know them: the answer to its acquire was lost, or it started anew.

        Their results go as well: nobody would ever acknowledge them, and so many of them stop all of the client's calls.
        """
        for held in list(self._core.table.held.values()):
            if held.client_id == client.client_id and held.lease_id not in holds and held.state != "ending":
                self._core.end(held, LeaseExpired.code, "its client does not hold it any more")
        for lease_id in client.journal.lease_ids():
            if lease_id not in holds:
                for entry in client.journal.give_up(lease_id):
                    client.answered(entry)
        client.eased()

    def disconnect(self, client: ClientState, connection: Connection) -> None:
        """A stream is over; the client's leases live on for their time."""
        if client.connection is connection:
            client.connection = None

    def tell(self, client_id: str, message: ServerMessage) -> None:
        """Send a message to a client that is connected; else it is lost."""
        client = self._all.get(client_id)
        if client is not None and client.connection is not None:
            client.connection.tell(message)

    def tell_ended(self, client_id: str, lease_id: str, epoch: int, code: str, message: str) -> None:
        """Tell a client that the server ended its lease."""
        self.tell(client_id, LeaseEnded(lease_id=lease_id, epoch=epoch, code=code, message=message))

    def tell_draining(self, deadline_s: float | None) -> None:
        """Tell everybody that no new lease is given."""
        self._deadline = deadline_s
        for client in self._all.values():
            if client.connection is not None:
                client.connection.tell(Draining(deadline_s=deadline_s))

    # --------------------------------------------------------------------------------------------------------- calls

    def submit(self, client: ClientState, call: Call) -> JournalEntry | Fault:
        """Take a call: run it if it is new, find it if it is not. A `Fault` means that it was not run (again)."""
        known = client.journal.look_up(call)
        if known is not None:
            if isinstance(known, JournalEntry) and known.state == "done":
                client.answered(known)
            return known
        self._core.counters["calls"] += 1
        found = self._core.table.find(call.lease_id, call.epoch)
        if not isinstance(found, HeldLease):
            return self._refuse_ended(client, call, found)
        if found.client_id != client.client_id:
            return _fault(call, LeaseExpired.code, "the lease belongs to another client")
        run = self._core.runs.get(call.lease_id)
        if found.state != "active" or run is None or run.lanes is None:
            code = LeaseExpired.code if found.code in {"released", ""} else found.code
            return _fault(call, code, found.message or "the lease is not granted yet")
        if client.journal.open_calls >= MAX_OPEN:
            return _fault(call, SandboxError.code, f"{MAX_OPEN} calls of this client wait already; it was not run")
        entry = client.journal.open(call)
        if entry.state == "done":
            client.answered(entry)
        else:
            run.lanes.submit(entry, call.operation)
        return entry

    def _refuse_ended(self, client: ClientState, call: Call, ended: EndedLease | None) -> Fault:
        if call.resent and (ended is None or client.since > ended.at):
            message = "the server no longer knows this lease, nor whether the call ran; it was not run again"
            return _fault(call, OutcomeUnknown.code, message)
        if ended is None:
            return _fault(call, LeaseExpired.code, f"lease {call.lease_id!r} is not known to this server")
        return _fault(call, LeaseExpired.code if ended.code == "released" else ended.code, ended.message)

    def cancel(self, client: ClientState, call_id: str) -> None:
        """Give a call up; if it has not come yet, it will not run when it does."""
        entry = client.journal.entries.get(call_id)
        if entry is None:
            client.journal.cancel_early(call_id)
            return
        if entry.state == "done":
            self.ack(client, (call_id,))  # nobody waits for the answer any more
            return
        run = self._core.runs.get(entry.lease_id)
        if run is not None and run.lanes is not None:
            run.lanes.cancel(entry)

    def ack(self, client: ClientState, call_ids: tuple[str, ...]) -> None:
        """The client has these answers."""
        for call_id in call_ids:
            client.journal.ack(call_id)
        client.eased()

    async def call(self, lease_id: str, request: CallRequest) -> Reply | Fault:
        """One call by HTTP: the same journal, the same lanes, and the answer as the return value."""
        own = request.call_id is not None
        found = self._core.table.find(lease_id, request.epoch)
        if found is None or not found.client_id:
            message = f"lease {lease_id!r} is not known to this server" if found is None else found.message
            return Fault(call_id=request.call_id or "", code=LeaseExpired.code, message=message)
        client = self.of(found.client_id)
        self._core.table.seen(client.client_id, self._core.now())
        call_id = request.call_id or f"http-{uuid.uuid4().hex}"
        call = Call(call_id=call_id, lease_id=lease_id, epoch=found.epoch, operation=request.operation, resent=own)
        entry = self.submit(client, call)
        if isinstance(entry, Fault):
            return entry
        if entry.state != "done":
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry.waiters.append(waiter)
            try:
                await waiter
            finally:
                with contextlib.suppress(ValueError):
                    entry.waiters.remove(waiter)
        assert entry.answer is not None
        answer = entry.answer
        if own:
            client.journal.keep(entry)
            client.eased()
        else:
            self.ack(client, (call_id,))
        return answer

    # -------------------------------------------------------------------------------------------------------- upkeep

    def forget_stale(self, now: float) -> list[str]:
        """Drop clients of which nothing has been heard for long; returns their ids. Trim the journals of the rest."""
        table = self._core.table
        holding = {held.client_id for held in table.held.values()}
        gone: list[str] = []
        for client_id, client in list(self._all.items()):
            for lease_id in client.journal.lease_ids():
                if lease_id not in table.held and lease_id not in table.ended:
                    client.journal.forget_lease(lease_id)
            client.eased()
            seen = table.last_seen(client_id) or client.since
            if client.connection is None and client_id not in holding and now - seen > FORGET_S:
                del self._all[client_id]
                table.forget_client(client_id)
                gone.append(client_id)
        return gone

    def close(self) -> None:
        """Cut every connection."""
        for client in self._all.values():
            if client.connection is not None:
                client.connection.abort("the server ended")


def _fault(call: Call, code: str, message: str) -> Fault:
    return Fault(call_id=call.call_id, code=code, message=message)
