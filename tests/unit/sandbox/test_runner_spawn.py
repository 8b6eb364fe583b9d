"""What is known of a child that is to become a program."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from atropos.sandbox.programs.runner.processes import spawn
from atropos.sandbox.programs.runner.processes.spawn import ended_before_exec, raise_report, read_report
from atropos.sandbox.programs.runner.start_failures import UserRefused


def test_report_in_pieces_is_whole() -> None:
    read, write = os.pipe()

    def child() -> None:
        for piece in (b"%d" % errno.EPERM, b"R"):
            os.write(write, piece)
            time.sleep(0.02)
        os.close(write)

    writer = threading.Thread(target=child)
    writer.start()
    report = read_report(read, os.getpid())
    writer.join()
    assert report == b"1R"
    with pytest.raises(UserRefused):
        raise_report(report)


def test_a_start_that_is_seen_early_is_one(monkeypatch) -> None:
    """Taken for one that was ended, it was tried again: a command ran twice, and what others had left was killed."""
    own = spawn.process_stat(os.getpid())
    name = own[own.index(b"(") : own.rindex(b")") + 1]
    seen = iter([b"7 %s R 1" % name] * 4 + [b"7 (bash) R 1"] * 9)
    monkeypatch.setattr(spawn, "process_stat", lambda pid: own if pid == os.getpid() else next(seen))
    assert not ended_before_exec(7)
    assert next(seen) == b"7 (bash) R 1"


def test_a_child_that_ended_is_none() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended_before_exec(pid)
    os.waitpid(pid, 0)
    assert not ended_before_exec(pid)
