"""Who waits for a child that does not become a program goes on: stopped in its start, or asleep before a leased file."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time

from atropos.sandbox.linux import stopped_children

STARTER = "import os, sys; print(os.waitpid(os.posix_spawn(sys.argv[1], ['program'], {}), 0)[1], flush=True)"


def test_child_on_a_lease_is_ended(tmp_path):
    program = tmp_path / "program"
    shutil.copy("/bin/true", program)
    handler = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(program, os.O_RDWR)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        with subprocess.Popen([sys.executable, "-c", STARTER, str(program)], stdout=subprocess.PIPE) as starter:
            try:
                ends = time.monotonic() + 20
                while not (stuck := stopped_children.kill_stopped_children(starter.pid, set())):
                    assert time.monotonic() < ends
                    time.sleep(0.02)
                assert stopped_children.kill_stopped_children(starter.pid, set()) == stuck  # it was not killed at once
                assert stopped_children.kill_stopped_children(starter.pid, stuck) == stuck
                assert starter.communicate(timeout=20)[0] == b"9\n"
            finally:
                os.close(fd)
                starter.kill()
    finally:
        signal.signal(signal.SIGIO, handler)
