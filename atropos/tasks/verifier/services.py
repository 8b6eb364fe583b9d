"""Ends what an agent left running before its work is judged, except servers; and what its tests left.

A task may ask for a server, and its tests then talk to it. So by default processes that listen on a socket stay, with
those that started them, the children of all these, and the shell of the terminal that they run on; everything else
ends. A hostile agent can listen as well: `environment_mode = "separate"` is for that.

A server that was started in the agent's last moment does not listen yet. So what is younger than `YOUNG_S` is given the
time to, up to that age.
"""

from __future__ import annotations

import logging
from typing import Literal

from atropos.slot_python import SLOT_PYTHON
from atropos.slots import Slot
from atropos.tasks.builder.transfer import PLAIN_S, exec_plain
from atropos.tasks.format.task import Task

_log = logging.getLogger(__name__)

Keep = Literal["services", "all", "none"]
"""Which processes are still there when the tests run: those that listen, all, or none."""
YOUNG_S = 10
"""Age in seconds by which a server listens. Interpreters with large libraries take some seconds to."""

_SCRIPT = r"""
import os, sys, time, _signal as signal
def listening():
    sockets = set()
    # proc_pid_net(5): state 0A is TCP_LISTEN; a UDP socket that is bound and not connected is in 07, TCP_CLOSE.
    for name, column, states in (("tcp", 3, {"0A"}), ("tcp6", 3, {"0A"}), ("udp", 3, {"07"}), ("udp6", 3, {"07"})):
        try:
            for line in open(f"/proc/net/{name}").readlines()[1:]:
                part = line.split()
                if part[column] in states:
                    sockets.add(f"socket:[{part[9]}]")
        except OSError:
            pass
    for line in open("/proc/net/unix").readlines()[1:]:
        part = line.split()
        # __SO_ACCEPTCON: it listens.
        if int(part[3], 16) & 0x10000:
            sockets.add(f"socket:[{part[6]}]")
    return sockets
def processes():  # the parent of each, the first process of its session where that has a terminal, and when it started
    tree = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                # Behind the program's name, which may hold anything: state, parent, process group, session, terminal
                # (proc_pid_stat(5)).
                stat = open(f"/proc/{name}/stat").read().rpartition(")")[2].split()
            except OSError:
                continue
            # A zombie has ended; its parent alone can remove it.
            if stat[0] not in "ZX":
                tree[int(name)] = int(stat[1]), int(stat[3]) if int(stat[4]) else None, int(stat[19])
    return tree
def sockets_of(pid):
    found = set()
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            found.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except OSError:
        pass
    return {name for name in found if name.startswith("socket:")}
def look():
    tree, pid = processes(), os.getpid()
    # PID 1 is the slot's own, and those above this process run it.
    spared = {1}
    while pid in tree:
        spared.add(pid)
        pid, *_ = tree[pid]
    if since is not None:
        # What is older than the tests, with what it has started since.
        survivors = {pid for pid, (*_, started) in tree.items() if started < since} - spared
    else:
        held = {pid: sockets for pid in tree if pid not in spared and (sockets := sockets_of(pid))}
        # Read for those alone: the kernel goes through its whole table of connections, which takes milliseconds.
        listen = listening() if held else set()
        survivors = {pid for pid, sockets in held.items() if sockets & listen}
        for pid in list(survivors):  # a server may be one of several programs that another one has started
            while (pid := tree[pid][0]) in tree and pid not in spared and tree[pid][1] != pid:  # no terminal's shell
                survivors.add(pid)
    while more := {pid for pid, (parent, *_) in tree.items() if parent in survivors and pid not in survivors}:
        survivors |= more
    survivors |= {tree[pid][1] for pid in survivors} & set(tree) - spared  # whose end would hang up a terminal
    return tree, spared, survivors
def may_listen_yet():  # what is younger than that age, but for the shell of a terminal
    tree, spared, survivors = look()
    after = (float(open("/proc/uptime").read().split()[0]) - young) * os.sysconf("SC_CLK_TCK")
    return any(tree[pid][2] > after and tree[pid][1] != pid for pid in set(tree) - spared - survivors)
waits = sys.argv[2:] == ["wait"]
young, since = float(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] and not waits else None
deadline = time.monotonic() + young
while since is None and time.monotonic() < deadline and may_listen_yet():
    time.sleep(0.2)
if waits:
    sys.exit()
try:
    os.kill(-1, signal.SIGSTOP)  # all but this one and PID 1: nothing forks or starts to listen while it is looked at
except OSError:  # there is nothing else
    pass
tree, spared, survivors = look()
ended = set(tree) - spared - survivors
for sent, those in ((signal.SIGKILL, ended), (signal.SIGCONT, survivors)):
    for pid in those:
        try:
            os.kill(pid, sent)
        except OSError:  # it was already ending when all were stopped
            pass
while ended & set(processes()):  # the tests see none of it
    time.sleep(0.005)
print(len(ended), len(survivors))
"""
"""For the Python that every slot has: many images have none, and the agent may replace one."""


async def end_processes(slot: Slot, task: Task, keep: Keep) -> bool:
    """End what the task doesn't need for its verification, and say how much that was.

    Returns:
        Whether any may be left.

    Raises:
        SandboxError: the infrastructure failed.
    """
    if keep == "all":
        await wait_for_young(slot, task.name)
        return True
    if keep == "services":
        counts = await _counted(slot, task)
        # None: the script failed, perhaps by the agent's doing; then nothing of the agent's stays.
        if counts is not None:
            _report(task, counts[0], f"{counts[1]} that listen stay")
            return counts[1] > 0
    _report(task, await slot.quiesce(), "none stays")
    return False


async def wait_for_young(slot: Slot, name: str) -> None:
    """Give what was started in the agent's last moment the time to listen. The log says `name`."""
    done = await exec_plain(slot, _command("wait"), timeout_s=PLAIN_S + YOUNG_S)
    if done.exit_code != 0:
        _log.warning("%s: no server is waited for: %s", name, done.output[-200:].strip())


async def end_tests(slot: Slot, task: Task, since: int | None) -> None:
    """End the tests and what they left: all that started after `since`, except by older processes; None: everything.

    Args:
        slot: where they ran.
        task: whose they are.
        since: hundredths of a second since the machine's start.

    Raises:
        SandboxError: the infrastructure failed.
    """
    if since is None or await _counted(slot, task, str(since)) is None:
        await slot.quiesce()


async def _counted(slot: Slot, task: Task, *arguments: str) -> tuple[int, int] | None:
    """How many processes the script ended, and how many it kept; None where it failed."""
    done = await exec_plain(slot, _command(*arguments), timeout_s=PLAIN_S + YOUNG_S)
    words = done.output.split()
    if done.exit_code == 0 and len(words) == 2 and all(word.isdecimal() for word in words):
        return int(words[0]), int(words[1])
    _log.warning("%s: processes can't be distinguished, and all are ended: %s", task.name, done.output[-200:].strip())
    return None


def _command(*arguments: str) -> tuple[str, ...]:
    return (*SLOT_PYTHON, "-c", _SCRIPT, str(YOUNG_S), *arguments)


def _report(task: Task, ended: int, rest: str) -> None:
    if ended:
        _log.info("%s: %d processes of the agent were ended before verification; %s", task.name, ended, rest)
