"""Ends the processes that an agent left running before its work is judged, except servers.

A task may ask for a server, and its tests then talk to it. So by default processes that listen on a socket stay, with
their children and the shell of the terminal that they run on; everything else ends. A hostile agent can listen as well: `environment_mode = "separate"` is for that.
"""

from __future__ import annotations

import logging

from atropos.slot_python import SLOT_PYTHON
from atropos.slots import Slot
from atropos.tasks.format.task import Task

_log = logging.getLogger(__name__)

_SCRIPT = r"""
import os, time, _signal as signal
def listening():
    found = set()
    for name, column, states in (("tcp", 3, {"0A"}), ("tcp6", 3, {"0A"}), ("udp", 3, {"07"}), ("udp6", 3, {"07"})):
        try:
            for line in open(f"/proc/net/{name}").readlines()[1:]:
                part = line.split()
                if part[column] in states:
                    found.add(f"socket:[{part[9]}]")
        except OSError:
            pass
    for line in open("/proc/net/unix").readlines()[1:]:
        part = line.split()
        if int(part[3], 16) & 0x10000:
            found.add(f"socket:[{part[6]}]")
    return found
def processes():  # the parent of each, and the first process of its session where that has a terminal
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                stat = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] not in "ZX":
                found[int(name)] = int(stat[1]), int(stat[3]) if int(stat[4]) else None
    return found
def holds(pid, sockets):
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") in sockets for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False
try:
    os.kill(-1, signal.SIGSTOP)  # all but this one and PID 1: nothing forks or starts to listen while it is looked at
except OSError:  # there is nothing else
    pass
tree, sockets, pid = processes(), listening(), os.getpid()
spared = {1}
while pid in tree:
    spared.add(pid)
    pid, _ = tree[pid]
kept = {pid for pid in tree if pid not in spared and holds(pid, sockets)}
while more := {pid for pid, (parent, _) in tree.items() if parent in kept and pid not in kept}:
    kept |= more
kept |= {tree[pid][1] for pid in kept} & set(tree) - spared  # at whose end what runs on the terminal is hung up
ended = set(tree) - spared - kept
for sent, those in ((signal.SIGKILL, ended), (signal.SIGCONT, kept)):
    for pid in those:
        os.kill(pid, sent)
while ended & set(processes()):  # none is seen by the tests
    time.sleep(0.005)
print(len(ended), len(kept))
"""
"""For the Python that every slot has: many images have none, and what is the agent's may be replaced."""


async def end_processes(slot: Slot, task: Task) -> None:
    """End what the task doesn't need for its verification, and say how much that was.

    Raises:
        SandboxError: the infrastructure failed.
    """
    keep = task.config.verifier.keep_processes
    if keep is True:
        return
    if keep == "services":
        done = await slot.exec((*SLOT_PYTHON, "-c", _SCRIPT), workdir="/", clean_env=True, timeout_s=30)
        counts = done.output.split()
        if done.exit_code == 0 and len(counts) == 2 and counts[0].isdecimal() and counts[1].isdecimal():
            _report(task, int(counts[0]), f"{counts[1]} that listen stay")
            return
        _log.warning(
            "%s: services can't be distinguished from other processes: %s", task.name, done.output[-200:].strip()
        )
    _report(task, await slot.quiesce(), "none stays")


def _report(task: Task, ended: int, rest: str) -> None:
    if ended:
        _log.info("%s: %d processes of the agent were ended before verification; %s", task.name, ended, rest)
