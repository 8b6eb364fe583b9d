"""Small programs, by group, whose output shall be the same in a slot as in `docker run` of the same image.

Each is a command line for bash, or (with `py`) for Python. They run in one process after the other, as root, in an
empty folder, without a terminal. What may differ by nature (pids, times, ids of containers) is not printed.
"""

from __future__ import annotations

import json
import shlex


def py(code: str) -> str:
    """A command line that runs Python code."""
    return f"python3 -c {shlex.quote(code)}"


FILES = {
    "hosts names localhost": "getent hosts localhost | grep -c localhost",
    "hosts names localhost by IPv4": "getent ahostsv4 localhost | head -1 | awk '{print $1}'",
    "localhost is a name for Python": py("import socket; print(socket.gethostbyname('localhost'))"),
    "127.0.0.1 has a name": py("import socket; print(socket.gethostbyaddr('127.0.0.1')[0])"),
    "hostname": "hostname; cat /etc/hostname; uname -n; cat /proc/sys/kernel/hostname",
    "fqdn": py("import socket; print(socket.getfqdn().split('.')[0])"),
    "mtab": "readlink /etc/mtab; [ -s /etc/mtab ] && echo full",
    "resolv.conf": "[ -f /etc/resolv.conf ] && echo there",
    "hosts is a file": "stat -c '%F %a %U' /etc/hosts",
    "hostname is a file": "stat -c '%F %a %U' /etc/hostname",
    "hosts can be added to": "cp /etc/hosts /tmp/h; echo 10.1.2.3 added >> /etc/hosts; getent hosts added; cat /tmp/h > /etc/hosts",
    "an unknown name fails": "getent hosts no.such.name.invalid; echo $?",
    "os-release": "cat /etc/os-release",
    "passwd": "cat /etc/passwd /etc/group",
    "top folders": "for d in bin boot dev etc home lib media mnt opt proc root run sbin srv sys tmp usr var; do stat -c '%n %F' /$d; done",
    "names in /": "ls -A /",
    "names in /etc": "ls -A /etc",
    "modes of top folders": "stat -c '%n %a %U' / /etc /root /tmp /usr /var /var/tmp /run /proc /dev /home",
    "tmp is writable": "echo x > /tmp/x; cat /tmp/x; rm /tmp/x",
    "usr is writable": "touch /usr/local/bin/x /usr/lib/x /etc/x && echo yes; rm -f /usr/local/bin/x /usr/lib/x /etc/x",
    "root is writable": "mkdir /made && echo yes; rmdir /made",
    "nsswitch": "cat /etc/nsswitch.conf 2>&1 | grep hosts",
    "shells": "ls -la /bin/sh | awk '{print $1, $NF}'",
    "timezone": "date +%Z; cat /etc/timezone 2>/dev/null",
    "locale": "locale 2>/dev/null | grep LC_ALL; locale -a 2>/dev/null | sort",
    "df of root has room": "df --output=target / | tail -1",
    "a file system keeps xattrs": py(
        "import os; os.setxattr('f', 'user.a', b'1'); print(os.getxattr('f', 'user.a'))"
    ).replace("python3", "touch f; python3"),
    "hard links": "echo x > a; ln a b; stat -c %h a",
    "symbolic links": "ln -s a l; readlink l; cat l 2>&1",
    "fifo": "mkfifo p; (echo through > p &); cat p",
    "sparse files": "truncate -s 1G s; stat -c '%s %b' s; rm s",
    "fallocate": "fallocate -l 1M fa && stat -c %s fa",
    "holes are found": py(
        "import os; f=os.open('h',os.O_RDWR|os.O_CREAT); os.ftruncate(f,1<<20); os.pwrite(f,b'x',1<<19); print(os.lseek(f,0,os.SEEK_DATA) > 0)"
    ),
    "rename over": "echo 1 > r1; echo 2 > r2; mv r1 r2; cat r2",
    "rename of a folder of the image": "mv /usr/share/doc /usr/share/doc2 2>&1; ls -d /usr/share/doc2; mv /usr/share/doc2 /usr/share/doc",
    "flock": "flock lock echo locked",
    "fcntl locks": py("import fcntl; f=open('k','w'); fcntl.lockf(f, fcntl.LOCK_EX); print('ok')"),
    "mmap shared": py(
        "import mmap; f=open('m','w+b'); f.truncate(4096); m=mmap.mmap(f.fileno(),4096); m[:2]=b'hi'; m.flush(); print(open('m','rb').read(2))"
    ),
    "inotify": py(
        "import ctypes,os; c=ctypes.CDLL(None); fd=c.inotify_init1(0); print(c.inotify_add_watch(fd,b'.',0x100)); open('new','w').close(); print(len(os.read(fd,100))>0)"
    ),
    "O_TMPFILE": py("import os; print(os.open('.', os.O_TMPFILE|os.O_RDWR) > 0)"),
    "O_DIRECT": py(
        "import os\ntry: os.open('d', os.O_CREAT|os.O_RDWR|os.O_DIRECT); print('ok')\nexcept OSError as e: print(e.errno)"
    ),
    "umask": "umask; touch um; stat -c %a um",
    "chown": "touch c; chown 1234:4321 c; stat -c %u:%g c",
    "set-user-id": "cp /usr/bin/id idx; chmod 4755 idx; stat -c %a idx",
    "capabilities of a file": py(
        "import os; open('f','w'); os.setxattr('f','security.capability',bytes.fromhex('0100000200040000000000000000000000000000')); print(len(os.getxattr('f','security.capability')))"
    ),
    "trusted attributes are refused": py(
        "import os; open('f','w')\ntry: os.setxattr('f','trusted.a',b'1'); print('ok')\nexcept OSError as e: print(e.errno)"
    ),
    "access control lists": py(
        "import os,struct; open('f','w'); os.setxattr('f','system.posix_acl_access',struct.pack('<I',2)+b''.join(struct.pack('<HHI',*e) for e in ((1,6,~0&0xffffffff),(2,4,7),(4,4,~0&0xffffffff),(16,6,~0&0xffffffff),(32,4,~0&0xffffffff)))); print(oct(os.stat('f').st_mode))"
    ),
    "long names": "n=$(printf 'x%.0s' $(seq 255)); echo 1 > $n; cat $n; echo 2> /dev/null > ${n}x; echo $?",
    "kinds of file systems": "stat -f -c %T / /tmp /etc /dev/shm /proc /dev",
    "one device below the root": "stat -c %d / /usr /tmp /root /var | sort -u | wc -l",
    "immutable flag": "touch im; chattr +i im 2>&1 | head -c 40; lsattr im >/dev/null 2>&1; echo $?",
}
PROC = {
    "own status": "grep -E '^(Name|Umask|State|Threads|NoNewPrivs|Seccomp):' /proc/self/status",
    "seccomp filters programs": "grep -c '^Seccomp:.*2' /proc/self/status",
    "uid_map covers 65536": "awk '{print $1, ($3 >= 65536)}' /proc/self/uid_map",
    "self": "[ /proc/self -ef /proc/$BASHPID ]; readlink /proc/self/exe | xargs basename",
    "fd": "ls /proc/self/fd | head -3 | tr '\\n' ' '",
    "cmdline": "tr '\\0' ' ' < /proc/self/cmdline | head -c 3",
    "environ": "tr '\\0' '\\n' < /proc/self/environ | grep -c ^PATH=",
    "limits": "awk 'NR>1 {print}' /proc/self/limits | grep -E 'cpu time|file size|data size|stack size|resident|locks|nice|realtime' | sed 's/  */ /g'",
    "maps": "grep -c libc /proc/self/maps | awk '{print ($1>0)}'",
    "meminfo": "grep -c MemTotal /proc/meminfo",
    "cpuinfo": "grep -c ^processor /proc/cpuinfo",
    "stat": "grep -c ^cpu /proc/stat",
    "loadavg": "wc -w < /proc/loadavg",
    "uptime": "wc -w < /proc/uptime",
    "version": "wc -l < /proc/version",
    "filesystems": "grep -cE 'tmpfs|overlay' /proc/filesystems",
    "mounts name the root": "awk '$2==\"/\" {print $3}' /proc/mounts",
    "net/dev": "awk 'NR>2 {print $1}' /proc/net/dev",
    "net/route": "wc -l < /proc/net/route",
    "net/tcp": "wc -l < /proc/net/tcp",
    "net/unix can be read": "head -1 /proc/net/unix | wc -w",
    "sys is read-only": "(echo 1 > /proc/sys/vm/overcommit_memory) 2>&1 | grep -c Read-only",
    "sysrq is read-only": "(echo h > /proc/sysrq-trigger) 2>&1 | grep -cE 'Read-only|denied'",
    "kcore is closed": "head -c 1 /proc/kcore 2>&1 | wc -c | awk '{print ($1>1)}' ; [ -s /proc/kcore ] && head -c1 /proc/kcore >/dev/null 2>&1; echo",
    "pid_max": "[ $(cat /proc/sys/kernel/pid_max) -gt 1000 ] && echo ok",
    "osrelease": "cat /proc/sys/kernel/osrelease",
    "random boot id": "wc -c < /proc/sys/kernel/random/boot_id",
    "random uuid": "wc -c < /proc/sys/kernel/random/uuid",
    "oom_score_adj is read": "grep -cE '^-?[0-9]+$' /proc/self/oom_score_adj",
    "oom_score_adj upwards": "echo 1000 > /proc/self/oom_score_adj && echo ok",
    "oom_score_adj below zero is refused": "(echo -1000 > /proc/self/oom_score_adj) 2>/dev/null || echo refused",
    "a thread is named": py(
        "import threading,time; t=threading.Thread(target=time.sleep,args=(1,)); t.start(); open(f'/proc/self/task/{t.native_id}/comm','w').write('mine'); print(open(f'/proc/self/task/{t.native_id}/comm').read())"
    ),
    "own name by prctl": py(
        "import ctypes; ctypes.CDLL(None).prctl(15,b'mine',0,0,0); print(open('/proc/self/comm').read().strip())"
    ),
    "own memory is read": py(
        "import ctypes; b=ctypes.create_string_buffer(b'hello'); f=open('/proc/self/mem','rb',0); f.seek(ctypes.addressof(b)); print(f.read(5))"
    ),
    "own memory is written": py(
        "import ctypes; b=ctypes.create_string_buffer(b'hello'); f=open('/proc/self/mem','r+b',0); f.seek(ctypes.addressof(b)); f.write(b'J'); print(b.value)"
    ),
    "smaps": "grep -c Rss /proc/self/smaps_rollup",
    "timers": "[ -r /proc/self/timerslack_ns ] && echo there",
    "coredump_filter": "(echo 0x33 > /proc/self/coredump_filter) 2>&1 | wc -l",
    "cgroup": "cut -d: -f3 /proc/self/cgroup | sort -u | head -1 | cut -c1",
    "cgroups": "grep -c memory /proc/cgroups",
    "ns": "ls /proc/self/ns | head -3",
    "files of the kernel": "for f in slabinfo vmallocinfo pagetypeinfo iomem kallsyms modules interrupts softirqs vmstat zoneinfo buddyinfo diskstats partitions swaps crypto locks misc devices cmdline schedstat consoles; do head -c 1 /proc/$f > /dev/null 2>&1 || echo $f; done",
    "files of a process": "cd /proc/self; for f in auxv cgroup environ io limits maps mountinfo mounts mountstats numa_maps oom_score pagemap personality sched schedstat setgroups smaps stack stat statm status syscall timers wchan; do [ ! -e $f ] || head -c 1 $f > /dev/null 2>&1 || echo $f; done",
    "settings of the kernel": "find /proc/sys/kernel /proc/sys/net/core /proc/sys/vm /proc/sys/fs -type f ! -readable 2>/dev/null | wc -l",
    "children are seen": "sleep 5 & until grep -s sleep /proc/$!/comm; do :; done; kill $!",
    "namespaces are listed": "lsns -n -o TYPE -p $$ 2>/dev/null | sort | tr '\\n' ' '",
    "ps": "ps -e 2>/dev/null | tail -n +2 | awk '{print $NF}' | grep -cx ps",
}
SYS = {
    "sys is read-only": "touch /sys/x 2>&1 | grep -c Read-only",
    "cgroup is read-only": "cd /sys/fs/cgroup/memory 2> /dev/null || cd /sys/fs/cgroup; mkdir x 2> /dev/null || echo refused",
    "memory limit (cgroup v2)": "[ -d /sys/fs/cgroup/memory ] || cat /sys/fs/cgroup/memory.max",
    "memory use (cgroup v2)": "[ -d /sys/fs/cgroup/memory ] || [ $(cat /sys/fs/cgroup/memory.current) -gt 0 ] && echo positive",
    "pids limit (cgroup v2)": "[ -d /sys/fs/cgroup/memory ] || cat /sys/fs/cgroup/pids.max",
    "memory limit (cgroup v1)": "cat /sys/fs/cgroup/memory/memory.limit_in_bytes 2>/dev/null",
    "memory use (cgroup v1)": "[ $(cat /sys/fs/cgroup/memory/memory.usage_in_bytes 2>/dev/null || echo 1) -gt 0 ] && echo positive",
    "pids limit (cgroup v1)": "cat /sys/fs/cgroup/pids/pids.max 2>/dev/null",
    "share of the CPU (cgroup v1)": "cd /sys/fs/cgroup/cpu 2>/dev/null && awk '{q=$1} END {getline p < \"cpu.cfs_period_us\"; print q/p}' cpu.cfs_quota_us",
    "cpus of the set (cgroup v1)": "cat /sys/fs/cgroup/cpuset/cpuset.cpus 2>/dev/null",
    "cpus online": "cat /sys/devices/system/cpu/online",
    "cpus possible": "cat /sys/devices/system/cpu/possible",
    "topology": "cat /sys/devices/system/cpu/cpu0/topology/core_id",
    "caches": "cat /sys/devices/system/cpu/cpu0/cache/index0/size 2>/dev/null",
    "nodes": "ls -d /sys/devices/system/node/node0; cat /sys/devices/system/node/online",
    "vulnerabilities": "ls /sys/devices/system/cpu/vulnerabilities | wc -l",
    "network classes": "ls /sys/class/net",
    "loopback": "cd /sys/class/net/lo; cat address mtu operstate type flags",
    "block devices": "[ -d /sys/block ] && [ -d /sys/class/block ] && [ -d /sys/dev/block ] && echo there",
    "Python counts CPUs": py("import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))"),
    "lscpu": "lscpu 2>/dev/null | grep -E '^(Architecture|CPU\\(s\\)|Thread|Core|Socket|NUMA node\\(s\\))' | sed 's/  */ /g'",
    "lsblk starts": "lsblk > /dev/null 2>&1; echo $?",
    "free": "free -b 2>/dev/null | wc -l",
    "getconf": "getconf PAGESIZE; getconf _NPROCESSORS_ONLN; getconf CLK_TCK; getconf LONG_BIT",
    "nproc without variables": "env -u OMP_NUM_THREADS nproc",
    "cores are chosen": py(
        "import os\ntry: os.sched_setaffinity(0,{0}); print(os.sched_getaffinity(0))\nexcept OSError as e: print(e.errno)"
    ),
}
TERMINALS = {
    "no TERM": "env | grep -c ^TERM=",
    "bash makes it dumb": "echo $TERM",
    "no terminal": "tty; [ -t 0 ] || [ -t 1 ] || echo none",
    "/dev/tty": "(: < /dev/tty) 2>&1 | grep -o 'No such device or address'",
    "git asks no editor": "command -v git >/dev/null || exit 0; git init -q g 2>&1; cd g && git -c user.name=a -c user.email=a@b commit --allow-empty 2>&1 | head -3",
    "a new terminal": py(
        "import os,pty; m,s=pty.openpty(); print(os.ttyname(s).startswith('/dev/pts/'), os.isatty(s))"
    ),
    "its size": py(
        "import os,pty,fcntl,termios,struct; m,s=pty.openpty(); fcntl.ioctl(m,termios.TIOCSWINSZ,struct.pack('HHHH',24,80,0,0)); print(os.get_terminal_size(s))"
    ),
    "its modes": py("import pty,termios; m,s=pty.openpty(); a=termios.tcgetattr(s); print([hex(x) for x in a[:4]])"),
    "a program on it": py(
        "import pty,os; pid,fd=pty.fork()\nif pid==0: os.execvp('sh',['sh','-c','tty >/dev/null && echo on; stty -a | grep -c echo'])\nout=b''\ntry:\n  while d:=os.read(fd,999): out+=d\nexcept OSError: pass\nprint(out)"
    ),
    "script": "script -qec 'tty > /dev/null && echo on' /dev/null 2>&1 | tr -d '\\r'",
    "TIOCSTI is refused": py(
        "import fcntl,pty,termios; m,s=pty.openpty()\ntry: fcntl.ioctl(s, termios.TIOCSTI, b'x'); print('ok')\nexcept OSError as e: print('refused')"
    ),
    "stty without a terminal": "stty -a 2>&1 | grep -c 'Inappropriate ioctl'",
    "tput without a terminal": "tput cols 2>/dev/null",
}
SYSTEM_CALLS = """
import ctypes, errno, os, signal
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "name_to_handle_at": 303, "open_by_handle_at": 304, "io_setup": 206, "io_uring_setup": 425, "keyctl": 250, "add_key": 248, "bpf": 321,
    "perf_event_open": 298, "userfaultfd": 323, "fanotify_init": 300, "kcmp": 312, "pidfd_getfd": 438, "process_madvise": 440,
    "memfd_secret": 447, "modify_ldt": 154, "mbind": 237, "get_mempolicy": 239, "move_pages": 279, "quotactl": 179, "fsopen": 430,
    "open_tree": 428, "move_mount": 429, "mount_setattr": 442, "pivot_root": 155, "setns": 308, "swapon": 167, "acct": 163, "ioperm": 173,
    "iopl": 172, "init_module": 175, "kexec_load": 246, "syslog": 103, "vhangup": 153, "clone3": 435, "landlock_create_ruleset": 444,
    "rseq": 334, "membarrier": 324, "copy_file_range": 326, "statx": 332, "close_range": 436, "openat2": 437, "faccessat2": 439,
    "preadv2": 327, "sched_setattr": 314, "getrandom": 318, "seccomp": 317, "splice": 275, "vmsplice": 278, "remap_file_pages": 216,
    "mlock2": 325, "pkey_alloc": 330, "epoll_pwait2": 441, "futex_waitv": 449, "cachestat": 451, "fchmodat2": 452, "lookup_dcookie": 212,
    "mincore": 27, "msync": 26, "ioprio_get": 252, "sync_file_range": 277, "arch_prctl": 158, "inotify_init1": 294, "signalfd4": 289,
}
for name, number in calls.items():
    if os.fork() == 0:
        signal.alarm(2)
        libc.syscall(number, *(ctypes.c_long(-1) for _ in range(6)))
        os._exit(ctypes.get_errno())
    status = os.wait()[1]
    code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0
    if code in (errno.EPERM, errno.ENOSYS): print(name, errno.errorcode[code])
"""
"""Those that are refused with any arguments, by their numbers on x86-64."""
PROGRAM_OF_32_BITS = """
import struct
code = bytes.fromhex("b801000000bb2a000000cd80")  # exit(42)
size = 52 + 32 + len(code)
head = struct.pack("<16sHHIIIIIHHHHHH", b"\x7fELF" + bytes((1, 1, 1)), 2, 3, 1, 0x8048054, 52, 0, 0, 52, 32, 1, 0, 0, 0)
open("p", "wb").write(head + struct.pack("<8I", 1, 0, 0x8048000, 0x8048000, size, size, 5, 0x1000) + code)
"""
EXEC = {
    "exit code": "bash -c 'exit 7'; echo $?",
    "killed by a signal": "{ bash -c 'kill -9 $$'; echo $?; } 2> /dev/null",
    "killed by SIGTERM": "bash -c 'kill $$'; echo $?",
    "SIGPIPE ends yes": "yes | head -1; echo ${PIPESTATUS[0]}",
    "SIGPIPE is at its default": py("import signal; print(signal.getsignal(signal.SIGPIPE) != signal.SIG_DFL)")
    + "; trap -p PIPE",
    "no signal is ignored": "a=$(awk '/SigIgn/ {print $2}' /proc/$$/status); echo $((16#$a & 0x7fffffff))",
    "no signal is blocked": "grep SigBlk /proc/self/status",
    "SIGINT is at its default": "bash -c 'kill -INT $$; echo on'; echo $?",
    "not found": "no-such-program 2>/dev/null; echo $?",
    "not executable": "touch n; ./n 2>/dev/null; echo $?",
    "a script without a line": "printf 'echo ran\\n' > s; chmod +x s; ./s",
    "a script with a line": "printf '#!/bin/sh\\necho ran $0\\n' > s; chmod +x s; ./s",
    "argument list": py(
        "import subprocess; print(len(subprocess.run(['echo','x'*100000],capture_output=True).stdout))"
    ),
    "argument too long": py(
        "import subprocess\ntry: subprocess.run(['echo','x'*200000])\nexcept OSError as e: print(e.errno)"
    ),
    "orphans are reaped": "(sleep 0.05 &) ; sleep 0.3; ps -eo stat= 2>/dev/null | grep -c ^Z",
    "background jobs": "sleep 0.05 & wait $!; echo $?",
    "process substitution": "cat <(echo one) <(echo two)",
    "tee into a substitution": "echo a | tee >(cat > t1) > /dev/null; sleep 0.1; cat t1",
    "here document": "cat <<< text",
    "coproc": "coproc cat; echo x >&${COPROC[1]}; read -u ${COPROC[0]} l; echo $l",
    "traps": "bash -c 'trap \"echo trapped\" EXIT; exit 3'; echo $?",
    "timeout": "timeout 0.1 sleep 5; echo $?",
    "setsid": "setsid -w echo s",
    "nohup": "nohup echo n 2>/dev/null",
    "nice": "nice -n 5 nice",
    "nice upwards is refused": "nice -n -5 true 2>&1 | grep -c denied",
    "xargs in parallel": "seq 8 | xargs -P4 -n1 echo | wc -l",
    "find -exec": "find /etc/passwd -exec cat {} + | wc -l | awk '{print ($1>0)}'",
    "500 forks": "for i in $(seq 100); do /bin/true & done; wait; echo done",
    "vfork and posix_spawn": py("import os; p=os.posix_spawn('/bin/true',['true'],{}); print(os.waitpid(p,0)[1])"),
    "threads": py(
        "import threading; t=[threading.Thread(target=lambda: None) for _ in range(50)]; [x.start() for x in t]; [x.join() for x in t]; print('ok')"
    ),
    "multiprocessing": py(
        "import multiprocessing as m\nwith m.get_context('fork').Pool(3) as p: print(p.map(abs,[-1,-2]))"
    ),
    "semaphores": py("import multiprocessing as m; s=m.Semaphore(2); print(s.acquire(), s.acquire())"),
    "shared memory": py(
        "from multiprocessing import shared_memory as s; m=s.SharedMemory(create=True,size=100); m.buf[0]=7; print(m.buf[0]); m.unlink()"
    ),
    "System V memory": "ipcmk -M 1000 2>&1 | grep -c id",
    "System V queue": "ipcmk -Q 2>&1 | grep -c id",
    "System V semaphores": "ipcmk -S 1 2>&1 | grep -c id",
    "POSIX queue": py("import ctypes; c=ctypes.CDLL(None); print(c.mq_open(b'/q',0o102,0o600,None) >= 0)"),
    "memfd": py("import os; f=os.memfd_create('m'); os.write(f,b'x'); print(os.fstat(f).st_size)"),
    "memfd is executed": py(
        "import os,subprocess; f=os.memfd_create('m',0); os.write(f,open('/bin/true','rb').read()); print(subprocess.run([f'/proc/self/fd/{f}'],pass_fds=[f]).returncode)"
    ),
    "eventfd, timerfd, signalfd": py(
        "import ctypes; c=ctypes.CDLL(None); print(c.eventfd(0,0)>0, c.timerfd_create(1,0)>0)"
    ),
    "epoll": py("import select; e=select.epoll(); print(e.poll(0))"),
    "userfaultfd is refused": py("import ctypes; print(ctypes.CDLL(None).syscall(323,0) < 0)"),
    "io_uring is refused": py("import ctypes; print(ctypes.CDLL(None).syscall(425,1,0) < 0)"),
    "ptrace of a child": py(
        "import ctypes,os,signal; c=ctypes.CDLL(None); p=os.fork()\nif p==0: c.ptrace(0,0,0,0); os.kill(os.getpid(),signal.SIGSTOP); os._exit(3)\nos.waitpid(p,0); print(c.ptrace(7,p,0,0)); print(os.waitpid(p,0)[1]>>8)"
    ),
    "process_vm_readv of itself": py(
        "import ctypes,os\nclass I(ctypes.Structure): _fields_=[('b',ctypes.c_void_p),('l',ctypes.c_size_t)]\na=ctypes.create_string_buffer(b'abc'); b=ctypes.create_string_buffer(4); print(ctypes.CDLL(None).process_vm_readv(os.getpid(),ctypes.byref(I(ctypes.addressof(b),3)),1,ctypes.byref(I(ctypes.addressof(a),3)),1,0))"
    ),
    "no address randomisation": "setarch -R true; echo $?",
    "prlimit of itself": "ulimit -n 100; ulimit -n",
    "core dumps are none": "{ bash -c 'kill -SEGV $$'; ls core* | wc -l; } 2> /dev/null",
    "system calls": py(SYSTEM_CALLS),
    "a filter of system calls": py(
        "import ctypes,struct; l=ctypes.CDLL(None,use_errno=True); b=ctypes.create_string_buffer(struct.pack('HBBI',6,0,0,0x7fff0000)); p=ctypes.create_string_buffer(struct.pack('HxxxxxxQ',1,ctypes.addressof(b))); l.prctl(38,1,0,0,0); print(l.prctl(22,2,p,0,0), ctypes.get_errno())"
    ),
    "a 32-bit program": py(PROGRAM_OF_32_BITS) + "; chmod +x p; ./p 2>/dev/null; echo $?",
    "pidfd": py("import os; print(os.pidfd_open(os.getpid()) > 0)"),
    "subreaper": py("import ctypes; print(ctypes.CDLL(None).prctl(36,1,0,0,0))"),
    "alarm": py(
        "import signal; signal.signal(signal.SIGALRM, lambda *a: print('rang')); signal.alarm(1); signal.pause()"
    ),
}
USERS = {
    "who": "id -u; id -g; id -un; whoami",
    "all groups": "id -G",
    "message queues": "ulimit -q",
    "priorities": "ulimit -e; ulimit -r; chrt -b 0 true; echo $?; chrt -i 0 true; echo $?; chrt -f 1 true 2>/dev/null; echo $?; ionice -c2 -n7 true; echo $?",
    "the kernel's log is refused": "dmesg 2>&1 | head -1",
    "groups": "id -Gn | tr ' ' '\\n' | head -1",
    "HOME": "echo $HOME",
    "as another user": "setpriv --reuid 1000 --regid 1000 --clear-groups id -u",
    "as nobody": "setpriv --reuid 65534 --regid 65534 --clear-groups bash -c 'id -u; cat /etc/shadow 2>&1 | grep -c denied'",
    "su": "su nobody -s /bin/sh -c 'id -un' 2>&1",
    "useradd": "useradd -m mia 2>&1; id -u mia; stat -c %U /home/mia; userdel -r mia 2>/dev/null",
    "a set-user-id program": "cp /usr/bin/id idy; chmod 4755 idy; setpriv --reuid 1000 --clear-groups --inh-caps=-all ./idy -u",
    "chroot": "mkdir -p c/bin c/lib c/lib64; chroot / true; echo $?",
    "mount is refused": "mount -t tmpfs t /mnt 2>&1 | grep -cE 'denied|permitted'",
    "umount is refused": "umount /proc 2>&1 | grep -cE 'denied|permitted|must be'",
    "unshare is refused": "unshare -m true 2>&1 | grep -c 'not permitted'",
    "user namespaces are refused": "unshare -U true 2>&1 | grep -cE 'not permitted|No space|denied'",
    "sethostname is refused": "hostname other 2>&1 | wc -l",
    "settimeofday is refused": "date -s 2020-01-01 2>&1 | grep -c 'cannot set'",
    "reboot is refused": py("import ctypes; print(ctypes.CDLL(None).reboot(0x1234) < 0)"),
    "modules are refused": py("import ctypes; print(ctypes.CDLL(None).syscall(175,0,0,0) < 0)"),
    "effective capabilities": "grep CapEff /proc/self/status",
    "bounding capabilities": "grep CapBnd /proc/self/status",
    "inheritable and ambient capabilities": "grep -E 'CapInh|CapAmb' /proc/self/status",
    "raw sockets": py("import socket\ntry: socket.socket(2,3,1); print('ok')\nexcept OSError as e: print('refused')"),
    "device files": "mknod n c 1 3 2>&1; [ -c n ] && echo made",
    "open files": "ulimit -n",
    "processes": "ulimit -u",
    "stack": "ulimit -s",
    "core": "ulimit -c",
    "locked memory": "ulimit -l",
    "pending signals": "ulimit -i | awk '{print ($1>100)}'",
    "file size": "ulimit -f; ulimit -v; ulimit -t; ulimit -m",
    "keyrings": py("import ctypes; print(ctypes.CDLL(None).syscall(250,0,-3,0) < 0)"),
    "bpf is refused": py("import ctypes; print(ctypes.CDLL(None).syscall(321,0,0,0) < 0)"),
    "perf is refused": py("import ctypes; print(ctypes.CDLL(None).syscall(298,0,0,-1,-1,0) < 0)"),
    "no new privileges": "grep NoNewPrivs /proc/self/status",
}
OTHER_USER = "setpriv --reuid 1000 --regid 1000 --clear-groups "
PING = py(
    "import socket; s=socket.socket(2,2,1); s.settimeout(3); s.sendto(bytes([8,0,247,255,0,0,0,0]),('127.0.0.1',0)); print(s.recv(99)[0])"
)
NETWORK = {
    "interfaces": py("import socket; print(socket.if_nameindex())"),
    "loopback answers": py(
        "import socket; s=socket.create_server(('127.0.0.1',0)); c=socket.create_connection(s.getsockname()); print(c.getpeername()[0])"
    ),
    "IPv6 loopback": py(
        "import socket\ntry: s=socket.create_server(('::1',0),family=10); print('ok')\nexcept OSError as e: print(e.errno)"
    ),
    "all addresses": py("import socket; s=socket.create_server(('0.0.0.0',0)); print('ok')"),
    "another loopback address": py("import socket; s=socket.create_server(('127.8.8.8',0)); print('ok')"),
    "port 80": py("import socket; s=socket.create_server(('127.0.0.1',80)); print('ok')"),
    "a server by localhost": py(
        "import http.server,threading,urllib.request as u; s=http.server.HTTPServer(('127.0.0.1',0),http.server.SimpleHTTPRequestHandler); threading.Thread(target=s.handle_request).start(); print(u.urlopen(f'http://localhost:{s.server_port}/',timeout=5).status)"
    )
    + " 2>/dev/null",
    "UDP": py(
        "import socket; a=socket.socket(2,2); a.bind(('127.0.0.1',0)); b=socket.socket(2,2); b.sendto(b'x',a.getsockname()); print(a.recv(9))"
    ),
    "unix sockets": py(
        "import socket; s=socket.socket(1); s.bind('u'); s.listen(); c=socket.socket(1); c.connect('u'); print('ok')"
    ),
    "abstract sockets": py(
        "import socket; s=socket.socket(1); s.bind('\\0u'); s.listen(); c=socket.socket(1); c.connect('\\0u'); print('ok')"
    ),
    "descriptors over sockets": py(
        "import socket; a,b=socket.socketpair(); socket.send_fds(a,[b'x'],[0]); print(len(socket.recv_fds(b,9,1)[1]))"
    ),
    "peer credentials": py(
        "import socket,struct; a,b=socket.socketpair(); print(struct.unpack('3i',a.getsockopt(1,17,12))[1:])"
    ),
    "outside is unreachable": py(
        "import socket\ntry: socket.create_connection(('192.0.2.1',9),timeout=3)\nexcept OSError as e: print(e.errno)"
    ),
    "netlink": py("import socket; s=socket.socket(16,3,0); print('ok')"),
    "refused": py(
        "import socket\ntry: socket.create_connection(('127.0.0.1',1),timeout=3)\nexcept OSError as e: print(e.errno)"
    ),
    "TCP options": py(
        "import socket; s=socket.socket(); s.setsockopt(6,1,1); s.setsockopt(1,9,1); s.setsockopt(1,15,1); print('ok')"
    ),
    "receive buffer": py("import socket; s=socket.socket(); s.setsockopt(1,8,10000); print(s.getsockopt(1,8))"),
    "ping": PING,
    "ping of another user": OTHER_USER + PING,
    "port 80 of another user": OTHER_USER + py("import socket; s=socket.create_server(('127.0.0.1',80)); print('ok')"),
    "multicast on the loopback": py(
        "import socket; s=socket.socket(2,2); s.setsockopt(0,32,socket.inet_aton('127.0.0.1')); print('ok')"
    ),
    "own name by files": "getent hosts $(hostname) > /dev/null; echo $?",
    "families of sockets": py(
        "import socket\nfor f,t,p in ((17,3,3),(38,5,0),(40,1,0),(2,1,132),(2,1,262),(2,2,136),(16,3,15),(16,3,9),(16,3,16),(30,1,0),(29,3,1)):\n  try: socket.socket(f,t,p); print(f,p)\n  except OSError: pass"
    ),
    "options of sockets": py(
        "import socket\nfor l,o,v in ((0,19,1),(1,36,1),(1,25,b'lo'),(6,31,b'x'),(6,13,b'cubic'),(6,23,5),(41,67,1)):\n  try: socket.socket(10 if l==41 else 2,1).setsockopt(l,o,v); print(l,o)\n  except OSError as e: print(l,o,e.errno)"
    ),
    "a filter of a socket": py(
        "import ctypes,socket,struct; b=ctypes.create_string_buffer(struct.pack('HBBI',6,0,0,0xffff)); s=socket.socket(2,2)\ntry: s.setsockopt(1,26,struct.pack('HxxxxxxQ',1,ctypes.addressof(b))); print('ok')\nexcept OSError as e: print(e.errno)"
    ),
    "services": "getent services http 2>/dev/null | awk '{print $2}'",
    "ephemeral ports": "wc -w < /proc/sys/net/ipv4/ip_local_port_range",
}
TIME = {
    "zone": "date +%z",
    "clock goes": py("import time; a=time.monotonic(); time.sleep(0.01); print(time.monotonic()>a)"),
    "clocks": py("import time; print([time.clock_gettime(i) > 0 for i in (0,1,2,3,4,7)])"),
    "resolution": py("import time; print(time.get_clock_info('monotonic').resolution)"),
    "TZ": "TZ=UTC-2 date -d @0 +%H",
    "year": "date +%Y",
    "nanosleep": py("import time; a=time.time(); time.sleep(0.05); print(time.time()-a >= 0.05)"),
    "adjtimex is refused": py("import ctypes; print(ctypes.CDLL(None).clock_settime(0,0) < 0)"),
}
DEVICES = {
    name: f"stat -c '%F %a %t:%T' /dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")
} | {
    "links": "readlink /dev/fd /dev/stdin /dev/stdout /dev/stderr /dev/ptmx",
    "names": "ls /dev | grep -vE '^(console|core|mqueue|shm)$'",
    "null": "echo x > /dev/null; cat /dev/null | wc -c",
    "zero": "head -c 3 /dev/zero | od -An -tx1",
    "full": "(echo x > /dev/full) 2>&1 | grep -c 'No space'",
    "random": "head -c 8 /dev/random | wc -c; head -c 8 /dev/urandom | wc -c",
    "stdout by name": "echo out > /dev/stdout; echo err > /dev/stderr",
    "fd by name": "cat /dev/fd/0 < /etc/hostname > /dev/null; echo $?",
    "shm": "stat -c '%F %a' /dev/shm; echo x > /dev/shm/x; cat /dev/shm/x; rm /dev/shm/x",
    "new files in /dev": "(echo x > /dev/mine) 2>/dev/null && echo made; rm -f /dev/mine",
    "mqueue": "[ -d /dev/mqueue ] && echo there",
    "console": "[ -e /dev/console ] && echo there",
    "core": "[ -e /dev/core ] && echo there",
    "kmsg is closed": "head -c 1 /dev/kmsg 2>&1 | grep -cE 'No such|not permitted|denied'",
    "fuse is closed": "[ -e /dev/fuse ] || echo none",
}
PROGRAMS = {
    "Python's platform": py("import platform; print(platform.system(), platform.machine(), platform.release())"),
    "Python's temporary folder": py("import tempfile; print(tempfile.gettempdir())"),
    "Python's user": py("import getpass,os,pwd; print(getpass.getuser(), os.path.expanduser('~'))"),
    "Python's encoding": py("import sys; print(sys.stdout.encoding, sys.getfilesystemencoding())"),
    "Python's resource": py("import resource; print(resource.getrlimit(resource.RLIMIT_STACK))"),
    "Python's asyncio": py("import asyncio; print(asyncio.run(asyncio.sleep(0, 'ok')))"),
    "Python's sqlite": py(
        "import sqlite3; c=sqlite3.connect('d.db'); c.execute('create table t(a)'); print(c.execute('pragma journal_mode=wal').fetchone())"
    ),
    "Python's crypt of time": py("import ssl; print(ssl.create_default_context().check_hostname)"),
    "venv": "python3 -m venv --without-pip v 2>&1 && v/bin/python -c 'import sys; print(sys.prefix != sys.base_prefix)'",
    "perl": "perl -e 'print $^O, qq(\\n)' 2>&1; perl -e 'print((getpwuid($<))[0], qq(\\n))'",
    "awk": "awk 'BEGIN {print 1+1}'",
    "sed in place": "echo a > si; sed -i s/a/b/ si; cat si",
    "sort in parallel": "seq 1000 | sort -rn --parallel=2 | head -1",
    "tar": "mkdir -p tt; echo x > tt/f; tar cf t.tar tt && tar tf t.tar",
    "tar keeps owners": "mkdir -p to; touch to/f; chown 5:6 to/f; tar cf o.tar to; rm -r to; tar xf o.tar; stat -c %u:%g to/f",
    "cp -a": "cp -a /etc/passwd cpa; stat -c '%a %U' cpa",
    "dd": "dd if=/dev/zero of=dd bs=1k count=2 2>/dev/null; stat -c %s dd",
    "du and df agree to start": "du -s /etc > /dev/null; df / > /dev/null; echo $?",
    "mount lists the root": "mount | awk '$3==\"/\" {print $5}'",
    "findmnt": "findmnt -no FSTYPE / 2>/dev/null",
    "uname": "uname -srm",
    "dpkg": "dpkg -s bash 2>/dev/null | grep Status",
    "apt lists": "apt-get --version 2>/dev/null | head -1",
    "ldd": "ldd /bin/true | wc -l | awk '{print ($1>1)}'",
    "ldconfig": "ldconfig 2>&1; echo $?",
    "LD_PRELOAD": "LD_PRELOAD=/nowhere.so true 2>&1 | grep -c 'cannot be preloaded'",
    "who is on": "who | wc -l",
    "w, uptime": "uptime -p >/dev/null 2>&1; echo $?",
    "pgrep": "sleep 7 & pgrep -c sleep; kill $!",
    "kill -0": "sleep 7 & kill -0 $! && echo alive; kill $!",
    "variables": "env | cut -d= -f1 | sort",
    "the locale": "locale charmap; printf ä | wc -m; locale | grep -c POSIX",
    "strings of the environment": "env | cut -d= -f1 | grep -E '^(PATH|HOME|HOSTNAME)$' | sort",
    "bash": "echo $BASH_VERSION; echo $SHLVL; echo $-",
    "bash's arrays and arithmetic": "a=(1 2 3); echo $((a[1] * 21)) ${#a[@]}",
    "printf of locales": "printf '%s\\n' ä | wc -c",
}
GROUPS = {
    "files": FILES,
    "proc": PROC,
    "sys": SYS,
    "terminals": TERMINALS,
    "exec": EXEC,
    "users": USERS,
    "network": NETWORK,
    "time": TIME,
    "devices": DEVICES,
    "programs": PROGRAMS,
}
PROBES = {f"{group}: {name}": command for group, probes in GROUPS.items() for name, command in probes.items()}
OWN_ADDRESS = "import socket; s=socket.socket(2,2); s.connect(('192.0.2.1',9)); own=s.getsockname()[0]; "
WITH_A_NETWORK = {
    "interfaces": py("import socket; print(*sorted(name for _, name in socket.if_nameindex()))"),
    "devices of /sys": "ls /sys/class/net; cat /sys/class/net/eth0/operstate /sys/class/net/eth0/type",
    "default route": "awk '$2 == \"00000000\" {print $1, $4}' /proc/net/route",
    "own address": py(OWN_ADDRESS + "print(not own.startswith('127.'))"),
    "own address by hostname -I": "hostname -I | awk '{print $1 != \"\"}'",
    "a server at the own address": py(
        OWN_ADDRESS
        + "l=socket.create_server(('',0)); socket.create_connection((own,l.getsockname()[1]),timeout=3); print('ok')"
    ),
    "all ports are free": py(
        "import socket; [socket.create_server(('',p)) for p in (22,53,80,443,3306,5432,6379)]; print('ok')"
    ),
    "own name": py("import socket; print(bool(socket.gethostbyname(socket.gethostname())))"),
    "localhost": "getent ahostsv4 localhost | head -1 | awk '{print $1}'",
    "a name server is named": "grep -c ^nameserver /etc/resolv.conf",
    "names come from files, then from it": "grep ^hosts /etc/nsswitch.conf",
    "an unknown name fails": "getent hosts no.such.name.invalid; echo $?",
    "multicast": py(
        "import socket; s=socket.socket(2,2); s.setsockopt(0,35,socket.inet_aton('224.1.1.1')+bytes(4)); print('ok')"
    ),
    "broadcasts": py(
        "import socket; s=socket.socket(2,2); s.setsockopt(1,6,1); s.sendto(b'x',('255.255.255.255',9)); print('ok')"
    ),
    "devices can't be made": py(
        "import socket,struct; n=socket.socket(16,3,0); n.send(struct.pack('IHHIIBxHiII',32,16,0x605,1,0,0,0,0,0,0)); print(struct.unpack('i',n.recv(99)[16:20])[0] < 0)"
    ),
    "routes can't be changed": py(
        "import fcntl,socket,struct\ntry: fcntl.ioctl(socket.socket(2,2),0x890C,bytes(120)); print('changed')\nexcept OSError as e: print(e.errno)"
    ),
}
"""Run where slot and container have a network."""


INTERPRETER = ("env", "PYTHONCOERCECLOCALE=0", "python3", "-")
"""Runs `program`, with no locale but the one that there is."""


def program(probes: dict[str, str] = PROBES, longest_s: float = 60) -> str:
    """A Python program that runs probes and prints a JSON object: by probe, exit code and output."""
    return f"""
import json, os, subprocess, tempfile
del os.environ["PYTHONCOERCECLOCALE"]
found = {{}}
for name, command in json.loads({json.dumps(json.dumps(probes))}).items():
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.Popen(["/bin/bash", "-c", command], cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            out, _ = done.communicate(timeout={longest_s})
        except subprocess.TimeoutExpired:
            os.killpg(done.pid, 9)
            out, _ = done.communicate()
            out += b"[timed out]"
    found[name] = f"{{done.returncode}} {{out.decode(errors='replace').strip()}}"
print(json.dumps(found))
"""
