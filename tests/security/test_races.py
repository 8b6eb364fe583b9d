"""Paths that change under every operation, slots released while they fight back, and what no namespace divides.

ATROPOS_FAULTS above 1 takes 200,000 files and repeats the races.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import tarfile
import time
from pathlib import Path

import pytest

from atropos import wire
from atropos.slots import SlotPool
from tests.backends import Engine
from tests.security.conftest import SECRET
from tests.security.test_what_programs_say_and_leave import says
from tests.waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="session")
TIMES = int(os.environ.get("ATROPOS_FAULTS", "1"))
FILES = 200_000 if TIMES > 1 else 30_000
NAME = f"race-{os.urandom(6).hex()}"

SWAP = r"""
import ctypes, itertools, os, platform, sys
libc = ctypes.CDLL(None)
NR = {"x86_64": 316, "aarch64": 276}[platform.machine()]
def exchange(a, b):
    libc.syscall(ctypes.c_long(NR), -100, a.encode(), -100, b.encode(), 2)
secret = sys.argv[1]
os.chdir("/workspace")
for folder in ("a/deep", "b/deep", "c/d/e", "spare"):
    os.makedirs(folder, exist_ok=True)
    for path in (folder, folder.split("/")[0]):
        open(f"{path}/f", "w").write("inside")
folders = ("/etc", "/proc/1/root", "/proc/self/fd", "/proc/1", "/proc/self/cwd", "..", "/", "/dev", "/tmp", "/run", "/.atropos",
           "/.atropos/next", "/usr/bin", os.path.dirname(secret), "a", "nowhere")
files = (secret, "/proc/1/environ", "/proc/1/mem", "/proc/self/mem", "/proc/self/fd/0", "/dev/zero", "/dev/ptmx", "/proc/kmsg",
         "/.atropos/runner.pyc", "/etc/ld.so.preload", "f", "nowhere", None)
def swap_folders():
    for target in itertools.cycle(folders):
        os.symlink(target, "la")
        for _ in range(20):
            exchange("a", "la")
        os.unlink("la")
def swap_files():
    for target in itertools.cycle(files):
        if target is None:
            os.mkfifo("lb")
        else:
            os.symlink(target, "lb")
        for _ in range(20):
            exchange("b/f", "lb")
        os.unlink("lb")
def move_folders():
    while True:
        for source, there in (("c/d", "spare/d"), ("c", "moved")):
            os.rename(source, there)
            os.rename(there, source)
for work in (swap_folders, swap_files, move_folders):
    if os.fork() == 0:
        while True:
            try:
                work()
            except OSError:
                for name in ("la", "lb"):
                    try:
                        os.unlink(name)
                    except OSError:
                        pass
                    try:
                        os.rename("moved", "c")
                    except OSError:
                        pass
print("swapping", flush=True)
os.wait()
"""


async def swapping(slot, secret_file) -> None:
    await slot.exec("rm -rf /workspace/*", workdir="/")
    await slot.write_file("/root/swap.py", SWAP)
    begun = await slot.run(wire.ProcStart(command=f"exec python3 /root/swap.py {secret_file}"))
    assert begun.kind == "proc_state", begun
    told = await slot.run(wire.ProcRead(id=begun.id, wait_s=20, until="output"))
    assert told.output == b"swapping\n", told


def archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def operation(rng: random.Random) -> wire.Operation:
    """Any file operation, on any of the paths that change."""
    folder = rng.choice(["a", "b", "c", "a/deep", "c/d", "c/d/e", "a/../b", "."])
    file = f"{folder}/{rng.choice(['f', NAME])}"
    match rng.randrange(9):
        case 0 | 1:
            return wire.ReadFile(path=file, max_bytes=rng.choice([100, 4096, 3_000_000]))
        case 2:
            return wire.WriteFile(path=file, data=SECRET[:4].encode(), append=rng.random() < 0.3)
        case 3:
            return wire.WriteFile(path=f"{folder}/{NAME}", data=bytes(1_100_000))
        case 4:
            return wire.WriteFile(path=f"{folder}/{NAME}/deeper/{NAME}", data=b"x", mode=0o600)
        case 5:
            return wire.Search(pattern="correct-horse|inside", path=folder)
        case 6:
            return wire.Tar(path=folder, max_bytes=8_000_000)
        case 7:
            return wire.Untar(path=folder, data=archive(**{f"{NAME}/f": b"x", "deep/f": b"y", "f": b"inside"}))
        case _:
            return wire.Exec(
                command="cat f a/f; true", workdir=f"/workspace/{folder}", timeout_s=1, max_output_bytes=5000
            )


def contents(result: wire.OpResult) -> bytes:
    """All that an answer says."""
    match result:
        case wire.FileResult():
            return result.data
        case wire.SearchResult():
            return "\n".join(match.text for match in result.matches).encode()
        case wire.ExecResult():
            return result.output
        case _:
            return repr(result).encode()


async def untouched(neighbours, secret_file) -> None:
    """Nothing of what was written under attack is anywhere else."""
    assert secret_file.read_text() == SECRET
    for folder in (
        "/",
        "/etc",
        "/tmp",
        "/root",
        "/run",
        "/run/atropos",
        "/var/lib",
        "/dev",
        "/usr/bin",
        "/dev/shm",
        os.getcwd(),
    ):
        with contextlib.suppress(OSError):
            assert NAME not in os.listdir(folder), folder
    for neighbour in neighbours:
        await says(neighbour.slot, f"find / -xdev -name {NAME} 2>/dev/null; true", "", workdir="/")


async def test_paths_that_change_meanwhile_lead_no_operation_out_of_the_slot(attacker, beside, secret_file):
    rng, ends = random.Random(31), time.monotonic() + 3 * min(TIMES, 20)
    await swapping(attacker, secret_file)
    answers = 0
    while time.monotonic() < ends:
        batch = [operation(rng) for _ in range(8)]
        async with asyncio.timeout(40):
            results = await asyncio.gather(*(attacker.run(each) for each in batch))
        for asked, result in zip(batch, results, strict=True):
            assert SECRET.encode() not in contents(result), asked
            if isinstance(result, wire.FileResult) and asked.op == "tar":
                with tarfile.open(fileobj=io.BytesIO(result.data)) as tar:
                    names = tar.getnames()
                assert all(name.split("/")[0] in (".", NAME) and ".." not in name.split("/") for name in names), names
            answers += result.kind != "op_error"
    assert answers > 0
    await attacker.quiesce()
    await untouched(beside, secret_file)
    await attacker.exec("rm -rf /workspace/*", workdir="/")
    await says(attacker, "echo next", "next\n")


async def test_a_snapshot_in_the_middle_of_it_holds_nothing_of_the_outside(pool, beside, secret_file):
    async with pool.lease("swapper") as slot:
        for number in range(2 * min(TIMES, 20)):
            await swapping(slot, secret_file)
            async with await slot.snapshot() as snapshot, pool.lease(f"swapped-{number}", snapshot=snapshot) as fork:
                look = "find . -type l -printf '%p\\n' | sort | tr '\\n' ' '; cat /proc/[0-9]*/comm | grep -c python; grep -rs correct-horse . ; true"
                found = await fork.exec(look)
                assert set(found.output.split()) <= {"0", "./a", "./la", "./lb", "./b/f"}, found
                async with asyncio.timeout(40):
                    for _ in range(20):
                        result = await fork.run(operation(random.Random(number)))
                        assert SECRET.encode() not in contents(result)
    await untouched(beside, secret_file)


HOSTILE = {
    "through a link": [("l", tarfile.SYMTYPE, "/etc"), (f"l/{NAME}", tarfile.REGTYPE, "")],
    "through a link upwards": [("l", tarfile.SYMTYPE, "../.."), (f"l/{NAME}", tarfile.REGTYPE, "")],
    "through two links": [
        ("l", tarfile.SYMTYPE, "."),
        ("l/m", tarfile.SYMTYPE, ".."),
        (f"m/m/{NAME}", tarfile.REGTYPE, ""),
    ],
    "into the process that unpacks": [("l", tarfile.SYMTYPE, "/proc/self/fd"), ("l/0", tarfile.REGTYPE, "")],
    "into its memory": [("l", tarfile.SYMTYPE, "/proc/self"), ("l/mem", tarfile.REGTYPE, "")],
    "a folder through a link": [("l", tarfile.SYMTYPE, "/"), (f"l/{NAME}", tarfile.DIRTYPE, "")],
    "a mode through a link": [("l", tarfile.SYMTYPE, "/root"), ("l", tarfile.DIRTYPE, "")],
    "a hard link to the outside": [("h", tarfile.LNKTYPE, "../../etc/passwd")],
    "a hard link through a link": [("l", tarfile.SYMTYPE, "/etc"), ("h", tarfile.LNKTYPE, "l/passwd")],
    "a hard link by its root": [("h", tarfile.LNKTYPE, "/etc/passwd")],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_an_archive_s_own_links_do_not_lead_out_of_its_folder(attacker, name):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, kind, target in HOSTILE[name]:
            info = tarfile.TarInfo(path)
            info.type, info.linkname, info.mode = kind, target, 0o777
            info.size = 12 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"FORGED RESULT"[: info.size]))
    before = (await attacker.exec("ls -ld /etc /root / /workspace | cut -d' ' -f1; ls -A / /etc")).output
    async with asyncio.timeout(20):
        result = await attacker.run(wire.Untar(path="in", data=buffer.getvalue()))
    assert result.kind == "op_error" and result.error == "bad_path", result
    after = (await attacker.exec("ls -ld /etc /root / /workspace | cut -d' ' -f1; ls -A / /etc; rm -rf in")).output
    assert after == before


async def test_an_archive_replaces_what_lies_in_wait_and_follows_links_that_stay_inside(attacker):
    await attacker.exec(
        "mkdir -p in/real; cd in; mkfifo pipe; ln -s /etc/passwd link; ln -s real way; echo old > file; ln file other"
    )
    data = archive(**{"pipe": b"1", "link": b"2", "way/in": b"3", "file": b"4", "new/folders/5": b"5"})
    async with asyncio.timeout(20):
        result = await attacker.run(wire.Untar(path="in", data=data))
    assert result.kind == "done", result
    await says(
        attacker, "cd in; cat pipe link real/in file new/folders/5 other; grep -c root:x:0 /etc/passwd", "12345old\n1\n"
    )


# ------------------------------------------------------------------------------------------------ heaps, at the release

HEAPS = f"""
import mmap, os, random, sys
os.chdir("/workspace")
kept = [os.open(f"/tmp/held-{{n}}", os.O_RDWR | os.O_CREAT) for n in range(200)]
for fd in kept[:100]:
    os.write(fd, bytes(10000))
for n in range(100):
    os.unlink(f"/tmp/held-{{n}}")
mapped = mmap.mmap(kept[0], 0)
def files():
    for folder in range({FILES} // 500):
        os.mkdir(f"m{{folder}}")
        for n in range(500):
            os.close(os.open(f"m{{folder}}/{{n}}", os.O_CREAT | os.O_WRONLY))
def deep():
    for _ in range(1500):
        os.mkdir("d" * 60)
        os.chdir("d" * 60)
    os.close(os.open("bottom", os.O_CREAT))
def odd():
    os.mkdir(b"odd")
    for n in range(2000):
        name = b"odd/" + random.randbytes(20).replace(b"/", b"_").replace(b"\\0", b"-")
        try:
            os.mkdir(name) if n % 2 else os.close(os.open(name, os.O_CREAT | os.O_WRONLY))
        except OSError:
            continue
        os.chmod(name, 0)
    os.chmod("odd", 0)
def restless():
    while True:
        for n in range(100):
            os.pwrite(kept[n], os.urandom(10), random.randrange(9000))
            mapped[n] = n
        if os.fork() == 0:
            os.setsid()
            os.chdir("/proc/self/fd")
for work in (deep, odd, restless, restless):
    if os.fork() == 0:
        os.setsid()
        try:
            work()
        finally:
            os._exit(0)
files()
print("made", flush=True)
while True:
    mapped[random.randrange(10000)] = 1
"""


async def test_heaps_of_files_and_processes_that_fight_are_forgotten_whole_at_the_release():
    engine, rng = Engine("local"), random.Random(41)
    limits = {"memory_mib": 1024, "inodes": FILES + 20_000, "disk_mib": 64, "pids": 48, "open_files": 1024}
    config = engine.config(slots_per_container=1, max_containers=1, min_containers=1, limits=limits)
    async with SlotPool(config) as pool:
        async with pool.lease("first"):
            (link,) = pool.keeper.links.values()
        pid = int(link.container.id.partition("-")[0])
        groups = [*Path("/sys/fs/cgroup").glob(f"**/atropos-{pid}-*/memory.usage_in_bytes")]
        groups += Path("/sys/fs/cgroup").glob(f"**/atropos-{pid}-*/memory.current")

        def held() -> tuple[int, int]:
            """MiB in use, and mounts."""
            used = int(groups[0].read_text()) if groups else 0
            return used >> 20, len(Path(f"/proc/{pid}/mounts").read_text().splitlines())

        async def settled() -> None:
            while (await link.client.status()).warming:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

        await settled()
        memory, mounts = held()
        for number in range(3 * min(TIMES, 10)):
            whole = number % 3 == 0
            async with pool.lease(f"heaps-{number}") as slot:
                begun = await slot.run(wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": HEAPS}))
                if whole:  # all of them are there, and everything goes on
                    told = await slot.run(wire.ProcRead(id=begun.id, wait_s=120, until="output"))
                    assert told.output == b"made\n", told
                else:
                    await asyncio.sleep(rng.random() * 1.5)
            async with pool.lease(f"after-{number}") as slot:
                await says(slot, "ls -A /workspace /tmp | wc -l; set -- /proc/[0-9]*; echo $#", "3\n2\n")
        await settled()
        await until(lambda: held()[0] <= memory + 24 and held()[1] <= mounts, f"{(memory, mounts)} again, not {held()}")
        stats = pool.stats()
        assert (stats.free, stats.retired) == (1, 0), repr(pool)
    assert await engine.residue(config) == []


# ------------------------------------------------------------------------------- counters of one user of the kernel's

GREEDY = """
import array, errno, fcntl, os, select, socket, time
kept, said = [], []
def attempt(what, work):
    try:
        while True:
            work()
    except OSError as error:
        said.append(f"{what}: {errno.errorcode[error.errno]}")
room = [os.dup(0) for _ in range(20)]
def pipes():
    r, w = os.pipe()
    kept.extend((r, w))
    fcntl.fcntl(w, 1031, 1 << 20)
def watches():
    epoll = select.epoll()
    kept.append(epoll)
    for fd in kept[:200]:
        if isinstance(fd, int):
            try:
                epoll.register(fd)
            except PermissionError:
                pass
def flights():
    a, b = socket.socketpair()
    kept.extend((a, b))
    a.setblocking(False)
    try:
        while True:
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 250))])
    except BlockingIOError:
        pass
for _ in range(8):
    if os.fork() == 0:
        break
attempt("pipes", pipes)
[os.close(fd) for fd in room[:12]]
attempt("watches", watches)
[os.close(fd) for fd in room[12:]]
del kept[-40:]
attempt("flights", flights)
print(*said, sep=", ", flush=True)
time.sleep(1000)
"""

PASSES = """
import array, os, socket
a, b = socket.socketpair()
try:
    a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
    print("passed")
except OSError as error:
    print(os.strerror(error.errno))
"""


async def test_counters_that_no_namespace_divides_touch_no_call_of_a_neighbour(pool, beside):
    """One slot takes all that it can of what the kernel counts per user. Others: calls, files, terminals, forks as ever."""
    async with pool.lease("victim") as victim:
        async with pool.lease("greedy") as greedy:
            begun = await greedy.run(wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": GREEDY}))
            told = await greedy.run(wire.ProcRead(id=begun.id, wait_s=30, until="output"))
            assert b"flights: ETOOMANYREFS" in told.output, told
            passes = (await victim.exec('python3 -c "$CODE"', env={"CODE": PASSES})).output
            assert passes in ("passed\n", "Too many references: cannot splice\n"), passes
            await says(victim, "head -c 150000 /dev/zero | tr '\\0' x | cat | wc -c", "150000\n")
            result = await victim.exec("head -c 180000 /dev/zero | tr '\\0' y; sleep 0.1; echo >&2 told", split=True)
            assert (len(result.stdout), result.stderr) == (180000, "told\n")
            for pty in (False, True):
                process = await victim.run(wire.ProcStart(command="read line; echo got $line; sleep 100", pty=pty))
                await victim.run(wire.ProcWrite(id=process.id, data=b"this\n"))
                async with asyncio.timeout(20):
                    read = wire.ProcRead(id=process.id, wait_s=1, until="output")
                    while b"got this" not in (await victim.run(read)).output:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            await victim.write_file("large", bytes(9_000_000))
            assert len(await victim.read_file("large")) == 9_000_000
            assert (await victim.run(wire.Untar(path="in", data=archive(f=b"x")))).kind == "done"
            async with await victim.snapshot() as snapshot, pool.lease("victim-fork", snapshot=snapshot) as fork:
                await says(fork, "cat in/f; ls", "xin\nlarge\n")
        # and what was taken is back with the release
        async with asyncio.timeout(20):
            while (await victim.exec('python3 -c "$CODE"', env={"CODE": PASSES})).output != "passed\n":  # noqa: ASYNC110
                await asyncio.sleep(0.05)


# ------------------------------------------------------------------------------------------------ what programs say


async def test_a_server_in_the_background_answers_however_much_it_says(attacker):
    """Nobody reads its log, which is the pipe of a call that is long over; and many more such come after it."""
    ask = (
        "import socket\n"
        "for n in range(1500):\n"
        "    s = socket.create_connection(('127.0.0.1', 9090), 10)\n"
        "    s.sendall(b'GET /' + b'x' * 200 + b' HTTP/1.0\\r\\n\\r\\n')\n"
        "    assert s.recv(100).startswith(b'HTTP/1.0 404'), n\n"
        "    s.close()\n"
        "print('answered')\n"
    )
    await attacker.exec(
        "python3 -u -m http.server 9090 & for i in $(seq 500); do (: > /dev/tcp/127.0.0.1/9090) 2>/dev/null && exit; sleep 0.02; done; exit 1"
    )
    result = await attacker.exec('python3 -c "$CODE"', env={"CODE": ask}, timeout_s=60)
    assert result.output == "answered\n", result
    for _ in range(45):
        assert (await attacker.exec("sleep 1000 &")).exit_code == 0
    result = await attacker.exec('python3 -c "$CODE"', env={"CODE": ask}, timeout_s=60)
    assert result.output == "answered\n", result
    await attacker.quiesce()


async def test_a_program_that_asks_to_be_traced_ends_as_any_other(attacker):
    """Its parent is PID 1, which would be told of its stops instead of its end."""
    trace = "import ctypes, os, signal; l = ctypes.CDLL(None); assert l.ptrace(0, 0, 0, 0) == 0\n"
    for number in ("SIGWINCH", "SIGTRAP", "SIGCHLD", "SIGURG"):
        code = (
            trace
            + f"os.kill(os.getpid(), signal.{number}); print('went on', flush=True); os.execv('/bin/sh', ['sh', '-c', 'echo executed; exit 7'])"
        )
        result = await attacker.exec('exec python3 -c "$CODE"', env={"CODE": code}, timeout_s=10)
        assert (result.exit_code, result.output) == (7, "went on\nexecuted\n"), (number, result)
    result = await attacker.exec(
        'exec python3 -c "$CODE"', env={"CODE": trace + "os.kill(os.getpid(), signal.SIGUSR1)"}, timeout_s=10
    )
    assert result.exit_code == -10, result
    result = await attacker.exec(
        'exec python3 -c "$CODE"', env={"CODE": trace + "os.kill(os.getpid(), signal.SIGSTOP)"}, timeout_s=0.3
    )
    assert result.timed_out, result
    begun = await attacker.run(
        wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": trace + "os.kill(os.getpid(), 28); print(1)"})
    )
    ended = await attacker.run(wire.ProcRead(id=begun.id, wait_s=10, until="exit"))
    assert (ended.running, ended.exit_code, ended.output) == (False, 0, b"1\n"), ended
    await says(attacker, "echo next", "next\n")


async def test_input_that_its_reader_gives_up_costs_no_time(attacker):
    """A full pipe whose reader closes it while it goes on: PID 1 doesn't turn in circles."""
    begun = await attacker.run(wire.ProcStart(command="sleep 0.5; exec 0<&-; exec sleep 1000"))
    assert (await attacker.run(wire.ProcWrite(id=begun.id, data=bytes(500_000)))).kind == "done"
    await asyncio.sleep(1)
    ticks = "cut -d' ' -f14,15 /proc/1/stat"
    first = sum(map(int, (await attacker.exec(ticks)).output.split()))
    await asyncio.sleep(1)
    assert sum(map(int, (await attacker.exec(ticks)).output.split())) - first < 30
    assert (await attacker.run(wire.ProcWrite(id=begun.id, data=b"x"))).kind == "op_error"


async def test_a_program_that_stops_all_others_again_and_again_makes_no_fault_of_a_call(attacker):
    """It catches programs in the moment of their start, when PID 1 waits for them in the kernel."""
    stopper = (
        "import os, signal\n"
        "os.fork() and os._exit(0)\n"
        "os.setsid()\n"
        "while True:\n"
        "    try:\n        os.kill(-1, signal.SIGSTOP)\n"
        "    except OSError:\n        pass\n"
    )
    await attacker.exec('python3 -c "$CODE"', env={"CODE": stopper}, timeout_s=2)
    for _ in range(5):
        async with asyncio.timeout(20):
            result = await attacker.exec("echo hi", timeout_s=1)
        assert (result.exit_code, result.output) in ((0, "hi\n"), (-9, "hi\n"), (-9, "")), result
    async with asyncio.timeout(30):
        read = await attacker.run(wire.ReadFile(path="/etc/passwd"))
        assert read.kind == "file_result"
        await attacker.quiesce()
    await says(attacker, "echo next", "next\n")


async def test_no_copy_of_pid_1_that_serves_files_can_be_read_or_traced(attacker):
    """Large files and archives are served by forks of PID 1, which know what it knows."""
    spy = r"""
import ctypes, os, time
libc = ctypes.CDLL(None)
own = open("/proc/1/comm").read()
seen, ends = set(), time.time() + 2.5
while time.time() < ends:
    for name in os.listdir("/proc"):
        if not name.isdigit() or name in ("1", str(os.getpid())):
            continue
        try:
            if open(f"/proc/{name}/comm").read() != own or open(f"/proc/{name}/cmdline").read():
                if "runner" not in open(f"/proc/{name}/cmdline").read():
                    continue
        except OSError:
            continue
        seen.add(name)
        for file in ("mem", "environ", "maps", "fd/0", "fd/3", "root/etc"):
            try:
                os.close(os.open(f"/proc/{name}/{file}", os.O_RDONLY))
            except OSError:
                continue
            try:
                if open(f"/proc/{name}/cmdline").read().find("runner") >= 0:
                    print("BREACH", file, flush=True)
            except OSError:
                pass
        if libc.ptrace(0x4206, int(name), 0, 0) == 0:
            print("BREACH ptrace", flush=True)
print("saw", len(seen), flush=True)
"""
    await attacker.exec("head -c 12000000 /dev/urandom > big; mkdir -p tree; cp big tree/")
    spying = await attacker.run(wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": spy}))
    operations = (
        wire.Tar(path="tree"),
        wire.ReadFile(path="big", max_bytes=10_000_000),
        wire.Search(pattern="z{9}", path="."),
    )
    for number in range(200):
        assert (await attacker.run(operations[number % 3])).kind != "op_error"
        ended = await attacker.run(wire.ProcRead(id=spying.id))
        if not ended.running:
            break
    ended = await attacker.run(wire.ProcRead(id=spying.id, wait_s=20, until="exit"))
    assert ended.exit_code == 0, ended
    assert b"BREACH" not in ended.output, ended
    assert int(ended.output.split()[1]) > 0, ended
