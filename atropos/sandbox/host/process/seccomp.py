"""The seccomp filter of every slot, as a BPF program.

Built with libseccomp, in front of which stand a few instructions of our own: for calls above the last one that was
judged here or that this libseccomp has a name for, and for the x32 numbers, the kernel's answer is ENOSYS, so that
programs fall back as on an older kernel.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Collection, Iterator
from typing import Any

from atropos.errors import IsolationUnavailable

PRIVILEGED = (  # noqa: SIM905
    # mounts and namespaces
    "mount umount umount2 pivot_root setns "
    # the machine's own
    "syslog acct swapon swapoff reboot sethostname setdomainname init_module finit_module delete_module iopl ioperm "
    "settimeofday clock_settime clock_adjtime adjtimex stime vhangup kexec_load kexec_file_load "
    # keys of the host's user; memory that others handle; rings and counters of the kernel; what others have open
    "keyctl add_key request_key userfaultfd process_madvise io_uring_setup io_uring_enter io_uring_register bpf "
    "perf_event_open kcmp pidfd_getfd open_by_handle_at fanotify_init "
    # the newer ways to mount; quotas
    "fsopen fsconfig fsmount fspick move_mount open_tree open_tree_attr mount_setattr quotactl quotactl_fd"
).split()
"""Answered with EPERM, as the kernel and containers' engines answer programs without the capability."""
ABSENT = (  # noqa: SIM905
    # its flags lie in memory, where no filter sees them, and the C library then uses clone
    "clone3 "
    # asynchronous I/O, whose requests the kernel counts for all; files' handles; memory that the kernel can't see
    "io_setup io_submit io_destroy io_cancel io_getevents io_pgetevents name_to_handle_at fanotify_mark memfd_secret "
    "modify_ldt "
    # placement in memory; mounts by number; security modules
    "mbind set_mempolicy get_mempolicy set_mempolicy_home_node move_pages migrate_pages listmount statmount "
    "lsm_get_self_attr lsm_set_self_attr lsm_list_modules "
    # what a kernel can be built without, and what Linux has given up
    "create_module query_module get_kernel_syms nfsservctl uselib lookup_dcookie sysfs "
    "ustat _sysctl afs_syscall tuxcall security getpmsg putpmsg vserver"
).split()
"""Answered with ENOSYS, as by a kernel that was built without them: programs then take another way, or say so."""
LAST_CALL = 456
"""futex_requeue, of Linux 6.7. Whoever raises it says for each call above it whether slots may make it: a newer
libseccomp doesn't."""
SOCKET_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK (and there NETLINK_ROUTE alone)."""
_FAMILIES = 64
"""More than there are."""
_PROTOCOLS = (0, 1, 6, 17, 58)
"""Of internet sockets, what slots have use for: the type's own, ICMP, TCP, UDP, ICMPv6. For others, each call has the
kernel look for a module: a program of the host's, and at no slot's cost."""
_MORE_PROTOCOLS = 64
"""None of `_PROTOCOLS` is as large."""
_NO_TYPES = ((0xF, 0), (0xC, 4), (0x8, 8))
"""(mask, value) of what is neither a stream, nor datagrams, nor raw: the type's own protocol would be SCTP or DCCP."""
_NEW_NAMESPACES = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
_TIOCSTI, _TIOCLINUX, _TIOCSETD = 0x5412, 0x541C, 0x5423
_BRIDGES = (0x8940, 0x8982, 0x89A0)
"""Each with the number above it: requests about bridges and VLANs, for which the kernel looks for a module before it
refuses them."""
_NSFS_TYPE = 0xB700
"""Second byte of all requests to namespaces: they hand out parents and owners (<linux/nsfs.h>)."""
_RLIMIT_CORE = 4
_SOL_SOCKET, _SO_RCVBUF, _SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF = 1, 8, 26, 51
_FADV_DONTNEED, _MADV_MERGEABLE, _MADV_COLD, _MADV_PAGEOUT = 4, 12, 20, 21
_MAP_HUGETLB, _MFD_HUGETLB, _SHM_HUGETLB = 0x40000, 0x4, 0o4000
_PR_SCHED_CORE, _PR_SET_SECCOMP = 62, 22
_SECCOMP_MODE_FILTER, _SECCOMP_SET_MODE_FILTER = 2, 1
_LOW = 0xFFFFFFFF
"""The kernel takes these arguments as 32 bits; a comparison of all 64 would miss a value with high bits set."""
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def _binding() -> Any:
    try:
        import pyseccomp
    except (ImportError, RuntimeError, OSError):
        try:
            # Debian's python3-seccomp, with the same names
            import seccomp as pyseccomp  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise IsolationUnavailable(
                "libseccomp or its Python binding is missing: apt-get install libseccomp2, and pip install pyseccomp "
                "(or apt-get install python3-seccomp)"
            ) from error
    return pyseccomp


class _Filter:
    """A filter in the making. What libseccomp's bindings give has no types."""

    def __init__(self, machine: str) -> None:
        self.machine = machine
        self._lib = lib = _binding()
        self._arch = lib.Arch.NATIVE
        self._rules = lib.SyscallFilter(lib.ALLOW)
        # A 32-bit call has other numbers: the rules below would judge another call by the name of this one.
        self._rules.set_attr(lib.Attr.ACT_BADARCH, getattr(lib, "KILL_PROCESS", lib.KILL))
        if machine != os.uname().machine:
            self._rules.remove_arch(self._arch)
            self._arch = getattr(lib.Arch, machine.upper())
            self._rules.add_arch(self._arch)

    def resolve(self, call: str | int) -> str | int | None:
        """A call's number by its name, or its name by its number: both bindings know it. None: there is none."""
        try:
            return self._lib.resolve_syscall(self._arch, call)
        except (ValueError, OSError, RuntimeError):
            return None

    def error(self, number: int) -> object:
        """The action of answering a call with an error."""
        return self._lib.ERRNO(number)

    def add(self, action: object, name: str, *arguments: object) -> None:
        """Add a rule for a call with these arguments, where the machine has the call."""
        number = self.resolve(name)
        if isinstance(number, int) and number >= 0:
            self._rules.add_rule(action, name, *arguments)

    def masked(self, index: int, mask: int, value: int) -> object:
        """An argument that has this value in the bits of the mask."""
        return self._lib.Arg(index, self._lib.MASKED_EQ, mask, value)

    def same(self, index: int, value: int) -> object:
        """An argument that is this value."""
        return self.masked(index, _LOW, value)

    def has(self, index: int, bit: int) -> object:
        """An argument that has this bit."""
        return self.masked(index, bit, bit)

    def other(self, index: int, value: int) -> object:
        """An argument that, with all its 64 bits, is not this value."""
        return self._lib.Arg(index, self._lib.NE, value)

    def least(self, index: int, value: int) -> object:
        """An argument that, with all its 64 bits, is at least this value."""
        return self._lib.Arg(index, self._lib.GE, value)

    def export(self) -> bytes:
        """The BPF program of all rules."""
        with open(os.memfd_create("seccomp"), "w+b") as file:
            self._rules.export_bpf(file)
            file.seek(0)
            return file.read()


def program(machine: str | None = None) -> bytes:
    """The BPF program of this machine, or of another, as `uname -m` names it.

    Raises:
        IsolationUnavailable: libseccomp isn't there.
    """
    built = _Filter(machine or os.uname().machine)
    for name in PRIVILEGED:
        built.add(built.error(errno.EPERM), name)
    for name in ABSENT:
        built.add(built.error(errno.ENOSYS), name)
    _deny_exits(built)
    _guard_shared(built)
    return _preamble(built) + built.export()


def _deny_exits(made: _Filter) -> None:
    """Deny ways out of the slot: namespaces, sockets, terminals."""
    same, has, refuse = made.same, made.has, made.error(errno.EPERM)
    for flag in _NEW_NAMESPACES:
        for name in ("clone", "unshare"):
            made.add(refuse, name, has(0, flag))
    # the errors of a kernel built without these: programs such as useradd go on without
    no_family, no_protocol = made.error(errno.EAFNOSUPPORT), made.error(errno.EPROTONOSUPPORT)
    no_type = made.error(errno.ESOCKTNOSUPPORT)
    for family in range(_FAMILIES):
        if family not in SOCKET_FAMILIES:
            for name in ("socket", "socketpair"):
                made.add(no_family, name, same(0, family))
    for name in ("socket", "socketpair"):
        made.add(no_family, name, made.least(0, _FAMILIES))
    for family in SOCKET_FAMILIES[1:]:  # these have no pairs
        made.add(made.error(errno.EOPNOTSUPP), "socketpair", same(0, family))
    made.add(no_protocol, "socket", same(0, 16), made.other(2, 0))  # 0 is NETLINK_ROUTE
    for family in (2, 10):
        for mask, value in _NO_TYPES:
            made.add(no_type, "socket", same(0, family), made.masked(1, mask, value))
        for mask, value in _without(_PROTOCOLS, 0, _MORE_PROTOCOLS):
            made.add(no_protocol, "socket", same(0, family), made.masked(2, mask, value))
        made.add(no_protocol, "socket", same(0, family), made.least(2, _MORE_PROTOCOLS))
    # as kernels with dev.tty.legacy_tiocsti=0; for terminals that are no console; with no line discipline but the first
    for request, error in ((_TIOCSTI, errno.EIO), (_TIOCLINUX, errno.ENOTTY), (_TIOCSETD, errno.EINVAL)):
        made.add(made.error(error), "ioctl", same(1, request))
    # the kernel's answer where a parent or owner is out of reach: lsns leaves processes out for any other
    made.add(refuse, "ioctl", made.masked(1, 0xFF00, _NSFS_TYPE))
    for request in _BRIDGES:
        made.add(made.error(errno.ENOPKG), "ioctl", made.masked(1, _LOW - 1, request))


def _without(numbers: Collection[int], begin: int, size: int) -> Iterator[tuple[int, int]]:
    """All others from `begin` on, as few (mask, value) as there can be; `size` is a power of two."""
    if not any(begin <= number < begin + size for number in numbers):
        yield _LOW & ~(size - 1), begin
    elif size > 1:
        yield from _without(numbers, begin, size // 2)
        yield from _without(numbers, begin + size // 2, size // 2)


def _guard_shared(made: _Filter) -> None:
    """Guard what all slots share: PID 1's limits, the kernel's memory, the cores."""
    same, has, refuse = made.same, made.has, made.error(errno.EPERM)
    # limits of another process, PID 1 first of all; reading them is harmless
    made.add(refuse, "prlimit64", made.other(0, 0), made.other(2, 0))
    # the limit of core dumps is 1 for good (0 would start the host's handler, see host_state.py); setting it
    # seems to succeed, since programs that turn dumps off end when they can't
    done = made.error(0)
    made.add(done, "setrlimit", same(0, _RLIMIT_CORE))
    made.add(done, "prlimit64", same(0, 0), same(1, _RLIMIT_CORE), made.other(2, 0))
    # what waits in a socket's receive buffer is memory that no cgroup counts, see sockets.py: it keeps its default size
    made.add(done, "setsockopt", same(1, _SOL_SOCKET), same(2, _SO_RCVBUF))
    # advice to forget files is no order to: their pages may be those of all slots' programs
    made.add(done, "fadvise64", same(3, _FADV_DONTNEED))
    # where the host looks for equal pages (KSM), how long a write takes would say what others have in memory, as its
    # virtual machines
    for advice in (_MADV_MERGEABLE, _MADV_COLD, _MADV_PAGEOUT):
        made.add(made.error(errno.EINVAL), "madvise", same(2, advice))
    # the host's huge pages are reserved for others, and count towards no limit of a slot
    made.add(made.error(errno.ENOMEM), "mmap", has(3, _MAP_HUGETLB))
    made.add(made.error(errno.EINVAL), "memfd_create", has(1, _MFD_HUGETLB))
    made.add(refuse, "shmget", has(2, _SHM_HUGETLB))
    # Filters of programs' own are compiled into memory of which the whole machine has one bounded piece, and each is
    # taken out of it under one lock: when a few slots were released with all that they may have, no sandbox and no
    # container could start on the host any more (Linux 6.18, a deadlock). The errors are those of a kernel built
    # without them.
    for option in (_SO_ATTACH_FILTER, _SO_ATTACH_REUSEPORT_CBPF):
        made.add(made.error(errno.ENOPROTOOPT), "setsockopt", same(1, _SOL_SOCKET), same(2, option))
    no_filter = made.error(errno.EINVAL)
    made.add(no_filter, "prctl", same(0, _PR_SET_SECCOMP), same(1, _SECCOMP_MODE_FILTER))
    made.add(no_filter, "seccomp", same(0, _SECCOMP_SET_MODE_FILTER))
    # with a cookie of its own, each thread of a slot would keep all others from its core's second half
    made.add(made.error(errno.EINVAL), "prctl", same(0, _PR_SCHED_CORE))
    for name in ("sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr"):
        made.add(refuse, name, same(0, 1))
    # Which core a program runs on stays the kernel's to choose: each move is made by a thread of the kernel's that
    # comes before everything else, and a few programs that moved to and fro took nearly all of the CPU from their
    # neighbours. Choosing seems to succeed, since .NET ends where it can't.
    made.add(done, "sched_setaffinity", made.other(0, 1))
    for name in ("setpriority", "ioprio_set"):
        made.add(refuse, name, same(1, 1))
    made.add(refuse, "setpriority", same(0, 2))  # PRIO_USER: all of a user's, PID 1 among them
    made.add(refuse, "ioprio_set", same(0, 3))
    # personality: every flag but PER_LINUX32, UNAME26 and ADDR_NO_RANDOMIZE (setarch -R, gdb); the query 0xffffffff has
    # all bits, so it is recognised by one that no other has
    allowed = 0x8 | 0x20000 | 0x40000
    # One rule for each forbidden bit, since a filter can compare with a mask but not say "none but these".
    for bit in range(31):
        if not allowed >> bit & 1:
            made.add(refuse, "personality", made.masked(0, (1 << 31) | (1 << bit), 1 << bit))


def _preamble(made: _Filter) -> bytes:
    """Instructions before libseccomp's: unknown numbers of the machine's own architecture answer ENOSYS."""
    arch = _AUDIT_ARCH.get(made.machine)
    if arch is None:
        return b""
    # Numbers are judged by hand up to LAST_CALL: an old libseccomp has no name for the newest of them.
    highest = max(number for number in range(LAST_CALL + 1) if made.resolve(number))

    def instruction(code: int, jump_unless: int, value: int) -> bytes:
        return struct.pack("<HBBI", code, 0, jump_unless, value)

    load, equal, greater, answer = 0x20, 0x15, 0x25, 0x06
    enosys = 0x00050000 | errno.ENOSYS
    return b"".join(
        (
            instruction(load, 0, 4),  # seccomp_data.arch
            instruction(equal, 3, arch),  # another: to libseccomp's part, which kills
            instruction(load, 0, 0),  # seccomp_data.nr
            instruction(greater, 1, highest),
            instruction(answer, 0, enosys),
        )
    )
