"""What attack programs begin with, inside the slot.

An attack prints BREACH for anything it achieved, and HELD at its end.
"""

from __future__ import annotations

from functools import cache

import pyseccomp

CALLS = (  # noqa: SIM905
    "ptrace syslog modify_ldt pivot_root adjtimex acct settimeofday mount umount2 swapon swapoff reboot sethostname "
    "setdomainname iopl ioperm init_module delete_module quotactl io_setup lookup_dcookie clock_settime mbind "
    "set_mempolicy get_mempolicy kexec_load add_key request_key keyctl migrate_pages unshare move_pages "
    "perf_event_open fanotify_init name_to_handle_at open_by_handle_at clock_adjtime setns process_vm_readv "
    "process_vm_writev kcmp finit_module kexec_file_load bpf userfaultfd pidfd_send_signal io_uring_setup open_tree "
    "move_mount fsopen fsmount fspick pidfd_open clone3 pidfd_getfd process_madvise mount_setattr quotactl_fd "
    "memfd_secret process_mrelease set_mempolicy_home_node clone vhangup sched_setaffinity sched_setscheduler "
    "setpriority prlimit64 ioprio_set mknod chroot uselib personality sysfs seccomp"
).split()
"""What attacks call by number: those that the machine has."""
NEWER = {"statmount": 457, "listmount": 458, "lsm_get_self_attr": 459}
"""Of every machine; libseccomp may be older."""

PRELUDE = r'''
import ctypes, errno, fcntl, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
NR = NUMBERS
def breach(what):
    print("BREACH:", what, flush=True)
def call(name, *arguments):
    if name not in NR:
        return -1
    ctypes.set_errno(0)
    return libc.syscall(ctypes.c_long(NR[name]), *[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
def refused(name, *arguments):
    if call(name, *arguments) != -1:
        breach(f"{name}{arguments} was allowed")
def denied(function, *arguments, what=""):
    try:
        result = function(*arguments)
    except (OSError, ValueError):
        return
    breach(f"{what or getattr(function, '__name__', function)}{arguments} gave {result!r:.80}")
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""
def write(path, data=b"1"):
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, data)
    finally:
        os.close(fd)
def forked(function):
    """Run in a child; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            print("child:", type(error).__name__, error, flush=True)
            os._exit(99)
        os._exit(0)
    return os.waitpid(child, 0)[1]
'''

EPILOGUE = '\nprint("HELD", flush=True)\n'


def program(body: str) -> str:
    """A whole attack program."""
    return PRELUDE.replace("NUMBERS", repr(numbers())) + body + EPILOGUE


@cache
def numbers() -> dict[str, int]:
    """Calls by name, of this machine's architecture."""
    native = pyseccomp.Arch.NATIVE
    return {name: number for name in CALLS if (number := pyseccomp.resolve_syscall(native, name)) >= 0} | NEWER
