"""What a child reports of a program that it could not start."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

from atropos.sandbox.programs.runner.processes.spawn import raise_report, read_report
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
