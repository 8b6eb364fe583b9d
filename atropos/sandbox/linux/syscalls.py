"""Linux system calls that Python's standard library lacks. Standard library only."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
from functools import cache

CLONE_FS = 0x200
CLONE_NEWNS = 0x0002_0000
CLONE_NEWCGROUP = 0x0200_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_NOSYMFOLLOW = 256
MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC = 32, 4096, 8192, 16384
MS_UNBINDABLE, MS_PRIVATE, MS_SLAVE, MS_SHARED = 1 << 17, 1 << 18, 1 << 19, 1 << 20
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
PR_SET_NAME, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 15, 22, 2
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_SET_KEEPCAPS = 38, 47, 8
PR_CAP_AMBIENT_RAISE, PR_CAP_AMBIENT_CLEAR_ALL = 2, 4
KEYCTL_JOIN_SESSION_KEYRING = 1
_CAP_VERSION_3 = 0x2008_0522
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_AT_FDCWD = -100
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
# <linux/capability.h>
CAPABILITIES = {
    "CHOWN": 0,
    "DAC_OVERRIDE": 1,
    "FOWNER": 3,
    "FSETID": 4,
    "KILL": 5,
    "SETGID": 6,
    "SETUID": 7,
    "SETPCAP": 8,
    "NET_BIND_SERVICE": 10,
    "NET_ADMIN": 12,
    "SYS_CHROOT": 18,
    "SYS_PTRACE": 19,
    "SYS_ADMIN": 21,
    "SETFCAP": 31,
}

_CapabilityHeader = ctypes.c_uint32 * 2
_CapabilityData = ctypes.c_uint32 * 6
libc = ctypes.CDLL(None, use_errno=True)
libc.mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
libc.prctl.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)


def load() -> None:
    """Look up what is needed: a fork that is the first to ask gets pages of its own for what that makes."""
    for name in ("umount2", "unshare", "setns", "capset", "ptrace", "syscall"):
        getattr(libc, name)
    last_capability()
    _arguments()


def _check(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def mount(
    source: str | bytes | None, target: str | bytes, kind: str | None, flags: int = 0, data: str | None = None
) -> None:
    """Call mount, which container profiles allow, unlike the newer calls of the program of this name."""
    args = [os.fsencode(arg) if isinstance(arg, str) else arg for arg in (source, target, kind, data)]
    _check(libc.mount(args[0], args[1], args[2], flags, args[3]), f"mount {kind or source or ''} on {target}")


def bind_read_only(path: str) -> None:
    """Mount a file or folder read-only over itself."""
    mount(path, path, None, MS_BIND)
    remount_read_only(path)


def remount_read_only(path: str, more: int = 0) -> None:
    """Make a mount over a file or folder read-only, without devices and set-user-id programs; `more`: further flags."""
    mount(None, path, None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV | more)


def punch_hole(fd: int, at: int, size: int) -> None:
    """Give a part of a file back to the disk; it then reads as zeros."""
    keep_size, punch = 0x01, 0x02  # <linux/falloc.h>
    _check(libc.fallocate(fd, keep_size | punch, at, size), "fallocate")


def idmapped_mount(path: str, namespace: int) -> None:
    """Mount a folder over itself with owners mapped by a user namespace (needs Linux 5.12 and the file system)."""
    mount_setattr, empty_path, idmap = 442, 0x1000, 0x0010_0000
    tree = detached_mount(path)
    try:
        attributes = (ctypes.c_uint64 * 4)(idmap, 0, 0, namespace)
        _check(
            libc.syscall(mount_setattr, tree, b"", empty_path, attributes, ctypes.sizeof(attributes)),
            f"idmapped mount of {path}",
        )
        attach_mount(tree, path)
    finally:
        os.close(tree)


def detached_mount(path: str) -> int:
    """A mount of a file or folder, with those below it, that is nowhere yet; a descriptor of it (Linux 5.2)."""
    open_tree, clone, recursive = 428, 1 | os.O_CLOEXEC, 0x8000
    return _check(libc.syscall(open_tree, _AT_FDCWD, os.fsencode(path), clone | recursive), f"open_tree {path}")


def make_private(path: str) -> None:
    """Have what is mounted on a path, and below it, appear nowhere else, and nothing from elsewhere appear there."""
    mount(None, path, None, MS_REC | MS_PRIVATE)


def attach_mount(tree: int, path: str) -> None:
    """Mount what `detached_mount` gave on a path of this mount namespace, which may be another one than its own."""
    move_mount, empty_path = 429, 4
    _check(libc.syscall(move_mount, tree, b"", _AT_FDCWD, os.fsencode(path), empty_path), f"move_mount {path}")


def open_in_root(root: int, path: str) -> int:
    """Open a path as a program would whose root a folder is: no link leads out of it (Linux 5.6). For `O_PATH` use.

    Raises:
        OSError: there is nothing.
    """
    openat2, in_root, no_magic_links = 437, 0x10, 0x02
    # O_PATH: neither a device nor a FIFO of the slot is opened. Magic links of /proc would lead out of any root.
    how = (ctypes.c_uint64 * 3)(os.O_PATH | os.O_CLOEXEC, 0, in_root | no_magic_links)
    name = os.fsencode(path)
    while True:
        fd: int = libc.syscall(openat2, root, name, how, ctypes.sizeof(how))
        if fd >= 0 or ctypes.get_errno() != errno.EAGAIN:  # a folder was moved meanwhile
            return _check(fd, f"open {path}")


def own_files_as_root() -> None:
    """Have what the calling thread creates belong to uid and gid 0 of this user namespace."""
    # The group first: once the user is another, the right to change the group is gone.
    libc.setfsgid(0)
    libc.setfsuid(0)


def umount(target: str | bytes) -> None:
    """Unmount lazily, so that the mount leaves this namespace even while it is in use."""
    name = os.fsencode(target) if isinstance(target, str) else target
    _check(libc.umount2(name, MNT_DETACH), f"umount {target}")


def unshare(flags: int) -> None:
    """Move the caller to new namespaces."""
    _check(libc.unshare(flags), "unshare")


def setns(fd: int, flags: int) -> None:
    """Enter namespaces of a process by its pidfd (Linux 5.8), or one namespace by its descriptor."""
    _check(libc.setns(fd, flags), "setns")


def pivot_root(new: str, put_old: str) -> None:
    """Make `new` the root of this mount namespace and of its processes."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(errno.ENOSYS, f"pivot_root: its number on {machine} is not known")
    _check(libc.syscall(_PIVOT_ROOT[machine], os.fsencode(new), os.fsencode(put_old)), "pivot_root")


def prctl(option: int, arg: int = 0, arg3: int = 0) -> int:
    """Operate on the calling process."""
    return _check(libc.prctl(option, arg, arg3, 0, 0), f"prctl {option}")


def die_with(parent: int) -> None:
    """Have the kernel kill this process with its parent. A change of ids or namespace ends that: call it after."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have died before the call above, which then waits for the wrong parent.
    if os.getppid() != parent:
        os._exit(1)


def name_process(name: bytes) -> None:
    """Set the name in a process's /proc/…/comm, of at most 15 bytes."""
    _check(libc.prctl(PR_SET_NAME, name, 0, 0, 0), "prctl PR_SET_NAME")


def rename_process(name: bytes) -> None:
    """Have `ps` show this name instead of the program's and its arguments."""
    name_process(name)
    start, size = _arguments()
    # In place: PR_SET_MM, which would move the arguments, needs CAP_SYS_RESOURCE over the host.
    libc.memcpy(start, name[: size - 1].ljust(size, b"\0"), size)


@cache
def _arguments() -> tuple[int, int]:
    """Where this process's arguments lie in its memory, and how many bytes they take."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end; the state, field 3, is the first here
    return start, end - start


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog of <linux/filter.h>."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def filter_calls(program: bytes) -> None:
    """Put a seccomp filter on this process for good; it must have no way to new privileges (PR_SET_NO_NEW_PRIVS)."""
    filtered = _FilterProgram(len(program) // 8, program)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(filtered))


def own_session_keyring() -> None:
    """Join a new session keyring: children could read the keys of the inherited one."""
    number = _KEYCTL.get(os.uname().machine)
    if number is not None:
        libc.syscall(number, KEYCTL_JOIN_SESSION_KEYRING, None)


@cache
def last_capability() -> int:
    """The highest capability number of this kernel."""
    with open("/proc/sys/kernel/cap_last_cap", encoding="ascii") as file:
        return int(file.read())


def set_capabilities(permitted: frozenset[int], inheritable: frozenset[int] = frozenset()) -> None:
    """Set the permitted and effective sets to `permitted`, and the inheritable set."""
    own, inherited = (sum(1 << cap for cap in caps) for caps in (permitted, inheritable))
    header = _CapabilityHeader(_CAP_VERSION_3, 0)
    # effective, permitted and inheritable: of capabilities 0 to 31, then of those above
    data = _CapabilityData(*(mask >> shift & 0xFFFF_FFFF for shift in (0, 32) for mask in (own, own, inherited)))
    _check(libc.capset(header, data), "capset")


def keep_only(names: frozenset[str], *, ambient: bool = True) -> None:
    """Keep these capabilities, also through execs, and drop all others for good, bounding set included.

    Root keeps them through execs without `ambient`.
    """
    keep = frozenset(CAPABILITIES[name] for name in names)
    for cap in range(last_capability() + 1):
        if cap not in keep:
            # needs CAP_SETPCAP in this namespace, so it comes before capset
            prctl(PR_CAPBSET_DROP, cap)
    set_capabilities(keep, keep if ambient else frozenset())
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    for cap in keep if ambient else ():
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, cap)
