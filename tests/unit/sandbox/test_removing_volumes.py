"""How volumes are removed: in the background, and what a killed server left on disk by the next one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from atropos.sandbox.host.files import volumes
from tests.waiting import SLOWNESS

USER = 65_530
"""Nobody else's, so that its folder on disk has nothing of other tests."""
FIRST_ID = 300_000
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")

NEWIDMAP = r"""
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **argument) {
    char path[100];
    setresgid(0, 0, 0);
    setresuid(0, 0, 0);
    sprintf(path, "/proc/%s/%s", argument[1], strstr(argument[0], "uid") ? "uid_map" : "gid_map");
    FILE *file = fopen(path, "w");
    for (int n = 2; file && n + 2 < count; n += 3)
        fprintf(file, "%s %s %s\n", argument[n], argument[n + 1], argument[n + 2]);
    return !file || fclose(file);
}
"""
SERVER = """
import os
from atropos.config import ServerConfig
from atropos.sandbox.boot import root_phase
config = root_phase.RootPhaseSettings.of(ServerConfig(token="-", volume="disk"))
passed = root_phase.passed_on() or root_phase.enter(config)
disk = passed[1].disk
os.makedirs(f"{disk}/1/up/folder")
for path in (f"{disk}/1/up/folder", f"{disk}/1/up"):
    os.chown(path, 7, 7)
print(os.listdir(os.path.dirname(disk)) == [os.path.basename(disk)])
"""
"""A server that is over once it has a volume, and removes nothing."""


async def test_cancelled_frees_its_volume(monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(volumes, "remove_tree", lambda _folder: go.wait())
    disposer = volumes.Disposer(lambda _folder: None)
    for number in range(disposer.BOUND):
        await disposer.submit([], f"{number}")
    read, write = os.pipe2(os.O_NONBLOCK)
    removing = asyncio.create_task(disposer.submit([write]))
    await asyncio.sleep(0)
    assert not removing.done()
    removing.cancel()
    await asyncio.gather(removing, return_exceptions=True)
    go.set()
    await disposer.aclose()
    assert os.read(read, 1) == b"", "the other end is closed"
    os.close(read)


REMOVE = "import sys; from atropos.trees import remove_tree; remove_tree(sys.argv[1])"


@needs_root
def test_stuck_file_keeps_no_other(folder):
    """For example, one that is mounted, or that NFS keeps for a program which has it open."""
    top = folder / "full"
    for number in range(8):
        (top / f"{number}/below").mkdir(parents=True)
        (top / f"{number}/file").touch()
        (top / f"file{number}").touch()
    files = [next(entry for entry in os.scandir(at) if entry.is_file()).path for at in (top, top / "3")]
    mounts = 'mount --bind "$1" "$1" && mount --bind "$2" "$2" && exec "$3" -c "$0" "$4"'
    command = ["unshare", "-m", "sh", "-c", mounts, REMOVE, *files, sys.executable, str(top)]
    subprocess.run(command, check=True, timeout=20 * SLOWNESS)
    assert {str(path) for path in top.rglob("*")} == {*files, str(top / "3")}


@needs_root
def test_a_stuck_tree_is_left(folder):
    top = folder / "top"
    (top / "kept").mkdir(parents=True)
    (top / "kept/file").touch()
    (top / "gone/below").mkdir(parents=True)
    for path in (top, top / "gone", top / "gone/below"):
        os.chown(path, USER, USER)
    as_user = [sys.executable, "-m", "tests.unit.sandbox.as_user", sys.executable, "-c", REMOVE, str(top)]
    subprocess.run(as_user, check=True, timeout=20 * SLOWNESS, env={**os.environ, "ATROPOS_TEST_USER": f"{USER}"})
    assert [str(path.relative_to(top)) for path in sorted(top.rglob("*"))] == ["kept", "kept/file"]


@needs_root
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a newuidmap of its own")
@pytest.mark.skipif(not os.path.exists("/etc/subuid"), reason="needs /etc/subuid, to mount another one there")
def test_next_server_removes_them(folder):
    """Their files belong to ids of /etc/subuid, which the user alone may not touch."""
    programs, ids = folder / "programs", folder / "ids"
    programs.mkdir()
    for name in ("newuidmap", "newgidmap"):
        subprocess.run(["cc", "-x", "c", "-", "-o", programs / name], input=NEWIDMAP, text=True, check=True)
        (programs / name).chmod(0o4755)
    ids.write_text(f"{USER}:{FIRST_ID}:70000\n")
    mounts = 'mount --bind "$0" /etc/subuid && mount --bind "$0" /etc/subgid && exec "$@"'
    server = [sys.executable, "-m", "tests.unit.sandbox.as_user", sys.executable, "-c", SERVER]
    environment = {**os.environ, "ATROPOS_TEST_USER": f"{USER}", "PATH": f"{programs}:{os.environ['PATH']}"}
    try:
        for _ in range(2):
            done = subprocess.run(
                ["unshare", "-m", "sh", "-c", mounts, ids, *server],
                check=True,
                capture_output=True,
                text=True,
                timeout=20 * SLOWNESS,
                env=environment,
            )
            assert done.stdout == "True\n"
        (left,) = Path(f"/var/tmp/atropos-{USER}").glob("*/1/up")
        assert left.stat().st_uid == FIRST_ID + 7
    finally:
        shutil.rmtree(f"/var/tmp/atropos-{USER}")
