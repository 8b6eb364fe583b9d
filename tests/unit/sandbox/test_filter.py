"""What the seccomp filter answers, read by an interpreter of its program: also to calls that are not to be tried for real.

A slot that loads filters of its own by the thousand can stop a host (Linux 6.18) for good.
"""

from __future__ import annotations

import errno
import platform
import struct

import pytest

from atropos.sandbox.host import seccomp as slot_filter

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are those of x86_64")
ALLOWED = 0x7FFF0000
HIGH = 1 << 32


@pytest.fixture(scope="module")
def program() -> list[tuple[int, int, int, int]]:
    return list(struct.iter_unpack("<HBBI", slot_filter.program()))


def answer(program: list[tuple[int, int, int, int]], number: int, *arguments: int) -> int:
    """The errno that a call gets; 0 where it is allowed."""
    filled = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, 0xC000003E, 0, *filled)
    at = register = 0
    while True:
        code, yes, no, k = program[at]
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
                if k == ALLOWED:
                    return 0
                assert k >> 16 == 0x0005, f"{k:#x} ends the process"
                return k & 0xFFFF
            case _:
                raise AssertionError(f"an instruction {code:#x}")


PRCTL, SECCOMP, SETSOCKOPT, SOCKET = 157, 317, 54, 41


@pytest.mark.parametrize("high", [0, HIGH])
def test_no_program_has_the_kernel_compile_filters_of_its_own(program, high):
    for option in (26, 51):  # SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF
        assert answer(program, SETSOCKOPT, 3, 1 | high, option | high, 0x1000, 16) == errno.ENOPROTOOPT
    assert answer(program, PRCTL, 22 | high, 2) == errno.EINVAL
    assert answer(program, SECCOMP, 1 | high, 0, 0x1000) == errno.EINVAL


def test_what_is_asked_of_the_same_calls_otherwise_is_allowed(program):
    for option in (2, 7, 9, 15):  # SO_REUSEADDR, SO_SNDBUF, SO_KEEPALIVE, SO_REUSEPORT
        assert answer(program, SETSOCKOPT, 3, 1, option, 0x1000, 4) == 0
    assert answer(program, SETSOCKOPT, 3, 6, 26, 0x1000, 4) == 0  # an option of TCP's
    assert answer(program, PRCTL, 22, 1) == 0  # the strict mode, which has no program
    assert answer(program, PRCTL, 38, 1) == 0
    assert answer(program, SECCOMP, 2, 0, 0x1000) == 0  # which actions there are
    assert answer(program, SOCKET, 2, 1, 0) == 0
    assert answer(program, SOCKET, 40, 1, 0) == errno.EAFNOSUPPORT
