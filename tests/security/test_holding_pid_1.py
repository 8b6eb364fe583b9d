"""What a program may do to hold PID 1 of its slot up or end it: its calls are results all the same, never faults."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from atropos import wire
from tests.security.test_what_programs_say_and_leave import says

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_loud_server_answers(attacker):
    """Nobody reads its log, which is the pipe of a call that is long over; and many more such come after it."""
    ask = (
        "import socket\n"
        "for n in range(400):\n"
        "    s = socket.create_connection(('127.0.0.1', 9090), 10)\n"
        "    s.sendall(b'GET /' + b'x' * 200 + b' HTTP/1.0\\r\\n\\r\\n')\n"
        "    assert s.recv(100).startswith(b'HTTP/1.0 404'), n\n"
        "    s.close()\n"
        "print('answered')\n"
    )
    await attacker.exec(
        "python3 -u -m http.server 9090 & until (: > /dev/tcp/127.0.0.1/9090) 2>/dev/null; do sleep 0.02; done"
    )
    result = await attacker.exec('python3 -c "$CODE"', env={"CODE": ask}, timeout_s=60)
    assert result.output == "answered\n", result
    for _ in range(45):
        assert (await attacker.exec("sleep 1000 &")).exit_code == 0
    result = await attacker.exec('python3 -c "$CODE"', env={"CODE": ask}, timeout_s=60)
    assert result.output == "answered\n", result
    await attacker.quiesce()


async def test_a_traced_program_ends(attacker):
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


async def test_abandoned_input_is_free(attacker):
    """A full pipe whose reader closes it while it goes on: PID 1 doesn't turn in circles."""
    begun = await attacker.run(wire.ProcStart(command="sleep 0.5; exec 0<&-; echo closed; exec sleep 1000"))
    assert (await attacker.run(wire.ProcWrite(id=begun.id, data=bytes(500_000)))).kind == "done"
    assert (await attacker.run(wire.ProcRead(id=begun.id, wait_s=20, until="output"))).output == b"closed\n"
    ticks = "cut -d' ' -f14,15 /proc/1/stat"
    first = sum(map(int, (await attacker.exec(ticks)).output.split()))
    await asyncio.sleep(1)
    assert sum(map(int, (await attacker.exec(ticks)).output.split())) - first < 30
    assert (await attacker.run(wire.ProcWrite(id=begun.id, data=b"x"))).kind == "op_error"


async def test_stopping_all_is_no_fault(attacker):
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


async def test_pid_1_copies_unreadable(attacker):
    """Large files and archives are served by forks of PID 1, which know what it knows."""
    spy = r"""
import ctypes, os, time
libc = ctypes.CDLL(None)
own = open("/proc/1/comm").read()
seen, ends = set(), time.time() + 20
print("looking", flush=True)
while len(seen) < 3 and time.time() < ends:
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
print("saw" if seen else "saw none", flush=True)
"""
    await attacker.exec("head -c 12000000 /dev/urandom > big; mkdir -p tree; cp big tree/")
    spying = await attacker.run(wire.ProcStart(command='exec python3 -c "$CODE"', env={"CODE": spy}))
    operations = (
        wire.Tar(path="tree"),
        wire.ReadFile(path="big", max_bytes=10_000_000),
        wire.Search(pattern="z{9}", path="."),
    )
    looks = await attacker.run(wire.ProcRead(id=spying.id, wait_s=20, until="output"))
    numbers = itertools.count()
    while looks.running:
        assert (await attacker.run(operations[next(numbers) % 3])).kind != "op_error"
        looks = await attacker.run(wire.ProcRead(id=spying.id))
    assert (looks.exit_code, looks.output) == (0, b"looking\nsaw\n"), looks


async def test_pid_1_survives_oom(attacker):
    """Many processes smaller than PID 1, in memory that is full of pipes: the kernel ends the largest of equals."""
    code = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <unistd.h>
static char data[65536], big[3 << 20];
int main() {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY);
    if (fd >= 0) { write(fd, "0", 1); close(fd); }
    for (int n = 0; n < 4 && fork(); n++);
    setsid();
    for (int p[2]; !pipe2(p, O_NONBLOCK);) { fcntl(p[1], F_SETPIPE_SZ, 1 << 20); while (write(p[1], data, sizeof data) > 0); }
    for (int n = 0; n < 30 && fork(); n++);
    for (;; usleep(1000)) for (int n = 0; n < sizeof big; n += 4096) big[n]++;
}
"""
    await attacker.write_file("dear.c", code)
    assert (await attacker.exec("cc -O -o dear dear.c 2>/dev/null", timeout_s=30)).exit_code == 0
    # those that it leaves in other sessions go on for a while; what is asked meanwhile starts no program
    assert (await attacker.exec("exec ./dear", timeout_s=2)).exit_code is not None
    for _ in range(20):
        assert (await attacker.run(wire.ReadFile(path="dear.c"))).kind == "file_result"
        await asyncio.sleep(0.1)
    await attacker.quiesce()
    await says(attacker, "echo next", "next\n")


async def test_endless_user_tables_cost_no_memory(attacker):
    """PID 1 reads them for each call with a user: were it ended for want of memory, its slot would be lost."""
    lines = "head -c 1000000 /dev/zero | tr '\\0' '\\n'"
    await attacker.exec(f"{lines} | tee -a /etc/passwd >> /etc/group; head -c 40000000 /dev/zero > full")
    await says(attacker, "id -u", "0\n", user="root")
    await attacker.exec("{ head -c 1000000 /dev/zero | tr '\\0' ,; echo; } | tee /etc/passwd > /etc/group")
    refused = await attacker.run(wire.Exec(command="id -u", user="root"))
    assert (refused.kind, refused.error) == ("op_error", "unknown_user"), refused
    await says(attacker, "echo next", "next\n")


LEASED = """
import fcntl, os, shutil, signal, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
shutil.copy("/usr/bin/true", "leased")
fcntl.fcntl(os.open("leased", os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
time.sleep(1000)
"""
SERVING = "cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c ^atropos-runner"


async def test_broken_start_is_no_stream(attacker):
    """The server ends a child that PID 1 waits for in the kernel. One that waits for a file's bytes looks alike."""
    holder = await attacker.run(wire.ProcStart(command=("python3", "-c", LEASED)))
    assert (await attacker.run(wire.ProcRead(id=holder.id, wait_s=20, until="output"))).output == b"held\n"
    upload = asyncio.create_task(attacker.run(wire.WriteStream(path="file", stream="nobody-sends-it")))

    async def begun() -> bool:
        return (await attacker.exec(SERVING, concurrent=True)).output == "2\n"

    async with asyncio.timeout(20):
        while not await begun():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    ended = await attacker.run(wire.Exec(command=("/workspace/leased",), concurrent=True))
    assert ended.kind == "op_error" or ended.exit_code == -9, ended  # by how long PID 1 had waited for it
    assert await begun()
    assert not upload.done(), upload
    upload.cancel()
