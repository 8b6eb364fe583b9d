"""The `atropos` command in this process, for words after which it ends at once: a process takes half a second of CPU."""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass

import pytest

from atropos.cli.app import main


@dataclass(frozen=True)
class Ended:
    """What a shell sees of it."""

    code: int
    out: str
    err: str


def ended(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> Ended:
    """Run the command with these words until it ends."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as exits:
            patch.setattr(sys, "argv", ["atropos", *words])
            patch.setenv("COLUMNS", "300")
            main()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    said = capfd.readouterr()
    assert isinstance(exits.value.code, int)
    assert "Traceback" not in said.err, said.err
    return Ended(exits.value.code, said.out, said.err)
