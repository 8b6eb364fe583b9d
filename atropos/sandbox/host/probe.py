"""Every isolation property, tried from inside a throw-away sandbox at start: what is published is what was seen.

The sandbox has small limits of its own, so that each can be run into within milliseconds. The program inside is the
slot's private Python, so that the probe works on any base.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.aio import Tasks
from atropos.errors import SandboxError
from atropos.sandbox.host import egress_supervisor
from atropos.sandbox.host.host_state import HostState
from atropos.sandbox.linux.cgroups import Cgroups
from atropos.sandbox.linux.disks import PROBE_INODES
from atropos.sandbox.programs.gateway import ADDRESS
from atropos.slot_python import SLOT_PYTHON
from atropos.wire import (
    CommandResult,
    Exec,
    Feature,
    OpResult,
    ProcKill,
    ProcRead,
    ProcStart,
    ProcState,
    ReadFile,
    SlotLimits,
    WriteFile,
)

if TYPE_CHECKING:
    from atropos.sandbox.host.slot import SlotSandbox


Start = Callable[..., Awaitable["SlotSandbox"]]
"""`SlotHost.start`."""
_LIMITS = SlotLimits(memory_mib=32, pids=16, disk_mib=8, open_files=256, wall_s=60).model_copy(
    update={"inodes": PROBE_INODES}  # fewer than a slot for use may have: making them takes its time at each start
)

_INSIDE = r"""
import os
descriptors = os.listdir("/proc/self/fd")  # before _ctypes: newer versions of libffi open a file of their own
import errno, _ctypes
handle = _ctypes.dlopen(None, 0)
libc = {name: _ctypes.dlsym(handle, name) for name in ("syscall", "socket", "prctl", "unshare", "mount")}
# By number (the kernel's syscall tables), as libc has no functions for most of them.
calls = {"x86_64": {"clone3": 435, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "io_uring_setup": 425},
         "aarch64": {"clone3": 435, "keyctl": 219, "bpf": 280, "perf_event_open": 241, "io_uring_setup": 425}}
calls = calls.get(os.uname().machine, {})
results = {}
def refused(name, *arguments):
    return _ctypes.call_function(libc[name], arguments) == -1
def check(name, passed, detail=""):
    results[name] = [bool(passed), str(detail)]
def can(function, *arguments):
    try:
        function(*arguments)
        return True
    except OSError:
        return False
def read(path):
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""
inside, outside, count = read("/proc/self/uid_map").split()
# CLONE_NEWUSER. In a namespace of its own a program would have all capabilities again.
check("user_namespace", refused("unshare", 0x10000000), "a nested user namespace could be made")
check("separate_ids", int(count) > 1, f"{int(count)} user ids are mapped")
pids = [name for name in os.listdir("/proc") if name.isdigit()]
# PID 1, this program, and a process or two of the runner's own.
check("pid_namespace", len(pids) <= 4 and "1" in pids, f"{len(pids)} processes are visible")
devices = [line.split(b":")[0].strip() for line in read("/proc/net/dev").splitlines()[2:]]
check("network_namespace", devices == [b"lo"], f"network devices: {devices}")
mounts = [line.decode().split() for line in read("/proc/self/mountinfo").splitlines()]
def own_of_sys(fields):
    kind = fields[fields.index("-") + 1]
    own = kind == "overlay" or (kind.startswith("cgroup") and fields[3] == "/") or fields[4] == "/sys/fs/cgroup/cpu.max"
    return own and "ro" in fields[5].split(",")
strange = [fields[4] for fields in mounts
           if not fields[4].startswith(("/proc", "/dev", "/usr", "/bin", "/sbin", "/lib", "/.atropos"))
           and fields[4] not in ("/", "/etc/ld.so.preload")
           and not (fields[4].startswith("/sys") and own_of_sys(fields))]
check("mount_namespace", not strange, f"mounts of the host: {strange[:5]}")
status = dict(line.split(b":\t", 1) for line in read("/proc/self/status").splitlines() if b":\t" in line)
bounding = int(status[b"CapBnd"], 16)
# CAP_SYS_ADMIN, NET_ADMIN, SYS_PTRACE and SYS_MODULE (linux/capability.h).
check("capabilities", not bounding & (1 << 21 | 1 << 12 | 1 << 19 | 1 << 16) and status[b"NoNewPrivs"].strip() == b"1",
      f"bounding set {bounding:x}")
# 2: a filter (proc_pid_status(5)). Socket family 40, AF_VSOCK, leads from a virtual machine to its host.
check("seccomp", status.get(b"Seccomp", b"").strip() == b"2"
      and all(refused("syscall", n, 0, 0, 0, 0) for n in calls.values())
      and refused("socket", 40, 1, 0) and refused("mount", 0, 0, 0, 0, 0), "a refused call went through")
check("runner_protected", not can(os.readlink, "/proc/1/exe") and not can(open, "/proc/1/mem", "rb")
      and read("/proc/1/environ") == b"", "PID 1 can be read")
check("no_inherited_descriptors", len(descriptors) <= 4, f"open at start: {sorted(descriptors)}")
check("no_inherited_environment", set(os.environ) <= set(WANTED), sorted(set(os.environ) - set(WANTED)))
known = {"null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "fd",
         "stdin", "stdout", "stderr", "core"}
# 0x103 is 1:3, /dev/null: harmless where it can be made.
check("devices", set(os.listdir("/dev")) <= known and not can(os.mknod, "/workspace/node", 0o020666, 0x103),
      sorted(set(os.listdir("/dev")) - known))
def whiteout():
    os.rmdir("/media")
    os.mkdir("/media")
    os.rmdir("/media")
try:
    if os.path.isdir("/media"):
        whiteout()
    check("overlay", True)
except OSError as error:
    check("overlay", False, f"a folder of the base can't be removed: {error}")
def fill():
    fd = os.open("/workspace/fill", os.O_WRONLY | os.O_CREAT)
    try:
        for _ in range(16):
            os.write(fd, b"x" * (1 << 20))
        return False
    except OSError as error:
        return error.errno == errno.ENOSPC
    finally:
        os.close(fd)
        os.unlink("/workspace/fill")
check("disk_limit", fill(), "16 MiB went into a volume of 8 MiB")
def inodes():
    os.mkdir("/workspace/many")
    try:
        for number in range(300):
            os.close(os.open(f"/workspace/many/{number}", os.O_CREAT))
        return False
    except OSError as error:
        return error.errno == errno.ENOSPC
    finally:
        for name in os.listdir("/workspace/many"):
            os.unlink(f"/workspace/many/{name}")
check("inode_limit", inodes(), "300 files went into a volume for 200")
children = []
try:
    for _ in range(80):
        child = os.fork()
        if child == 0:
            import time
            time.sleep(5)
            os._exit(0)
        children.append(child)
    check("pids_limit", False, "80 processes ran under a limit of 16")
except OSError:
    check("pids_limit", len(children) >= 8, f"only {len(children)} processes could be started")
for child in children:
    os.kill(child, 9)
import _json
def text(value):
    return _json.encode_basestring_ascii(value)
print("{" + ",".join(f'{text(k)}:[{"true" if v[0] else "false"},{text(v[1])}]' for k, v in results.items()) + "}")
"""

_EGRESS = r"""
import os, _socket
def ask(line, to=("127.0.0.1", PORT)):
    s = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
    s.settimeout(15)  # the gateway and the proxy are programs, for which a busy machine may have no time
    try:
        s.connect(to)
        s.send(line.encode() + b"\r\nHost: x\r\n\r\n")
        answer = b""
        while data := s.recv(4096):
            answer += data
        return answer.decode("utf-8", "replace")
    except OSError as error:
        return f"error {error.errno}: {error}"
    finally:
        s.close()
wrong = []
with open("/proc/net/dev") as file:
    devices = [line.split(":")[0].strip() for line in file.readlines()[2:]]
if devices != ["lo"] + ["eth0"] * GATEWAY:
    wrong.append(f"network devices: {devices}")
for address in ("168.63.129.16", "169.254.169.254", "100.100.100.200"):
    answer = ask("GET / HTTP/1.1", (address, 80))
    # Reset or refused by the gateway; without one, no network is reachable.
    if not answer.startswith(("error 104:", "error 111:") if GATEWAY else "error 101:"):
        wrong.append(f"{address} can be reached past the proxy: {answer[:80]}")
        break
if GATEWAY:
    names = _socket.socket(_socket.AF_INET, _socket.SOCK_DGRAM)
    names.settimeout(10)
    question = b"\0\1\1\0\0\1\0\0\0\0\0\0\x09localhost\0\0\1\0\1"
    try:
        names.sendto(question, ("RESOLVER", 53))
        answer = names.recv(512)
    except OSError as error:
        answer = str(error).encode()
    # A response (RFC 1035, section 4.1.1) with the name error 3: the resolver answers for no name of its own machine.
    if answer != question[:2] + b"\x81\x83" + question[4:]:
        wrong.append(f"the resolver answered {answer!r} when asked for localhost")
for line in ("GET http://169.254.169.254/", "GET http://127.0.0.1/",
             "CONNECT 168.63.129.16:443", "CONNECT [::1]:443", "CONNECT [::ffff:127.0.0.1]:80"):
    answer = ask(line + " HTTP/1.1")
    if not answer.startswith("HTTP/1.1 403 ") or "egress refused" not in answer:
        wrong.append(f"the proxy answered {line!r} with {answer[:80]!r}")
        break
print("; ".join(wrong) or "held")
"""


_DISK_FIX = "start the server as root, with loop devices and e2fsprogs (mkfs.ext4); or volume='memory'"


@dataclass(frozen=True)
class _Known:
    required: bool
    fix: str


_KNOWN = {
    "user_namespace": _Known(
        True, "a kernel with user namespaces: sysctl user.max_user_namespaces, and seccomp as shipped"
    ),
    "separate_ids": _Known(
        False, "run the server as root, or give its user 65536 ids in /etc/subuid and /etc/subgid and install uidmap"
    ),
    "pid_namespace": _Known(True, "a kernel with CONFIG_PID_NS"),
    "network_namespace": _Known(True, "a kernel with CONFIG_NET_NS"),
    "mount_namespace": _Known(True, "a kernel with user-namespace mounts"),
    "capabilities": _Known(True, "bubblewrap 0.8 or later"),
    "seccomp": _Known(True, "a kernel with CONFIG_SECCOMP_FILTER, and libseccomp 2.5 or later"),
    "runner_protected": _Known(True, "a kernel without fs.suid_dumpable=1 or a ptrace policy that overrides it"),
    "no_inherited_descriptors": _Known(True, "report this: the server leaked a descriptor"),
    "no_inherited_environment": _Known(True, "report this: the server leaked its environment"),
    "devices": _Known(True, "bubblewrap 0.8 or later"),
    "overlay": _Known(
        True,
        "Linux 6.6 or later (tmpfs needs user xattrs under an overlay), or volume='disk'; and the overlay module "
        "loaded on the host",
    ),
    "disk_limit": _Known(True, "volume='memory', and a kernel whose tmpfs takes size="),
    "inode_limit": _Known(True, "volume='memory', and a kernel whose tmpfs takes nr_inodes="),
    "pids_limit": _Known(
        False, "run the server as root, or delegate the pids controller to its user (systemd Delegate=yes)"
    ),
    "memory_limit": _Known(
        False,
        "run the server as root with a memory cgroup controller, or delegate it to its user (systemd Delegate=yes)",
    ),
    "cpu_weight": _Known(False, "run the server as root with a cpu cgroup controller, or delegate it to its user"),
    "egress": _Known(
        True, "allow_network=False, or report this: a slot with a network reaches more than its proxy, or no proxy"
    ),
    "gateway": _Known(
        False,
        "a kernel with veth devices (CONFIG_VETH; modprobe veth on the host): without, hosts are reached by programs "
        "that read HTTPS_PROXY alone",
    ),
    "files": _Known(True, "report this: the runner's file operations failed"),
    "forks": _Known(True, "Linux 5.8 or later, and a seccomp profile that allows setns and pivot_root, as shipped"),
    "sessions": _Known(False, "devpts in a user namespace: a kernel with CONFIG_DEVPTS_MULTIPLE_INSTANCES"),
}


async def run(host: HostState, start: Start) -> list[Feature]:
    """Start a sandbox with small limits, try everything, stop it.

    Raises:
        SandboxError: not even the throw-away sandbox could be started.
    """
    gateway = host.gateway is not None
    async with Tasks("probe") as tasks:
        if host.egress is None:
            return await _properties(host, start)
        # Beside the other properties: a server listens only after both.
        egress = tasks.spawn(_egress(start, gateway=gateway), "egress", awaited=True)
        features = await _properties(host, start)
        passed, detail = await egress
    features.append(_feature("egress", passed, detail))
    features.append(_feature("gateway", gateway, "no network device could be made"))
    return features


async def _properties(host: HostState, start: Start) -> list[Feature]:
    cgroups = host.entered.cgroups
    sandbox = await start("probe", limits=_LIMITS)
    try:
        checks = await _inside(sandbox, set(host.environment))
        checks["memory_limit"] = await _memory(sandbox, cgroups)
        checks["cpu_weight"] = ("cpu" in cgroups.controllers, cgroups.missing.get("cpu", ""))
        if not host.counts_pids and checks["pids_limit"][0]:
            checks["pids_limit"] = (False, "processes are bounded, but a fork bomb's stay and fill the slot")
        # After everything else has tried to break the slot: what follows shows that it still works.
        checks["files"] = await _files(sandbox)
        checks["sessions"] = await _sessions(sandbox)
        checks["forks"] = await _forks(sandbox)
    finally:
        # As a lease's sandbox ends, so that its end proves the reset.
        stopped = await sandbox.stop()
    checks["reset"] = (stopped.clean, stopped.detail)
    features = [_feature(name, passed, detail) for name, (passed, detail) in checks.items()]
    if host.config.volume != "disk" or host.entered.cells is not None:
        return features
    # a folder on disk has no limits of its own: published, not promised
    without = {
        "required": False,
        "detail": f"volume='disk' without a limit: {host.entered.no_cells}",
        "fix": _DISK_FIX,
    }
    return [f.model_copy(update=without) if f.name in ("disk_limit", "inode_limit") else f for f in features]


def _feature(name: str, passed: bool, detail: str) -> Feature:
    known = _KNOWN.get(name, _Known(True, "report this: the sandbox could not be confirmed gone"))
    return Feature(
        name=name, ok=passed, required=known.required, detail="" if passed else detail, fix="" if passed else known.fix
    )


async def _inside(sandbox: SlotSandbox, names: set[str]) -> dict[str, tuple[bool, str]]:
    code = _INSIDE.replace("WANTED", repr(sorted(names)))
    result = await sandbox.run("probe-inside", Exec(command=(*SLOT_PYTHON, "-c", code), timeout_s=60))
    try:
        output = result.output if isinstance(result, CommandResult) else b""
        # The last line: a loader or a sanitizer of the base may print before it.
        answers: dict[str, tuple[object, object]] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise SandboxError(f"the start-up probe failed inside its sandbox: {_shown(result)}") from None
    return {name: (bool(passed), str(detail)) for name, (passed, detail) in answers.items()}


def _shown(result: OpResult) -> str:
    if not isinstance(result, CommandResult):
        return str(result)
    text = " ".join(result.output.decode(errors="replace")[-500:].split())
    return text or f"it printed nothing (exit code {result.exit_code}{', timed out' if result.timed_out else ''})"


async def _egress(start: Start, *, gateway: bool) -> tuple[bool, str]:
    """A slot with a network has a loopback with a proxy, and a device to its gateway; both refuse what they must."""
    sandbox = await start("probe-egress", limits=_LIMITS, network=True)
    try:
        code = _EGRESS.replace("PORT", str(egress_supervisor.PORT)).replace("GATEWAY", str(gateway))
        code = code.replace("RESOLVER", ADDRESS)
        result = await sandbox.run("probe-egress", Exec(command=(*SLOT_PYTHON, "-c", code), timeout_s=30))
    finally:
        stopped = await sandbox.stop()
    if not stopped.clean:
        return False, stopped.detail
    return isinstance(result, CommandResult) and result.output == b"held\n", _shown(result)


async def _memory(sandbox: SlotSandbox, cgroups: Cgroups) -> tuple[bool, str]:
    if "memory" not in cgroups.controllers:
        return False, cgroups.missing["memory"]
    # Twice the limit, and written to: pages that are only reserved don't count.
    hog = (*SLOT_PYTHON, "-c", "x = b'x' * (64 << 20)")
    result = await sandbox.run("probe-memory", Exec(command=hog, timeout_s=60))
    # The kill alone is not enough: the server must also know which limit it was.
    named = isinstance(result, CommandResult) and result.limit == "memory" and result.exit_code == -9
    return named, f"64 MiB were used under a limit of {_LIMITS.memory_mib} MiB: {_shown(result)}"


async def _files(sandbox: SlotSandbox) -> tuple[bool, str]:
    data = bytes(range(256))
    await sandbox.run("probe-write", WriteFile(path="/workspace/many/0", data=data))
    result = await sandbox.run("probe-read", ReadFile(path="/workspace/many/0"))
    return getattr(result, "data", None) == data, str(result)[:300]


async def _sessions(sandbox: SlotSandbox) -> tuple[bool, str]:
    started = await sandbox.run("probe-start", ProcStart(command="test -t 0 && echo terminal", pty=True))
    if not isinstance(started, ProcState):
        return False, str(started)
    state = await sandbox.run("probe-session", ProcRead(id=started.id, wait_s=5))
    passed = isinstance(state, ProcState) and b"terminal" in state.output
    await sandbox.run("probe-end", ProcKill(id=started.id, signal="KILL"))
    return passed, str(state)[:300]


async def _forks(sandbox: SlotSandbox) -> tuple[bool, str]:
    """Another root for a sandbox that runs: what was written on the first one is not there any more."""
    await sandbox.run("probe-before", WriteFile(path="/workspace/before", data=b""))
    try:
        await sandbox.change_root(())
    except SandboxError as error:
        return False, str(error)
    result = await sandbox.run("probe-fork", Exec(command="test -d /workspace -a ! -e /workspace/before", timeout_s=60))
    return isinstance(result, CommandResult) and result.exit_code == 0, _shown(result)
