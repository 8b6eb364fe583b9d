"""How many slots a host's limits allow: decided on plain numbers; and a server's start does not depend on a pipe's
size."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atropos.cli import doctor
from atropos.cli.app import command_line
from atropos.cli.doctor import room_for
from atropos.errors import BackendUnavailable
from atropos.sandbox.linux import host_limits
from atropos.sandbox.linux.host_limits import HostLimit
from atropos.slots import SlotPool, SlotPoolConfig
from tests.unit.sandbox.conftest import Driver, tiny_base

USER = 65_531
"""Nobody else's, so that no other test has small pipes."""
HOG = """
import fcntl, os, sys
os.setresgid({user}, {user}, {user})
os.setresuid({user}, {user}, {user})
kept = []
while True:
    kept.append(os.pipe())
    try:
        fcntl.fcntl(kept[-1][0], fcntl.F_SETPIPE_SZ, 1 << 20)
    except PermissionError:
        break
for _ in range(32):
    kept.append(os.pipe())
print(fcntl.fcntl(kept[-1][0], fcntl.F_GETPIPE_SZ), flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user whose pipes are all used up")
def test_slots_work_by_tiny_pipes():
    code = HOG.format(user=USER)
    hog = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/")
    try:
        assert hog.stdout is not None and int(hog.stdout.readline()) <= 2 * os.sysconf("SC_PAGESIZE")
        with tempfile.TemporaryDirectory(prefix="atropos-test-") as folder:
            os.chmod(folder, 0o755)
            base = tiny_base(Path(folder, "base"), USER)
            driver = Driver(base, as_user=True, before=["env", f"ATROPOS_TEST_USER={USER}"])
            try:
                for name in (
                    "output_and_exit_code",
                    "stdin_of_any_size",
                    "output_keeps_head_and_tail_with_an_exact_count",
                ):
                    driver.run("tests.unit.sandbox.scenarios", name)
            finally:
                driver.close()
    finally:
        hog.communicate()


def test_first_limit_comes_first():
    limits = [
        HostLimit("plenty", 10_000, 0, 1, "raise plenty"),
        HostLimit("mounts", 1000, 100, 15, "raise mounts"),
        HostLimit("pids", 500, 450, 2, "raise pids"),
        HostLimit("gone", 10, 12, 1, "raise gone"),
    ]
    assert [(one.name, one.slots) for one in host_limits.rooms(limits)] == [
        ("gone", 0), ("pids", 25), ("mounts", 60), ("plenty", 10_000)
    ]  # fmt: skip
    assert [one.name for one in host_limits.nearly_reached(limits)] == ["gone"]


def test_doctor_names_low_limits():
    limits = [HostLimit("mounts", 1000, 100, 15, "raise mounts"), HostLimit("pids", 500, 450, 2, "raise pids")]
    assert [(one.name, one.ok, one.fix) for one in room_for(30, limits)] == [("pids", False, "raise pids")]
    assert [one.name for one in room_for(100, limits)] == ["pids", "mounts"]
    assert [(one.name, one.ok, one.fix) for one in room_for(20, limits)] == [("pids", True, "")]


def test_hosts_limits_are_read():
    before = threads()
    found = {one.name: one for one in host_limits.read()}
    after = threads()  # others start and end some meanwhile
    assert {"RLIMIT_NOFILE", "kernel.pid_max", "fs.mount-max", "user.max_user_namespaces", "memory (MiB)"} <= set(found)
    assert all(one.value > 0 and one.per_slot > 0 and one.fix for one in found.values()), found
    assert min(before, after) - 200 < found["kernel.pid_max"].used < max(before, after) + 200


def test_open_files_limit_is_named():
    code = """if True:
        import os, resource
        from atropos.sandbox.linux import host_limits
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
        print(host_limits.named())
    """
    named = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "RLIMIT_NOFILE is nearly reached" in named and "ulimit -Hn" in named


def threads() -> int:
    """How many there are on this machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])


def test_memory_files_are_bounded():
    from atropos.sandbox.linux import memory_files

    fd = memory_files.bounded("words", 4096)
    try:
        os.write(fd, b"first ")
        os.write(fd, b"second")
        assert memory_files.line(fd) == "first second"
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 4096)
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        os.close(fd)


@pytest.mark.parametrize(("load", "named"), [(4e5, True), (0.1, False)])
async def test_late_start_names_load(monkeypatch, load, named):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    with pytest.raises(BackendUnavailable, match="start_timeout_s") as refused:
        await SlotPool(SlotPoolConfig(slots_per_container=1, start_timeout_s=0.01)).start()
    assert (f"the load is {load:.0f} on {os.cpu_count()} cores" in str(refused.value)) == named


@pytest.mark.parametrize(("load", "named"), [(4e5, True), (0.1, False)])
def test_doctor_names_a_high_load(monkeypatch, load, named):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    no_folder = CliRunner().invoke(command_line(), ["doctor", "--base", "/nonexistent"], env={"COLUMNS": "400"})
    assert "base: /nonexistent is not a folder" in no_folder.output and "the load is" not in no_folder.output
    monkeypatch.setattr(doctor, "START_LIMIT_S", 0.01)
    result = CliRunner().invoke(command_line(), ["doctor"], env={"COLUMNS": "400"})
    assert result.exit_code == 3, result.output
    assert "Slots can't start here" in result.output
    assert (f"the load is {load:.0f} on {os.cpu_count()} cores" in result.output) == named
