"""Truth 3: no process, file, mount, socket or limit of an earlier lease is left."""

from __future__ import annotations

import asyncio

import pytest
import pytest_asyncio

from tests.waiting import SLOWNESS

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK = r"""
cd /; find / -xdev \( -path /proc -o -path /sys -o -path /usr -o -path /.atropos \) -prune -o -printf '%p %y %m %U %G\n' 2>&1 | sort
ls -A /tmp /dev/shm /var/tmp /root /workspace
ls -l /dev | sed 's/ *[A-Z][a-z][a-z]  *[0-9]* .*:.. / /'
env | grep -v '^_=' | sort
ulimit -a
set -- /proc/[0-9]*; echo $# processes
ls /proc/sys/fs/mqueue; ipcs -a; cat /proc/net/tcp /proc/net/unix | wc -l
hostname; umask; awk '{print $2, $3, $5, $9}' /proc/self/mountinfo | wc -l
"""

MESSES = {
    "processes": "for i in 1 2 3 4 5; do (setsid nohup sh -c 'trap \"\" TERM HUP INT; while :; do sleep 1; done' >/dev/null 2>&1 &); done",
    "deep folders": "python3 -c \"import os\nfor i in range(1500): os.mkdir('d'); os.chdir('d')\"",
    "modes and names": "mkdir m; touch m/f; chmod 000 m; touch \"$(printf 'bad\\xff\\xfename')\"; ln -s /nowhere l; mkfifo p",
    "open files": "exec 9>held; rm held; (setsid sleep 1000 >/dev/null 2>&1 <&9 &)",
    "sockets and ipc": "python3 -c \"import socket,os,time; s=socket.socket(); s.bind(('127.0.0.1',7777)); s.listen(); u=socket.socket(socket.AF_UNIX); u.bind('/tmp/u'); os.fork() and os._exit(0); os.setsid(); time.sleep(1000)\" >/dev/null 2>&1; ipcmk -M 4096 -Q -S 2 2>/dev/null",
    "system files": "echo evil >> /etc/passwd; echo 6.6.6.6 x >> /etc/hosts; rm -rf /etc/ssl /root; mkdir -p /root; echo 'echo evil' > /root/.bashrc; rm /tmp -rf; ln -s /etc /tmp",
    "limits and host name": "ulimit -n 10; ulimit -u 5; hostname evil 2>/dev/null; renice 19 $$ >/dev/null 2>&1; umask 0",
    "shared memory": "head -c 5000000 /dev/zero > /dev/shm/x; head -c 5000000 /dev/zero > /tmp/y",
    "a fork bomb that goes on": "(setsid bash -c ':(){ :|:& };:' >/dev/null 2>&1 &); sleep 0.2",
    "everything is stopped": "for i in 1 2 3 4 5; do sleep 1000 & kill -STOP $!; done; python3 -c 'import os, signal; os.fork(); os.kill(-1, signal.SIGSTOP)'",
    "a parent that waits in the kernel": 'python3 -c "import ctypes; l=ctypes.CDLL(None); l.vfork() == 0 and l.pause()" & sleep 0.2',
    "attributes and holes": "truncate -s 8E hole; truncate -s 1T hole2; python3 -c \"import os; open('a','w'); [os.setxattr('a', f'user.{n}', bytes(60000)) for n in range(50)]\"; chmod 7777 a",
    "many files": "mkdir many; cd many; seq 20000 | xargs touch",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one_slot(local_pool):
    """A pool of one slot, so that each lease follows on the one before."""
    async with local_pool(slots_per_container=1, max_containers=1, limits={"inodes": 100_000}) as pool:
        yield pool


async def test_nothing_earlier_is_left(one_slot):
    async with one_slot.lease("first") as slot:
        fresh = (await slot.exec(LOOK)).output
        assert "/workspace" in fresh
    for name, mess in MESSES.items():
        async with one_slot.lease(name) as slot:
            await slot.exec(mess, timeout_s=2 if "stopped" in name else 60 * SLOWNESS)
        async with one_slot.lease(f"after {name}") as slot:
            assert (await slot.exec(LOOK)).output == fresh, name
    assert one_slot.stats().retired == 0


async def test_reset_time_is_constant(one_slot):
    """Compared in one run and very generously: wiping 30,000 files takes some hundred times as long as forgetting them."""

    async def reset_s(command: str) -> float:
        best = 1e9
        for _ in range(3):
            slot = await one_slot.acquire("t")
            await slot.exec(command, timeout_s=120 * SLOWNESS)
            loop = asyncio.get_running_loop()
            began = loop.time()
            await slot.release()
            best = min(best, loop.time() - began)
        return best

    few = await reset_s("touch one")
    many = await reset_s("mkdir many; cd many; seq 30000 | xargs touch")
    assert many < 10 * few + 0.25


@pytest.mark.parametrize("deep", [1, 3])
async def test_fork_starts_from_snapshot(shared_pool, deep):
    async with shared_pool.lease("origin") as origin:
        snapshots = []
        for n in range(deep):
            await origin.exec(f"echo {n} > file{n}; echo {n} > last; (setsid sleep 1000 >/dev/null 2>&1 &)")
            snapshots.append(await origin.snapshot())
            assert "sleep" not in (await origin.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).output
        await origin.exec("echo after > last; rm file0")
        for n, snapshot in enumerate(snapshots):
            async with shared_pool.lease(f"fork{n}", snapshot=snapshot) as fork:
                names = "".join(f"file{i}\n" for i in range(n + 1))
                assert (await fork.exec("ls; cat last")).output == f"{names}last\n{n}\n"
                assert "sleep" not in (await fork.exec("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")).output
                await fork.exec("rm -r /workspace/*; echo fork > last")
        assert (await origin.exec("cat last")).output == "after\n"
    for snapshot in snapshots:
        await snapshot.drop()
