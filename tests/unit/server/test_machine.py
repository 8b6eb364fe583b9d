"""A model of who owns what, against the server's real leases, journal and lanes, with a clock of its own.

1,000 examples in CI; ATROPOS_EXAMPLES=20000 by hand.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atropos.errors import LeaseExpired, PoolFull, SandboxError
from atropos.sandbox.server.calls.journal import JournalEntry
from atropos.sandbox.server.core import Core
from atropos.sandbox.server.upkeep import beat
from atropos.wire import Call, Exec, Fault, Hello, Lease, LeaseEnded, LeaseRequest, Reply, WireMessage
from tests.unit.server.fakes import FakeHost, config

SLOTS = 3
CLIENTS = ("a", "b")
TTL = 10.0


class Stream:
    """A client's connection that only collects."""

    def __init__(self) -> None:
        self.answers: dict[str, list[Reply | Fault]] = {}
        self.ended: list[LeaseEnded] = []
        self.aborted = False

    def push(self, entry: JournalEntry) -> None:
        assert entry.answer is not None
        self.answers.setdefault(entry.call_id, []).append(entry.answer)

    def send(self, message: WireMessage) -> None:
        if isinstance(message, LeaseEnded):
            self.ended.append(message)

    def abort(self, reason: str) -> None:
        self.aborted = True


@dataclass
class Owned:
    """What the model knows of a lease."""

    lease: Lease
    client: str
    renewed_at: float
    over: str = ""


@dataclass
class Asked:
    """What the model knows of a call."""

    call: Call
    client: str
    lease_id: str
    answers: list[Reply | Fault] = field(default_factory=list)
    cancelled: bool = False
    acked: bool = False


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.time = 1000.0
        self.ids = itertools.count()
        self.numbers = itertools.count()
        self.leases: dict[str, Owned] = {}
        self.calls: dict[str, Asked] = {}
        self.streams: dict[str, Stream | None] = {}
        self.retired = 0
        self.used: dict[int, str] = {}

    def do(self, work):
        async def run():
            result = await work if asyncio.iscoroutine(work) else work()
            for _ in range(12):
                await asyncio.sleep(0)
            return result

        result = self.loop.run_until_complete(run())
        self.collect()
        return result

    @initialize()
    def boot(self) -> None:
        self.host = FakeHost()
        self.do(self.start())

    async def start(self) -> None:
        self.core = Core(config(slots=SLOTS, warm=1, max_retired=SLOTS), self.host, clock=lambda: self.time)
        self.core.leasing.warm_pool.fill()
        self.streams = {}
        for name in CLIENTS:
            self.connect(name)

    def connect(self, name: str, holds: tuple[str, ...] | None = None) -> None:
        stream = self.streams[name] = Stream()
        hello = Hello(client_id=name, connection=next(self.numbers), holds=holds)
        assert self.core.leasing.connect(hello, stream) is not None
        self.seen(name)

    def seen(self, name: str) -> None:
        self.core.state.table.seen(name, self.core.state.now())
        for owned in self.leases.values():
            if owned.client == name and not owned.over:
                owned.renewed_at = self.time

    def collect(self) -> None:
        for name, stream in self.streams.items():
            if stream is None:
                continue
            for call_id, answers in stream.answers.items():
                self.calls[call_id].answers += answers
            stream.answers.clear()
            for message in stream.ended:
                if (owned := self.leases.get(message.lease_id)) is not None:
                    assert owned.client == name
                    owned.over = owned.over or message.code
            stream.ended.clear()

    def live(self) -> list[Owned]:
        return [owned for owned in self.leases.values() if not owned.over]

    def pick(self, data, items):
        return data.draw(st.sampled_from(list(items)))

    # ------------------------------------------------------------------------------------------------------------ rules

    @rule(client=st.sampled_from(CLIENTS))
    def acquire(self, client: str) -> None:
        free = self.core.state.table.free
        others = [name for name in self.core.state.table.wanting() if name != client]
        name = f"lease-{next(self.ids):05}"
        try:
            lease = self.do(self.core.leasing.acquire(LeaseRequest(lease_id=name, client_id=client, ttl_s=TTL)))
        except PoolFull:
            assert free == 0 or others
            return
        assert free > 0
        assert all(
            lease.epoch > owned.lease.epoch for owned in self.leases.values() if owned.lease.boot_id == lease.boot_id
        )
        self.leases[name] = Owned(lease, client, self.time)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def ask_again_for_the_same_lease(self, data) -> None:
        owned = self.pick(data, self.live())
        request = LeaseRequest(lease_id=owned.lease.lease_id, client_id=owned.client, ttl_s=TTL)
        assert self.do(self.core.leasing.acquire(request)) == owned.lease
        owned.renewed_at = self.time

    @precondition(lambda self: [o for o in self.leases.values() if o.over])
    @rule(data=st.data())
    def an_ended_lease_is_not_granted_again(self, data) -> None:
        owned = self.pick(data, [o for o in self.leases.values() if o.over])
        try:
            self.do(
                self.core.leasing.acquire(
                    LeaseRequest(lease_id=owned.lease.lease_id, client_id=owned.client, ttl_s=TTL)
                )
            )
        except SandboxError:
            return
        raise AssertionError(owned)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), right=st.booleans())
    def release(self, data, right: bool) -> None:
        owned = self.pick(data, self.leases.values())
        epoch = owned.lease.epoch if right else owned.lease.epoch + 1
        result = self.do(self.core.leasing.release(owned.lease.lease_id, epoch))
        if not right and not owned.over:
            assert not result.released
        elif not owned.over:
            assert result.released
            owned.over = "released"
        elif owned.over == "released":
            assert result.released
        else:
            assert not result.released

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), word=st.sampled_from(["echo", "hang", "hang"]), stale=st.booleans())
    def call(self, data, word: str, stale: bool) -> None:
        owned = self.pick(data, self.leases.values())
        name = f"call-{next(self.ids)}"
        epoch = owned.lease.epoch - stale
        call = Call(call_id=name, lease_id=owned.lease.lease_id, epoch=epoch, operation=Exec(command=f"{word} {name}"))
        asked = self.calls[name] = Asked(call, owned.client, owned.lease.lease_id)
        answer = self.submit(asked)
        if owned.over or stale:
            assert isinstance(answer, Fault)
            assert answer.code in {LeaseExpired.code, "slot_lost"}
            assert not self.ran(asked)

    def submit(self, asked: Asked) -> JournalEntry | Fault:
        client = self.core.state.clients.of(asked.client)
        answer = self.do(lambda: self.core.calls.submit(client, asked.call))
        if isinstance(answer, Fault):
            asked.answers.append(answer)
        return answer

    def ran(self, asked: Asked) -> int:
        return self.host.ran[asked.call.operation.command]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def send_again(self, data) -> None:
        asked = self.pick(data, self.calls.values())
        before, known = self.ran(asked), list(asked.answers)
        asked.call = asked.call.model_copy(update={"resent": True})
        self.submit(asked)
        owned = self.leases[asked.lease_id]
        if before or known:
            assert self.ran(asked) == before
        if before and not owned.over and known and not asked.acked and self.streams[asked.client]:
            assert asked.answers[-1] == known[-1]

    @precondition(lambda self: self.calls)
    @rule(data=st.data())
    def cancel(self, data) -> None:
        asked = self.pick(data, self.calls.values())
        self.do(lambda: self.core.calls.cancel(self.core.state.clients.of(asked.client), asked.call.call_id))
        asked.cancelled = True
        if asked.answers:
            asked.acked = True

    @rule(client=st.sampled_from(CLIENTS), data=st.data())
    def cancel_before_the_call(self, client: str, data) -> None:
        mine = [owned for owned in self.live() if owned.client == client]
        if not mine:
            return
        owned = self.pick(data, mine)
        name = f"call-{next(self.ids)}"
        self.do(lambda: self.core.calls.cancel(self.core.state.clients.of(client), name))
        call = Call(
            call_id=name, lease_id=owned.lease.lease_id, epoch=owned.lease.epoch, operation=Exec(command=f"echo {name}")
        )
        asked = self.calls[name] = Asked(call, client, owned.lease.lease_id, cancelled=True)
        self.submit(asked)
        assert not self.ran(asked)

    @precondition(lambda self: self.calls)
    @rule(data=st.data(), again=st.booleans())
    def ack(self, data, again: bool) -> None:
        asked = self.pick(data, self.calls.values())
        if asked.answers:
            self.do(lambda: self.core.calls.ack(self.core.state.clients.of(asked.client), (asked.call.call_id,)))
            asked.acked = True
        before = self.ran(asked)
        if again and before:
            self.submit(asked)
            assert self.ran(asked) == before

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.9, 10.0, 25.0]))
    def time_passes(self, seconds: float) -> None:
        self.time += seconds
        due = {o.lease.lease_id for o in self.live() if self.time >= o.renewed_at + TTL}
        self.do(lambda: beat(self.core))
        for name in due:
            assert name not in self.core.state.runs, "it is over in time"
            self.leases[name].over = LeaseExpired.code
        for owned in self.live():
            assert owned.lease.lease_id in self.core.state.runs, "it is not over before its time"

    @rule(client=st.sampled_from(CLIENTS))
    def heartbeat(self, client: str) -> None:
        if self.streams[client] is not None:
            self.seen(client)

    @rule(client=st.sampled_from(CLIENTS))
    def the_connection_breaks(self, client: str) -> None:
        stream = self.streams[client]
        if stream is not None:
            self.do(lambda: self.core.state.clients.disconnect(self.core.state.clients.of(client), stream))
            self.streams[client] = None

    @rule(client=st.sampled_from(CLIENTS), exact=st.booleans())
    def the_client_connects_again(self, client: str, exact: bool) -> None:
        holds = tuple(o.lease.lease_id for o in self.live() if o.client == client)
        self.do(lambda: self.connect(client, holds if exact else None))

    @rule(client=st.sampled_from(CLIENTS))
    def a_client_that_forgot_its_leases_connects(self, client: str) -> None:
        self.do(lambda: self.connect(client, ()))
        for owned in self.leases.values():
            assert owned.client != client or owned.over

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def a_sandbox_dies(self, data) -> None:
        owned = self.pick(data, self.live())
        self.do(lambda: self.core.state.runs[owned.lease.lease_id].sandbox.die("killed"))
        owned.over = owned.over or "slot_lost"

    @precondition(lambda self: self.live() and self.retired < SLOTS - 1)
    @rule(data=st.data())
    def a_reset_is_in_doubt(self, data) -> None:
        owned = self.pick(data, self.live())
        self.host.dirty.add(self.core.state.runs[owned.lease.lease_id].sandbox.name)
        result = self.do(self.core.leasing.release(owned.lease.lease_id, owned.lease.epoch))
        assert result.released
        assert not result.clean
        owned.over = "released"
        self.retired += 1

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def snapshot_and_drop(self, data) -> None:
        owned = self.pick(data, self.live())
        run = self.core.state.runs[owned.lease.lease_id]
        if run.lanes.queued or len(run.layers) > 3:
            return
        info = self.do(self.core.workspaces.snapshot(owned.lease.lease_id, None, owned.lease.epoch))
        assert info.users == 1
        self.do(lambda: self.core.layers.drop_snapshot(info.snapshot_id))

    @rule()
    def the_server_restarts(self) -> None:
        self.host.dirty.clear()
        self.do(self.core.aclose())
        assert not self.host.live
        assert not self.host.layers
        self.collect()
        for owned in self.leases.values():
            owned.over = owned.over or "slot_lost"
        for asked in self.calls.values():  # the client's rule: what was sent to another boot is never sent again
            asked.answers = asked.answers or [Fault(call_id=asked.call.call_id, code="outcome_unknown", message="")]
        self.leases.clear()
        self.calls.clear()
        self.retired = 0
        self.do(self.start())

    # ------------------------------------------------------------------------------------------------------- invariants

    @invariant()
    def no_slot_is_held_twice_or_lost(self) -> None:
        if not hasattr(self, "core"):
            return
        table = self.core.state.table
        slots = [held.slot for held in table.held.values()]
        assert len(slots) == len(set(slots))
        assert not set(slots) & set(table.retired)
        assert table.free + len(slots) + len(table.retired) == SLOTS
        assert len(table.retired) == self.retired
        assert set(table.held) == {owned.lease.lease_id for owned in self.live()}

    @invariant()
    def every_sandbox_is_on_the_shelf_or_in_one_lease(self) -> None:
        if not hasattr(self, "core"):
            return
        leased = [run.sandbox for run in self.core.state.runs.values()]
        assert len(leased) == len(set(map(id, leased)))
        assert self.host.live.issuperset(leased)
        assert len(leased) + self.core.leasing.warm_pool.ready == len(self.host.live)
        for sandbox in leased:
            if self.used.setdefault(id(sandbox), sandbox.name) != sandbox.name:
                self.used[id(sandbox)] = sandbox.name

    @invariant()
    def no_call_ran_twice_and_answers_agree(self) -> None:
        for asked in self.calls.values():
            assert self.ran(asked) <= 1
            results = [answer for answer in asked.answers if isinstance(answer, Reply)]
            assert all(result == results[0] for result in results)
            if results and not results[0].result.cancelled:
                assert self.ran(asked) == 1
            if self.streams.get(asked.client) is not None and asked.lease_id not in self.core.state.runs:
                assert asked.answers or asked.cancelled or not self.was_connected(asked)

    def was_connected(self, asked: Asked) -> bool:
        """Whether the answer went to a connection: otherwise it waits in the journal for the call to come again."""
        entry = self.core.state.clients.of(asked.client).journal.entries.get(asked.call.call_id)
        return entry is None

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.host.dirty.clear()
            self.do(self.core.aclose())
            assert not self.host.live
            assert not self.host.layers
        self.loop.run_until_complete(asyncio.sleep(0))
        assert not asyncio.all_tasks(self.loop)
        self.loop.close()


TestMachine = pytest.mark.slow("large input")(Machine.TestCase)
TestMachine.settings = settings(
    max_examples=int(os.environ.get("ATROPOS_EXAMPLES", "250")),
    stateful_step_count=15,
    database=None,
    suppress_health_check=list(HealthCheck),
)
