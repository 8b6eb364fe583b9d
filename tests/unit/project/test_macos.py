"""A pool's own side loads where Python lacks what Linux alone has, as on a Mac."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITHOUT = r"""
import aiohttp, asyncio, ctypes, docker, fcntl, httpx, importlib, os, pydantic, resource, select, signal, socket, sys, sysconfig

sysconfig.get_config_vars()  # from the file of the platform that this Python is for
LACKS = {
    os: "CLONE_NEWNS MFD_CLOEXEC O_DIRECT O_LARGEFILE O_NOATIME O_PATH O_RSYNC O_TMPFILE SCHED_BATCH SCHED_IDLE copy_file_range eventfd fdatasync "
    "getrandom getresuid getxattr listxattr memfd_create pidfd_open pipe2 posix_fadvise posix_fallocate removexattr sched_getaffinity "
    "sched_setaffinity sched_setscheduler setns setresgid setresuid setxattr splice unshare",
    signal: "SIGPOLL SIGPWR SIGRTMAX SIGRTMIN SIGSTKFLT pidfd_send_signal sigtimedwait sigwaitinfo",
    socket: "AF_NETLINK AF_PACKET AF_VSOCK SOCK_CLOEXEC SOCK_NONBLOCK SO_BINDTODEVICE SO_MARK SO_PEERCRED TCP_CORK TCP_KEEPIDLE TCP_USER_TIMEOUT",
    resource: "RLIMIT_MSGQUEUE RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_SIGPENDING prlimit",
    select: "epoll EPOLLIN EPOLLRDHUP",
    fcntl: "F_ADD_SEALS F_GETPIPE_SZ F_GET_SEALS F_OFD_SETLK F_SETPIPE_SZ",
}
for module, names in LACKS.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name in {"capset", "prctl", "setfsgid", "setfsuid", "setns", "umount2", "unshare"}:
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
uname = os.uname_result(("Darwin", "mac", "24.0.0", "Darwin Kernel", "arm64"))
os.uname = lambda: uname
sys.platform = "darwin"
for module in sys.argv[1:]:
    importlib.import_module(module)
from atropos.images.manifests import MACHINE
print(MACHINE)
"""


MODULES = (
    "atropos.slots.backends.docker.backend",
    "atropos.tasks.folder",
    "atropos.tools",
    "atropos.agent",
    "atropos.cli.app",
)


@pytest.mark.slow("starts Python anew")
def test_it_loads():
    done = subprocess.run([sys.executable, "-c", WITHOUT, *MODULES], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "arm64\n"), done.stderr
