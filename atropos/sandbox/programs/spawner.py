"""The process that starts bubblewraps: small, single-threaded and kept apart, so that starting one is a cheap fork.

It is the parent of every slot's bubblewrap (whose die-with-parent follows the *thread* that started it), makes each
slot's user namespace, and reports ends. It takes requests of the server over an inherited socket and ends with it.
Standard library only: a fork of the server itself would copy the page tables of an event loop with all its libraries.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import NotRequired, TypedDict

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))))

from atropos.sandbox.linux import memory_files, syscalls

STATUS_FD, SECCOMP_FD, RUNNER_FD = 4, 5, 3
_MAX_REQUEST = 1 << 18
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # <linux/sockios.h>, <linux/if.h>


class StartRequest(TypedDict):
    """What starting one slot's bubblewrap takes."""

    own: tuple[str, str, str]
    argv: list[str]
    proxy_port: int | None
    joins: bool
    ids: int
    creator: int | None
    cgroups: list[str]
    seccomp: str
    rlimits_before: dict[str, int]
    rlimits: dict[str, int]
    counters: dict[str, int]
    ipc: dict[str, int | str]


class NumberedRequest(StartRequest):
    """One with the number that its reports carry."""

    id: int


class Report(TypedDict):
    """What became of a request: a pid or an error first, its exit code at its end."""

    id: int
    pid: NotRequired[int]
    error: NotRequired[str]
    exit: NotRequired[int]


def main() -> None:
    """Serve until the server's end of the socket is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the server decides when slots end; a Ctrl-C reaches the whole process group
        signal.signal(number, signal.SIG_IGN)
    # The PID 1 of a slot whose bubblewrap was killed comes here. Bubblewrap's own die-with-parent has a gap: a child
    # that it has made but not yet prepared waits for it forever.
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    syscalls.own_session_keyring()
    spawner = Spawner(socket.socket(fileno=0))
    try:
        spawner.run()
    finally:
        spawner.end_all()


def _wake(_number: int, _frame: object) -> None:
    """Do nothing: having a handler makes the signal wake the loop."""


class Spawner:
    """Requests in, reports out: one JSON text a datagram, descriptors beside it.

    Args:
        server: for requests to start a slot.
    """

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._running: dict[int, int] = {}
        self._wake, notify = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(notify, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _wake)

    def run(self) -> None:
        """Serve until the server goes."""
        poll = select.poll()
        poll.register(self._server, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                    self._reap()
                elif not self._request():
                    return

    def _request(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._server, _MAX_REQUEST, 8)
        except ConnectionError:
            return False
        if not data:
            return False
        request: NumberedRequest = json.loads(data)
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
        with contextlib.suppress(BrokenPipeError, ConnectionError):
            self._server.send(json.dumps(report).encode())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            ident = self._running.pop(pid, None)
            if ident is not None:
                self._end_orphans()
                self._report({"id": ident, "exit": os.waitstatus_to_exitcode(status)})

    def _end_orphans(self) -> None:
        """Kill what a bubblewrap left behind, and wait for it (milliseconds), before its end is reported."""
        for pid in _children():
            if pid not in self._running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                for _ in range(200):
                    try:
                        if os.waitpid(pid, os.WNOHANG)[0]:
                            break
                    except ChildProcessError:
                        break
                    time.sleep(0.001)

    def end_all(self) -> None:
        """Kill every child: the server is gone."""
        for _ in range(5000):
            for pid in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return
            time.sleep(0.002)

    def _start(self, request: StartRequest, fds: list[int]) -> int:
        """Fork; the child enters a user namespace of its own, gets its maps from here, and becomes bubblewrap."""
        ready_r, ready_w = os.pipe2(os.O_CLOEXEC)
        go_r, go_w = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            try:
                os.close(ready_r)
                os.close(go_w)
                _child(request, fds, lambda: (os.write(ready_w, b"x"), os.close(ready_w), os.read(go_r, 1))[2])
            except BaseException as error:  # its text goes where bubblewrap's own complaints go
                with contextlib.suppress(OSError):
                    os.write(2, f"{type(error).__name__}: {error}\n".encode())
            finally:
                os._exit(127)
        os.close(ready_w)
        os.close(go_r)
        try:
            if os.read(ready_r, 1):
                for name in ("uid_map", "gid_map"):
                    fd = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
                    try:
                        os.write(fd, f"0 0 {request['ids']}".encode())
                    finally:
                        os.close(fd)
                os.write(go_w, b"x")
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        finally:
            os.close(ready_r)
            os.close(go_w)
        return pid


def _children() -> list[int]:
    """This process's children, the adopted ones among them."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without CONFIG_PROC_CHILDREN
        found: list[int] = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                    if int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                        found.append(int(name))
        return found


def _child(request: StartRequest, fds: list[int], mapped: Callable[[], bytes]) -> None:
    """Run in the fork: set up descriptors, cgroups, limits, and a namespace as uid 0, then execute bubblewrap."""
    parent = os.getppid()
    signal.set_wakeup_fd(-1)
    runner, status, errors = fds[:3]
    os.dup2(errors, 2)
    for path in request["cgroups"]:
        fd = os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        os.write(fd, b"0")
        os.close(fd)
    for name, value in request["rlimits_before"].items():
        _lower(name, value)
    _own_mounts(*request["own"])
    if request["joins"]:
        syscalls.setns(fds[4], syscalls.CLONE_NEWNET)
    creator: int | None = request["creator"]
    if creator is not None:
        os.setresgid(creator, creator, creator)
        os.setresuid(creator, creator, creator)
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    if not mapped():
        os._exit(126)
    with contextlib.suppress(PermissionError):  # refused where the outer namespace denies it: one id, no groups
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    if not request["joins"]:
        _own_network(request["proxy_port"], fds[3])
    for name, value in request["counters"].items():
        _set(f"user/{name}", value)
    _own_objects(request["ipc"])
    for name, value in request["rlimits"].items():
        _lower(name, value)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    _place_descriptors(runner, status, bytes.fromhex(request["seccomp"]))
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(126)
    os.execve(request["argv"][0], request["argv"], {})


def _own_mounts(volume: str, seen: str, slots: str) -> None:
    """A mount namespace without the mounts of other slots: bubblewrap reads the whole list for each mount that it makes.

    Args:
        volume: where this slot's mounts are.
        seen: where bubblewrap finds them.
        slots: the mount that all slots' mounts are in.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    # one way alone: what is taken away here must stay where it is in the server's namespace
    syscalls.mount(None, "/", None, syscalls.MS_REC | syscalls.MS_SLAVE)
    syscalls.mount(volume, seen, None, syscalls.MS_BIND | syscalls.MS_REC)
    syscalls.umount(slots)


def _own_network(port: int | None, answer: int) -> None:
    """A network namespace with a loopback, for the server to join others to.

    With a port, a socket listens there; it goes to the server, too, for its proxy.
    """
    syscalls.unshare(syscalls.CLONE_NEWNET)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        handed = [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)]
        if port is not None:
            listener.bind(("127.0.0.1", port))
            listener.listen(64)
            handed.append(listener.fileno())
        with socket.socket(fileno=os.dup(answer)) as channel:
            socket.send_fds(channel, [b"x"], handed)
        os.close(handed[0])


def _own_objects(bounds: dict[str, int | str]) -> None:
    """A namespace for System V memory, queues and semaphores with bounds of its own, where Linux lets us (6.9)."""
    syscalls.unshare(syscalls.CLONE_NEWIPC)
    for name, value in bounds.items():
        with contextlib.suppress(PermissionError):
            _set(f"kernel/{name}", value)


def _place_descriptors(runner: int, status: int, seccomp: bytes) -> None:
    """Leave exactly the descriptors that bubblewrap and the runner expect."""
    rules = memory_files.holding("seccomp", seccomp)
    high = [os.dup2(fd, 20 + index, inheritable=False) for index, fd in enumerate((runner, status, rules))]
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    for fd, target in zip(high, (RUNNER_FD, STATUS_FD, SECCOMP_FD), strict=True):
        os.dup2(fd, target, inheritable=True)
    os.closerange(6, 4096)


def _set(name: str, value: int | str) -> None:
    """Set one of the kernel's bounds in this namespace, if the kernel has it."""
    try:
        fd = os.open(f"/proc/sys/{name}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _lower(name: str, value: int) -> None:
    number = getattr(resource, f"RLIMIT_{name}")
    hard = resource.getrlimit(number)[1]
    wanted = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (wanted, wanted))


if __name__ == "__main__":
    main()
