"""Ends the processes that an agent left running before its work is judged, except servers; and those that its tests left.

A task may ask for a server, and its tests then talk to it. So by default processes that listen on a socket stay, with
their children and the shell of the terminal that they run on; everything else ends. A hostile agent can listen as well:
`environment_mode = "separate"` is for that.
"""

from __future__ import annotations

import logging

from atropos.slot_python import SLOT_PYTHON
from atropos.slots import Slot
from atropos.tasks.format.task import Task

_log = logging.getLogger(__name__)

_SCRIPT = r"""
import os, sys, time, _signal as signal
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
def processes():  # the parent of each, the first process of its session where that has a terminal, and when it started
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                stat = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
            except OSError:
                continue
            if stat[0] not in "ZX":
                found[int(name)] = int(stat[1]), int(stat[3]) if int(stat[4]) else None, int(stat[19])
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
    pid, *_ = tree[pid]
if sys.argv[1:]:
    kept = {pid for pid, (*_, started) in tree.items() if started < int(sys.argv[1])} - spared
else:
    kept = {pid for pid in tree if pid not in spared and holds(pid, sockets)}
while more := {pid for pid, (parent, *_) in tree.items() if parent in kept and pid not in kept}:
    kept |= more
kept |= {tree[pid][1] for pid in kept} & set(tree) - spared  # at whose end what runs on the terminal is hung up
ended = set(tree) - spared - kept
for sent, those in ((signal.SIGKILL, ended), (signal.SIGCONT, kept)):
    for pid in those:
        try:
            os.kill(pid, sent)
        except OSError:  # it was ending already when all were stopped
            pass
while ended & set(processes()):  # none is seen by the tests
    time.sleep(0.005)
print(len(ended), len(kept))
"""
"""For the Python that every slot has: many images have none, and what is the agent's may be replaced."""
_NOW = 'print(open("/proc/self/stat").read().rpartition(")")[2].split()[19])'


async def end_processes(slot: Slot, task: Task) -> None:
    """End what the task doesn't need for its verification, and say how much that was.

    Raises:
        SandboxError: the infrastructure failed.
    """
    keep = task.config.verifier.keep_processes
    if keep is True:
        return
    if keep == "services":
        counts = await _counted(slot, task)
        if counts is not None:
            _report(task, counts[0], f"{counts[1]} that listen stay")
            return
    _report(task, await slot.quiesce(), "none stays")


async def moment(slot: Slot) -> int | None:
    """Now, as the kernel counts the time at which a process started; None where the slot can't say.

    Raises:
        SandboxError: the infrastructure failed.
    """
    return next(iter(await _numbers(slot, _NOW)), None)


async def end_tests(slot: Slot, task: Task, since: int | None) -> None:
    """End the tests and what they left: all that started later than `since`, except by what was there; None: everything.

    Raises:
        SandboxError: the infrastructure failed.
    """
    if since is None or await _counted(slot, task, str(since)) is None:
        await slot.quiesce()


async def _counted(slot: Slot, task: Task, *arguments: str) -> tuple[int, int] | None:
    """How many processes the script ended, and how many it kept; None where it failed."""
    counts = await _numbers(slot, _SCRIPT, *arguments)
    if len(counts) == 2:
        return counts[0], counts[1]
    _log.warning("%s: processes can't be distinguished, and all are ended", task.name)
    return None


async def _numbers(slot: Slot, script: str, *arguments: str) -> list[int]:
    """What a script printed; nothing where it failed."""
    done = await slot.exec((*SLOT_PYTHON, "-c", script, *arguments), workdir="/", clean_env=True, timeout_s=30)
    words = done.output.split()
    if done.exit_code != 0 or not all(word.isdecimal() for word in words):
        _log.warning("a program of atropos's own failed in a slot: %s", done.output[-200:].strip())
        return []
    return [int(word) for word in words]


def _report(task: Task, ended: int, rest: str) -> None:
    if ended:
        _log.info("%s: %d processes of the agent were ended before verification; %s", task.name, ended, rest)
