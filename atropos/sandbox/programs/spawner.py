"""The process that PID 1 of each slot is forked from: small, single-threaded and kept apart, with the runner loaded.

It is the parent of every PID 1, makes each slot's user namespace, and reports ends. It takes requests of the server
over an inherited socket and ends with it. Standard library only: what it holds in memory, every slot shares
(docs/decisions/0013).
"""

from __future__ import annotations

import _socket
import fcntl
import gc
import marshal
import os
import select
import signal
import struct
import sys
import time
from types import FunctionType
from typing import NotRequired, TypedDict

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from atropos.sandbox.linux import netlink, syscalls
from atropos.sandbox.linux.stopped_children import children_of
from atropos.sandbox.linux.sysctl import tell_kernel
from atropos.sandbox.programs import first_process, gateway
from atropos.sandbox.programs.first_process import FirstProcessRequest
from atropos.sandbox.programs.runner import main as runner
from atropos.sandbox.programs.runner.children import children
from atropos.sandbox.programs.runner.frames import link
from atropos.sandbox.programs.runner.loop import loop
from atropos.sandbox.programs.runner.state import state

STATUS_FD, PIDS_FD = 4, 5
"""Where bubblewrap writes its child's number; the namespace of processes that the slot's /proc shows."""
_MAX_REQUEST = 1 << 18


class StartRequest(FirstProcessRequest):
    """What starting one slot takes."""

    argv: list[str]
    own: tuple[bytes, bytes, bytes]
    sys: str
    ids: int
    creator: int | None
    cgroups: list[str]
    rlimits_before: dict[str, int]


class NumberedRequest(StartRequest):
    """One with the number that its reports carry."""

    id: int


class Report(TypedDict):
    """The result of a request: first a pid or an error; at its end the CPU time of its processes, -1 if unknown."""

    id: int
    pid: NotRequired[int]
    error: NotRequired[str]
    cpu_s: NotRequired[float]


def main() -> None:
    """Serve until the server's end of the socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the server decides when slots end; a Ctrl-C reaches the whole process group
        signal.signal(number, signal.SIG_IGN)
    # each PID 1 comes here when the process that forked it ends
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.own_session_keyring()
    syscalls.load()
    # a slot's PID 1 has what is loaded now: more would come from the slot's root
    sys.path.clear()
    sys.meta_path.clear()
    _look_up_names()
    # A collection in a fork would write to every object's header, and so copy every page.
    gc.freeze()
    spawner = Spawner(_socket.socket(fileno=0))
    try:
        spawner.run()
    finally:
        spawner.end_all()


def _look_up_names() -> None:
    """Look up the attributes that a fork will ask for, so that it finds them in Python's cache.

    CPython keeps that cache (`type_cache`) in 24 pages, and an attribute that isn't in it is written to any of them.
    """
    asking = {
        each.__module__
        for each in (
            *(_child, first_process.run, gateway.enter_network, netlink.veth, syscalls.load),
            *(runner.main, loop.run, link.open, state.protect_self),
        )
    }
    functions = [each for each in gc.get_objects() if isinstance(each, FunctionType) and each.__module__ in asking]
    names = {name for function in functions for name in function.__code__.co_names}
    for name in names:
        getattr(os, name, None)  # the cache is by type: this is for all modules
    for thing in (link, loop, state, children, _socket.socket(), bytearray(), b"", "", 0, [], {}, set[object]()):
        for name in names.intersection(dir(thing)):
            getattr(thing, name, None)


class Spawner:
    """Requests in, reports out: one marshalled object a datagram, descriptors beside it."""

    def __init__(self, server: _socket.socket) -> None:
        self._server = server
        self._running: dict[int, int] = {}
        """The number of the request, by PID 1."""
        self._makers: dict[int, tuple[int, int, int]] = {}
        """By a pipe that PID 1 keeps open until it has entered its root: the bubblewrap that makes the root (pidfd),
        the pipe that tells PID 1 that this process is its parent, and PID 1."""
        self._poll = select.poll()
        self._wake, notify = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        # With poll alone, a SIGCHLD between two calls would be seen only with the next event.
        signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, runner.ignore_signal)

    def run(self) -> None:
        """Say that it runs, and serve until the server goes."""
        try:
            self._server.send(b"r")
        except ConnectionError:  # it has gone already, for example over a wrong configuration
            return
        self._poll.register(self._server, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        while True:
            # Adopted before anything is reaped: an end is reported under the request that is known by then.
            ready = [fd for fd, _ in self._poll.poll()]
            self._adopt_entered()
            if self._wake in ready:
                try:
                    os.read(self._wake, 4096)
                except BlockingIOError:
                    pass
                self._reap()
            if self._server.fileno() in ready and not self._request():
                return

    def _request(self) -> bool:
        try:
            data, control, _, _ = self._server.recvmsg(_MAX_REQUEST, _socket.CMSG_LEN(8 * 4))
        except ConnectionError:
            return False
        if not data:
            return False
        fds = [fd for _, _, numbers in control for (fd,) in struct.iter_unpack("i", numbers)]
        request: NumberedRequest = marshal.loads(data)  # noqa: S302 (of the server, which is the same Python)
        try:
            pid = self._start(request, fds)
        except OSError as error:
            self._report({"id": request["id"], "error": str(error)})
        else:
            self._running[pid] = request["id"]
            self._report({"id": request["id"], "pid": pid})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _report(self, report: Report) -> None:
        try:
            self._server.send(marshal.dumps({**report}))
        except ConnectionError:
            pass

    def _reap(self) -> None:
        while True:
            try:
                pid, _, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ident = self._running.pop(pid, None)
            if ident is not None:
                self._adopt_entered()  # its bubblewrap ends before its own end is reported
                self._report({"id": ident, "cpu_s": usage.ru_utime + usage.ru_stime})  # of all that PID 1 has reaped

    def _adopt_entered(self) -> None:
        """Adopt each PID 1 that has entered its root, or has ended."""
        for fd, _ in self._poll.poll(0):
            if fd in self._makers:
                self._adopt(fd)

    def _adopt(self, entered: int) -> None:
        """End the bubblewrap of a root that PID 1 has entered: this process is PID 1's parent from then on."""
        maker, tells, first = self._makers.pop(entered)
        self._poll.unregister(entered)
        try:
            # It waits for its child, which is this slot's PID 1: without it that one becomes this process's
            # (subreaper).
            signal.pidfd_send_signal(maker, signal.SIGKILL)
            # Reaped here, so that PID 1 is told only once its parent has changed.
            os.waitid(os.P_PIDFD, maker, os.WEXITED)
        except (ProcessLookupError, ChildProcessError):  # it has ended
            pass
        try:
            os.write(tells, b"x")
        except BrokenPipeError:
            pass
        for fd in (entered, maker, tells):
            os.close(fd)
        try:
            # Only asks whether it is a child of this process; WNOWAIT leaves it for `_reap`.
            os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # it ended, and bubblewrap, its parent until now, has reaped it
            if (ident := self._running.pop(first, None)) is not None:
                self._report({"id": ident, "cpu_s": -1})

    def end_all(self) -> None:
        """Kill every child: the server is gone."""
        # Ten seconds: what doesn't die by then waits in the kernel, and this process must end as well.
        for _ in range(5000):
            for pid in children_of(os.getpid()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)

    def _start(self, request: StartRequest, fds: list[int]) -> int:
        """Fork; the child enters a user namespace, gets its maps from here, forks PID 1, and becomes bubblewrap.

        Returns:
            PID 1's number here; that of the child where it got no so far.
        """
        said_r, said_w, go_r, go_w = pipes = (*os.pipe2(os.O_CLOEXEC), *os.pipe2(os.O_CLOEXEC))
        try:
            pid = os.fork()
        except OSError:  # the host or container has no room for processes now
            for fd in pipes:
                os.close(fd)
            raise
        if pid == 0:
            try:
                os.close(said_r)
                os.close(go_w)
                _child(request, fds, said_w, go_r)
            except BaseException as error:  # its message goes where bubblewrap's do
                try:
                    os.write(2, f"{type(error).__name__}: {error}\n".encode())
                except OSError:
                    pass
            finally:
                os._exit(127)
        os.close(said_w)
        os.close(go_r)
        first = b""
        try:
            # The child is in its namespace. An id map is written from outside, by a process with power over those ids.
            if os.read(said_r, 1):
                _map_ids(pid, request["ids"])
                os.write(go_w, b"x")
                first = os.read(said_r, 16)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            if not first:
                os.close(said_r)
                os.close(go_w)
        if not first:
            return pid
        self._makers[said_r] = (os.pidfd_open(pid), go_w, int(first))
        self._poll.register(said_r, select.POLLIN)
        return int(first)


def _map_ids(pid: int, count: int) -> None:
    """Give the user namespace of a process its first ids, from 0 on."""
    for name in ("uid_map", "gid_map"):
        tell_kernel(f"/proc/{pid}/{name}", f"0 0 {count}")


def _child(request: StartRequest, fds: list[int], said: int, go: int) -> None:
    """Run in the fork: set up cgroups, limits, and a user namespace as uid 0; fork PID 1, and execute bubblewrap.

    PID 1 enters what bubblewrap has made, and is the spawner's once bubblewrap has ended.
    """
    parent = os.getppid()
    # The pipe is shared with the parent, which would be woken by signals of this child.
    signal.set_wakeup_fd(-1)
    link, errors, network = fds[:3]
    os.dup2(errors, 2)
    for path in request["cgroups"]:
        # First: all that follows counts as the slot's, and PID 1 is born in its cgroup.
        tell_kernel(f"{path}/cgroup.procs", "0")
    for name, value in request["rlimits_before"].items():
        first_process.lower_limit(name, value)
    # Taken now: the next line takes away the mount that it is found by.
    tree = syscalls.detached_mount(request["sys"])
    _own_mounts(*request["own"])
    if request["joins"]:
        syscalls.setns(fds[3], syscalls.CLONE_NEWNET)
    creator: int | None = request["creator"]
    if creator is not None:
        # A user namespace belongs to who makes it: the kernel counts its objects towards this uid (ucounts).
        os.setresgid(creator, creator, creator)
        os.setresuid(creator, creator, creator)
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
    os.write(said, b"x")
    if not os.read(go, 1):
        os._exit(126)
    try:
        os.setgroups([])
    except PermissionError:  # refused where the outer namespace denies it: one id, no groups
        pass
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    near, far = _socket.socketpair()
    # For PID 1, to see bubblewrap end; by number it is not to be seen from inside its PID namespace.
    own = os.pidfd_open(os.getpid())
    first = os.fork()
    if not first:
        far.close()
        first_process.run(request, link, network, tree, own, near.fileno(), said, go)
    os.write(said, f"{first}".encode())
    # The namespace exists since `first` was forked into it; bubblewrap's child has to be in it, too.
    pids = os.open("/proc/self/ns/pid_for_children", os.O_RDONLY)
    # Moved up first: a target number may be one of the sources.
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, PIDS_FD + 1) for fd in (far.fileno(), pids)]
    for fd, target in ((high[0], 0), (high[0], 1), (high[0], STATUS_FD), (high[1], PIDS_FD)):
        os.dup2(fd, target)
    os.closerange(3, 4)
    os.closerange(PIDS_FD + 1, 1 << 16)
    # After the change of ids, which clears it (prctl(2)).
    syscalls.die_with(parent)
    bwrap, *arguments = request["argv"]
    os.execve(bwrap, [bwrap, "--pidns", str(PIDS_FD), "--json-status-fd", str(STATUS_FD), *arguments], {})


def _own_mounts(volume: bytes, seen: bytes, slots: bytes) -> None:
    """A mount namespace without other slots' mounts, since bubblewrap reads the whole list for each mount it makes.

    Args:
        volume: where this slot's mounts are.
        seen: where bubblewrap finds them.
        slots: the mount that all slots' mounts are in.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # one way only: what is unmounted here must stay mounted in the server's namespace
    syscalls.mount(None, b"/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    syscalls.mount(volume, seen, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.umount(slots)


if __name__ == "__main__":
    main()
