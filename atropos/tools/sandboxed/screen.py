"""A terminal's screen, computed from the bytes that programs wrote to it. Without I/O.

pyte emulates the terminal. What programs write is untrusted: here no sequence raises, characters without width don't
hide the text after them, and nothing grows without bound.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections import deque

import pyte
from pyte.screens import Char, StaticDefaultDict
from wcwidth import wcwidth

TERM = "xterm-256color"
"""The value of TERM for programs."""
_ALTERNATE = frozenset({47, 1047, 1049})
"""Private modes that switch to the alternate screen and back."""
_STRING = re.compile(r"\x1b[PX^_][^\x1b\x07]*(?:\x1b\\|\x07|(?=\x1b[^\\]))", re.DOTALL)
"""Device control strings and the like, which are queries and not text; this terminal ignores them."""
_STRING_BEGUN = re.compile(r"\x1b(?:[PX^_][^\x1b\x07]*\x1b?)?\Z", re.DOTALL)
MAX_CELL = 8
"""Most characters that combine in one cell."""
MAX_SEQUENCE = 65_536
"""Longest escape sequence; after it the parser is reset."""
MAX_DRAWN = 32_768
"""Characters drawn at once; those before them have scrolled off."""
_MODES = re.compile(r"\x1b\[\?[\d;]{1,40}[hl]")
APPLICATION_KEYS = 1 << 5
"""DECCKM as pyte stores private modes: cursor keys send ESC O instead of ESC [."""

_SPECIAL: dict[str, bytes] = {
    "enter": b"\r", "escape": b"\x1b", "esc": b"\x1b", "tab": b"\t", "space": b" ", "bspace": b"\x7f",
    "backspace": b"\x7f", "btab": b"\x1b[Z", "delete": b"\x1b[3~", "dc": b"\x1b[3~", "insert": b"\x1b[2~",
    "ic": b"\x1b[2~", "pageup": b"\x1b[5~", "pgup": b"\x1b[5~", "ppage": b"\x1b[5~", "pagedown": b"\x1b[6~",
    "pgdn": b"\x1b[6~", "npage": b"\x1b[6~",
    "f1": b"\x1bOP", "f2": b"\x1bOQ", "f3": b"\x1bOR", "f4": b"\x1bOS", "f5": b"\x1b[15~", "f6": b"\x1b[17~",
    "f7": b"\x1b[18~", "f8": b"\x1b[19~", "f9": b"\x1b[20~", "f10": b"\x1b[21~", "f11": b"\x1b[23~",
    "f12": b"\x1b[24~",
}  # fmt: skip
"""What xterm sends for a key (terminfo), by tmux's name of the key."""
_CURSOR = {"up": b"A", "down": b"B", "right": b"C", "left": b"D", "home": b"H", "end": b"F"}


_Row = StaticDefaultDict[int, Char]


class _Stream(pyte.Stream):
    """A stream whose errors end at the sequence that caused them."""

    def _send_to_parser(self, data: str) -> bool | None:
        try:
            return super()._send_to_parser(data)
        except Exception:  # pyte has reset its parser; the sequence is dropped
            return True

    @property
    def idle(self) -> bool:
        """Whether the parser is between sequences."""
        return bool(self._taking_plain_text)

    def reset_parser(self) -> None:
        """Drop an unfinished sequence."""
        self._initialize_parser()


class _Emulator(pyte.Screen):
    """pyte's screen with a scrollback, an alternate screen, and a list of its answers to programs.

    pyte's own scrollback takes five times as long as drawing.
    """

    def __init__(self, cols: int, rows: int, history: int) -> None:
        self.answers: list[str] = []
        self._main: tuple[dict[int, _Row], int, int] | None = None
        self.scrolled: deque[_Row] = deque(maxlen=history)
        super().__init__(cols, rows)

    def write_process_input(self, data: str) -> None:
        """Store an answer to a program's query (the cursor's position, the terminal's type)."""
        if len(self.answers) < 64:
            self.answers.append(data)

    def set_mode(self, *modes: int, **options: object) -> None:
        """Set a mode; the alternate screen replaces the main one."""
        if options.get("private") and _ALTERNATE & {*modes} and self._main is None:
            self._main = dict(self.buffer), self.cursor.y, self.cursor.x
            self.buffer.clear()  # `_main` still has the rows
        super().set_mode(*(mode for mode in modes if mode not in _ALTERNATE), **options)

    def reset_mode(self, *modes: int, **options: object) -> None:
        """Reset a mode; the main screen is restored."""
        if options.get("private") and _ALTERNATE & {*modes} and self._main is not None:
            rows, row, column = self._main
            self._main = None
            self._place(rows, row, column)
        super().reset_mode(*(mode for mode in modes if mode not in _ALTERNATE), **options)

    def resize(self, lines: int | None = None, columns: int | None = None) -> None:
        """Change the size. pyte drops rows at the top, and leaves the cursor where it was."""
        rows, self.lines = dict(self.buffer), lines or self.lines
        super().resize(self.lines, columns)
        self.set_margins()
        self._place(rows, self.cursor.y, self.cursor.x)

    def _place(self, rows: dict[int, _Row], y: int, x: int) -> None:
        """Show rows, with the cursor; as in xterm, they leave at the top only where it would be below the bottom."""
        leaving = max(y + 1 - self.lines, 0)
        if self._main is None:
            self.scrolled.extend(rows.get(gone, _Row(self.default_char)) for gone in range(leaving))
        self.buffer.clear()
        self.buffer.update({at - leaving: row for at, row in rows.items() if leaving <= at < leaving + self.lines})
        self.cursor.y, self.cursor.x = y - leaving, min(x, self.columns - 1)

    def index(self) -> None:
        """A line feed; the row that leaves the top of the main screen is added to the scrollback."""
        top, bottom = self.margins or (0, self.lines - 1)
        if self.cursor.y == bottom and top == 0 and self._main is None:
            self.scrolled.append(self.buffer[0])
        super().index()

    def erase_in_display(self, how: int = 0, *_: object, **__: object) -> None:
        """Erase; `3` means the scrollback as well."""
        super().erase_in_display(how)
        if how == 3:
            self.scrolled.clear()

    def draw(self, data: str) -> None:
        """Draw text; a character without width would stop pyte."""
        super().draw(data if data.isascii() else self._drawable(data))

    def _drawable(self, data: str) -> str:
        drawable: list[str] = []
        run = len(self.buffer[self.cursor.y][self.cursor.x - 1].data) if self.cursor.x else 1
        for char in data:
            if wcwidth(char) > 0:
                run = 1
            elif unicodedata.combining(char) and wcwidth(char) == 0 and run < MAX_CELL:
                run += 1
            else:
                continue
            drawable.append(char)
        return "".join(drawable)

    def select_graphic_rendition(self, *attrs: int, **options: object) -> None:
        """Set colours; the private forms that vim sends are for key reporting."""
        if not options:
            super().select_graphic_rendition(*attrs)


class Screen:
    """The rows of a terminal, its cursor and its scrollback."""

    def __init__(self, rows: int, cols: int, history: int = 2000) -> None:
        self.rows, self.cols = rows, cols
        self._screen = _Emulator(cols, rows, history)
        self._stream = _Stream(self._screen)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._sequence_chars = 0
        self._unfinished = ""

    def feed(self, data: bytes) -> str:
        """Process what programs wrote; returns it as text."""
        text = self._decoder.decode(data)
        plain = _STRING.sub("", self._unfinished + text)
        begun = _STRING_BEGUN.search(plain)
        self._unfinished = plain[begun.start() :][:MAX_SEQUENCE] if begun else ""
        plain = plain[: begun.start()] if begun else plain
        if len(plain) > MAX_DRAWN:
            plain = _shortened(plain)
        for start in range(0, len(plain), 4096):
            piece = plain[start : start + 4096]
            self._stream.feed(piece)
            self._sequence_chars = 0 if self._stream.idle else self._sequence_chars + len(piece)
            if self._sequence_chars > MAX_SEQUENCE:
                self._stream.reset_parser()
                self._sequence_chars = 0
        return text

    def answers(self) -> bytes:
        """Remove and return the terminal's answers to programs' queries."""
        answers, self._screen.answers = self._screen.answers, []
        return "".join(answers).encode()

    def resize(self, rows: int, cols: int) -> None:
        """Change the size; the kernel notifies the programs."""
        self.rows, self.cols = rows, cols
        self._screen.resize(rows, cols)

    def text(self) -> str:
        """The rows on the screen, without the blank ones at the end."""
        return "\n".join(self._row(self._screen.buffer[y]) for y in range(self._screen.lines)).rstrip("\n")

    def scrollback(self, lines: int) -> str:
        """The last lines that scrolled off the top, and the screen."""
        off = [self._row(row) for row in list(self._screen.scrolled)[-lines:]]
        return "\n".join([*off, self.text()])

    def _row(self, row: _Row) -> str:
        return "".join(row[x].data for x in range(self._screen.columns)).rstrip()

    @property
    def cursor(self) -> tuple[int, int]:
        """Row and column, counted from 1."""
        at = self._screen.cursor
        return at.y + 1, min(at.x, self._screen.columns - 1) + 1

    def key(self, name: str) -> bytes | None:
        """What a key sends (`Enter`, `C-c`, `M-x`, `Up`, `F5`); None for other text."""
        lower = name.lower()
        if lower in _SPECIAL:
            return _SPECIAL[lower]
        if lower in _CURSOR:
            return (b"\x1bO" if APPLICATION_KEYS in self._screen.mode else b"\x1b[") + _CURSOR[lower]
        if len(name) > 2 and name[1] == "-" and name[0] in "CM^":
            rest = name[2:]
            if name[0] == "M":
                inner = rest.encode() if len(rest) == 1 else self.key(rest)
                return None if inner is None else b"\x1b" + inner
            return _control(rest)
        return None


def _shortened(text: str) -> str:
    """The end of long output, after the modes that were set before it: the rest has scrolled off."""
    begin = text.find("\n", len(text) - MAX_DRAWN) + 1 or len(text) - MAX_DRAWN
    modes = _MODES.findall(text, 0, begin)
    return "".join(modes[-100:]) + text[begin:]


def _control(rest: str) -> bytes | None:
    if rest.lower() == "space":
        return b"\x00"
    if len(rest) == 1 and rest.upper() in "@ABCDEFGHIJKLMNOPQRSTUVWXYZ[\\]^_":
        return bytes([ord(rest.upper()) & 0x1F])
    return b"\x7f" if rest == "?" else None
