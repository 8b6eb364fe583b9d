"""What is written as numbers for each architecture is what libseccomp knows, and what the kernel runs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess

import pyseccomp
import pytest

from atropos.sandbox.host import probe
from atropos.sandbox.linux import pause_program, syscalls

ARCHITECTURES = ("x86_64", "aarch64")


def number(machine: str, name: str) -> int:
    return pyseccomp.resolve_syscall(getattr(pyseccomp.Arch, machine.upper()), name)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_have_their_machine_s_numbers(machine):
    assert syscalls._KEYCTL[machine] == number(machine, "keyctl")
    assert syscalls._PIVOT_ROOT[machine] == number(machine, "pivot_root")
    everywhere = {"open_tree": 428, "move_mount": 429, "openat2": 437, "mount_setattr": 442}
    assert {name: number(machine, name) for name in everywhere} == everywhere


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_probe_tries_what_it_means(machine):
    """Under another's number it would try a call that is refused for other reasons."""
    table = re.search(r"(?s)^calls = (\{.*?\}\})$", probe._INSIDE, re.MULTILINE)
    assert table, "the probe's table"
    calls = ast.literal_eval(table[1])[machine]
    assert calls == {name: number(machine, name) for name in calls}
    assert len(calls) >= 5


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_program_that_pauses_runs(machine, monkeypatch, tmp_path):
    emulator = [] if machine == os.uname().machine else [shutil.which(f"qemu-{machine}-static")]
    if None in emulator:
        pytest.skip(f"qemu-{machine}-static (qemu-user-static) is not installed")
    uname = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result((*uname[:4], machine)))
    file = tmp_path / "pause"
    file.write_bytes(pause_program.elf())
    file.chmod(0o755)
    with subprocess.Popen([*emulator, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.read(1) == pause_program.PAUSED
        assert program.poll() is None, "it waits"
        program.stdin.write(b"x")
        program.stdin.close()
        assert program.wait(30) == 0
