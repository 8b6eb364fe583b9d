"""What attack programs begin with, inside the slot.

An attack prints BREACH for anything it achieved, and HELD at its end.
"""

PRELUDE = r'''
import ctypes, errno, fcntl, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
NR = {"x86_64": dict(ptrace=101, syslog=103, modify_ldt=154, pivot_root=155, adjtimex=159, acct=163, settimeofday=164, mount=165,
    umount2=166, swapon=167, swapoff=168, reboot=169, sethostname=170, setdomainname=171, iopl=172, ioperm=173, init_module=175,
    delete_module=176, quotactl=179, io_setup=206, lookup_dcookie=212, clock_settime=227, mbind=237, set_mempolicy=238,
    get_mempolicy=239, kexec_load=246, add_key=248, request_key=249, keyctl=250, migrate_pages=256, unshare=272, move_pages=279,
    perf_event_open=298, fanotify_init=300, name_to_handle_at=303, open_by_handle_at=304, clock_adjtime=305, setns=308,
    process_vm_readv=310, process_vm_writev=311, kcmp=312, finit_module=313, kexec_file_load=320, bpf=321, userfaultfd=323,
    pidfd_send_signal=424, io_uring_setup=425, open_tree=428, move_mount=429, fsopen=430, fsmount=432, fspick=433,
    pidfd_open=434, clone3=435, pidfd_getfd=438, process_madvise=440, mount_setattr=442, quotactl_fd=443, memfd_secret=447,
    process_mrelease=448, set_mempolicy_home_node=450, statmount=457, listmount=458, lsm_get_self_attr=459, clone=56, vhangup=153,
    sched_setaffinity=203, sched_setscheduler=144, setpriority=141, prlimit64=302, ioprio_set=251, mknod=133, chroot=161,
    uselib=134, personality=135, sysfs=139, seccomp=317)}.get(os.uname().machine, {})
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
    return PRELUDE + body + EPILOGUE
