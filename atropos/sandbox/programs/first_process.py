"""What PID 1 of a slot does between its fork from the spawner and the runner's loop.

It leaves the spawner's namespaces, enters the root that bubblewrap has made meanwhile, and gives up every privilege
that a slot must not have. Nothing is executed in it: no loader, library or preload of the slot's root ever runs in PID
1.
"""

from __future__ import annotations

import _socket
import codecs
import fcntl
import os
import resource
import select
import signal
import struct
from typing import NoReturn, TypedDict

from atropos.sandbox.linux import syscalls
from atropos.sandbox.linux.pause_program import PAUSED
from atropos.sandbox.linux.sysctl import tell_kernel
from atropos.sandbox.programs import gateway
from atropos.sandbox.programs.runner import main as runner
from atropos.sandbox.programs.runner.frames import SOCKET

NAME = b"atropos-runner"
"""What `ps` shows; no program that is started has it (see `linux.stopped_children`)."""
CAPABILITIES = frozenset(
    {
        "CHOWN",
        "DAC_OVERRIDE",
        "FOWNER",
        "FSETID",
        "SETUID",
        "SETGID",
        "KILL",
        "NET_BIND_SERVICE",
        "SYS_CHROOT",
        "SETPCAP",
        "SETFCAP",
    }
)
"""Those of a usual container, inside the slot's own user namespace; outside of it they mean nothing."""
for _codec in ("ascii", "latin-1"):
    codecs.lookup(_codec)  # loads it: in a slot nothing can be loaded
_LIMITS = {
    name.removeprefix("RLIMIT_"): getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")
}
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1  # <linux/sockios.h>, <linux/if.h>


class FirstProcessRequest(TypedDict):
    """What PID 1 needs to know.

    `proxy_port` is for a slot with egress; `gateway` what its gateway is made of (`gateway.enter_network`), where this
    machine has any.
    """

    proxy_port: int | None
    gateway: tuple[int, list[int]] | None
    joins: bool
    rlimits: dict[str, int]
    counters: dict[str, int]
    ipc: dict[str, int | str]
    seccomp: bytes


def run(
    request: FirstProcessRequest, link: int, network: int, sys: int, maker: int, root: int, entered: int, adopted: int
) -> NoReturn:
    """Become the slot's PID 1; called as root of its user namespace, in the first process of its PID namespace.

    Args:
        request: settings.
        link: the runner's socket.
        network: where the new network namespace is sent, unless the slot joins another's.
        sys: what is mounted at /sys, with what is below it.
        maker: bubblewrap, which makes the root meanwhile (pidfd).
        root: what it says, and its child's standard input.
        entered: closed once the root is entered.
        adopted: can be read when the spawner is this process's parent.

    Raises:
        OSError: the slot could not be set up.
    """
    if not request["joins"]:
        # First, since the server waits for the namespace while the rest is done.
        _own_network(request, network)
    for name, value in request["counters"].items():
        # After the network: with a gateway it took two namespaces, more than the bound allows.
        _set(f"user/{name}", value)
    _own_objects(request["ipc"])
    for name, value in request["rlimits"].items():
        lower_limit(name, value)
    # The resource limits before it: they are set by numbers, whatever the root is.
    _enter_root(root, maker)
    # By this process and not by bubblewrap, which reads the list of all mounts for each that it makes (decision 17).
    syscalls.attach_mount(sys, "/sys")
    os.close(entered)
    # Until bubblewrap is gone it is the parent, whose end must not kill this process.
    if not os.read(adopted, 1):
        raise OSError("the process that slots are forked from is gone")
    # From here on the spawner's end ends the slot: nobody else would reap it or know of it.
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    _keep_descriptors(link)
    os.setsid()
    syscalls.rename_process(NAME)
    # Everything above takes a capability, and the filter forbids most of it: these three come last, in this order.
    syscalls.keep_only(CAPABILITIES, ambient=False)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    syscalls.filter_calls(request["seccomp"])
    runner.main()
    os._exit(0)


def _own_network(request: FirstProcessRequest, answer: int) -> None:
    """A network namespace with a loopback, for the server to join others to.

    With egress, sockets listen there and in its gateway; they go to the server, too, for its proxy.
    """
    sockets: list[int] = []
    if request["gateway"] is not None:
        sockets = gateway.enter_network(*request["gateway"])
    else:
        syscalls.unshare(syscalls.CLONE_NEWNET)
        control = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
        fcntl.ioctl(control.fileno(), _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
        control.close()
    _open_to_users()
    handed = [os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)]
    if request["proxy_port"] is not None:
        listener = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", request["proxy_port"]))
        listener.listen(64)
        handed += [listener.detach(), *sockets]
    channel = _socket.socket(fileno=answer)
    channel.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, struct.pack(f"{len(handed)}i", *handed))])
    channel.detach()
    for fd in handed:
        # The server has copies. A program of the slot must not find these.
        os.close(fd)


def _open_to_users() -> None:
    """Let every user of the slot ping and listen on any port of its network, as containers' runtimes do."""
    _set("net/ipv4/ip_unprivileged_port_start", 0)
    mapped = os.open("/proc/self/gid_map", os.O_RDONLY | os.O_CLOEXEC)
    _set("net/ipv4/ping_group_range", f"0 {int(os.read(mapped, 99).split()[2]) - 1}")
    os.close(mapped)


def _own_objects(bounds: dict[str, int | str]) -> None:
    """Namespaces for a host name, cgroup paths, and System V objects with own bounds, if Linux allows it (6.9)."""
    syscalls.unshare(syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWCGROUP)
    for name, value in bounds.items():
        try:
            _set(f"kernel/{name}", value)
        except PermissionError:
            pass
    try:
        _socket.sethostname(gateway.HOSTNAME)
    except PermissionError:  # a container's seccomp profile refuses it; ours bear the name already
        pass


def _enter_root(root: int, maker: int) -> None:
    """Enter the mount namespace that bubblewrap has made, and let bubblewrap end.

    Raises:
        OSError: bubblewrap ended; what it had to say is on the standard error output.
    """
    poll = select.poll()
    poll.register(root, select.POLLIN)
    poll.register(maker, select.POLLIN)  # a child that it leaves behind holds `root` open
    message = b""
    while not message.endswith(PAUSED):
        ended = maker in [fd for fd, _ in poll.poll()]
        data = b"" if ended else os.read(root, 4096)
        if not data:
            raise OSError("bubblewrap ended before the slot's root was made")
        message += data
    # Cut out by hand: the json module would be in every slot's memory.
    pid = message.partition(b'"child-pid":')[2].partition(b",")[0].split()[0].decode()
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    syscalls.setns(mounts, syscalls.CLONE_NEWNS)
    os.close(root)  # the program that paused ends
    try:
        # With --pidns bubblewrap forks twice: the program is an orphan of this namespace, and so this process's to
        # reap.
        os.waitpid(-1, 0)
    except ChildProcessError:
        pass


def _keep_descriptors(link: int) -> None:
    """Leave the runner's socket and the standard descriptors."""
    os.dup2(link, SOCKET, inheritable=False)
    null = os.open("/dev/null", os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    # One system call (close_range), whatever was inherited.
    os.closerange(SOCKET + 1, 1 << 16)


def _set(name: str, value: int | str) -> None:
    """Set one of the kernel's bounds in this namespace, if the kernel has it."""
    try:
        tell_kernel(f"/proc/sys/{name}", str(value))
    except FileNotFoundError:
        pass


def lower_limit(name: str, value: int) -> None:
    """Lower a resource limit (RLIMIT_`name`) for good."""
    number = _LIMITS[name]
    hard = resource.getrlimit(number)[1]
    # Raising a hard limit needs CAP_SYS_RESOURCE over the host.
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(number, (soft, soft))
