"""The screen: what programs draw is what is seen, and nothing that they write breaks it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos.tools.sandboxed.recording import Recording, write_recordings
from atropos.tools.sandboxed.screen import Screen

PIECES = [b"\x1b[", b"\x1b]0;", b"\x1bP", b"\x1b\\", b"\x07", b"?1049h", b"?1049l", b"m", b"9999;9999H", b"\x1b[2J", b"\x1b[?6c",
          b"\x1b[6n", b"\xff", "é".encode(), "世".encode(), "\u200b".encode(), "a\u0301".encode(), b"\r\n", b"\x1b[?3h",
          b"\x1b[5;3r", b"\x1b[3r", b"\x1bM", b"\x1bD", b"\x1b[999L", b"\x1b[999M", b"\x1b[999@", b"\x1b[999P", b"text ", b"\t",
          b"\x1b[>4;2m", b"\x1b[?25l", b"\x0e", b"\x0f", b"\x1b(0", b"\x1b[\xb2m", b"\x1b[1;2;3;4;5J", b"\x1b[38;5m",
          b"\x1b[38;2;1m"]  # fmt: skip


def test_text_cursor_and_erasing():
    screen = Screen(4, 20)
    screen.feed(b"one\r\ntwo\x1b[1;5Hmore\x1b[3;1Hx\x1b[K")
    assert screen.text() == "one more\ntwo\nx"
    assert screen.cursor == (3, 2)
    screen.feed(b"\x1b[2J\x1b[H")
    assert screen.text() == ""


def test_scrolled_off_is_kept():
    screen = Screen(4, 20, history=50)
    screen.feed(b"".join(b"%d\r\n" % i for i in range(100)))
    assert screen.text() == "97\n98\n99"
    assert screen.scrollback(2) == "95\n96\n97\n98\n99"
    assert screen.scrollback(1000).split("\n")[0] == "47"


def test_alternate_gives_way():
    screen = Screen(5, 20)
    screen.feed(b"$ vim\r\n\x1b[?1049h\x1b[2J\x1b[Hediting\r\n~\r\n~\r\n~\r\n~\r\n~")
    assert "editing" not in screen.text()
    assert screen.text().count("~") == 5
    screen.feed(b"\x1b[?1049l$ ")
    assert screen.text() == "$ vim\n$"
    assert screen.scrollback(10) == "$ vim\n$"


def test_questions_answered_once():
    screen = Screen(5, 20)
    screen.feed(b"ab\x1b[6n\x1b[c")
    assert screen.answers() == b"\x1b[1;3R\x1b[?6c"
    assert screen.answers() == b""


def test_strings_are_no_text():
    screen = Screen(3, 40)
    for piece in (b"a\x1bP$q", b" q\x1b", b"\\b\x1b_hidden\x07c\x1b]0;title\x07d"):
        screen.feed(piece)
    assert screen.text() == "abcd"


def test_wide_and_combining():
    screen = Screen(3, 20)
    screen.feed("世界 e\u0301 a\u200bb\u200dc".encode())
    assert screen.text() == "世界 é abc"
    screen.feed(("\r\nz" + "\u0301" * 100_000 + "y").encode())
    assert len(screen.text()) < 100
    assert screen.text().endswith("y")


def test_bytes_split_anywhere_draw_the_same():
    data = "é世\x1b[31mred\x1b[0m\x1b[2;3Hx\x1bPq\x1b\\\x1b[?1049hz".encode()
    whole = Screen(5, 20)
    whole.feed(data)
    single = Screen(5, 20)
    for index in range(len(data)):
        single.feed(data[index : index + 1])
    assert single.text() == whole.text()


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PIECES) | st.binary(max_size=6), max_size=40), st.integers(2, 30), st.integers(10, 90))
def test_nothing_breaks_it(pieces, rows, cols):
    screen = Screen(10, 40)
    for index, piece in enumerate(pieces):
        screen.feed(piece)
        if index == 20:
            screen.resize(rows, cols)
    screen.text()
    screen.scrollback(100)
    screen.answers()
    row, column = screen.cursor
    assert row >= 1
    assert column >= 1


def test_smaller_keeps_cursor():
    screen = Screen(24, 80)
    screen.feed(b"".join(b"line %d\r\n" % number for number in range(30)) + b"$ ")
    screen.resize(4, 40)
    assert (screen.text(), screen.cursor) == ("line 27\nline 28\nline 29\n$", (4, 3))
    screen.feed(b"echo hi\r\nhi\r\n$ ")
    assert screen.text() == "line 29\n$ echo hi\nhi\n$"
    assert [line for line in screen.scrollback(100).splitlines() if "line" in line] == [f"line {n}" for n in range(30)]
    screen.feed(b"\x1b[2J\x1b[Htop" + b"\x1b[1;39H" + b"ab")
    screen.resize(2, 10)
    assert screen.text() == "top", "nothing below the cursor leaves at the top"
    screen.feed(b"x" * 11)
    assert screen.text() == "top      x\nxxxxxxxxxx"


def test_covered_screen_is_resized():
    screen = Screen(24, 80)
    screen.feed(b"".join(b"line %d\r\n" % number for number in range(23)) + b"$ vi\x1b[?1049h\x1b[2J\x1b[Htext")
    screen.resize(3, 80)
    screen.feed(b"\x1b[?1049l\r\n$ ")
    assert (screen.text(), screen.cursor) == ("line 22\n$ vi\n$", (3, 3))


@pytest.mark.slow("large input")
def test_floods_cost_their_length():
    def seconds(size):
        started = time.process_time()
        screen = Screen(24, 80)
        for head, unit in (
            (b"", b"flood\r\n"),
            (b"\x1b]0;", b"x"),
            (b"\x1bP", b"y"),
            (b"\x1b[", b"1"),
            (b"z", "\u0301".encode()),
        ):
            screen.feed(head + unit * (size // len(unit)))
            screen.feed(b"\x1b\\\x07\x18\x1b[2J\x1b[Hback")
            assert "back" in screen.text()
        return time.process_time() - started

    # Eight times as much: quadratic work would take 64 times as long.
    assert seconds(400_000) < max(seconds(50_000), 0.2) * 30


def test_modes_outlast_a_flood():
    screen = Screen(5, 20)
    screen.feed(b"main\x1b[?1049h\x1b[?1h" + b"x\r\n" * 50_000)
    assert screen.key("Up") == b"\x1bOA"
    screen.feed(b"\x1b[?1049l")
    assert "main" not in screen.text() or "x" not in screen.text()


@pytest.mark.parametrize(
    ("name", "sends"),
    [("Enter", b"\r"), ("C-c", b"\x03"), ("c-c", None), ("^c", None), ("C-Space", b"\x00"), ("M-x", b"\x1bx"), ("Up", b"\x1b[A"),
     ("F5", b"\x1b[15~"), ("M-Enter", b"\x1b\r"), ("C-[", b"\x1b"), ("BSpace", b"\x7f"), ("hello", None), ("C-", None),
     ("C-é", None), ("", None), ("PageDown", b"\x1b[6~"), ("M-😀", "\x1b😀".encode())],
)  # fmt: skip
def test_keys_by_tmuxs_names(name, sends):
    assert Screen(5, 20).key(name) == sends


def test_recording_is_bounded(tmp_path):
    recording = Recording(rows=24, cols=80, started=1.5e9, most_bytes=2000, command="bash", term="xterm")
    for index in range(1000):
        recording.event(index / 10, "o", "output\r\n")
    lines = [json.loads(line) for line in recording.text().splitlines()]
    assert (lines[0]["version"], lines[0]["width"], lines[0]["height"]) == (2, 80, 24)
    assert lines[1] == [0.0, "o", "output\r\n"]
    assert lines[-1][1:] == ["m", "the recording's bound was reached"]
    assert len(recording.text()) < 2200
    write_recordings(str(tmp_path / "r"), "../../evil id", {"p/1": recording.text()})
    assert [path.read_text() for path in (tmp_path / "r").iterdir()] == [recording.text()]
