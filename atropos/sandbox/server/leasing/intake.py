"""The calls of clients as they come in: found in the journal, refused, or passed on to the lanes of their lease."""

from __future__ import annotations

import asyncio
import contextlib
import uuid

from atropos.errors import LeaseExpired, OutcomeUnknown, SandboxError
from atropos.sandbox.server.calls.file_streams import FileStreams
from atropos.sandbox.server.calls.journal import JournalEntry
from atropos.sandbox.server.state.clients import ClientState
from atropos.sandbox.server.state.lease_table import EndedLease, HeldLease
from atropos.sandbox.server.state.state import ServerState
from atropos.wire import Call, CallRequest, Fault, Reply

MAX_OPEN = 20_000
"""Calls of one client that may wait or run; one more is refused, not run."""


class CallIntake:
    """Takes calls from streams and HTTP requests."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    def submit(self, client: ClientState, call: Call) -> JournalEntry | Fault:
        """Accept a call: run a new one, find a known one. A `Fault` means that it was not run (again)."""
        known = client.journal.look_up(call)
        if known is not None:
            # Its answer was lost with a connection; a call that still runs is pushed when it ends.
            if isinstance(known, JournalEntry) and known.state == "done":
                client.answered(known)
            return known
        self._state.counters["calls"] += 1
        # Only now: a call that is known keeps its answer after its lease has ended.
        lease = self._state.table.find(call.lease_id, call.epoch)
        if not isinstance(lease, HeldLease):
            return self._refuse_ended(client, call, lease)
        if lease.client_id != client.client_id:
            return _fault(call, LeaseExpired.code, "the lease belongs to another client")
        run = self._state.runs[call.lease_id]
        if lease.state != "active" or run.lanes is None:
            code = LeaseExpired.code if lease.code in {"released", ""} else lease.code
            return _fault(call, code, lease.message or "the lease is not granted yet")
        # Refused without an entry: nothing of it is remembered, and it may be sent again under its id.
        if client.journal.open_calls >= MAX_OPEN:
            return _fault(call, SandboxError.code, f"{MAX_OPEN} calls of this client wait already; it was not run")
        entry = client.journal.open(call)
        if entry.state == "done":
            client.answered(entry)
        else:
            run.lanes.submit(entry, call.operation)
        return entry

    def _refuse_ended(self, client: ClientState, call: Call, ended: EndedLease | None) -> Fault:
        # Its journal is younger than the lease's end: the call may have run before, and been forgotten with the client.
        if call.resent and (ended is None or client.since > ended.at):
            message = "the server no longer knows this lease, nor whether the call ran; it was not run again"
            return _fault(call, OutcomeUnknown.code, message)
        if ended is None:
            return _fault(call, LeaseExpired.code, f"lease {call.lease_id!r} is not known to this server")
        return _fault(call, LeaseExpired.code if ended.code == "released" else ended.code, ended.message)

    def cancel(self, client: ClientState, call_id: str) -> None:
        """Cancel a call, even before it arrives."""
        entry = client.journal.entries.get(call_id)
        if entry is None:
            client.journal.cancel_early(call_id)
            return
        if entry.state == "done":
            self.ack(client, (call_id,))  # no one waits for the answer
            return
        run = self._state.runs.get(entry.lease_id)
        if run is not None and run.lanes is not None:
            run.lanes.cancel(entry)

    def ack(self, client: ClientState, call_ids: tuple[str, ...]) -> None:
        """The client has these answers."""
        for call_id in call_ids:
            client.journal.ack(call_id)
        client.signal_room()

    async def call(self, lease_id: str, request: CallRequest) -> Reply | Fault:
        """One call by HTTP: the same journal, the same lanes, and the answer as the return value."""
        own = request.call_id is not None
        run = self._state.table.find(lease_id, request.epoch)
        if run is None or not run.client_id:
            message = f"lease {lease_id!r} is not known to this server" if run is None else run.message
            return Fault(call_id=request.call_id or "", code=LeaseExpired.code, message=message)
        client = self._state.clients.of(run.client_id)
        # A client that only speaks HTTP has no heartbeats: each call renews its leases.
        self._state.table.seen(client.client_id, self._state.now())
        call_id = request.call_id or f"http-{uuid.uuid4().hex}"
        # Any request under an id of the caller's may be a repetition; one without can't be.
        call = Call(call_id=call_id, lease_id=lease_id, epoch=run.epoch, operation=request.operation, resent=own)
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
        # Read before it is acknowledged, which drops it from the journal.
        answer = entry.answer
        if own:
            client.journal.keep(entry)
            client.signal_room()
        else:
            self.ack(client, (call_id,))
        return answer

    def streams_of(self, lease_id: str, epoch: int | None) -> FileStreams:
        """The file streams of a lease.

        Raises:
            LeaseExpired: it is over.
        """
        run = self._state.run_of(lease_id, epoch)
        if run.lanes is None:
            raise LeaseExpired(f"lease {lease_id!r} has not been granted yet")
        return run.lanes.streams


def _fault(call: Call, code: str, message: str) -> Fault:
    return Fault(call_id=call.call_id, code=code, message=message)
