"""The clients of a server: their journals and their live connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from atropos.sandbox.server.calls.journal import Journal, JournalEntry
from atropos.sandbox.server.state.lease_table import LeaseTable
from atropos.wire import Hello, LeaseEnded, ServerMessage

FORGET_S = 300.0
"""A client without leases and connection that was not heard for this many seconds is forgotten, its snapshots too."""
ALIVE_S = 60.0
"""How long a client's snapshots are not dropped to make room for others, in seconds."""


class Connection(Protocol):
    """The part of a client's live stream that the rest of the server uses."""

    client: ClientState | None
    """None before its hello."""
    heard_at: float
    paused: bool
    """Whether the server stopped reading until the client has read its answers."""

    @property
    def silent_s(self) -> float:
        """Seconds since the client was last heard."""
        ...

    def push(self, entry: JournalEntry) -> None:
        """Send the answer of a finished call."""
        ...

    def send(self, message: ServerMessage) -> None:
        """Send a message."""
        ...

    def abort(self, reason: str) -> None:
        """Cut the connection now."""
        ...


@dataclass(slots=True, eq=False)
class ClientState:
    """One client: its journal and its connection."""

    client_id: str
    since: float
    journal: Journal = field(default_factory=Journal)
    connection: Connection | None = None
    number: int = -1
    """The latest connection's, as its client counts them."""
    acked: asyncio.Event = field(default_factory=asyncio.Event)

    def answered(self, entry: JournalEntry) -> None:
        """A call has its answer: send it, if there is a connection; else it waits in the journal."""
        if self.connection is not None:
            self.connection.push(entry)

    def signal_room(self) -> None:
        """Answers were acknowledged or dropped: calls that wait for room in the journal continue, if there is some."""
        if not self.journal.congested:
            self.acked.set()

    async def wait_for_room(self) -> None:
        """Wait until the client has acknowledged enough."""
        # In a loop: another lane of the same client may have filled the room again.
        while self.journal.congested:
            self.acked.clear()
            await self.acked.wait()


class ClientTable:
    """All clients that the server remembers.

    Args:
        leases: the leases, and when each client was last heard.
        now: the server's clock.
        heartbeat_s: seconds between the heartbeats of a client.
    """

    def __init__(self, leases: LeaseTable, now: Callable[[], float], heartbeat_s: float) -> None:
        self._leases = leases
        self._now = now
        self._heartbeat_s = heartbeat_s
        self._all: dict[str, ClientState] = {}

    def of(self, client_id: str) -> ClientState:
        """A client by its id, made when new."""
        client = self._all.get(client_id)
        if client is None:
            client = self._all[client_id] = ClientState(client_id, self._now())
        return client

    def __contains__(self, client_id: str) -> bool:
        return client_id in self._all

    def __len__(self) -> int:
        return len(self._all)

    def connected(self) -> tuple[str, ...]:
        """Ids of the clients whose stream is open."""
        return tuple(client_id for client_id, client in self._all.items() if client.connection is not None)

    def is_connected(self, client_id: str) -> bool:
        """Whether a client's stream is open."""
        client = self._all.get(client_id)
        return client is not None and client.connection is not None

    def live(self) -> tuple[str, ...]:
        """Ids of the clients that are connected, or hold leases and were heard within two heartbeats."""
        return tuple(
            client_id
            for client_id, client in self._all.items()
            if client.connection is not None
            or (self._leases.holds(client_id) and self._silent_s(client) < 2 * self._heartbeat_s)
        )

    def alive(self, client_id: str, within_s: float = ALIVE_S) -> bool:
        """Whether a client is connected, holds a lease, or was heard within this time."""
        client = self._all.get(client_id)
        return client is not None and (
            client.connection is not None or self._leases.holds(client_id) or self._silent_s(client) < within_s
        )

    def _silent_s(self, client: ClientState) -> float:
        """Seconds since a client was last heard."""
        return self._now() - (self._leases.last_seen(client.client_id) or client.since)

    @property
    def journal_bytes(self) -> int:
        """Size of all journals."""
        return sum(client.journal.bytes for client in self._all.values())

    # ---------------------------------------------------------------------------------------------------- connections

    def connect(self, hello: Hello, connection: Connection) -> ClientState | None:
        """Register the stream of a client, and report the leases that it lost.

        The stream replaces an older one of the same client; None: it is the older one itself. What a replaced
        connection still delivers must be ignored: its calls were sent again on the newer one.
        """
        client = self.of(hello.client_id)
        # A packet that was long under way: the newer connection has taken over its calls.
        if hello.connection < client.number:
            return None
        old, client.connection, client.number = client.connection, connection, hello.connection
        if old is not None:
            # Cut, not closed: a close would deliver what is queued, whose answers belong to the newer one now.
            old.abort("replaced by a newer connection of the same client")
        self._leases.seen(client.client_id, self._now())
        for each in self._leases.unreported(client.client_id):
            message = each.message
            connection.send(LeaseEnded(lease_id=each.lease_id, epoch=each.epoch, code=each.code, message=message))
        return client

    def disconnect(self, client: ClientState, connection: Connection) -> None:
        """A stream is over; the client's leases live on for their time."""
        # A replaced connection ends later than its successor begins.
        if client.connection is connection:
            client.connection = None

    def send(self, client_id: str, message: ServerMessage) -> None:
        """Send a message to a client that is connected; else it is lost."""
        client = self._all.get(client_id)
        if client is not None and client.connection is not None:
            client.connection.send(message)

    def send_all(self, message: ServerMessage) -> None:
        """Send a message to every client that is connected."""
        for client in self._all.values():
            if client.connection is not None:
                client.connection.send(message)

    # -------------------------------------------------------------------------------------------------------- upkeep

    def forget_stale(self) -> None:
        """Forget clients that were silent for `FORGET_S`, and trim the journals of the rest."""
        leases = self._leases
        for client_id, client in list(self._all.items()):
            for lease_id in client.journal.lease_ids():
                # The table has forgotten the lease itself: nothing can refer to its calls any more.
                if lease_id not in leases.held and lease_id not in leases.ended:
                    client.journal.forget_lease(lease_id)
            client.signal_room()
            if not self.alive(client_id, FORGET_S):
                del self._all[client_id]
                leases.forget_client(client_id)

    def close(self) -> None:
        """Cut every connection."""
        for client in self._all.values():
            if client.connection is not None:
                client.connection.abort("the server ended")
