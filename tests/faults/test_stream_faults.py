"""The stream broken at every possible point: no call is doubled, none is lost, every outcome is a result or typed.

ATROPOS_FAULTS multiplies the number of faults (1 in CI; 20 gives thousands).
"""

# ruff: noqa: SIM117
from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time

import pytest

from atropos.errors import SandboxError
from atropos.slots.client import SandboxClient
from atropos.wire import CommandResult, Exec, LeaseRequest
from tests.faults.proxy import Fault, Proxy, proxied
from tests.repeats import TIMES
from tests.unit.server.fakes import TOKEN, FakeHost, serving

pytestmark = pytest.mark.timeout(120 + 30 * TIMES)
ids = itertools.count()


def request(**fields) -> LeaseRequest:
    return LeaseRequest.model_validate({"lease_id": f"lease-{next(ids):05}", "client_id": "tester", **fields})


def client_of(proxy: Proxy) -> SandboxClient:
    return SandboxClient(proxy.url, TOKEN, client_id="tester", reconnect_s=20)


async def test_cut_anywhere_doubles_none():
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running, proxied(running.server.port) as proxy:
        async with client_of(proxy) as client:
            lease = await client.acquire(request())
            for direction, step in itertools.product(("up", "down"), range(TIMES)):
                for position in range(0, 320, 1 if TIMES > 1 else 2):
                    proxy.strike(Fault(**{direction: position}))
                    command = f"count {direction} {step} {position}"
                    result = await asyncio.wait_for(client.call(lease, Exec(command=command)), 20)
                    assert isinstance(result, CommandResult)
                    assert result.output.decode() == command.partition(" ")[2]
                    assert host.ran[command] == 1
            assert proxy.struck > 200
            assert not client.lost.is_set()
            assert running.core.state.table.free == 3
            assert (await client.release(lease)).clean
    assert set(host.ran.values()) == {1}


async def test_cuts_double_no_concurrent_command():
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running, proxied(running.server.port) as proxy:
        async with client_of(proxy) as client:
            lease = await client.acquire(request())
            for direction, position in itertools.product(("up", "down"), range(0, 1200, 40)):
                proxy.strike(Fault(**{direction: position}))
                commands = [f"count {direction} {position} {n}" for n in range(4)]
                calls = [client.call(lease, Exec(command=each, concurrent=True)) for each in commands]
                results = await asyncio.wait_for(asyncio.gather(*calls), 20)
                assert [each.output.decode() for each in results] == [each.partition(" ")[2] for each in commands]
            assert proxy.struck > 20
    assert set(host.ran.values()) == {1}


async def test_a_cut_while_connecting():
    host = FakeHost()
    async with serving(host, heartbeat_s=5) as running, proxied(running.server.port) as proxy:
        async with client_of(proxy) as client:
            lease = await client.acquire(request())
            for direction in ("up", "down"):
                for position in range(0, 700, 7 if TIMES == 1 else 1):
                    proxy.next_fault = Fault(**{direction: position})
                    proxy.strike(Fault(up=0))
                    await asyncio.wait_for(client.call(lease, Exec(command=f"count {direction}{position}")), 20)
            assert proxy.streams > 200
    assert set(host.ran.values()) == {1}


async def test_random_faults_double_none():
    host = FakeHost()
    rng = random.Random(20261121)
    outcomes: list[str] = []
    wanted = 120 * TIMES
    async with serving(host, slots=16, heartbeat_s=0.1) as running, proxied(running.server.port, seed=1) as proxy:
        async with client_of(proxy) as client:

            async def trajectory(number: int) -> None:
                lease = await client.acquire(request())
                for step in itertools.count():
                    if step >= 40 and proxy.struck >= wanted:
                        break
                    command = f"sleep {rng.random() * 0.01}" if step % 5 == 0 else f"count {number} {step}"
                    result = await client.call(lease, Exec(command=command))
                    assert isinstance(result, CommandResult)
                    assert not result.cancelled
                    if command.startswith("count"):
                        assert result.output.decode() == f"{number} {step}"
                        assert host.ran[command] == 1
                    outcomes.append(command)
                assert (await client.release(lease)).clean

            async def breaker() -> None:
                while True:
                    kind = rng.choice(["cut"] * 16 + ["half"] + ["late"] * 3)
                    where = rng.choice(["up", "down"]) if kind != "late" else "up"
                    jitter = rng.choice([0, 0, 0.005])
                    proxy.strike(Fault(**{where: rng.randrange(3000)}, kind=kind, late_s=0.1, jitter_s=jitter))
                    await asyncio.sleep(rng.random() * 0.02)

            breaking = asyncio.create_task(breaker())
            try:
                await asyncio.wait_for(asyncio.gather(*(trajectory(n) for n in range(16))), 60 * TIMES)
            finally:
                breaking.cancel()
            assert proxy.struck >= wanted
            assert running.core.state.table.free == 16
    assert len(outcomes) >= 16 * 40
    assert all(times == 1 for command, times in host.ran.items() if command.startswith("count"))


async def test_cancelled_leave_no_entry():
    host = FakeHost()
    rng = random.Random(7)
    async with serving(host, slots=8, heartbeat_s=0.2) as running, proxied(running.server.port, seed=2) as proxy:
        async with client_of(proxy) as client:

            async def trajectory() -> None:
                lease = await client.acquire(request())
                for step in range(30 * TIMES):
                    task = asyncio.create_task(client.call(lease, Exec(command=rng.choice(["hang", f"echo {step}"]))))
                    await asyncio.sleep(rng.random() * 0.01)
                    task.cancel()
                    await asyncio.wait([task])
                    if not task.cancelled():
                        assert task.exception() is None
                # A call that is not cancelled gets through: what was cancelled does not block the lane.
                await asyncio.wait_for(client.call(lease, Exec(command="echo end")), 20)

            async def breaker() -> None:
                while True:
                    proxy.strike(Fault(**{rng.choice(["up", "down"]): rng.randrange(1500)}))
                    await asyncio.sleep(rng.random() * 0.05)

            breaking = asyncio.create_task(breaker())
            try:
                await asyncio.wait_for(asyncio.gather(*(trajectory() for _ in range(8))), 60 * TIMES)
            finally:
                breaking.cancel()
            proxy.strike(Fault())
            journal = running.core.state.clients.of("tester").journal
            async with asyncio.timeout(10):
                while journal.entries:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)


async def test_late_deliveries_stay_out():
    host = FakeHost()
    async with serving(host) as running, proxied(running.server.port) as proxy:
        async with client_of(proxy) as client:
            lease = await client.acquire(request())
            for n in range(10 * TIMES):
                proxy.strike(Fault(up=0, kind="late", late_s=0.05))
                await asyncio.wait_for(client.call(lease, Exec(command=f"count {n}")), 10)
                # A second one, so that the first is acknowledged and its answer forgotten before it comes again.
                await client.call(lease, Exec(command=f"count again {n}"))
                await asyncio.sleep(0.1)
    assert set(host.ran.values()) == {1}


async def test_a_replayed_connection_runs_nothing():
    host, rng = FakeHost(), random.Random(18)
    async with serving(host) as running, proxied(running.server.port) as proxy:
        async with client_of(proxy) as client:
            lease = await client.acquire(request())
            for n in range(5):
                await client.call(lease, Exec(command=f"count {n}"))
            proxy.strike(Fault(up=0))
            await client.call(lease, Exec(command="count last"))
            assert proxy.recorded
            for n in range(3 * TIMES):
                # calls of the live connection go on beside it, one of them left open
                ahead = asyncio.create_task(client.call(lease, Exec(command=f"sleep {rng.random() * 0.04}")))
                reader, writer = await asyncio.open_connection("127.0.0.1", running.server.port)
                recorded = proxy.recorded[0]
                await asyncio.sleep(rng.random() * 0.02)
                cut = rng.randrange(1, len(recorded) + 1) if n else len(recorded)
                with contextlib.suppress(ConnectionError):  # the server may close before it has read, or was sent, all
                    for piece in (recorded[:cut], recorded[cut:]):  # whole, in two pieces
                        writer.write(piece)
                        await writer.drain()
                        await asyncio.sleep(rng.random() * 0.01)
                    await asyncio.wait_for(reader.read(65_536), 20)
                writer.close()
                await asyncio.wait_for(ahead, 20)
                # The live connection is still the client's.
                await client.call(lease, Exec(command=f"count after {n}"))
            assert proxy.streams == 2
    assert {times for command, times in host.ran.items() if command.startswith("count")} == {1}


async def test_gone_server_typed_errors():
    rng = random.Random(3)
    for _ in range(4 * TIMES):
        host = FakeHost()
        async with serving(host, slots=4) as running, proxied(running.server.port) as proxy:
            client = client_of(proxy)
            await client.connect()
            leases = [await client.acquire(request()) for _ in range(4)]
            calls = {
                f"count {number} {step}": asyncio.create_task(
                    client.call(lease, Exec(command=f"count {number} {step}"))
                )
                for number, lease in enumerate(leases)
                for step in range(20)
            }
            await asyncio.sleep(rng.random() * 0.01)
            if rng.random() < 0.5:
                proxy.strike(Fault(up=rng.randrange(2000)))
            running.server.stop(0)
            await running.task
            await proxy.close()
            await asyncio.wait_for(client.lost.wait(), 30)
            for command, task in calls.items():
                outcome = (await asyncio.gather(task, return_exceptions=True))[0]
                ran = host.ran[command]
                if isinstance(outcome, CommandResult):
                    assert ran == 1
                else:
                    assert isinstance(outcome, SandboxError), outcome
                    assert outcome.code in {"slot_lost", "outcome_unknown", "lease_expired"}
                    assert ran <= 1
                    if outcome.code == "lease_expired":
                        assert ran == 0
            await client.close()


async def test_clock_steps_do_nothing(monkeypatch):
    """The time of day leaps by up to years, both ways, under server and client: no lease ends, no call is lost."""
    host, rng, real, steps = FakeHost(), random.Random(17), time.time, 100 * TIMES
    async with serving(host, slots=4, heartbeat_s=0.1) as running, proxied(running.server.port) as proxy:
        async with client_of(proxy) as client:
            leases = [await client.acquire(request(ttl_s=5)) for _ in range(4)]
            for step in range(steps):
                leap = rng.choice([-1, 1]) * 10 ** (rng.random() * 9)
                monkeypatch.setattr(time, "time", lambda leap=leap: real() + leap)
                monkeypatch.setattr(time, "time_ns", lambda leap=leap: int((real() + leap) * 1e9))
                calls = (client.call(lease, Exec(command=f"count {step} {lease.lease_id}")) for lease in leases)
                for result in await asyncio.wait_for(asyncio.gather(*calls), 20):
                    assert isinstance(result, CommandResult)
            assert [(await client.release(lease)).clean for lease in leases] == [True] * 4
    assert len(host.ran) == 4 * steps and set(host.ran.values()) == {1}
