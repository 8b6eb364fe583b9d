"""`make demo`'s program, as a user runs it: whole, repeatable, and gone without a trace in every ending."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.processes import alive, descendants, parent_of

ROOT = Path(__file__).resolve().parents[2]
SCORES = {"top-words": [1.0, 1.0, 1.0, 1.0], "merge-config": [1.0, 1.0, 0.0, 1.0]}
"""Of two tasks, in every run."""
GONE_S = 5.0
"""What is promised; a loaded machine is given more (`SLACK_S`), because a test's deadline is no benchmark."""
SLACK_S = 10.0


def containers(pid: int) -> list[int]:
    """The sandbox servers below a process."""
    below = descendants(pid).items()
    return sorted(child for child, line in below if "atropos.sandbox" in line and parent_of(child) == pid)


def left_by(pid: int, *, killed: bool = False) -> list[str]:
    """Mounts and scratch folders that carry the process's number: other tests' and other people's are not ours.

    A killed run can't remove its empty scratch folder; the next run does.
    """
    mark = f"atropos-{pid}-"
    mounted = [line for line in Path("/proc/self/mounts").read_text().splitlines() if mark in line]
    return mounted if killed else mounted + [str(path) for path in Path(tempfile.gettempdir()).glob(f"{mark}*")]


class Demo:
    """The program as a subprocess in a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pid = process.pid
        self.ever: set[int] = set()

    def look(self) -> set[int]:
        self.ever |= set(descendants(self.pid))
        return self.ever

    async def until(self, wanted) -> None:
        async with asyncio.timeout(90):
            while not wanted():
                assert self.process.returncode is None, (await self.process.communicate())[0].decode()
                self.look()
                await asyncio.sleep(0.05)

    async def gone(self) -> None:
        """The process and all that it ever started end in time."""
        async with asyncio.timeout(GONE_S + SLACK_S):
            await self.process.wait()
            while alive(self.ever):  # noqa: ASYNC110 (the kernel tells nobody of grandchildren)
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def demo(tmp_path: Path, *flags: str):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "examples.demo",
        f"--out={tmp_path}",
        *flags,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT if "--json" not in flags else asyncio.subprocess.PIPE,
        start_new_session=True,
        env={**os.environ, "COLUMNS": "120"},
    )
    try:
        yield Demo(process)
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def test_runs_score_alike(tmp_path):
    (tmp_path / "groups.jsonl").write_text("an earlier run's\n")
    async with demo(tmp_path, "--json", f"--names={','.join(SCORES)}", "--containers=2", "--slots=4") as run:
        reader = asyncio.create_task(run.process.communicate())
        while not reader.done():
            run.look()
            await asyncio.sleep(0.1)
        out, err = await reader
        assert run.process.returncode == 0, err.decode()
        await run.gone()
    assert left_by(run.pid) == []
    report = json.loads(out)
    assert report["trajectories"] == 8
    assert report["resets"] >= 8
    assert {name: task["scores"] for name, task in report["tasks"].items()} == SCORES
    groups = [json.loads(line) for line in (tmp_path / "groups.jsonl").read_text().splitlines()]
    assert {group["atropos"]["item"]: group["scores"] for group in groups} == SCORES
    for group in groups:
        for tokens, masks, logprobs in zip(group["tokens"], group["masks"], group["inference_logprobs"], strict=True):
            assert len(tokens) == len(masks) == len(logprobs)
    page = (tmp_path / "groups.html").read_text()
    assert "top-words" in page
    assert page.count("<script") == 1  # the player of replays


MOMENTS = ("importing", "starting", "working")


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("importing", signal.SIGINT),
        ("importing", signal.SIGTERM),
        ("starting", signal.SIGINT),
        ("starting", signal.SIGTERM),
        ("working", signal.SIGINT),
        ("working", signal.SIGTERM),
        ("working", signal.SIGKILL),
    ],
    ids=lambda value: getattr(value, "name", value),
)
async def test_signal_leaves_nothing(tmp_path, moment, number):
    few = "--names=fix-*,git-*,merge-*"  # all of them are proven before the first is played
    async with demo(tmp_path, "--containers=2", "--slots=2", "--group-size=2", few) as run:
        output = bytearray()

        async def read():
            while chunk := await run.process.stdout.read(4096):
                output.extend(chunk)

        reader = asyncio.create_task(read())
        if moment == "importing":
            await asyncio.sleep(0.5)
        elif moment == "starting":
            await run.until(lambda: any("atropos-runner" in name(pid) for pid in run.look()))
        else:
            await run.until(lambda: b" 1.00" in output)
        run.look()
        started = time.monotonic()
        run.process.send_signal(number)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.gone())
            if number is signal.SIGTERM:
                tasks.create_task(send_again(run, number, output))
        print(f"{moment} {number.name}: gone after {time.monotonic() - started:.2f} s")
        assert run.process.returncode in {-number, 128 + number}
        await reader
        assert b"Traceback" not in output, output.decode()
        assert left_by(run.pid, killed=number is signal.SIGKILL) == []
        if moment == "working" and number is not signal.SIGKILL:
            assert (tmp_path / "groups.jsonl").read_text().count("\n") >= 1
            assert (tmp_path / "groups.html").exists()


async def send_again(run: Demo, number: signal.Signals, output: bytearray) -> None:
    """Impatient signals do no harm: one while it shuts down, and many when it has done so and Python ends."""
    await asyncio.sleep(0.05)
    again = True
    while run.process.returncode is None:
        if again or b"everything was shut down" in output:
            with contextlib.suppress(ProcessLookupError):
                os.kill(run.pid, number)  # `send_signal` may take its exit code
        again = False
        await asyncio.sleep(0.001)


def name(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (Path("/proc") / str(pid) / "comm").read_text()
    return ""


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--mistakes=7", "--mistakes: must be from 0 to 1, not 7"),
        ("--out=/proc/x", "error: --out: "),
        ("--tasks=/nope", "error: --tasks: there is no folder /nope"),
    ],
)
async def test_impossible_flag_is_one_line(tmp_path, flag, said):
    async with demo(tmp_path, flag) as run:
        out, _ = await run.process.communicate()
    assert run.process.returncode == 2
    assert said in out.decode()
    assert "Traceback" not in out.decode()


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        ("examples.policy", "--port=99999"),
        ("examples.policy", "--log=/proc/x/y"),
        ("examples.learn", "--out=/proc/x"),
        ("examples.serve", "--out=/proc/x"),
    ],
)
def test_unusable_place_is_one_line(program, flag):
    command = [sys.executable, "-m", program, flag]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in {1, 2}
    assert "Traceback" not in done.stderr
    assert (flag.rpartition("=")[2] if "port" not in flag else "--port 99999") in done.stderr


def test_orphaned_policy_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "examples.policy"]
    ended = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")
