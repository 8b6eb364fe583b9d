"""A real server that is stopped, cut off and left by its clients, at random moments: files in the slots are the proof.

ATROPOS_FAULTS multiplies the number of faults (1 in CI; 100 takes about an hour).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from atropos.errors import OutcomeUnknown, PoolFull, SandboxError, SlotLost
from atropos.slots.client import SandboxClient
from atropos.slots.config import SlotPoolConfig
from atropos.wire import CommandResult, Exec, LeaseRequest, ViewFolders
from tests import privileges
from tests.faults.proxy import Fault, proxied
from tests.images.test_leases import busybox_image, pool_for
from tests.processes import adopt_orphans, alive, descendants, first_processes
from tests.repeats import TIMES
from tests.small_disk import keeping_files_on, small_disk
from tests.unit.server.fakes import TOKEN
from tests.unit.server.test_serve import ROOT, Process, running
from tests.waiting import until

pytestmark = pytest.mark.timeout(240 + 30 * TIMES)
ids = itertools.count()


def request(**fields) -> LeaseRequest:
    return LeaseRequest.model_validate({"lease_id": f"lease-{next(ids):05}", "client_id": "tester", **fields})


async def test_stops_and_cuts_run_once():
    rng = random.Random(11)
    async with running(slots=4, heartbeat_s=0.2) as server, proxied(server.port, seed=3) as proxy:
        client = SandboxClient(proxy.url, TOKEN, client_id="tester", reconnect_s=60)
        await client.connect()
        stopping = True

        async def trajectory() -> None:
            lease = await client.acquire(request())
            count = 0
            while stopping:
                count += 1
                result = await client.call(lease, Exec(command=f"echo {count} >> log; tail -1 log"))
                assert isinstance(result, CommandResult)
                assert result.output == f"{count}\n".encode()
            result = await client.call(lease, Exec(command="wc -l < log; uniq log | wc -l"))
            assert result.output.split() == [str(count).encode()] * 2
            assert (await client.release(lease)).clean

        working = [asyncio.create_task(trajectory()) for _ in range(3)]
        for number in itertools.count():
            if number >= 12 * TIMES and proxy.struck:  # on a busy machine few bytes pass before the next fault
                break
            if number % 6 == 5:
                os.kill(server.process.pid, signal.SIGSTOP)
                await asyncio.sleep(rng.choice([0.05, 0.3, 0.9]))
                os.kill(server.process.pid, signal.SIGCONT)
            elif number % 6 == 4:  # slow: it has a tenth of its time
                for _ in range(12):
                    os.kill(server.process.pid, signal.SIGSTOP)
                    await asyncio.sleep(0.018)
                    os.kill(server.process.pid, signal.SIGCONT)
                    await asyncio.sleep(0.002)
            else:
                proxy.strike(Fault(**{rng.choice(["up", "down"]): rng.randrange(2000)}))
            await asyncio.sleep(rng.random() * 0.1)
        proxy.strike(Fault())
        stopping = False
        await asyncio.wait_for(asyncio.gather(*working), 60)
        await client.close()


async def test_partition_costs_nothing():
    defaults = SlotPoolConfig()
    heartbeat_s = defaults.server_config(TOKEN).heartbeat_s
    async with running(heartbeat_s=heartbeat_s) as server, proxied(server.port) as proxy:
        client = SandboxClient(proxy.url, TOKEN, client_id="tester", reconnect_s=defaults.reconnect_s)
        await client.connect()
        lease = await client.acquire(request(ttl_s=defaults.lease_ttl_s))
        under_way = asyncio.create_task(client.call(lease, Exec(command="echo under way >> log; sleep 9.25; cat log")))
        await until(lambda: "sleep 9.25" in str(descendants(server.process.pid)), "the call's command")
        async with proxy.partitioned():
            sent_meanwhile = asyncio.create_task(client.call(lease, Exec(command="echo meanwhile >> log; cat log")))
            await asyncio.sleep(20)
            assert not under_way.done()
            assert not sent_meanwhile.done()
        assert (await under_way).output == b"under way\n"
        assert (await sent_meanwhile).output == b"under way\nmeanwhile\n"
        assert (await client.release(lease)).clean
        await client.close()


async def granted(client):
    """A lease; what the dead asked for last keeps slots free for a moment."""
    wanted = request()  # the same one again: another would be one more that wants a slot
    async with asyncio.timeout(30):
        while True:
            try:
                return await client.acquire(wanted)
            except PoolFull:
                await asyncio.sleep(0.05)


async def test_killed_clients_keep_none():
    rng = random.Random(12)
    async with running(slots=4, heartbeat_s=0.5) as server, server.client() as client:
        code = (
            "import asyncio, itertools\n"
            "from atropos.slots.client import SandboxClient\n"
            "from atropos.wire import Exec, LeaseRequest\n"
            "async def life(client, names):\n"
            "    while True:\n"
            "        try:\n"
            "            lease = await client.acquire(LeaseRequest(lease_id=next(names), client_id='x', ttl_s=1))\n"
            "            await client.call(lease, Exec(command='sleep 0.02 & echo hi'))\n"
            "            await client.snapshot(lease)\n"
            "            await client.release(lease)\n"
            "        except Exception:\n"
            "            await asyncio.sleep(0.01)\n"
            "async def main():\n"
            "    import os, sys\n"
            "    names = (f'victim-{os.getpid()}-{n}' for n in itertools.count())\n"
            f"    client = SandboxClient({server.url!r}, {TOKEN!r}, client_id=f'victim-{{os.getpid()}}')\n"
            "    await client.connect()\n"
            "    print('up', flush=True)\n"
            "    await asyncio.gather(*(life(client, names) for _ in range(4)))\n"
            "asyncio.run(main())\n"
        )
        for _ in range(2 * TIMES):
            victim = await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.PIPE
            )
            assert victim.stdout is not None
            assert await asyncio.wait_for(victim.stdout.readline(), 60) == b"up\n"
            await asyncio.sleep(rng.random() * 0.3)
            victim.kill()
            await victim.wait()
        async with asyncio.timeout(30):
            while (await client.status()).free < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        leases = [await granted(client) for _ in range(4)]
        for lease in leases:
            result = await client.call(lease, Exec(command="ls -A | wc -l; pgrep sleep | wc -l"))
            assert result.output.split() == [b"0", b"0"]


async def test_a_killed_server_gives_typed_errors():
    """What was answered is right and came in order, and nothing of the server or its slots is left."""
    rng = random.Random(13)
    adopt_orphans()
    before, killed = set(descendants()), set[int]()
    for _ in range(2 * TIMES):
        async with running(slots=2) as server:
            killed.add(server.process.pid)
            client = server.client(reconnect_s=0.5)
            await client.connect()
            leases = [await client.acquire(request()) for _ in range(2)]
            calls = [
                asyncio.create_task(client.call(lease, Exec(command=f"echo {number}")))
                for number in range(100)
                for lease in leases
            ]
            releasing = asyncio.create_task(client.acquire(request()))
            await asyncio.sleep(rng.random() * 0.15)
            server.process.kill()
            await asyncio.wait_for(client.lost.wait(), 30)
            outcomes = await asyncio.gather(*calls, releasing, return_exceptions=True)
            for lane in (outcomes[:-1:2], outcomes[1:-1:2]):
                answered = [isinstance(outcome, CommandResult) for outcome in lane]
                assert answered == sorted(answered, reverse=True), lane  # none after one that is lost
                for number, outcome in enumerate(lane):
                    assert isinstance(outcome, CommandResult | SandboxError), outcome
                    if isinstance(outcome, SandboxError):
                        assert outcome.code in {"outcome_unknown", "slot_lost"}
                    else:
                        assert outcome.output == f"{number}\n".encode()
            assert isinstance(outcomes[-1], SandboxError)
            await client.close()
        await until(lambda: set(descendants()) <= before, "the end of everything below the killed server")
    async with running(slots=1):
        pass  # the next one removes what nobody could
    # walked, not globbed: other servers' groups come and go meanwhile
    groups = [name for _, names, _ in os.walk("/sys/fs/cgroup") for name in names]
    assert [name for name in groups if name.startswith(tuple(f"atropos-{pid}-" for pid in killed))] == []


async def test_sleeping_client_is_fenced():
    """It wakes, takes its lease for its own, and reaches nothing of the lease that followed."""
    code = (
        "import asyncio, sys\n"
        "from atropos.errors import SandboxError\n"
        "from atropos.slots.client import SandboxClient\n"
        "from atropos.wire import Exec, LeaseRequest\n"
        "async def main():\n"
        "    name, url, token = sys.argv[1:]\n"
        "    client = SandboxClient(url, token, client_id=name)\n"
        "    await client.connect()\n"
        "    lease = await client.acquire(LeaseRequest(lease_id=f'{name}-lease', client_id=name, ttl_s=0.5))\n"
        "    print('up', flush=True)\n"
        "    while True:\n"
        "        try:\n"
        "            await client.call(lease, Exec(command='echo stale >> log'))\n"
        "        except SandboxError as error:\n"
        "            print(error.code, flush=True)\n"
        "            return\n"
        "        await asyncio.sleep(0.01)\n"
        "asyncio.run(main())\n"
    )
    async with running(slots=1, heartbeat_s=0.2) as server, server.client() as client:
        for number in range(2 * TIMES):
            sleeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", code, f"sleeper-{number:04}", server.url, TOKEN),
                cwd=ROOT,
                stdout=asyncio.subprocess.PIPE,
            )
            assert sleeper.stdout is not None
            assert await asyncio.wait_for(sleeper.stdout.readline(), 60) == b"up\n"
            sleeper.send_signal(signal.SIGSTOP)
            lease = await granted(client)
            sleeper.send_signal(signal.SIGCONT)
            assert (await asyncio.wait_for(sleeper.stdout.readline(), 60)).strip() in {
                b"lease_expired", b"slot_lost", b"outcome_unknown",
            }  # fmt: skip
            await asyncio.wait_for(sleeper.wait(), 20)
            result = await client.call(lease, Exec(command="ls -A"))
            assert isinstance(result, CommandResult) and result.output == b""
            assert (await client.release(lease)).clean


@pytest.fixture
def disk():
    with small_disk(64) as folder:
        yield folder


PLACES = {
    # five places of 10 MiB are reserved, the probe's among them: what a slot got stays good, whatever fills the disk
    "places of a given size": ("true", {"limits": {"disk_mib": 8, "inodes": 1000}, "warm": 1, "max_snapshots": 0}),
    "plain folders": ("mount --bind /dev/null /dev/loop-control", {}),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to make a small file system")
@pytest.mark.parametrize("kind", PLACES)
async def test_full_disk_answers_all(disk, kind):
    """Volumes on a disk that is too small for them, and filled from outside at random moments."""
    rng = random.Random(14)
    extra, settings = PLACES[kind]
    async with (
        running(keeping_files_on(disk, extra), slots=3, volume="disk", **settings) as server,
        server.client() as client,
    ):
        going, lives, failed = True, 0, 0
        most = 1_900_000 if settings else 9_000_000

        async def trajectory() -> None:
            nonlocal lives, failed
            while going:
                lease = None
                try:
                    lease = await client.acquire(request())
                    for step in range(4):
                        size = rng.randrange(most)
                        write = f"head -c {size} /dev/zero > f{step} && sync f{step}; s=$?; stat -c %s f{step}; exit $s"
                        result = await client.call(lease, Exec(command=write))
                        assert isinstance(result, CommandResult)
                        if result.exit_code == 0:
                            assert result.output == f"{size}\n".encode()
                        else:
                            failed += 1
                            assert b"No space left on device" in result.output, result
                    lives += 1
                except SandboxError:
                    await asyncio.sleep(0.02)
                finally:
                    if lease is not None:
                        assert (await client.release(lease)).clean

        working = [asyncio.create_task(trajectory()) for _ in range(3)]
        hog = disk / "hog"
        for number in itertools.count():
            if number >= 6 * TIMES and lives and (failed or settings):
                break
            await asyncio.sleep(rng.random() * 0.1)
            with pytest.raises(OSError, match="No space left"), open(hog, "wb", buffering=0) as file:
                while file.write(bytes(1 << 20)):
                    pass
            await asyncio.sleep(rng.random() * 0.1)
            hog.unlink()
        going = False
        await asyncio.wait_for(asyncio.gather(*working), 60)
        assert not (settings and failed)
        async with asyncio.timeout(30):
            while (await client.status()).free < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        lease = await granted(client)
        result = await client.call(lease, Exec(command="head -c 4000000 /dev/zero > f && echo room"))
        assert isinstance(result, CommandResult) and result.output == b"room\n"


async def test_snapshots_outlive_kills():
    rng = random.Random(7)
    served = 0
    async with running(slots=4) as server, server.client() as client:
        lease = await client.acquire(request())
        await client.call(lease, Exec(command="echo kept > file"))
        snapshot = await client.snapshot(lease)
        await client.release(lease)
        for _ in range(15 * TIMES):
            killed = first_processes(server.process.pid)
            acquired = asyncio.create_task(client.acquire(request(snapshot=snapshot.snapshot_id)))
            await asyncio.sleep(rng.random() * 0.004)
            for pid in killed:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                fork = await acquired
                result = await client.call(fork, Exec(command="cat file"))
            except SandboxError:  # killed after it was granted
                continue
            assert isinstance(result, CommandResult) and result.output == b"kept\n"
            served += 1
            await client.release(fork)
        assert served
        async with asyncio.timeout(30):
            while (await client.status()).free < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def viewed_with_a_kill(server: Process, client: SandboxClient) -> None:
    lease = await client.acquire(request())
    await client.call(lease, Exec(command="echo kept > file; mkdir /opt/agent"))
    there = set(descendants(server.process.pid))
    viewing = asyncio.create_task(client.view(lease, ViewFolders(folders=("/workspace",))))
    spawner = next(pid for pid, line in descendants(server.process.pid).items() if "spawner.py" in line)
    killed = set[int]()
    while not killed:
        for pid in set(descendants(spawner)) - there:
            with contextlib.suppress(ProcessLookupError):  # one of those that end by themselves as a view starts
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        await asyncio.sleep(0)
    await viewing
    assert (await client.call(lease, Exec(command="cat file; ls -d /opt/agent 2>&1 | wc -l"))).output == b"kept\n1\n"
    assert (await client.call(lease, Exec(command="ls -d /opt/agent"))).exit_code != 0
    assert (await client.release(lease)).clean


async def test_view_outlives_a_kill():
    """Calls go on in the view, or in the slot as before; one kill costs nothing."""
    async with running(slots=2) as server, server.client() as client:
        for _ in range(5):
            try:
                return await viewed_with_a_kill(server, client)
            except (OutcomeUnknown, SlotLost):
                """It was up before the kill came, as this process had to wait for a core."""
        pytest.fail("no view outlived a kill")


HOLDING = """#!/bin/sh
[ -e "$0.holds" ] || exec {bwrap} "$@"
exec nsenter --pid=/proc/self/fd/5 sleep 1000
"""
"""bubblewrap, or a parent and a child in the namespace of processes as it has them where the child waits for its
parent."""


async def test_starting_end_with_server():
    """bubblewrap's child waits for its parent without end; PID 1 waited for that child, the next PID 1 for the first."""
    folder = Path(tempfile.mkdtemp(prefix="held-", dir="/tmp"))  # where the server's own user may execute it
    folder.chmod(0o755)
    wrapped = folder / "bwrap"
    wrapped.write_text(HOLDING.format(bwrap=shutil.which("bwrap")))
    wrapped.chmod(0o755)
    try:
        async with running(("env", f"PATH={folder}:{os.environ['PATH']}"), slots=2) as server:
            Path(f"{wrapped}.holds").touch()
            for pid in first_processes(server.process.pid):
                os.kill(pid, signal.SIGKILL)
            await until(lambda: "sleep 1000 " in descendants(server.process.pid).values(), "a slot on its way")
            there = descendants(server.process.pid)
            for pid in (next(pid for pid, line in there.items() if "spawner.py" in line), server.process.pid):
                os.kill(pid, signal.SIGKILL)

            def all_ended() -> bool:
                # a namespace ends once its processes are reaped: by this one, if it adopts orphans
                with contextlib.suppress(ChildProcessError):
                    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
                    while (found := os.waitid(os.P_ALL, 0, ended)) and found.si_pid != server.process.pid:
                        os.waitpid(found.si_pid, os.WNOHANG)
                return not alive(there)

            await until(all_ended, "the end of all its processes")
    finally:
        shutil.rmtree(folder)


@privileges.owners
async def test_images_outlive_kills(tmp_path):
    rng = random.Random(8)
    busybox_image(tmp_path / "layout")
    image = f"oci:{tmp_path}/layout:image"
    async with pool_for(tmp_path, acquire_timeout_s=30) as pool:
        await pool.prepare(image)
        spawner = next(pid for pid, line in descendants().items() if "programs/spawner.py" in line)

        async def leased(number: int) -> bool:
            try:
                async with pool.lease(f"lease-{number}", image=image) as slot:
                    assert (await slot.exec("cat text; echo mine >> text")).output == "hello"
            except SandboxError:
                return False
            return True

        granted = 0
        for _ in range(10 * TIMES):
            leasing = [asyncio.create_task(leased(number)) for number in range(3)]
            await asyncio.sleep(rng.random() * 0.01)
            sandboxes = first_processes(spawner)
            for pid in rng.sample(sandboxes, min(1, len(sandboxes))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            granted += sum(await asyncio.wait_for(asyncio.gather(*leasing), 60))
        assert granted > 0
        async with contextlib.AsyncExitStack() as slots:  # every slot is there, at the same time
            for number in range(4):
                slot = await slots.enter_async_context(pool.lease(f"last-{number}", image=image))
                assert (await slot.exec("cat text")).output == "hello"
