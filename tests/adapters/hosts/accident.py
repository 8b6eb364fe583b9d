"""An accident: a container of the local backend, which is a process, is killed."""

from __future__ import annotations

import os
import signal
import subprocess


def kill_container() -> None:
    """Kill the one that this process started last."""
    command = ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args=", "--sort=start_time"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *_, newest = (line for line in listed.splitlines() if " -m atropos.sandbox " in line)
    os.kill(int(newest.split()[0]), signal.SIGKILL)
