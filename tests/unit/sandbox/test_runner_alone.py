"""What PID 1 of a slot, and the process that it is forked from, do without a slot: their functions, in a process of
their own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

CHANGED = """
import resource, sys
from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.files.files import write_file
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + (16 << 20),) * 2)
try:
    write_file(sys.argv[1], b"x", None, "0" * 64, in_place=0)
except OpFailed as failed:
    print(failed.error, failed.limit)
"""
TERMINALS = """
import os
from atropos.sandbox.programs.runner.failures import OpFailed
from atropos.sandbox.programs.runner.processes.terminals import open_terminal
kept = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
try:
    open_terminal(24, 80)
except OpFailed as failed:
    print(failed.error, failed.limit)
"""
ORPHANS = """
import os, resource
from atropos.sandbox.programs.runner.processes import orphan_pipes
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))  # a slot's, long after the runner was loaded
for _ in range(100):
    read, write = os.pipe()
    os.close(write)
    orphan_pipes.adopt(read)
print(len(orphan_pipes.orphan_pipes))
"""
ENDED_BEFORE = """
import os, socket, time
from atropos.sandbox.programs.runner import main
near, far = socket.socketpair()
ended = os.fork()
if not ended:
    os._exit(0)
os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
if not os.fork():  # the server
    far.close()
    until = time.monotonic() + 60
    while time.monotonic() < until and os.path.exists(f"/proc/{ended}"):
        time.sleep(0.01)
    print(os.path.exists(f"/proc/{ended}"), flush=True)
    os._exit(0)
near.close()
os.dup2(far.fileno(), 3)
if far.fileno() != 3:
    far.close()
main.main()
"""
NO_ROOM = """
import marshal, os, resource, socket
from atropos.sandbox.programs.spawner import Spawner
near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
spawner = Spawner(far)
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # the limit is none for root
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
before = os.listdir("/proc/self/fd")
for number in range(10):
    near.send(marshal.dumps({"id": number}))
near.shutdown(socket.SHUT_WR)
spawner.run()
print(len(os.listdir("/proc/self/fd")) - len(before))
near.recv(1)  # it says that it runs
for _ in range(10):
    print(marshal.loads(near.recv(4096))["error"])
"""


def said(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_large_not_read_whole(tmp_path):
    """The memory of PID 1 is its slot's: a file of half of it would be the end of both."""
    file = tmp_path / "large"
    with file.open("wb") as opened:
        opened.truncate(48 << 20)
    assert said(sys.executable, "-c", CHANGED, str(file)) == "changed None\n"


def test_orphan_pipes_are_bounded():
    assert said(sys.executable, "-c", ORPHANS) == "16\n"


def test_early_ends_are_reaped():
    assert said(sys.executable, "-c", ENDED_BEFORE) == "False\n"


def test_failed_starts_cost_no_descriptors():
    """The server asks again and again: without any left, no slot would ever start once there is room."""
    refused = f"{OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))}\n"
    assert said(sys.executable, "-c", NO_ROOM) == "0\n" + 10 * refused


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to mount terminals")
def test_used_up_is_no_full_disk():
    few = "mount -t devpts -o newinstance,max=1,ptmxmode=0666 few /dev/pts && mount --bind /dev/pts/ptmx /dev/ptmx"
    command = f'{few} && exec "$@"'
    assert said("unshare", "--mount", "sh", "-c", command, "sh", sys.executable, "-c", TERMINALS) == "limit None\n"
