"""Attack programs, by what they are after. Each runs as root of its own slot, beside neighbours at work."""

ESCAPE = {
    "make_a_nested_user_namespace": """
for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x10000000 | 0x20000):
    refused("unshare", flag)
    pid = call("clone", flag | 17, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
        breach(f"clone with {flag:#x}")
""",
    "make_one_through_clone3": """
class Arguments(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in "flags pidfd child parent exit stack size tls set_tid count cgroup".split()]
arguments = Arguments(flags=0x10000000, exit=17)
pid = call("clone3", ctypes.byref(arguments), ctypes.sizeof(arguments))
if pid == 0:
    os._exit(0)
if pid > 0 or ctypes.get_errno() != errno.ENOSYS:
    breach(f"clone3: {pid}, errno {ctypes.get_errno()}")
""",
    "join_the_namespaces_of_pid_1_or_of_a_descriptor": """
for name in ("user", "mnt", "net", "pid", "ipc", "uts", "cgroup", "time"):
    for pid in ("1", "self"):
        try:
            fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
        except OSError:
            continue
        refused("setns", fd, 0)
""",
    "mount_something": """
for kind in (b"tmpfs", b"proc", b"sysfs", b"cgroup", b"cgroup2", b"overlay", b"devpts", b"mqueue", b"debugfs", b"ext4"):
    refused("mount", b"none", b"/mnt", kind, 0, 0)
refused("mount", b"/usr", b"/mnt", 0, 4096, 0)
refused("mount", 0, b"/usr", 0, 32 | 4096, 0)
for path in (b"/usr", b"/.atropos", b"/proc", b"/proc/sys", b"/dev", b"/dev/pts", b"/dev/shm", b"/etc/ld.so.preload"):
    refused("umount2", path, 2)
refused("pivot_root", b".", b".")
""",
    "mount_through_the_new_interface": """
refused("fsopen", b"tmpfs", 0)
refused("open_tree", -100, b"/", 1)
refused("move_mount", -1, b"", -100, b"/mnt", 4)
refused("fspick", -100, b"/", 0)
refused("mount_setattr", -100, b"/usr", 0, 0, 0)
refused("listmount", 0, 0, 0, 0)
refused("statmount", 0, 0, 0, 0)
""",
    "break_out_of_a_chroot": """
os.makedirs("jail", exist_ok=True)
here = os.open("/", os.O_RDONLY)
def out():
    os.chroot("jail")
    os.fchdir(here)
    for _ in range(200):
        os.chdir("..")
    os.chroot(".")
    names = set(os.listdir("/"))
    if "oldroot" in names or "newroot" in names or os.path.exists("/run/atropos") or os.path.exists(SECRET_FILE):
        breach(f"above the root: {sorted(names)}")
forked(out)
""",
    "see_the_host_s_file_system": """
for path in ("/oldroot", "/newroot", "/run/atropos", "/work", "/rootfs", SECRET_FILE, "/var/run/docker.sock", "/host", "/sys/kernel",
             "/proc/1/root/etc", "/proc/1/cwd/etc", "/proc/self/root/run/atropos"):
    if os.path.exists(path):
        breach(path)
mounts = [line.split()[4] for line in open("/proc/self/mountinfo")]
for path in mounts:
    if not path.startswith(("/proc", "/dev", "/sys", "/usr", "/bin", "/sbin", "/lib", "/.atropos")) and path not in ("/", "/etc/ld.so.preload"):
        breach(path)
""",
    "find_the_host_s_secret_anywhere": """
needle = SECRET.encode()
for top, folders, files in os.walk("/", followlinks=False):
    folders[:] = [name for name in folders if os.path.join(top, name) not in ("/usr", "/proc", "/sys", "/lib", "/bin")]
    for name in files:
        path = os.path.join(top, name)
        if os.path.isfile(path) and needle in read(path):
            breach(path)
for pid in os.listdir("/proc"):
    if pid.isdigit():
        for name in ("environ", "cmdline", "maps", "status"):
            if needle in read(f"/proc/{pid}/{name}") and int(pid) not in (os.getpid(), os.getppid()):
                breach(f"/proc/{pid}/{name}")
""",
    "see_processes_of_others": """
names = [read(f"/proc/{pid}/cmdline") for pid in os.listdir("/proc") if pid.isdigit()]
if len(names) > 5 or any(NEIGHBOUR.encode() in name for name in names):
    breach(names)
for pid in range(2, 400):
    if os.path.exists(f"/proc/{pid}/stat") and pid not in (os.getpid(), os.getppid()) and f"{pid}" not in os.listdir("/proc/self/task"):
        line = read(f"/proc/{pid}/cmdline")
        if b"atropos" in line and b"/.atropos" not in line:
            breach(line)
""",
    "read_pid_1": """
for name in ("mem", "environ", "maps", "smaps", "auxv", "stack", "syscall", "pagemap", "fd/0", "fd/3", "map_files", "personality", "io"):
    if name.startswith("fd/"):
        denied(os.readlink, f"/proc/1/{name}")
        denied(os.open, f"/proc/1/{name}", os.O_RDWR)
    elif read(f"/proc/1/{name}"):
        breach(name)
for name in ("exe", "cwd", "root"):
    denied(os.readlink, f"/proc/1/{name}")
denied(os.listdir, "/proc/1/root/")
denied(os.listdir, "/proc/1/task/1/cwd/")
""",
    "trace_pid_1": """
for request in (16, 0x4206):
    refused("ptrace", request, 1, 0, 0)
buffer = ctypes.create_string_buffer(8)
class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
local = Vector(ctypes.addressof(buffer), 8)
for name in ("process_vm_readv", "process_vm_writev"):
    for address in (0x400000, 0x7f0000000000, 0x555555554000):
        remote = Vector(address, 8)
        refused(name, 1, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0)
        if ctypes.get_errno() not in (errno.EPERM, errno.ESRCH):
            breach(f"{name}: errno {ctypes.get_errno()}")
refused("kcmp", 1, os.getpid(), 0, 0, 0)
""",
    "take_descriptors_of_pid_1": """
fd = call("pidfd_open", 1, 0)
for number in range(12):
    if fd >= 0:
        refused("pidfd_getfd", fd, number, 0)
refused("process_madvise", fd, 0, 0, 21, 0)
refused("process_mrelease", fd, 0)
""",
    "signal_pid_1": """
for number in range(1, 65):
    if number not in (32, 33):
        try:
            os.kill(1, number)
        except OSError:
            pass
for _ in range(2000):
    os.kill(1, signal.SIGCHLD)
    os.kill(1, signal.SIGUSR1)
""",
    "weaken_pid_1": """
class Limit(ctypes.Structure):
    _fields_ = [("soft", ctypes.c_uint64), ("hard", ctypes.c_uint64)]
for number in range(16):
    limit = Limit(0, 0)
    refused("prlimit64", 1, number, ctypes.byref(limit), 0)
    refused("prlimit64", 1 | 1 << 32, number, ctypes.byref(limit), 0)
mask = ctypes.c_uint64(1)
refused("sched_setaffinity", 1, 8, ctypes.byref(mask))
refused("sched_setscheduler", 1, 5, ctypes.byref(ctypes.c_int(0)))
refused("setpriority", 0, 1, 19)
refused("setpriority", 2, 0, 19)
refused("ioprio_set", 1, 1, 3 << 13)
refused("ioprio_set", 3, 0, 3 << 13)
""",
    "reach_the_kernel": """
for name in ("syslog", "acct", "swapon", "swapoff", "reboot", "kexec_load", "kexec_file_load", "init_module", "finit_module",
             "delete_module", "quotactl", "quotactl_fd", "iopl", "ioperm", "modify_ldt", "lookup_dcookie", "vhangup", "uselib", "sysfs",
             "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "memfd_secret", "fanotify_init", "keyctl", "add_key",
             "request_key", "mbind", "set_mempolicy", "get_mempolicy", "move_pages", "migrate_pages", "lsm_get_self_attr"):
    refused(name, 0, 0, 0, 0, 0, 0)
    if name in NR and ctypes.get_errno() not in (errno.EPERM, errno.ENOSYS):
        breach(f"{name}: errno {ctypes.get_errno()}, so that it got past the filter")
refused("io_setup", 1000, ctypes.byref(ctypes.c_ulong(0)))
if ctypes.get_errno() != errno.ENOSYS:
    breach("io_setup")
""",
    "change_the_machine": """
refused("sethostname", b"evil", 4)
refused("setdomainname", b"evil", 4)
refused("settimeofday", ctypes.create_string_buffer(16), 0)
refused("clock_settime", 0, ctypes.create_string_buffer(16))
refused("clock_adjtime", 0, ctypes.create_string_buffer(256))
refused("adjtimex", ctypes.create_string_buffer(256))
for path in ("kernel/core_pattern", "kernel/hostname", "kernel/panic", "kernel/modprobe", "vm/overcommit_memory", "fs/file-max",
             "user/max_user_namespaces", "user/max_inotify_instances", "net/ipv4/ip_forward", "kernel/shmmax", "kernel/yama/ptrace_scope"):
    if os.path.exists(f"/proc/sys/{path}"):
        denied(write, f"/proc/sys/{path}")
for path in ("/proc/sysrq-trigger", "/proc/kcore", "/proc/kmsg", "/proc/kpageflags", "/proc/timer_list", "/proc/irq/0/smp_affinity",
             "/proc/mtrr", "/proc/scsi/scsi"):
    if os.path.exists(path):
        denied(write, path)
if read("/proc/kcore") or read("/proc/kmsg"):
    breach("kernel memory or log")
""",
    "open_devices": """
import stat
denied(os.mknod, "/workspace/mem", 0o020666, os.makedev(1, 1))
denied(os.mknod, "/dev/disk", 0o060666, os.makedev(8, 0))
denied(os.mknod, "/tmp/kmsg", 0o020666, os.makedev(1, 11))
for name in ("mem", "kmem", "port", "kmsg", "fuse", "kvm", "net/tun", "loop0", "loop-control", "sda", "vda", "mapper/control", "vsock",
             "vhost-net", "snd", "dri", "input", "hpet", "rtc0", "userfaultfd", "nvidia0", "mqueue"):
    if os.path.exists(f"/dev/{name}"):
        breach(name)
denied(os.mkdir, "/dev/mine")
""",
    "gain_capabilities": """
import subprocess, shutil
status = dict(line.split(":\\t") for line in open("/proc/self/status") if ":\\t" in line)
for name in ("CapPrm", "CapEff", "CapBnd"):
    bits = int(status[name], 16)
    for cap, called in ((21, "SYS_ADMIN"), (12, "NET_ADMIN"), (13, "NET_RAW"), (19, "SYS_PTRACE"), (16, "SYS_MODULE"), (17, "SYS_RAWIO"),
                        (22, "SYS_BOOT"), (27, "MKNOD"), (24, "SYS_RESOURCE"), (39, "BPF"), (38, "PERFMON"), (2, "DAC_READ_SEARCH")):
        if bits >> cap & 1:
            breach(f"{called} in {name}")
if status["NoNewPrivs"].strip() != "1":
    breach("no_new_privs")
# a file capability that the bounding set doesn't hold
shutil.copy("/usr/bin/cat", "/workspace/cat")
xattr = struct.pack("<IIIII", 0x02000001, 1 << 21, 0, 0, 0)
try:
    os.setxattr("/workspace/cat", "security.capability", xattr)
except OSError:
    pass
shown = subprocess.run(["/workspace/cat", "/proc/self/status"], capture_output=True, text=True).stdout
if "CapEff:" in shown and int(shown.split("CapEff:")[1].split()[0], 16) >> 21 & 1:
    breach("SYS_ADMIN through a file capability")
""",
    "use_32_bit_and_x32_calls": """
if os.uname().machine == "x86_64":
    page = libc.mmap(None, 4096, 7, 0x22, -1, 0)
    # getpid by int 0x80, and by an x32 number
    ctypes.memmove(page, bytes.fromhex("b814000000cd80c3"), 8)
    def legacy():
        result = ctypes.CFUNCTYPE(ctypes.c_int)(page)()
        breach(f"int 0x80 answered {result}")
    status = forked(legacy)
    if not os.WIFSIGNALED(status):
        breach(f"a 32-bit call did not kill: {status}")
    def x32():
        ctypes.set_errno(0)
        result = libc.syscall(ctypes.c_long(0x40000000 + 39))
        if result != -1 or ctypes.get_errno() != errno.ENOSYS:
            breach(f"x32 getpid: {result}, errno {ctypes.get_errno()}")
    forked(x32)
if os.uname().machine == "aarch64":
    # exit(3) of a program for 32-bit ARM
    code = bytes.fromhex("0170a0e3 0300a0e3 000000ef")
    size = 52 + 32 + len(code)
    head = struct.pack("<16sHHIIIIIHHHHHH", b"\x7fELF" + bytes((1, 1, 1)), 2, 40, 1, 0x10054, 52, 0, 0x5000000, 52, 32, 1, 0, 0, 0)
    with open("/workspace/arm", "wb") as file:
        file.write(head + struct.pack("<8I", 1, 0, 0x10000, 0x10000, size, size, 5, 0x1000) + code)
    os.chmod("/workspace/arm", 0o755)
    def thirty_two_bits():
        try:
            os.execv("/workspace/arm", ["arm"])
        except OSError as error:  # of a machine that runs none
            os._exit(0 if error.errno == errno.ENOEXEC else 99)
    status = forked(thirty_two_bits)
    if status != 0 and not os.WIFSIGNALED(status):
        breach(f"a 32-bit program did not end by a signal: {status}")
""",
    "unknown_call_numbers": """
for number in (*range(457, 480), 500, 511, 600, 1000, 100000):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM):
        breach(f"call {number}: errno {ctypes.get_errno()}")
""",
    "open_forbidden_sockets": """
for family in (3, 4, 9, 15, 17, 21, 29, 30, 31, 36, 38, 40, 41, 43, 44, 45):
    for kind in (1, 2, 3, 5):
        for number in (family, family | 1 << 32):
            result = libc.socket(ctypes.c_long(number), kind, 0)
            if result != -1:
                breach(f"family {family} type {kind}")
for protocol in (4, 7, 9, 10, 11, 12, 15, 16, 18, 20, 21):
    if libc.socket(16, 3, protocol) != -1:
        breach(f"netlink {protocol}")
for family in (2, 10):
    for protocol in (1, 6, 17, 58, 255):
        if libc.socket(family, 3, protocol) != -1:
            breach(f"raw socket {family} {protocol}")
""",
    "open_sockets_of_protocols_that_nobody_needs": """
for family in (2, 10):
    for kind in (1, 2, 5, 6):
        for protocol in (33, 99, 115, 132, 136, 256, 262, *(0,) * (kind > 3)):
            refusals = (errno.EPROTONOSUPPORT, errno.EINVAL, *(errno.ESOCKTNOSUPPORT,) * (kind > 3))
            if libc.socket(family, kind, protocol) != -1 or ctypes.get_errno() not in refusals:
                breach(f"family {family} type {kind} protocol {protocol}: errno {ctypes.get_errno()}")
""",
    "climb_from_its_namespaces": """
for name in os.listdir("/proc/self/ns"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    for request in (0xB701, 0xB702, 0xB704, 0x8008B705, 0x8010B70A, 0x8010B70B, 0x8010B70C, 0x8008B70D):
        found = libc.ioctl(fd, ctypes.c_ulong(request), ctypes.create_string_buffer(64))
        if found != -1 or ctypes.get_errno() != errno.EPERM:
            breach(f"{name}: {request:#x}: {found}, errno {ctypes.get_errno()}")
""",
    "change_its_own_network": """
import subprocess
def answer(kind, flags, body):
    with socket.socket(16, 3, 0) as s:
        s.bind((0, 0))
        s.send(struct.pack("IHHII", 16 + len(body), kind, flags | 5, 1, 0) + body)  # NLM_F_REQUEST | NLM_F_ACK
        found = s.recv(65536)
        return -struct.unpack_from("i", found, 16)[0] if struct.unpack_from("H", found, 4)[0] == 2 else 0
link = struct.pack("BxHiII", 0, 0, 1, 0, 1)
name = struct.pack("HH", 8 + 4, 18 | 0x8000) + struct.pack("HH", 8, 1) + b"dumm"
for kind in range(16, 120):  # every request there is to change something: RTM_NEW*, DEL*, SET*
    if kind % 4 != 2 and answer(kind, 0x600, link + name) not in (errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL):
        breach(f"rtnetlink {kind}")
if open("/proc/net/dev").read().count(":") != 1:
    breach("another device")
""",
    "learn_where_the_server_keeps_its_files": """
shown = open("/proc/self/mountinfo").read() + open("/proc/mounts").read()
for word in ("/tmp/", "/run/", "slots/", "/server"):
    if word in shown:
        breach(f"{word} in {shown}")
""",
    "push_characters_into_a_terminal": """
import pty
main, other = pty.openpty()
for request, answer in ((0x5412, errno.EIO), (0x541C, errno.ENOTTY), (0x5423, errno.EINVAL)):
    for value in (request, request | 1 << 32):
        ctypes.set_errno(0)
        if libc.ioctl(ctypes.c_int(other), ctypes.c_ulong(value), ctypes.byref(ctypes.c_int(27))) != -1:
            breach(f"ioctl {value:#x}")
        if ctypes.get_errno() != answer and value == request:
            breach(f"ioctl {value:#x}: errno {ctypes.get_errno()}")
""",
    "open_files_by_handle": """
handle = ctypes.create_string_buffer(128)
struct.pack_into("<I", handle, 0, 100)
refused("name_to_handle_at", -100, b"/", handle, ctypes.byref(ctypes.c_int()), 0)
refused("open_by_handle_at", os.open("/", os.O_RDONLY), handle, 0)
""",
    "change_what_is_read_only": """
for path in ("/usr/bin/env", "/usr/lib/os-release", "/.atropos/python", "/.atropos/pause", "/etc/ld.so.preload"):
    if os.path.exists(path):
        denied(os.open, path, os.O_WRONLY)
        denied(os.unlink, path)
        denied(os.rename, path, "/workspace/x")
denied(os.chmod, "/usr/bin/env", 0o777)
denied(os.setxattr, "/usr/bin/env", "user.x", b"1")
denied(os.mkdir, "/usr/mine")
denied(os.mkdir, "/.atropos/mine")
denied(os.symlink, "/", "/.atropos/link")
""",
    "take_what_is_set_aside_or_make_others_slow": """
import mmap
for flags in (0x40022, 0x40022 | 21 << 26, 0x40022 | 30 << 26):
    if libc.mmap(None, 1 << 21, 3, flags, -1, 0) != ctypes.c_void_p(-1).value:
        breach(f"huge pages {flags:#x}")
denied(os.memfd_create, "x", 4, what="a memory file of huge pages")
if libc.shmget(0, 1 << 21, 0o4000 | 0o1600) != -1:
    breach("a segment of huge pages")
if libc.prctl(62, 1, 0, 0, 0) != -1 or ctypes.get_errno() != errno.EINVAL:
    breach("core scheduling")
for family, kind in ((1, 1), (2, 1), (2, 2), (16, 3)):
    s = socket.socket(family, kind)
    before = s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    for number in (8, 33):
        for level in (1, 1 | 1 << 32):
            libc.setsockopt(s.fileno(), ctypes.c_long(level), ctypes.c_long(number), ctypes.byref(ctypes.c_int(1 << 26)), 4)
    if s.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) > before:
        breach(f"a larger receive buffer {family} {kind}")
path = "/usr/bin/find"
if os.path.exists(path):  # a page that no process has mapped stays in memory, whoever advises to forget it
    read(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        there = (ctypes.c_ubyte * (len(mapped) // 4096 + 1))()
        at = libc.mmap(None, len(mapped), 1, 2, fd, 0)
        if libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(len(mapped)), 21) == 0:
            breach("pages of others were put out")
        libc.mincore(ctypes.c_void_p(at), ctypes.c_size_t(len(mapped)), there)
        print(sum(page & 1 for page in there), "of", len(there))
""",
    "have_the_kernel_compile_filters": """
code = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0x7FFF0000))  # one instruction: everything passes
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 1, ctypes.addressof(code)))
for family, kind in ((1, 2), (2, 1), (2, 2), (16, 3)):
    s = socket.socket(family, kind)
    if family == 2:
        s.setsockopt(1, 15, 1)  # SO_REUSEPORT
    for option in (26, 51) if family == 2 else (26,):
        for level in (1, 1 | 1 << 32):
            if libc.setsockopt(s.fileno(), ctypes.c_long(level), ctypes.c_long(option), program, 16) != -1:
                breach(f"a filter on a socket {family} {kind} {option}")
def filtered():
    for number in (1, 1 | 1 << 32):
        refused("seccomp", number, 0, program)
    for option in (22, 22 | 1 << 32):
        if libc.prctl(ctypes.c_long(option), 2, program) != -1:
            breach("a filter by prctl")
forked(filtered)
""",
    "reach_a_cgroup": """
for line in open("/proc/self/mountinfo"):
    fields = line.split()
    if " - cgroup" in line and (fields[3] != "/" or "ro" not in fields[5].split(",")):
        breach(line)  # its own, read-only, is what it may see
for line in open("/proc/self/cgroup"):
    path = line.strip().split(":", 2)[2]
    if path not in ("/", "/..", "/../..", "/../../..") and "slot" in path and not path.startswith("/"):
        breach(line)
pids = {name for name in os.listdir("/proc") if name.isdigit()}
for top, folders, files in os.walk("/sys/fs/cgroup"):
    denied(os.mkdir, f"{top}/mine", what=f"mkdir in {top}")
    if top.count("/") > 4:
        breach(f"a cgroup below: {top}")
    for name in files:
        denied(write, f"{top}/{name}")
        if name in ("cgroup.procs", "tasks") and set(read(f"{top}/{name}").decode().split()) - pids:
            breach(f"processes of others: {top}/{name}")
""",
    "offer_pid_1_to_the_memory_killer": """
for path in ("/proc/1/oom_score_adj", "/proc/1/oom_adj", "/proc/1/task/1/oom_score_adj", "/proc/1/task/1/oom_adj"):
    denied(write, path, b"1000")
for name in ("timerslack_ns", "coredump_filter", "comm", "autogroup", "sched", "clear_refs", "loginuid", "uid_map", "setgroups"):
    try:
        write(f"/proc/1/{name}", b"1")
    except OSError:
        pass
""",
    "write_every_setting_of_the_kernel": """
for top, folders, files in os.walk("/proc/sys"):
    for name in files:
        path = os.path.join(top, name)
        value = read(path)
        try:
            if write(path, value or b"1") >= 0:
                breach(path)
        except OSError:
            pass
""",
    "open_any_file_of_the_kernel_for_writing": """
for root in ("/proc", "/sys"):
    for top, folders, files in os.walk(root):
        if top == "/proc":
            folders[:] = [name for name in folders if not name.isdigit() and name not in ("self", "thread-self", "sys")]
        for name in files:
            path = os.path.join(top, name)
            try:
                fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:
                continue
            try:  # some open for anybody and refuse the write
                if os.write(fd, b"1\\n") > 0 and not os.path.realpath(path).startswith(f"/proc/{os.getpid()}/"):
                    breach(path)
            except OSError:
                pass
            os.close(fd)
""",
    "climb_to_the_namespace_above": """
for name in ("user", "pid"):
    fd = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    for request in (0xB701, 0xB702):  # NS_GET_USERNS, NS_GET_PARENT
        try:
            above = fcntl.ioctl(fd, request)
        except OSError:
            continue
        own = os.readlink(f"/proc/self/ns/user")
        if os.readlink(f"/proc/self/fd/{above}") != own:
            breach(f"{name} {request:#x}: {os.readlink(f'/proc/self/fd/{above}')}")
        refused("setns", above, 0)
for path in ("uid_map", "gid_map", "setgroups", "projid_map"):
    denied(write, f"/proc/self/{path}", b"0 0 1")
""",
    "dump_core_where_it_should_not": """
before = resource.getrlimit(resource.RLIMIT_CORE)
if before[1] > 1:
    breach(f"core dumps of {before} bytes")
for limit in ((1 << 30, 1 << 30), (0, 0)):  # with 0, a core_pattern that is a pipe starts its program as the host's root
    try:
        resource.setrlimit(resource.RLIMIT_CORE, limit)
    except (OSError, ValueError):
        pass
    libc.syscall(ctypes.c_long(160), 4, struct.pack("QQ", *limit))
if resource.getrlimit(resource.RLIMIT_CORE) != before:
    breach(f"core dumps of {resource.getrlimit(resource.RLIMIT_CORE)} bytes")
status = forked(lambda: os.kill(os.getpid(), signal.SIGSEGV))
if os.WCOREDUMP(status):
    breach("a core dump")
for top in ("/workspace", "/tmp", "/"):
    for name in os.listdir(top):
        if name.startswith("core"):
            breach(os.path.join(top, name))
""",
    "find_a_socket_of_pid_1": """
import array, stat
for fd in range(512):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            breach(f"descriptor {fd} is a socket")
    except OSError:
        pass
for line in open("/proc/net/unix").readlines()[1:]:
    breach(line)
frame = struct.pack("<II", 40, 36) + b'{"id":1,"r":{"kind":"done"},"b":[]}'
for name in ["", "\\0", "\\0atropos", "/run/atropos", "/.atropos/socket"]:
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
        s = socket.socket(socket.AF_UNIX, kind)
        try:
            s.connect(name)
            s.sendmsg([frame], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))])
            breach(f"{name!r} takes frames")
        except (OSError, ValueError):
            pass
""",
    "signal_pid_1_by_other_ways": """
a, b = socket.socketpair()
for number in range(1, 65):
    for owner in (1, -1):
        try:
            fcntl.fcntl(a, 10, number)  # F_SETSIG
            fcntl.fcntl(a, fcntl.F_SETOWN, owner)
            fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            b.send(b"x")
            a.recv(10)
        except OSError:
            pass
info = ctypes.create_string_buffer(128)
for number in (9, 10, 17, 19, 34, 64):
    struct.pack_into("<iii", info, 0, number, 0, -1)
    for name, arguments in ((129, (1, number, info)), (297, (1, 1, number, info)), (200, (1, number)), (234, (1, 1, number)),
                            (424, (os.pidfd_open(1), number, 0, 0))):
        libc.syscall(ctypes.c_long(name), *arguments)
class Event(ctypes.Structure):
    _fields_ = [("value", ctypes.c_void_p), ("signal", ctypes.c_int), ("notify", ctypes.c_int), ("tid", ctypes.c_int), ("pad", ctypes.c_char * 48)]
timer = ctypes.c_void_p()
if libc.timer_create(1, ctypes.byref(Event(0, 9, 4, 1)), ctypes.byref(timer)) == 0:
    breach("a timer that signals PID 1")
time.sleep(0.05)
""",
    "be_traced_by_pid_1": """
def stops():
    while os.getppid() != 1:
        time.sleep(0.001)
    if call("ptrace", 0, 0, 0, 0) == 0:
        for number in (signal.SIGWINCH, signal.SIGTRAP, signal.SIGUSR1):
            os.kill(os.getpid(), number)
for _ in range(8):  # orphans, whose parent is PID 1
    forked(lambda: os.fork() or stops())
threads = [threading.Thread(target=lambda: call("ptrace", 0, 0, 0, 0)) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
if call("ptrace", 0, 0, 0, 0) == 0:
    os.kill(os.getpid(), signal.SIGWINCH)
""",
    "raise_limits_and_priorities": """
for name in ("RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_MEMLOCK", "RLIMIT_MSGQUEUE", "RLIMIT_SIGPENDING", "RLIMIT_RTPRIO", "RLIMIT_NICE"):
    number = getattr(resource, name)
    hard = resource.getrlimit(number)[1]
    if hard == resource.RLIM_INFINITY:
        breach(f"{name} is endless")
    else:
        denied(resource.setrlimit, number, (hard + 1, hard + 1), what=name)
denied(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1), what="FIFO")
denied(os.sched_setscheduler, 0, os.SCHED_RR, os.sched_param(1), what="RR")
denied(os.nice, -5)
if call("ioprio_set", 1, 0, 1 << 13) == 0:
    breach("real-time I/O")
denied(write, "/proc/self/oom_score_adj", b"-1000", what="oom_score_adj")
""",
    "link_to_what_is_not_ones_own": """
for path in ("/usr/bin/env", "/.atropos/python", "/proc/1/exe", "/etc/ld.so.preload"):
    if os.path.lexists(path):
        denied(os.link, path, "/workspace/linked", what=path)
for path in ("/usr/bin/su", "/usr/bin/passwd", "/usr/bin/mount"):
    if os.path.exists(path):
        status = forked(lambda: os.execv(path, [path, "--version"]))
""",
}

NEIGHBOURS = {
    "connect_to_the_neighbour": """
import urllib.request
for port in (8080, 9999):
    s = socket.socket()
    s.settimeout(1)
    if s.connect_ex(("127.0.0.1", port)) == 0:
        breach(f"port {port}")
s = socket.socket(socket.AF_UNIX)
if s.connect_ex("\\0" + NEIGHBOUR) == 0:
    breach("abstract socket")
if NEIGHBOUR.encode() in read("/proc/net/unix"):
    breach("/proc/net/unix")
mine = socket.socket()
mine.bind(("127.0.0.1", 8080))
mine.listen()
""",
    "connect_to_the_host_and_beyond": """
for host, port in (("127.0.0.1", SERVER_PORT), ("169.254.169.254", 80), ("10.0.0.1", 80), ("172.17.0.1", 2375), ("192.168.0.1", 80),
                   ("1.1.1.1", 53), ("100.100.100.200", 80)):
    s = socket.socket()
    s.settimeout(1)
    if s.connect_ex((host, port)) == 0:
        breach(f"{host}:{port}")
for host in ("fe80::1", "fd00:ec2::254", "2606:4700:4700::1111"):
    s = socket.socket(socket.AF_INET6)
    s.settimeout(1)
    if s.connect_ex((host, 80)) == 0:
        breach(host)
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
denied(s.sendto, b"x", ("1.1.1.1", 53))
devices = [line.split(":")[0].strip() for line in open("/proc/net/dev").readlines()[2:]]
if devices != ["lo"]:
    breach(devices)
""",
    "share_memory_with_the_neighbour": """
libc.shmget.restype = ctypes.c_int
if libc.shmget(0x41545250, 4096, 0) != -1:
    breach("System V memory")
if libc.semget(0x41545250, 1, 0) != -1 or libc.msgget(0x41545250, 0) != -1:
    breach("System V semaphore or queue")
if os.listdir("/dev/shm"):
    breach(os.listdir("/dev/shm"))
for line in open("/proc/sysvipc/shm").readlines()[1:]:
    breach(line)
""",
    "find_the_neighbour_s_files": """
for top, folders, files in os.walk("/", followlinks=False):
    folders[:] = [name for name in folders if os.path.join(top, name) not in ("/usr", "/proc", "/sys")]
    for name in files + folders:
        if NEIGHBOUR in name:
            breach(os.path.join(top, name))
""",
    "lock_what_the_neighbour_needs": """
for path in ("/usr/bin/env", "/usr/bin/bash", "/usr/bin/python3", "/.atropos/python", "/.atropos/pause", "/etc/ld.so.preload"):
    if os.path.exists(path):
        fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            breach(f"{path} is locked by somebody else: {error}")
time.sleep(0.5)
""",
    "watch_what_the_neighbour_runs": """
fd = libc.inotify_init1(os.O_NONBLOCK)
for path in (b"/usr/bin", b"/usr/bin/cat", b"/usr/lib", b"/.atropos", b"/.atropos/lib", b"/etc"):
    libc.inotify_add_watch(fd, path, 0xFFF)
time.sleep(0.6)
try:
    data = os.read(fd, 65536)
    breach(f"{len(data)} bytes of events")
except BlockingIOError:
    pass
""",
    "hold_a_lease_on_a_shared_file": """
for path in ("/usr/bin/cat", "/usr/bin/bash"):
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError:
        pass
time.sleep(0.3)
""",
}

BOMBS = {
    "fork_without_end": """
started = time.time()
count = 0
while time.time() - started < 1.5:
    try:
        if os.fork() == 0:
            signal.pause()
        count += 1
    except OSError:
        time.sleep(0.01)
if count > 200:
    breach(f"{count} processes")
os.kill(0, signal.SIGKILL)
""",
    "threads_without_end": """
stop = threading.Event()
count = 0
try:
    while count < 1000:
        threading.Thread(target=stop.wait, daemon=True).start()
        count += 1
except RuntimeError:
    pass
if count > 200:
    breach(f"{count} threads")
stop.set()
""",
    "memory_without_end": """
def eat():
    kept = []
    while True:
        kept.append(bytearray(8 << 20))
        if len(kept) > 100:
            breach("800 MiB under a limit of 128")
            return
status = forked(eat)
""",
    "shared_and_hidden_memory": """
def shared():
    kept = []
    for number in range(64):
        fd = os.memfd_create("x")
        os.write(fd, bytes(8 << 20))
        kept.append(fd)
    breach("512 MiB in memory files")
forked(shared)
def mapped():
    import mmap
    m = mmap.mmap(-1, 512 << 20)
    for at in range(0, 512 << 20, 4096):
        m[at] = 1
    breach("512 MiB mapped")
forked(mapped)
""",
    "fill_every_file_system": """
for folder in ("/workspace", "/tmp", "/dev/shm", "/var/tmp", "/root", "/run"):
    try:
        fd = os.open(f"{folder}/fill", os.O_WRONLY | os.O_CREAT)
    except OSError:
        continue
    written = 0
    try:
        while written < 200 << 20:
            written += os.write(fd, bytes(1 << 20))
        breach(f"{written} bytes in {folder}")
    except OSError as error:
        if error.errno != errno.ENOSPC:
            print(folder, error)
    os.close(fd)
    os.unlink(f"{folder}/fill")
for folder in ("/dev", "/proc", "/.atropos", "/usr"):
    try:
        fd = os.open(f"{folder}/fill", os.O_WRONLY | os.O_CREAT)
        breach(folder)
    except OSError:
        pass
""",
    "use_up_inodes": """
count = 0
try:
    os.mkdir("/tmp/many")
    while count < 20000:
        os.close(os.open(f"/tmp/many/{count}", os.O_CREAT | os.O_WRONLY))
        count += 1
    breach("20,000 files under a limit of 5,000")
except OSError as error:
    if error.errno != errno.ENOSPC:
        breach(error)
""",
    "a_folder_deeper_than_any_path": """
depth = 0
try:
    for depth in range(1500):
        os.mkdir("d" * 100)
        os.chdir("d" * 100)
except OSError as error:
    print(depth, error)
""",
    "names_and_modes_that_break_cleaners": r"""
os.mkdir(b"/workspace/bad")
for name in (b"\xff\xfe", b"\n", b"-rf", b" ", b"\x01\x02", b"a" * 255, "ü".encode("latin-1"), b"..."):
    with open(b"/workspace/bad/" + name, "wb") as file:
        file.write(b"x")
os.mkdir("/workspace/closed")
open("/workspace/closed/in", "w").close()
os.chmod("/workspace/closed", 0)
os.symlink("/", "/workspace/to-root")
os.symlink("loop", "/workspace/loop")
os.mkfifo("/workspace/fifo")
""",
    "descriptors_without_end": """
kept = []
try:
    while len(kept) < 100000:
        kept.append(os.open("/dev/null", os.O_RDONLY))
    breach(f"{len(kept)} descriptors")
except OSError as error:
    if error.errno != errno.EMFILE:
        print(error)
""",
    "descriptors_in_flight": """
import array
kept = []
try:
    for _ in range(300):
        a, b = socket.socketpair()
        kept += [a, b]
        for _ in range(50):
            a.setblocking(False)
            a.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 200))])
except OSError as error:
    print(error)
time.sleep(0.5)
""",
    "socket_buffers_without_end": """
kept, sent = [], 0
try:
    for _ in range(100):
        a, b = socket.socketpair()
        a.setblocking(False)
        a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
        kept += [a, b]
        try:
            while True:
                sent += a.send(bytes(65536))
        except BlockingIOError:
            pass
except OSError as error:
    print(error)
server = socket.socket()
server.bind(("127.0.0.1", 0))
server.listen(1000)
try:
    for _ in range(60):
        c = socket.socket()
        c.connect(server.getsockname())
        c.setblocking(False)
        kept.append(c)
        try:
            while True:
                sent += c.send(bytes(65536))
        except BlockingIOError:
            pass
except OSError as error:
    print(error)
if sent > 400 << 20:
    breach(f"{sent >> 20} MiB queued under a limit of 128")
""",
    "pipe_buffers_without_end": """
kept, total = [], 0
try:
    for _ in range(100):
        r, w = os.pipe()
        kept += [r, w]
        try:
            total += fcntl.fcntl(w, 1031, 1 << 20)
        except OSError:
            total += 65536
        os.set_blocking(w, False)
        try:
            while True:
                os.write(w, bytes(65536))
        except BlockingIOError:
            pass
except OSError as error:
    print(error)
""",
    "inotify_without_end": """
kept = []
while len(kept) < 4096:
    fd = libc.inotify_init1(0)
    if fd < 0:
        break
    kept.append(fd)
if len(kept) > 64:
    breach(f"{len(kept)} inotify instances")
watches = 0
if kept:
    for number in range(30000):
        path = f"/tmp/w{number}"
        try:
            os.mkdir(path)
        except OSError:
            break
        if libc.inotify_add_watch(kept[0], path.encode(), 0xFFF) < 0:
            break
        watches += 1
print(len(kept), watches)
time.sleep(0.3)
""",
    "queued_signals_and_timers_without_end": """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
count = 0
class Value(ctypes.Structure):
    _fields_ = [("v", ctypes.c_void_p)]
while count < 200000 and libc.sigqueue(os.getpid(), int(signal.SIGRTMIN), Value(0)) == 0:
    count += 1
if count > 20000:
    breach(f"{count} signals queued")
time.sleep(0.3)
""",
    "message_queues_without_end": """
count = 0
class Attributes(ctypes.Structure):
    _fields_ = [("flags", ctypes.c_long), ("most", ctypes.c_long), ("size", ctypes.c_long), ("now", ctypes.c_long), ("pad", ctypes.c_long * 4)]
try:
    rt = ctypes.CDLL("librt.so.1", use_errno=True)
    a = Attributes(0, 10, 8192)
    while count < 5000 and rt.mq_open(f"/q{count}".encode(), os.O_CREAT | os.O_RDWR, 0o600, ctypes.byref(a)) >= 0:
        count += 1
except OSError as error:
    print(error)
if count > 100:
    breach(f"{count} queues")
time.sleep(0.3)
""",
    "terminals_without_end": """
kept = []
try:
    while len(kept) < 3000:
        kept.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    breach(f"{len(kept)} terminals")
except OSError as error:
    print(len(kept), error)
time.sleep(0.3)
""",
    "locks_without_end": """
fd = os.open("/workspace/locks", os.O_RDWR | os.O_CREAT)
count = 0
try:
    for count in range(3000):
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, count * 2)
except OSError as error:
    print(count, error)
""",
    "burn_every_core": """
for _ in range(16):
    if os.fork() == 0:
        until = time.time() + 1
        while time.time() < until:
            pass
        os._exit(0)
for _ in range(16):
    os.wait()
""",
    "wake_each_other_without_end": """
for _ in range(16):
    ends = os.pipe(), os.pipe()
    for mine, other in (ends, ends[::-1]):
        if os.fork() == 0:
            signal.alarm(1)
            os.write(other[1], b"x")
            while True:
                os.read(mine[0], 1)
                os.write(other[1], b"x")
for _ in range(32):
    os.wait()
""",
    "sleep_for_moments_without_end": """
for _ in range(40):
    if os.fork() == 0:
        until = time.time() + 1
        while time.time() < until:
            time.sleep(1e-5)
        os._exit(0)
for _ in range(40):
    os.wait()
""",
    "moves_from_core_to_core_without_end": """
cores = sorted(os.sched_getaffinity(0))
for _ in range(8):
    if os.fork() == 0:
        until, count = time.time() + 1, 0
        while time.time() < until:
            os.sched_setaffinity(0, {cores[count % len(cores)]})
            count += 1
        if sorted(os.sched_getaffinity(0)) != cores:
            breach("a core was chosen")
        os._exit(0)
for _ in range(8):
    os.wait()
""",
    "orphans_and_zombies_without_end": """
for _ in range(200):
    try:
        if os.fork() == 0:
            if os.fork() == 0:
                os._exit(0)
            os._exit(0)
        os.wait()
    except OSError:
        pass
def zombies():
    return sum(b") Z" in read(f"/proc/{pid}/stat") for pid in os.listdir("/proc") if pid.isdigit())
until = time.time() + 20
while zombies() > 30 and time.time() < until:
    time.sleep(0.05)
if zombies() > 30:
    breach("zombies that PID 1 doesn't reap")
""",
    "answers_and_errors_that_nobody_reads": """
ask = struct.pack("IHHII", 32, 18, 1, 1, 0) + struct.pack("BxHiII", 0, 0, 1, 0, 0)
def fill():
    kept = []
    try:
        while True:
            kept.append(socket.socket(16, 3, 0))
            kept.append(socket.socket(2, 2))
            kept[-1].setsockopt(0, 11, 1)
            for s in kept[-2:]:
                s.setsockopt(1, 8, 1 << 26)
            for _ in range(150):
                kept[-2].send(ask)
                try:
                    kept[-1].sendto(bytes(1000), ("127.0.0.1", 9))
                except OSError:
                    pass
    except OSError as error:
        print(len(kept), error, flush=True)
    time.sleep(5)
for _ in range(6):
    if os.fork() == 0:
        fill()
time.sleep(5)
if int(open("/proc/net/sockstat").read().split()[2]) > 700:
    breach("more sockets than there may be")
""",
    "segments_of_system_v_memory": """
def eat():
    libc.shmat.restype = ctypes.c_void_p
    for number in range(100):
        ident = libc.shmget(0, 8 << 20, 0o1600)
        if ident < 0:
            return
        at = libc.shmat(ident, None, 0)
        libc.shmctl(ident, 0, None)  # gone with its last user
        ctypes.memset(at, 1, 8 << 20)
    breach("800 MiB of segments under a limit of 128")
forked(eat)
""",
}

TRICKS = {
    "kill_everything": """
print("HELD", flush=True)
os.kill(-1, signal.SIGKILL)
""",
    "stop_everything": """
if os.fork() == 0:
    os.setsid()
    for _ in range(20):
        os.kill(-1, signal.SIGSTOP)
os.kill(-1, signal.SIGSTOP)
""",
    "signal_pid_1_without_end": """
until = time.time() + 0.5
while time.time() < until:
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGRTMIN, signal.SIGWINCH):
        try:
            os.kill(1, number)
        except OSError:
            pass
""",
    "waits_in_the_kernel": """
for _ in range(10):
    if os.fork() == 0:
        os.setsid()
        if libc.vfork() == 0:
            libc.pause()
time.sleep(0.2)
""",
    "attributes_without_end": """
count = 0
try:
    for number in range(400):
        os.close(os.open(f"/workspace/a{number}", os.O_CREAT | os.O_WRONLY))
        for key in range(100):
            os.setxattr(f"/workspace/a{number}", f"user.{key}", bytes(60000))
            count += 1
    breach(f"{count * 60000 >> 20} MiB of attributes")
except OSError as error:
    print(count, error)
""",
    "holes_without_end": """
for number in range(50):
    fd = os.open(f"/workspace/h{number}", os.O_CREAT | os.O_RDWR)
    try:
        os.ftruncate(fd, 1 << 62)
        os.pwrite(fd, b"x", (1 << 62) - 10)
        os.posix_fallocate(fd, 0, 1 << 40)
        breach("a terabyte was given")
    except OSError as error:
        print(error)
""",
    "watches_of_epoll_without_end": """
import select
fds = [os.eventfd(0) for _ in range(200)]
kept = []
try:
    while True:
        kept.append(select.epoll())
        for fd in fds:
            kept[-1].register(fd, select.EPOLLIN)
except OSError as error:
    print(len(kept), error)
time.sleep(0.2)
""",
    "listeners_without_end": """
kept = []
try:
    while True:
        s = socket.socket()
        s.bind(("127.0.0.1", 0))
        s.listen(4096)
        kept.append(s)
except OSError as error:
    print(len(kept), error)
""",
    "timers_without_end": """
kept, timer = 0, ctypes.c_void_p()
while kept < 100000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0:
    kept += 1
if kept > 10000:
    breach(f"{kept} timers")
""",
    "names_that_are_not_there": """
for number in range(100000):
    try:
        os.stat(f"/usr/not-there-{number}")
    except OSError:
        pass
""",
    "mapped_and_locked_memory": """
class Limit(ctypes.Structure):
    _fields_ = [("soft", ctypes.c_ulong), ("hard", ctypes.c_ulong)]
libc.mlockall(3)
kept = []
for number in range(60000):
    at = libc.mmap(None, 8192, 3 if number % 2 else 1, 0x22, -1, 0)
    if at in (None, ctypes.c_void_p(-1).value):
        break
    kept.append(at)
print(len(kept))
""",
    "processes_of_other_users": """
for uid in range(1, 40):
    try:
        if os.fork() == 0:
            os.setsid()
            os.setresuid(uid, uid, uid)
            for _ in range(20):
                if os.fork() == 0:
                    time.sleep(20)
            time.sleep(20)
    except OSError as error:
        print(uid, error)
        break
running = sum(name.isdigit() for name in os.listdir("/proc"))
if running > 80:
    breach(f"{running} processes under a limit of 64")
""",
}
