"""Where a slot differs from `docker run`, by probe, and why: the table in docs/limits.md is made of it.

`python -m tests.fidelity.differences` writes the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "limits.md"
BEGIN, END = "<!-- differences: begin -->", "<!-- differences: end -->"


@dataclass(frozen=True)
class Difference:
    """One that stays.

    Attributes:
        what: for the table.
        why: for the table.
        probes: those that show it.
        everywhere: whether they do whatever the engine's version.
    """

    what: str
    why: str
    probes: tuple[str, ...]
    everywhere: bool = True


DIFFERENCES = (
    Difference(
        "set-user-id programs give no rights: `sudo` and `su` work for root alone (`no_new_privs`)",
        "no program may get rights that PID 1 hasn't; `user=` runs a command as any user",
        ("proc: own status", "users: a set-user-id program", "users: no new privileges"),
    ),
    Difference(
        "sockets are Unix, TCP, UDP, ping and netlink about devices and routes: no raw and packet sockets, SCTP, MPTCP, AF_ALG (`ss` reads /proc/net instead)",
        "for others the host loads modules, or they open code of the kernel to every slot that tasks hardly need",
        ("users: raw sockets", "network: families of sockets", "tools: ss"),
    ),
    Difference(
        "no device files, audit messages and IP_TRANSPARENT (CAP_MKNOD, CAP_AUDIT_WRITE, CAP_NET_RAW)",
        "a device file would open the host's devices, messages would be in its log",
        (
            "users: effective capabilities",
            "users: bounding capabilities",
            "users: device files",
            "network: options of sockets",
        ),
    ),
    Difference(
        "`/proc` is read-only, a process's own `oom_score_adj`, `mem`, `coredump_filter` and its threads' `comm` too; "
        "`ptrace` and `prctl(PR_SET_NAME)` work, so debuggers do (gdb warns twice)",
        "one mount holds all of them: a program that could lower its `oom_score_adj` would have the kernel kill the slot's PID 1, the server or a "
        "neighbour's program instead of it",
        (
            "proc: oom_score_adj upwards",
            "proc: a thread is named",
            "proc: own memory is written",
            "proc: coredump_filter",
            "tools: gdbserver: a breakpoint",
        ),
    ),
    Difference(
        "`sched_setaffinity` succeeds and changes nothing, as `sched_getaffinity` says",
        "programs that moved between cores took the CPU of their neighbours (decision 11); .NET ends where it is refused",
        ("sys: cores are chosen",),
    ),
    Difference(
        "`/dev` is read-only and has no `mqueue` (`mq_open` works); `/` has `.atropos` and `workspace`, and `.dockerenv` only where the image has it; "
        "`/etc/ld.so.preload` is empty for good",
        "files in /dev would be in no limit of the slot's volume; the others are the slot's own, and no program may load a library into them",
        ("devices: new files in /dev", "devices: mqueue", "files: names in /", "files: names in /etc"),
    ),
    Difference(
        "what the kernel's own files belong to is shown as `nobody`, and those for the machine's root alone can't be read (`/proc/slabinfo`)",
        "their owner is no user of the slot's namespace",
        ("files: modes of top folders", "proc: files of the kernel", "proc: settings of the kernel"),
    ),
    Difference(
        "`ulimit -c` is 1 block, `-l` 64 KiB, `-q` 256 KiB",
        "a core dump would start the host's handler; locked memory and queues are the kernel's, not the slot's",
        ("proc: limits", "users: locked memory", "users: message queues"),
    ),
    Difference(
        "`SO_RCVBUF` is accepted and changes nothing",
        "what waits in a socket counts towards no limit (see above)",
        ("network: receive buffer",),
    ),
    Difference(
        "variables beside an image's own: `USER`, `LOGNAME`, `SHELL`, `LC_CTYPE=C.UTF-8`, `PIP_ROOT_USER_ACTION`, and the slot's share of the CPUs "
        "(`PYTHON_CPU_COUNT`, `GOMAXPROCS`, `OMP_NUM_THREADS` and the like)",
        "programs take text for UTF-8 as on any machine; a container's own variables don't say its share, and programs start too many threads",
        (
            "programs: variables",
            "programs: the locale",
            "sys: Python counts CPUs",
            "tools: Go: GOMAXPROCS",
            "tools: OpenMP: threads",
        ),
    ),
    Difference(
        "no `libaio` (`io_setup`), `io_uring` (as in newer engines), `memfd_secret`, `modify_ldt`, filters of programs' own (seccomp, SO_ATTACH_FILTER); "
        "32-bit programs are killed; `perf record` says that it may not, records nothing and ends with 0",
        "their counters and memory are the kernel's, which slots share; the filter of calls knows one set of numbers; perf finds no sysfs to ask",
        (
            "exec: system calls",
            "exec: a filter of system calls",
            "exec: a 32-bit program",
            "network: a filter of a socket",
            "tools: perf is refused",
        ),
        everywhere=False,
    ),
    Difference(
        "more is allowed: `process_vm_readv`, `setarch -R`, `::1` (to which `localhost` leads first, as on most hosts), the own name without a network",
        "debuggers and reproducible runs need them, and they reach nothing outside the slot",
        (
            "exec: process_vm_readv of itself",
            "exec: no address randomisation",
            "network: IPv6 loopback",
            "network: own name by files",
            "tools: Node: workers, processes, names",
        ),
        everywhere=False,
    ),
)
KNOWN = frozenset(probe for difference in DIFFERENCES for probe in difference.probes)

ALWAYS = frozenset(probe for difference in DIFFERENCES if difference.everywhere for probe in difference.probes)


def table() -> str:
    """The table of docs/limits.md."""
    rows = [f"| {each.what} | {each.why} |" for each in DIFFERENCES]
    return "\n".join(("| in a slot, unlike `docker run` | why |", "| --- | --- |", *rows))


def page() -> str:
    """The page with the table as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
