"""A slot through the pool: commands, files, privacy, forks. On every backend."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import tarfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from atropos.archives import WholeTar
from atropos.errors import LeaseExpired, LimitTooLarge
from atropos.slots import ExecResult, LeaseLimits, PortForward, Slot, SlotPool
from atropos.slots.slot.processes import Process
from atropos.testing.waiting import SLOWNESS

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(name="slot", loop_scope="module")
async def slot_fixture(pool: SlotPool) -> AsyncIterator[Slot]:
    """A lease for one test."""
    async with pool.lease("t") as slot:
        yield slot


async def command_lines(slot: Slot) -> str:
    """The programs that run in a slot, with their arguments."""
    return (await slot.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).output


async def test_a_command_s_end_is_a_value(slot: Slot) -> None:
    result = await slot.exec("echo hi; exit 3")
    assert (result.exit_code, result.output, result.timed_out, result.truncated) == (3, "hi\n", False, False)
    assert (await slot.exec("kill -9 $$")).exit_code == -9
    assert (await slot.exec("nonsense-command")).exit_code == 127


async def test_output_is_ordered_or_apart(slot: Slot) -> None:
    result = await slot.exec("echo a; echo b >&2; echo c")
    assert result.output == "a\nb\nc\n"
    result = await slot.exec("echo a; echo b >&2; echo c", split=True)
    assert (result.stdout, result.stderr) == ("a\nc\n", "b\n")
    assert sorted(result.output.split()) == ["a", "b", "c"]


async def test_env_workdir_and_stdin_arrive(slot: Slot) -> None:
    result = await slot.exec("pwd; echo $GREETING; cat", workdir="/tmp", env={"GREETING": "hé"}, stdin="in\x00put")
    assert result.output == "/tmp\nhé\nin\x00put"
    assert (await slot.exec("pwd; id -u")).output == "/workspace\n0\n"


async def test_a_command_runs_as_a_user_of_the_slot(slot: Slot) -> None:
    await slot.exec("echo agent:x:1234:1234::/tmp:/bin/sh >> /etc/passwd; echo crew:x:2000:agent >> /etc/group")
    refused = await slot.exec("id", user="nobody-here")
    assert refused.exit_code is None
    assert "unknown_user" in (refused.error or "")
    result = await slot.exec("id -u; id -G; echo $HOME $USER $WORD", user="agent", env={"WORD": "x"})
    if result.error is not None and result.error.startswith("not_supported"):
        pytest.skip(result.error)
    assert (result.output, result.exit_code) == ("1234\n1234 2000\n/tmp agent x\n", 0)
    assert (await slot.exec("id -u; echo $USER")).output.startswith("0\n")


async def test_a_program_runs_without_a_shell(slot: Slot) -> None:
    assert (await slot.exec(["printf", "%s|", "a b", "$HOME", "*"])).output == "a b|$HOME|*|"
    assert (await slot.exec(["no-such-program"])).error == "not_found: No such file or directory: no-such-program"
    refused = await slot.exec(["/etc/passwd"])
    assert (refused.exit_code, refused.error) == (None, "permission: Permission denied: /etc/passwd")
    await slot.exec(["rm", "-r", "/bin"])
    without = await slot.exec("true", split=True)
    assert without.exit_code is None
    assert (without.error or "").startswith("not_started: "), "a line for the shell, which is gone"


async def test_long_stdin_is_read_to_its_end(slot: Slot) -> None:
    data = b"x" * (9 << 20)
    assert (await slot.exec(["wc", "-c"], stdin=data)).output == f"{len(data)}\n"
    assert (await slot.exec("rm -r /workspace; wc -c; echo $0", stdin=data)).output.startswith(f"{len(data)}\n")
    assert (await slot.exec("ls -A /tmp")).output == ""


async def test_background_process_is_held(slot: Slot) -> None:
    process = await slot.start(["sh", "-c", "read a; echo got $a >&2; cat; sleep 1000"])
    assert (await process.poll(), await process.read()) == (None, b"")
    await process.write("one\n")
    assert await process.read(wait_s=10 * SLOWNESS) == b"got one\n"
    await process.write("two\n")
    assert await process.read(wait_s=10 * SLOWNESS) == b"two\n"
    await process.close_stdin()
    assert await process.wait(0.2) is None
    assert [one.id for one in await slot.processes()] == [process.id]
    await process.kill()
    assert await process.wait(10 * SLOWNESS) == -9
    assert await process.read() == b""
    with pytest.raises(FileNotFoundError):
        await slot.start(["no-such-program"])


async def test_input_waits_for_its_reader(slot: Slot) -> None:
    process = await slot.start("sleep 1; wc -c")
    await process.write(b"x" * (3 << 20))
    await process.close_stdin()
    assert b"".join([piece async for piece in process.output()]) == f"{3 << 20}\n".encode()
    assert process.exit_code == 0
    with pytest.raises(OSError, match="has ended"):
        await process.write("more")


async def test_errors_are_read_apart(slot: Slot) -> None:
    process = await slot.start("echo out; echo err >&2; read x; echo more >&2; exit 3", split=True)
    assert process.errors is not None
    assert await process.read(wait_s=10 * SLOWNESS) == b"out\n"
    assert await process.errors.read(wait_s=10 * SLOWNESS) == b"err\n"
    (again,) = await slot.processes()
    await again.write("go\n")
    assert b"".join([piece async for piece in process.errors.output()]) == b"more\n"
    assert (process.errors.exit_code, await process.wait(10 * SLOWNESS), await process.read()) == (3, 3, b"")
    assert again.errors is not None
    assert await again.errors.read() == b"err\nmore\n"


async def test_held_output_never_falls_out(slot: Slot) -> None:
    command = "head -c 3000000 /dev/zero; touch wrote; head -c 3000000 /dev/zero >&2"
    process = await slot.start(command, split=True, hold=True, buffer_bytes=300_000)
    assert process.errors is not None
    assert await process.wait(0.3) is None
    assert not (await slot.exec("test -e wrote")).ok

    async def size(output: Process) -> int:
        return sum([len(piece) async for piece in output.output()])

    sizes = await asyncio.gather(size(process), size(process.errors))
    assert (sizes, process.exit_code, process.dropped_bytes) == ([3_000_000] * 2, 0, 0)


async def test_dropped_output_is_counted(slot: Slot) -> None:
    process = await slot.start("head -c 100000 /dev/zero", buffer_bytes=1024)
    assert await process.wait(10 * SLOWNESS) == 0
    assert len(await process.read()) + process.dropped_bytes == 100_000


async def test_a_terminal_has_a_size_that_changes(slot: Slot) -> None:
    process = await slot.start("stty -echo; stty size; read x; stty size", pty=(30, 100))
    line = b""
    while not line.endswith(b"\n") and (
        piece := await process.read(wait_s=10 * SLOWNESS)
    ):  # the kernel may give it in two
        line += piece
    assert line == b"30 100\r\n"
    await process.resize(40, 120)
    await process.write("\n")
    assert b"40 120\r\n" in b"".join([piece async for piece in process.output()])


async def test_users_have_their_permissions(slot: Slot) -> None:
    if (await slot.exec("id", user="1234:1234")).error is not None:
        pytest.skip("slots of this host have one user")
    await slot.exec("mkdir -m 777 open; echo root > open/root; chmod 600 open/root")
    await slot.write_file("open/theirs", "x" * (9 << 20), user="1234:1234")
    assert (await slot.exec("stat -c '%u:%g %s' open/theirs")).output == f"1234:1234 {9 << 20}\n"
    assert await slot.read_file("open/theirs", user="1234") == b"x" * (9 << 20)
    with pytest.raises(PermissionError):
        await slot.read_file("open/root", user="1234")
    with pytest.raises(PermissionError):
        await slot.write_file("open/root", "no", user="1234")


async def test_binary_output_arrives_as_it_was(slot: Slot) -> None:
    result = await slot.exec(r"printf '\xff\x00\xfe'")
    assert result.output_bytes == b"\xff\x00\xfe"
    assert result.output == "\ufffd\x00\ufffd"


async def test_timeout_ends_the_session(slot: Slot) -> None:
    result = await slot.exec("echo before; sleep 1000 & sleep 1000", timeout_s=3 * SLOWNESS**0.5)
    assert result.timed_out
    assert result.output == "before\n"
    assert "sleep" not in await command_lines(slot)


async def test_held_pipe_holds_no_call(slot: Slot) -> None:
    began = time.monotonic()
    assert (await slot.exec("sleep 1000 & echo done")).output == "done\n"
    assert time.monotonic() - began < 30 * SLOWNESS


async def test_a_flood_is_cut_to_head_and_tail(slot: Slot) -> None:
    result = await slot.exec("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert result.truncated
    assert result.dropped_bytes > 1_000_000
    assert result.output.startswith("first\n")
    assert result.output.endswith("last\n")
    assert len(result.output_bytes) < 1_100_000


async def test_cancelled_call_is_killed(slot: Slot) -> None:
    task = asyncio.create_task(slot.exec("echo $$ > pid; sleep 1000"))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert "sleep" not in await command_lines(slot)


async def test_calls_run_in_order(slot: Slot) -> None:
    await asyncio.gather(*(slot.exec(f"echo {n} >> order") for n in range(20)))
    assert (await slot.read_file("order")).split() == [b"%d" % n for n in range(20)]


async def test_concurrent_commands_end_alone(slot: Slot) -> None:
    def start(command: str, timeout_s: float = 60) -> asyncio.Task[ExecResult]:
        return asyncio.create_task(slot.exec(command, timeout_s=timeout_s, concurrent=True))

    waits = start("until [ -s go ]; do sleep 0.02; done; cat go; exit 3")
    late = start("echo before; sleep 1000", timeout_s=3 * SLOWNESS**0.5)
    cancelled = start("echo $$ > pid; sleep 1000")
    await slot.exec("until [ -s pid ]; do sleep 0.02; done")
    cancelled.cancel()
    await asyncio.gather(*(slot.exec(f"echo {n} >> order") for n in range(20)))
    assert (await slot.read_file("order")).split() == [b"%d" % n for n in range(20)]
    await slot.exec("until ! kill -0 $(cat pid); do sleep 0.02; done 2>/dev/null")
    timed_out = await late
    assert not waits.done()
    second = await start("echo one > go; echo two")
    first = await waits
    assert (timed_out.timed_out, timed_out.output) == (True, "before\n")
    assert (first.exit_code, first.output, first.timed_out, first.cancelled) == (3, "one\n", False, False)
    assert (second.exit_code, second.output) == (0, "two\n")
    assert "sleep 1000" not in await command_lines(slot)


async def test_file_errors_are_pythons(slot: Slot) -> None:
    data = bytes(range(256)) * 4000
    await slot.write_file("deep/er/a.bin", data, mode=0o640)
    assert await slot.read_file("deep/er/a.bin") == data
    assert await slot.read_file("/workspace/deep/er/a.bin") == data
    assert (await slot.exec("stat -c %a deep/er/a.bin")).output == "640\n"
    with pytest.raises(FileNotFoundError):
        await slot.read_file("no/such")
    with pytest.raises(IsADirectoryError):
        await slot.read_file("deep")
    with pytest.raises((NotADirectoryError, FileExistsError)):
        await slot.write_file("deep/er/a.bin/b", b"")


async def test_a_file_of_many_pieces_arrives_whole(slot: Slot) -> None:
    data = b"0123456789abcdef" * (20 * 65536)
    await slot.write_file("large", data)
    assert await slot.read_file("large") == data
    assert (await slot.exec("stat -c %s large")).output == f"{len(data)}\n"


async def test_too_long_file_is_refused(slot: Slot) -> None:
    """EFBIG, before more than a piece of the file travels."""
    await slot.exec("truncate -s 1T huge; printf 12345 > small; mkdir folder; truncate -s 1T folder/huge")
    async with asyncio.timeout(10 * SLOWNESS):
        for read in (slot.read_file("huge"), slot.read_file("small", max_bytes=4)):
            with pytest.raises(OSError, match=r"1,099,511,627,776 bytes|5 bytes") as refused:
                await read
            assert refused.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="larger") as refused:
            await slot.download("folder")
        assert refused.value.errno == errno.EFBIG
        with pytest.raises(OSError, match="larger"):
            await slot.download("small", max_bytes=1024)
    assert await slot.read_file("small", max_bytes=5) == b"12345"


async def test_folders_keep_links_and_modes(slot: Slot, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "sub" / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("sub/run.sh")
    (tmp_path / "empty").mkdir()
    (tmp_path / "nämé").write_bytes(b"x" * 10_000_000)
    await slot.upload(tmp_path, "up")
    assert (await slot.exec("./link && ls", workdir="up")).output == "ran\nempty\nlink\nnämé\nsub\n"
    assert (await slot.exec("stat -c '%s %U' up/*m*")).output.splitlines()[-1] == "10000000 root"
    with tarfile.open(fileobj=io.BytesIO(await slot.download("up/sub")), tarinfo=WholeTar) as archive:
        names = archive.getnames()
    assert any(name.endswith("run.sh") for name in names)


async def test_quiesce_ends_concurrent_commands(slot: Slot) -> None:
    command = asyncio.create_task(slot.exec("touch started; sleep 1000", concurrent=True))
    await slot.exec("until [ -e started ]; do sleep 0.02; done")
    assert await slot.quiesce() >= 1
    assert (await command).exit_code == -9


async def test_quiesce_keeps_files(slot: Slot) -> None:
    await slot.exec("sleep 1000 & echo kept > f; nohup setsid sleep 1000 >/dev/null 2>&1 &")
    await slot.quiesce()
    assert "sleep" not in await command_lines(slot)
    assert await slot.read_file("f") == b"kept\n"


async def test_view_is_a_clean_machine(slot: Slot) -> None:
    """What the slot's programs wrote elsewhere isn't in its view, and they see nothing that the view writes."""
    watches = "while :; do cat hidden >> seen 2>/dev/null; date +%s%N > beat; sleep 0.02; done"
    await slot.exec(f"echo 42 > answer; echo 1 > /etc/made; (setsid sh -c '{watches}' >/dev/null 2>&1 &)")
    await slot.view()
    await slot.exec("echo secret > hidden")
    assert (await slot.exec("cat answer; ls /etc/made 2>/dev/null")).output == "42\n"
    beats = "cp beat last; while cmp -s beat last; do sleep 0.02; done"
    assert (await slot.exec(beats, timeout_s=30 * SLOWNESS)).exit_code == 0
    assert "secret" not in (await slot.exec("cat seen")).output


async def test_nothing_is_left_for_the_next(pool: SlotPool) -> None:
    mess = (
        "echo secret > a; mkdir -p d/e; echo x > /tmp/t; echo x > /dev/shm/s; echo x > /etc/mark; echo x > /root/r; "
        "mkfifo p; (setsid sleep 12345 >/dev/null 2>&1 &); useradd eve 2>/dev/null; echo hi > /var/tmp/v; umask 777"
    )
    look = (
        "ls -A /workspace /tmp /dev/shm /var/tmp /root; ls /etc/mark; grep eve /etc/passwd; "
        "cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[1]2345'"
    )
    async with pool.lease("before") as first:
        untouched = (await first.exec(look)).output
    for n in range(9):  # by then each slot of both containers has had a turn
        async with pool.lease(f"t{n}") as slot:
            assert (await slot.exec(look)).output == untouched
            await slot.exec(mess)


async def test_neighbours_see_nothing(pool: SlotPool) -> None:
    serve = "import socket; s = socket.create_server(('127.0.0.1', 8080)); print('bound', flush=True); s.accept()"
    async with pool.lease("a") as a, pool.lease("b") as b:
        for slot in (a, b):
            server = await slot.start(["python3", "-c", serve])
            assert await server.read(wait_s=30 * SLOWNESS) == b"bound\n", "each has a loopback of its own"
        await a.exec("echo a > mine; echo a > /tmp/mine; sleep 4321 &")
        assert "a\n" not in (await b.exec("cat mine /tmp/mine")).output
        assert "4321" not in await command_lines(b)


async def test_a_released_slot_refuses_calls(pool: SlotPool) -> None:
    slot = await pool.acquire("t")
    await slot.release()
    with pytest.raises(LeaseExpired):
        await slot.exec("true")


async def test_release_ends_calls(pool: SlotPool) -> None:
    slot = await pool.acquire("t")
    calls = [asyncio.create_task(slot.exec("sleep 1000", concurrent=each)) for each in (False, True, True)]
    await asyncio.sleep(0.1)
    await slot.release()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(ended, LeaseExpired), ended


async def test_slots_work_side_by_side(pool: SlotPool) -> None:
    async def trajectory(n: int) -> list[str]:
        async with pool.lease(f"t{n}") as slot:
            for step in range(5):
                await slot.exec(f"echo {n}-{step} >> log")
            return (await slot.read_file("log")).decode().split()

    logs = await asyncio.gather(*(trajectory(n) for n in range(24)))
    assert logs == [[f"{n}-{step}" for step in range(5)] for n in range(24)]


async def test_lease_has_its_own_size(pool: SlotPool) -> None:
    memory = pool.config.limits.memory_mib
    command = f"exec python3 -c \"x = b'x' * ({memory * 3 // 2} << 20); print('lives')\""
    async with pool.lease("large", limits=LeaseLimits(memory_mib=2 * memory)) as slot:
        assert (await slot.exec(command)).output == "lives\n"
        if "memory_limit" in (slot.lease.limit_note or ""):
            pytest.skip(f"the slots of this backend lack {slot.lease.limit_note}")
    for n in range(4):
        async with pool.lease(f"plain{n}") as slot:
            assert (await slot.exec(command)).limit == "memory"
    with pytest.raises(LimitTooLarge):
        await pool.acquire("huge", limits=LeaseLimits(memory_mib=1 << 20))


ANSWERS = """
import os, socket
with socket.create_server(("", 4714)) as listening:
    while True:
        peer, _ = listening.accept()
        peer.sendall(os.environ["NAME"].encode())
        peer.close()
"""
ASKS = """
import socket, sys
for host in sys.argv[1:]:
    with socket.create_connection((host, 4714), timeout=20) as peer:
        print(peer.recv(10).decode())
"""


async def test_groups_share_names_and_end(pool: SlotPool) -> None:
    small = LeaseLimits(memory_mib=96)
    members = LeaseLimits(members=(LeaseLimits(), small))
    async with pool.lease("main", limits=members) as slot, pool.lease("alone") as alone:
        db = await pool.join(slot, ["db"], its_names=["main"])
        web = await pool.join(slot, ["web"], its_names=["main"], limits=small)
        group = {"main": slot, "db": db, "web": web}
        assert {each.container for each in group.values()} == {slot.container}
        for name, each in group.items():
            await each.start(["python3", "-c", ANSWERS], env={"NAME": name})
        for each in group.values():
            command = 'until out=$(python3 -c "$ASKS" main db web 2> /dev/null); do sleep 0.1; done; echo "$out"'
            answers = await each.exec(command, env={"ASKS": ASKS}, timeout_s=60 * SLOWNESS)
            assert answers.output == "main\ndb\nweb\n", "each its own, on one port"
        address = (await slot.exec("getent hosts db")).output.split()[0]
        for host in ("db", address):
            assert (await alone.exec(["python3", "-c", ASKS, host])).exit_code == 1, "no other slot gets there"
        if "memory_limit" not in (web.lease.limit_note or ""):
            assert (await web.exec("head -c 150M /dev/zero | tail -c 150M > /dev/null")).limit == "memory"
        await db.release()
        for each in group.values():
            with pytest.raises(LeaseExpired):
                await each.exec("true")
        assert (await alone.exec("echo on")).output == "on\n"


async def test_networks_keep_slots_of_a_group_apart(pool: SlotPool) -> None:
    members = LeaseLimits(members=(LeaseLimits(), LeaseLimits()))
    async with pool.lease("main", limits=members) as slot:
        api = await pool.join(slot, ["api"], its_names=["main"], networks=["front", "back"], its_networks=["front"])
        db = await pool.join(slot, ["db"], networks=["back"])
        group = {"main": slot, "api": api, "db": db}
        for name, each in group.items():
            await each.start(["python3", "-c", ANSWERS], env={"NAME": name})
        addresses = [(await api.exec(f"getent hosts {name}")).output.split()[0] for name in ("main", "db")]
        for each, others in ((slot, ("main", "api")), (api, tuple(group)), (db, ("api", "db"))):
            command = (
                f'until out=$(python3 -c "$ASKS" {" ".join(others)} 2> /dev/null); do sleep 0.1; done; echo "$out"'
            )
            answers = await each.exec(command, env={"ASKS": ASKS}, timeout_s=60 * SLOWNESS)
            assert answers.output.split() == [*others]
        for each, name, address in ((slot, "db", addresses[1]), (db, "main", addresses[0])):
            for host in (name, address):
                assert (await each.exec(["python3", "-c", ASKS, host])).exit_code == 1


async def test_groups_share_folders(pool: SlotPool) -> None:
    async with pool.lease("main", limits=LeaseLimits(members=(LeaseLimits(),))) as slot:
        db = await pool.join(slot, ["db"], its_names=["main"])
        await db.exec("mkdir -p /data/more; echo 1 > /data/one")
        await slot.mount("/data", "/shared/data", of=db)
        await slot.mount("/data/one", "/only", of=db, read_only=True)
        assert (await slot.exec("cat /shared/data/one; echo 2 > /shared/data/more/two")).output == "1\n"
        assert (await db.exec("cat /data/more/two; rm /data/more/two; echo 3 > /data/one")).output == "2\n"
        assert (await slot.exec("cat /only; ls /shared/data/more")).output == "3\n"
        assert "Read-only" in (await slot.exec("echo 4 > /only")).output
        for source, path, error in (
            ("/nothing", "/x", FileNotFoundError),
            ("/data", "/only", NotADirectoryError),
            ("/data", "/only/below", NotADirectoryError),
            ("/data/one", "/shared", IsADirectoryError),
        ):
            with pytest.raises(error):
                await slot.mount(source, path, of=db)


async def test_forks_go_their_own_ways(pool: SlotPool) -> None:
    async with pool.lease("origin") as origin:
        await origin.exec("mkdir d; echo base > d/f; ln -s d/f link; echo gone > g")
        async with await origin.snapshot() as snapshot:
            await origin.exec("echo original > d/f; rm g")
            async with pool.lease("f1", snapshot=snapshot) as one, pool.lease("f2", snapshot=snapshot) as two:
                assert (await one.exec("cat link g; rm -r d; echo 1 > new")).output == "base\ngone\n"
                assert (await two.exec("cat link g; ls")).output == "base\ngone\nd\ng\nlink\n"
                assert (await origin.exec("cat d/f; ls")).output == "original\nd\nlink\n"


async def test_forks_are_the_same_anywhere(pool: SlotPool) -> None:
    make = (
        "mkdir d; echo x > d/f; ln d/f d/g; ln -s f d/l; mkfifo d/p; chmod 4755 d/f; chown 5:7 d; rm -r /etc/ssl; "
        "mkdir /etc/ssl; rm /etc/hosts; head -c 3000000 /dev/urandom > big; touch d/$(printf 'bad\\xff'); umask 0; "
        "mkdir -m 1777 sticky; touch -d 2001-02-03T04:05:06.789 old; (setsid sleep 1000 >/dev/null 2>&1 &)"
    )
    look = (
        "ls -lAR --time-style=full-iso . /etc/ssl | grep -av total; "
        "sha256sum big; ls /etc/hosts; stat -c %h d/f; cat two"
    )
    async with pool.lease("origin") as origin:
        assert (await origin.exec(make)).ok
        first = await origin.snapshot()
        await origin.exec("echo 2 > two; rm d/g")
        async with first, await origin.snapshot() as snapshot:
            forks = await asyncio.gather(*(pool.acquire(f"f{n}", snapshot=snapshot) for n in range(7)))
            assert len({fork.container for fork in forks}) == 2
            seen = {(await fork.exec(look)).output_bytes for fork in forks}
            assert len(seen) == 1, seen
            assert b"bad\xff" in next(iter(seen))
            await asyncio.gather(*(fork.release() for fork in forks))


async def test_ports_go_both_ways(slot: Slot) -> None:
    data = bytes(range(256)) * 8000

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()

    async def through(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.create_task(_send(writer, data))
        try:
            return await reader.read()
        finally:
            await sending
            writer.close()

    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server:
        target = server.sockets[0].getsockname()[1]
        async with await PortForward.from_slot(slot, 4711, target), await PortForward.to_slot(slot, 4711) as there:
            assert await asyncio.gather(*(through(there.port) for _ in range(3))) == [data] * 3
            with pytest.raises(OSError, match="in use"):
                await PortForward.from_slot(slot, 4711, target)
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", there.port)
    async with await PortForward.to_slot(slot, 4711) as nobody:
        reader, writer = await asyncio.open_connection("127.0.0.1", nobody.port)
        with pytest.raises(ConnectionResetError):  # no one listens there
            await reader.read()
        writer.close()


async def test_snapshot_ends_a_forward(slot: Slot, caplog: pytest.LogCaptureFixture) -> None:
    async with await PortForward.to_slot(slot, 4713) as forward, await slot.snapshot(), asyncio.timeout(30 * SLOWNESS):
        with pytest.raises(ConnectionRefusedError):
            while True:
                with contextlib.suppress(ConnectionResetError):  # it was waiting to be accepted as the forward ended
                    _, writer = await asyncio.open_connection("127.0.0.1", forward.port)
                    writer.close()
                await asyncio.sleep(0.02)
    assert "Traceback" not in caplog.text


ENDLESS = """
import socket, threading
def serve(peer):
    try:
        while peer.recv(10) != b"ping":
            while True: peer.sendall(bytes(65536))
        peer.sendall(b"pong")
    except OSError:
        open("broken", "w").close()
    peer.close()
listener = socket.create_server(("127.0.0.1", 4712))
print("listens", flush=True)
while True: threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


async def test_broken_download_ends_alone(slot: Slot) -> None:
    service = await slot.start(["python3", "-c", ENDLESS])
    assert await service.read(wait_s=30 * SLOWNESS) == b"listens\n"

    async def ping(port: int) -> bytes:
        async with asyncio.timeout(30 * SLOWNESS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"ping")
            pong = await reader.read()
            writer.close()
            return pong

    async with await PortForward.to_slot(slot, 4712) as there:
        assert await ping(there.port) == b"pong"
        reader, writer = await asyncio.open_connection("127.0.0.1", there.port)
        writer.write(b"download")
        writer.write_eof()
        await reader.readexactly(1 << 20)
        await asyncio.sleep(1)  # until every buffer on the way to the service is full
        writer.transport.abort()
        assert await ping(there.port) == b"pong"
        assert (await slot.exec("while [ ! -e broken ]; do sleep 0.1; done", timeout_s=30 * SLOWNESS)).exit_code == 0


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    writer.write_eof()
