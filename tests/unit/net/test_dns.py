"""Questions about names are read and answered as RFC 1035 has them; anything else is refused, and nothing is read past
its end."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from atropos.net import dns
from atropos.net.dns import Question

LABELS = st.lists(st.text("abcXYZ019-_", min_size=1, max_size=63), min_size=1, max_size=3)


def message(labels: list[str], kind: int = dns.A, *, flags: int = 0x100, network: int = 1, count: int = 1) -> bytes:
    section = b"".join(bytes([len(label)]) + label.encode("latin-1") for label in labels) + b"\0"
    return struct.pack(">HHHHHH", 77, flags, count, 0, 0, 1) + section + struct.pack(">HH", kind, network) + b"\0\0\x29"


@example(["a" * 63, "b"], dns.A)
@given(LABELS, st.sampled_from((dns.A, dns.AAAA, 15)))
def test_answer_repeats_question(labels, kind):
    asked = Question.parse(message(labels, kind))
    assert (asked.name, asked.kind) == (".".join(labels), kind)
    answer = asked.answer(dns.NO_ERROR, b"\xc6\x12\0\x09", 30)
    assert struct.unpack_from(">HHHHHH", answer) == (77, 0x8180, 1, 1, 0, 0)
    assert answer.endswith(asked.section + b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 30, 4) + b"\xc6\x12\0\x09")
    assert len(answer) <= 512


def test_no_address_has_a_code():
    answer = Question.parse(message(["a", "org"])).answer(dns.NO_SUCH_NAME)
    assert struct.unpack_from(">HHHHHH", answer) == (77, 0x8183, 1, 0, 0, 0)
    assert answer[12:] == b"\1a\3org\0\0\1\0\1"


@pytest.mark.parametrize(
    "data",
    [
        message(["a"], flags=0x8180),
        message(["a"], count=0),
        message(["a"], count=2),
        message(["a"])[:12] + b"\xc0\x0c\0\1\0\1",
        message(["a"])[:12] + b"\x40" + b"a" * 64 + b"\0\0\1\0\1",
        message(["a"])[:17],
        message(["a"])[:13],
        b"",
    ],
)
def test_no_question_is_refused(data):
    with pytest.raises(ValueError, match=r"question|cut off|can't be read"):
        Question.parse(data)


def test_other_classes_unknown():
    assert Question.parse(message(["a"], network=3)).kind == 0
    other = Question.parse(message(["a"], flags=0x2D00))
    assert other.kind == 0
    assert struct.unpack_from(">HH", other.answer(dns.NOT_IMPLEMENTED)) == (77, 0xA984)


@given(st.binary(max_size=600))
def test_any_bytes_are_judged(data):
    with contextlib.suppress(ValueError):
        asked = Question.parse(data)
        assert Question.parse(data[:12] + asked.section).section == asked.section
