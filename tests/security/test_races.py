"""Paths that change under every operation, and archives whose own links lead out: nothing outside is read or written.

ATROPOS_FAULTS repeats the races.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import random
import tarfile
import time

import pytest

from atropos import wire
from tests.repeats import TIMES
from tests.security.conftest import SECRET
from tests.security.test_what_programs_say_and_leave import says
from tests.waiting import SLOWNESS

pytestmark = pytest.mark.asyncio(loop_scope="session")
NAME = f"race-{os.urandom(6).hex()}"

SWAP = r"""
import ctypes, itertools, os, platform, sys
libc = ctypes.CDLL(None)
NR = {"x86_64": 316, "aarch64": 276}[platform.machine()]
def exchange(a, b):
    libc.syscall(ctypes.c_long(NR), -100, a.encode(), -100, b.encode(), 2)
secret = sys.argv[1]
os.chdir("/workspace")
for folder in ("a/deep", "b/deep", "c/d/e", "spare"):
    os.makedirs(folder, exist_ok=True)
    for path in (folder, folder.split("/")[0]):
        open(f"{path}/f", "w").write("inside")
folders = ("/etc", "/proc/1/root", "/proc/self/fd", "/proc/1", "/proc/self/cwd", "..", "/", "/dev", "/tmp", "/run", "/.atropos",
           "/.atropos/next", "/usr/bin", os.path.dirname(secret), "a", "nowhere")
files = (secret, "/proc/1/environ", "/proc/1/mem", "/proc/self/mem", "/proc/self/fd/0", "/dev/zero", "/dev/ptmx", "/proc/kmsg",
         "/.atropos/pause", "/etc/ld.so.preload", "f", "nowhere", None)
def swap_folders():
    for target in itertools.cycle(folders):
        os.symlink(target, "la")
        for _ in range(20):
            exchange("a", "la")
        os.unlink("la")
def swap_files():
    for target in itertools.cycle(files):
        if target is None:
            os.mkfifo("lb")
        else:
            os.symlink(target, "lb")
        for _ in range(20):
            exchange("b/f", "lb")
        os.unlink("lb")
def move_folders():
    while True:
        for source, there in (("c/d", "spare/d"), ("c", "moved")):
            os.rename(source, there)
            os.rename(there, source)
for work in (swap_folders, swap_files, move_folders):
    if os.fork() == 0:
        while True:
            try:
                work()
            except OSError:
                for name in ("la", "lb"):
                    try:
                        os.unlink(name)
                    except OSError:
                        pass
                    try:
                        os.rename("moved", "c")
                    except OSError:
                        pass
print("swapping", flush=True)
os.wait()
"""


async def swapping(slot, secret_file) -> None:
    await slot.exec("rm -rf /workspace/*", workdir="/")
    await slot.write_file("/root/swap.py", SWAP)
    begun = await slot.run(wire.ProcStart(command=f"exec python3 /root/swap.py {secret_file}"))
    assert begun.kind == "proc_state", begun
    told = await slot.run(wire.ProcRead(id=begun.id, wait_s=20 * SLOWNESS, until="output"))
    assert told.output == b"swapping\n", told


def archive(**files: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def operation(rng: random.Random) -> wire.Operation:
    """Any file operation, on any of the paths that change."""
    folder = rng.choice(["a", "b", "c", "a/deep", "c/d", "c/d/e", "a/../b", "."])
    file = f"{folder}/{rng.choice(['f', NAME])}"
    match rng.randrange(9):
        case 0 | 1:
            return wire.ReadFile(path=file, max_bytes=rng.choice([100, 4096, 3_000_000]))
        case 2:
            return wire.WriteFile(path=file, data=SECRET[:4].encode(), append=rng.random() < 0.3)
        case 3:
            return wire.WriteFile(path=f"{folder}/{NAME}", data=bytes(1_100_000))
        case 4:
            return wire.WriteFile(path=f"{folder}/{NAME}/deeper/{NAME}", data=b"x", mode=0o600)
        case 5:
            return wire.Search(pattern="correct-horse|inside", path=folder)
        case 6:
            return wire.Tar(path=folder, max_bytes=8_000_000)
        case 7:
            return wire.Untar(path=folder, data=archive(**{f"{NAME}/f": b"x", "deep/f": b"y", "f": b"inside"}))
        case _:
            return wire.Exec(
                command="cat f a/f; true", workdir=f"/workspace/{folder}", timeout_s=1, max_output_bytes=5000
            )


def contents(result: wire.OpResult) -> bytes:
    """All that an answer says."""
    match result:
        case wire.FileResult():
            return result.data
        case wire.SearchResult():
            return "\n".join(match.text for match in result.matches).encode()
        case wire.CommandResult():
            return result.output
        case _:
            return repr(result).encode()


async def untouched(neighbours, secret_file) -> None:
    """Nothing of what was written under attack is anywhere else."""
    assert secret_file.read_text() == SECRET
    for folder in (
        "/",
        "/etc",
        "/tmp",
        "/root",
        "/run",
        "/run/atropos",
        "/var/lib",
        "/dev",
        "/usr/bin",
        "/dev/shm",
        os.getcwd(),
    ):
        with contextlib.suppress(OSError):
            assert NAME not in os.listdir(folder), folder
    for neighbour in neighbours:
        await says(neighbour.slot, f"find / -xdev -name {NAME} 2>/dev/null; true", "", workdir="/")


async def test_swapped_paths_go_nowhere(attacker, beside, secret_file):
    rng, ends = random.Random(31), time.monotonic() + 3 * min(TIMES, 20)
    await swapping(attacker, secret_file)
    answers = 0
    while time.monotonic() < ends:
        batch = [operation(rng) for _ in range(8)]
        async with asyncio.timeout(40 * SLOWNESS):
            results = await asyncio.gather(*(attacker.run(each) for each in batch))
        for asked, result in zip(batch, results, strict=True):
            assert SECRET.encode() not in contents(result), asked
            if isinstance(result, wire.FileResult) and asked.op == "tar":
                with tarfile.open(fileobj=io.BytesIO(result.data)) as tar:
                    names = tar.getnames()
                tops = (".", NAME, asked.path)  # its own name where it was a link to nowhere just then
                assert all(name.split("/")[0] in tops and ".." not in name.split("/") for name in names), names
            answers += result.kind != "op_error"
    assert answers > 0
    await attacker.quiesce()
    await untouched(beside, secret_file)
    await attacker.exec("rm -rf /workspace/*", workdir="/")
    await says(attacker, "echo next", "next\n")


async def test_a_snapshot_midway_holds_no_outside(pool, beside, secret_file):
    async with pool.lease("swapper") as slot:
        for number in range(2 * min(TIMES, 20)):
            await swapping(slot, secret_file)
            async with await slot.snapshot() as snapshot, pool.lease(f"swapped-{number}", snapshot=snapshot) as fork:
                look = "find . -type l -printf '%p\\n' | sort | tr '\\n' ' '; cat /proc/[0-9]*/comm | grep -c python; grep -rs correct-horse . ; true"
                found = await fork.exec(look)
                assert set(found.output.split()) <= {"0", "./a", "./la", "./lb", "./b/f"}, found
                async with asyncio.timeout(40 * SLOWNESS):
                    for _ in range(20):
                        result = await fork.run(operation(random.Random(number)))
                        assert SECRET.encode() not in contents(result)
    await untouched(beside, secret_file)


HOSTILE = {
    "through a link": [("l", tarfile.SYMTYPE, "/etc"), (f"l/{NAME}", tarfile.REGTYPE, "")],
    "through a link upwards": [("l", tarfile.SYMTYPE, "../.."), (f"l/{NAME}", tarfile.REGTYPE, "")],
    "through two links": [
        ("l", tarfile.SYMTYPE, "."),
        ("l/m", tarfile.SYMTYPE, ".."),
        (f"m/m/{NAME}", tarfile.REGTYPE, ""),
    ],
    "into the process that unpacks": [("l", tarfile.SYMTYPE, "/proc/self/fd"), ("l/0", tarfile.REGTYPE, "")],
    "into its memory": [("l", tarfile.SYMTYPE, "/proc/self"), ("l/mem", tarfile.REGTYPE, "")],
    "a folder through a link": [("l", tarfile.SYMTYPE, "/"), (f"l/{NAME}", tarfile.DIRTYPE, "")],
    "a mode through a link": [("l", tarfile.SYMTYPE, "/root"), ("l", tarfile.DIRTYPE, "")],
    "a hard link to the outside": [("h", tarfile.LNKTYPE, "../../etc/passwd")],
    "a hard link through a link": [("l", tarfile.SYMTYPE, "/etc"), ("h", tarfile.LNKTYPE, "l/passwd")],
    "a hard link by its root": [("h", tarfile.LNKTYPE, "/etc/passwd")],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_archived_links_nowhere(attacker, name):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for path, kind, target in HOSTILE[name]:
            info = tarfile.TarInfo(path)
            info.type, info.linkname, info.mode = kind, target, 0o777
            info.size = 12 if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(b"FORGED RESULT"[: info.size]))
    before = (await attacker.exec("ls -ld /etc /root / /workspace | cut -d' ' -f1; ls -A / /etc")).output
    async with asyncio.timeout(20 * SLOWNESS):
        result = await attacker.run(wire.Untar(path="in", data=buffer.getvalue()))
    assert result.kind == "op_error" and result.error == "bad_path", result
    after = (await attacker.exec("ls -ld /etc /root / /workspace | cut -d' ' -f1; ls -A / /etc; rm -rf in")).output
    assert after == before


async def test_archive_replaces_links(attacker):
    await attacker.exec(
        "mkdir -p in/real; cd in; mkfifo pipe; ln -s /etc/passwd link; ln -s real way; echo old > file; ln file other"
    )
    data = archive(**{"pipe": b"1", "link": b"2", "way/in": b"3", "file": b"4", "new/folders/5": b"5"})
    async with asyncio.timeout(20 * SLOWNESS):
        result = await attacker.run(wire.Untar(path="in", data=data))
    assert result.kind == "done", result
    await says(
        attacker, "cd in; cat pipe link real/in file new/folders/5 other; grep -c root:x:0 /etc/passwd", "12345old\n1\n"
    )
