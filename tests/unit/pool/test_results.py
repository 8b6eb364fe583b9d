"""How commands ended is a value; what a slot refuses about files is Python's own error, and no fault of the slot's."""

from __future__ import annotations

import errno

import pytest

from atropos import wire
from atropos.slots.slot.results import ExecResult, SlotFileError, answered, file_error


def test_a_command_s_end_is_whole():
    sent = wire.CommandResult(
        exit_code=3,
        output=b"o\xffe",
        stdout=b"o\xff",
        stderr=b"e",
        truncated=True,
        dropped_bytes=7,
        limit="memory",
        duration_s=1.5,
    )
    result = ExecResult.of(sent)
    assert (result.exit_code, result.ok, result.output, result.output_bytes) == (3, False, "o\ufffde", b"o\xffe")
    assert (result.stdout, result.stderr, result.stdout_bytes, result.stderr_bytes) == ("o\ufffd", "e", b"o\xff", b"e")
    assert (result.truncated, result.dropped_bytes, result.limit, result.duration_s) == (True, 7, "memory", 1.5)
    assert (result.timed_out, result.cancelled, result.error) == (False, False, None)
    plain = ExecResult.of(wire.CommandResult(exit_code=0, output=b"", duration_s=0))
    assert plain.ok
    assert plain.stdout is plain.stderr is plain.stdout_bytes is plain.error is None


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({}, "not_started: no such folder"),
        ({"exit_code": 1}, None),
        ({"timed_out": True}, None),
        ({"cancelled": True}, None),
    ],
)
def test_only_what_never_started_has_an_error(fields, error):
    result = ExecResult.of(
        wire.CommandResult(**{"exit_code": None, "output": b"no such folder\n", "duration_s": 0, **fields})
    )
    assert result.error == error
    assert not result.ok


def test_a_refused_command_says_why():
    result = ExecResult.of(wire.OpError(error="limit", message="too many", limit="pids"))
    assert (result.exit_code, result.output, result.output_bytes) == (None, "too many", b"too many")
    assert (result.error, result.limit, result.ok) == ("limit: too many", "pids", False)
    assert not any((result.timed_out, result.cancelled, result.truncated, result.dropped_bytes, result.duration_s))
    with pytest.raises(TypeError, match="the answer to an exec is a done"):
        ExecResult.of(wire.Done())


@pytest.mark.parametrize(
    ("code", "number", "kind"),
    [
        ("not_found", errno.ENOENT, FileNotFoundError),
        ("is_directory", errno.EISDIR, IsADirectoryError),
        ("not_directory", errno.ENOTDIR, NotADirectoryError),
        ("permission", errno.EACCES, PermissionError),
        ("exists", errno.EEXIST, FileExistsError),
        ("too_large", errno.EFBIG, SlotFileError),
        ("no_space", errno.ENOSPC, SlotFileError),
        ("limit", errno.EDQUOT, SlotFileError),
        ("io", errno.EIO, SlotFileError),
    ],
)
def test_refusals_are_python_s_errors(code, number, kind):
    error = file_error(wire.OpError(error=code, message="why"), "/f")
    assert isinstance(error, SlotFileError)
    assert isinstance(error, kind)
    assert (error.errno, error.strerror, error.filename) == (number, "why", "/f")


def test_an_answer_is_given_or_raised():
    done = wire.Done()
    assert answered(done, wire.Done) is done
    with pytest.raises(OSError, match="No space left on device") as caught:
        answered(wire.OpError(error="no_space", message=""), wire.Done, "/f")
    assert caught.value.filename == "/f"
