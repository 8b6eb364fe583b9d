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
        "no raw sockets, device files or audit messages (CAP_NET_RAW, CAP_MKNOD, CAP_AUDIT_WRITE)",
        "they would open code of the kernel to every slot that tasks hardly need",
        ("users: effective capabilities", "users: bounding capabilities", "users: raw sockets", "users: device files"),
    ),
    Difference(
        "`/proc` is read-only, a process's own `oom_score_adj`, `mem`, `coredump_filter` and its threads' `comm` too; "
        "`ptrace` and `prctl(PR_SET_NAME)` work, so debuggers do (gdb warns twice)",
        "one mount holds all of them: a program that could lower its `oom_score_adj` would have the kernel kill the slot's PID 1 instead of it",
        (
            "proc: oom_score_adj upwards",
            "proc: a thread is named",
            "proc: own memory is written",
            "proc: coredump_filter",
            "tools: gdbserver: a breakpoint",
        ),
    ),
    Difference(
        "netlink sockets are for devices, addresses and routes: `ss` says so and reads /proc/net instead",
        "for other kinds the host loads modules",
        ("tools: ss",),
    ),
    Difference(
        "`sched_setaffinity` succeeds and changes nothing, as `sched_getaffinity` says",
        "programs that moved between cores took the CPU of their neighbours (decision 11); .NET ends where it is refused",
        ("sys: cores are chosen",),
    ),
    Difference(
        "`/dev` is read-only and has no `mqueue`; `mq_open` works",
        "files there would be in no limit of the slot's volume",
        ("devices: new files in /dev", "devices: mqueue"),
    ),
    Difference(
        "what the kernel's own files belong to is shown as `nobody`",
        "their owner is no user of the slot's namespace",
        ("files: modes of top folders",),
    ),
    Difference(
        "`ulimit -c` is 1 block and `ulimit -l` is 64 KiB",
        "a core dump would start the host's handler; locked memory is the kernel's, not the slot's",
        ("proc: limits", "users: locked memory"),
    ),
    Difference(
        "`SO_RCVBUF` is accepted and changes nothing",
        "what waits in a socket counts towards no limit (see above)",
        ("network: receive buffer",),
    ),
    Difference(
        "Python 3.13, Go and OpenMP count the slot's share of the CPUs (`PYTHON_CPU_COUNT`, `GOMAXPROCS`, `OMP_NUM_THREADS`)",
        "a container's own variables don't say it, and programs start too many threads",
        ("sys: Python counts CPUs", "tools: Go: GOMAXPROCS", "tools: OpenMP: threads"),
    ),
    Difference(
        "`perf` says that it can't open its events, records nothing and ends with 0; in a container it ends with an error",
        "counters are the kernel's that slots share",
        ("tools: perf is refused",),
    ),
    Difference(
        "more is allowed: `process_vm_readv`, `setarch -R`, `::1` (to which `localhost` leads first, as on most hosts)",
        "debuggers and reproducible runs need them, and they reach nothing outside the slot",
        (
            "exec: process_vm_readv of itself",
            "exec: no address randomisation",
            "network: IPv6 loopback",
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
