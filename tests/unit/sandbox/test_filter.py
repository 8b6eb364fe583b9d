"""What the seccomp filter answers, read by an interpreter of its program: also to calls that are not to be tried for
real.

A slot that loads filters of its own by the thousand can stop a host (Linux 6.18) for good.
"""

from __future__ import annotations

import errno
import struct
from dataclasses import dataclass

import pyseccomp
import pytest

from atropos.sandbox.host.process import seccomp as slot_filter

ALLOWED = 0x7FFF0000
KILL_PROCESS = 0x80000000
HIGH = 1 << 32
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@dataclass(frozen=True)
class Program:
    """The filter of a machine's slots, whichever machine this is."""

    machine: str
    instructions: list[tuple[int, int, int, int]]

    def number(self, name: str) -> int:
        """Negative where the machine has no such call."""
        return pyseccomp.resolve_syscall(getattr(pyseccomp.Arch, self.machine.upper()), name)


def made_for(machine: str) -> Program:
    return Program(machine, list(struct.iter_unpack("<HBBI", slot_filter.program(machine))))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def program(request) -> Program:
    return made_for(request.param)


def answer(program: Program, call: str | int, *arguments: int) -> int:
    """The errno that a call gets; 0 where it is allowed."""
    number = program.number(call) if isinstance(call, str) else call
    action = decided(program, ARCHITECTURES[program.machine], number, *arguments)
    if action == ALLOWED:
        return 0
    assert action >> 16 == 0x0005, f"{action:#x} ends the process"
    return action & 0xFFFF


def decided(program: Program, architecture: int, number: int, *arguments: int) -> int:
    """What the program returns for a call."""
    filled = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, architecture, 0, *filled)
    at = register = 0
    while True:
        code, yes, no, k = program.instructions[at]
        at += 1
        match code:
            case 0x20:
                register = struct.unpack_from("<I", data, k)[0]
            case 0x54:
                register &= k
            case 0x05:
                at += k
            case 0x15 | 0x25 | 0x35 | 0x45:
                holds = {0x15: register == k, 0x25: register > k, 0x35: register >= k, 0x45: bool(register & k)}[code]
                at += yes if holds else no
            case 0x06:
                return k
            case _:
                raise AssertionError(f"an instruction {code:#x}")


PRIVILEGED = ("mount", "setns", "sethostname", "init_module", "iopl", "syslog", "keyctl", "io_uring_setup", "bpf", "perf_event_open",
              "kcmp", "userfaultfd", "fsopen", "pidfd_getfd")  # fmt: skip
ABSENT = ("io_setup", "get_mempolicy", "memfd_secret", "modify_ldt", "clone3", "name_to_handle_at")
NO_PROTOCOL = {"DCCP": 33, "L2TP": 115, "SCTP": 132, "UDP-Lite": 136, "SMC": 256, "MPTCP": 262}


@pytest.mark.parametrize("high", [0, HIGH])
def test_no_program_installs_one(program, high):
    for option in (26, 51):  # SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF
        assert answer(program, "setsockopt", 3, 1 | high, option | high, 0x1000, 16) == errno.ENOPROTOOPT
    assert answer(program, "prctl", 22 | high, 2) == errno.EINVAL
    assert answer(program, "seccomp", 1 | high, 0, 0x1000) == errno.EINVAL


def test_other_uses_are_allowed(program):
    for option in (2, 7, 9, 15):  # SO_REUSEADDR, SO_SNDBUF, SO_KEEPALIVE, SO_REUSEPORT
        assert answer(program, "setsockopt", 3, 1, option, 0x1000, 4) == 0
    assert answer(program, "setsockopt", 3, 6, 26, 0x1000, 4) == 0  # an option of TCP's
    assert answer(program, "prctl", 22, 1) == 0  # the strict mode, which has no program
    assert answer(program, "prctl", 38, 1) == 0
    assert answer(program, "seccomp", 2, 0, 0x1000) == 0  # which actions there are
    assert answer(program, "socket", 2, 1, 0) == 0
    assert answer(program, "socket", 40, 1, 0) == errno.EAFNOSUPPORT


@pytest.mark.parametrize("name", PRIVILEGED)
def test_privileged_get_eperm(program, name):
    assert program.number(name) < 0 or answer(program, name) == errno.EPERM


@pytest.mark.parametrize("name", ABSENT)
def test_optional_calls_get_enosys(program, name):
    assert program.number(name) < 0 or answer(program, name) == errno.ENOSYS


@pytest.mark.parametrize("name", NO_PROTOCOL)
@pytest.mark.parametrize("high", [0, HIGH])
def test_unneeded_protocols_unknown(program, name, high):
    for family in (2, 10):
        assert answer(program, "socket", family | high, 1, NO_PROTOCOL[name] | high) == errno.EPROTONOSUPPORT
        for protocol in (0, 1, 6, 17, 58):
            for kind in (1, 2, 3, 1 | 0x80800):  # with SOCK_NONBLOCK | SOCK_CLOEXEC
                assert answer(program, "socket", family, kind, protocol) == 0


@pytest.mark.parametrize("high", [0, HIGH])
def test_sockets_load_no_module(program, high):
    """It would have the host start a program for each, which no slot's CPU time pays for."""
    for family in (2, 10):
        for protocol in {*range(600), 0xFFFFFFFF} - {0, 1, 6, 17, 58}:
            assert answer(program, "socket", family | high, 1, protocol | high) == errno.EPROTONOSUPPORT
        for kind in {*range(16)} - {1, 2, 3}:  # SCTP's and DCCP's own among them
            for flags in (0, 0x80800):
                assert answer(program, "socket", family | high, kind | flags | high, 0) == errno.ESOCKTNOSUPPORT
    for request in (
        0x8940,
        0x8941,
        0x8982,
        0x8983,
        0x89A0,
        0x89A1,
    ):  # SIOCGIFBR, SIOCGIFVLAN, SIOCBRADDBR and their kin
        assert answer(program, "ioctl", 3, request | high, 0x1000) == errno.ENOPKG
    for request in (0x8912, 0x8913, 0x8927, 0x8933, 0x8942, 0x8981, 0x89A2):  # SIOCGIFCONF, SIOCGIFFLAGS and others
        assert answer(program, "ioctl", 3, request, 0x1000) == 0
    for family in (2, 10, 16):
        assert answer(program, "socketpair", family | high, 1, 99 | high) == errno.EOPNOTSUPP
    for kind in (1, 2, 5):  # SOCK_SEQPACKET of Unix among them
        assert answer(program, "socket", 1, kind, 0) == answer(program, "socketpair", 1, kind, 0) == 0


@pytest.mark.parametrize("high", [0, HIGH])
def test_terminals_take_no_injected_input(program, high):
    for request, expected in ((0x5412, errno.EIO), (0x541C, errno.ENOTTY), (0x5423, errno.EINVAL)):
        assert answer(program, "ioctl", 3, request | high, 0x1000) == expected
    for request in (0x5401, 0x5413, 0x540E, 0x5424, 0x541B):  # TCGETS, TIOCGWINSZ, TIOCSCTTY, TIOCGETD, FIONREAD
        assert answer(program, "ioctl", 3, request, 0x1000) == 0


@pytest.mark.parametrize("high", [0, HIGH])
def test_namespaces_show_no_owner(program, high):
    for request in (0xB701, 0xB702, 0xB704, 0x8008B705, 0x8010B70A, 0x8010B70B, 0x8010B70C, 0x8008B70D):
        assert answer(program, "ioctl", 3, request | high, 0x1000) == errno.EPERM


@pytest.mark.parametrize("flags", [4, 5, 7, 0xFFFFFFFF, 0xFFFFFFE7])
def test_odd_memfd_flags_refused(program, flags):
    """Chromium, Electron and others try this, and end when the answer is another."""
    assert answer(program, "memfd_create", 0x1000, flags) == errno.EINVAL
    assert answer(program, "memfd_create", 0x1000, flags & ~4) == 0  # the kernel's own to answer


@pytest.mark.parametrize("high", [0, HIGH])
def test_no_advice_on_shared_pages(program, high):
    for advice in (12, 20, 21):  # MADV_MERGEABLE, MADV_COLD, MADV_PAGEOUT
        assert answer(program, "madvise", 0x1000, 4096, advice | high) == errno.EINVAL
    for advice in (0, 1, 3, 4, 8, 9, 10, 13, 14, 15, 18, 23):  # MADV_NORMAL, MADV_DONTNEED, MADV_HUGEPAGE and others
        assert answer(program, "madvise", 0x1000, 4096, advice) == 0


def test_only_namespaces_can_t_be_made_anew(program):
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert answer(program, "unshare", flag) == answer(program, "unshare", flag | 0x600) == errno.EPERM
    assert answer(program, "unshare", 0x600) == 0  # a working directory and descriptors of a thread's own


def test_unjudged_are_refused(program, monkeypatch):
    known = slot_filter._Filter.resolve
    monkeypatch.setattr(slot_filter._Filter, "resolve", lambda self, call: call if call == 500 else known(self, call))
    made = made_for(program.machine)
    assert answer(made, "getpid") == 0
    assert [answer(made, number) for number in (457, 462, 470, 500, 501)] == [errno.ENOSYS] * 5


def test_other_architecture_ends_it(program):
    for other in {0x40000003, 0x40000028, *ARCHITECTURES.values()} - {ARCHITECTURES[program.machine]}:  # i386 and ARM
        for number in (0, 1, 20, 39, 172, 456, 457, 1000, 0x40000027, 0x0F0002):
            assert decided(program, other, number) == KILL_PROCESS


def test_arm64_has_no_unjudged_call():
    names = [
        {name.decode() for number in range(slot_filter.LAST_CALL + 1) if (name := named(number))}
        for named in (slot_filter._Filter(machine).resolve for machine in ("aarch64", "x86_64"))
    ]
    assert names[0] <= names[1]


@pytest.mark.parametrize("values", [0, 1, 2, 12, 16, 0x5412, 0x8940, 0x10000000, 0x40000, 0x7FFFFFFF, HIGH | 22])
def test_both_machines_judge_alike(values):
    """What stands in one filter alone would be a way out on one kind of machine."""
    one, other = (made_for(machine) for machine in ARCHITECTURES)
    named = slot_filter._Filter("x86_64").resolve
    known = [name.decode() for number in range(slot_filter.LAST_CALL + 1) if (name := named(number))]
    shared = [name for name in known if other.number(name) >= 0]
    assert len(shared) > 250
    arguments = [values] * 6
    assert {name: answer(one, name, *arguments) for name in shared} == {
        name: answer(other, name, *arguments) for name in shared
    }
