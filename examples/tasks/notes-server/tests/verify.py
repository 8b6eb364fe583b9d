"""What every verifier of these tasks needs: the agent's work is run on a copy, as nobody, and never trusted.

The same file stands in each task's tests/, because a task folder is complete in itself. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from pathlib import Path

WORK = Path("/workspace")
REWARD = Path("/logs/verifier/reward.txt")
NOBODY = 65534
MAX_BYTES = 8_000_000
PATIENCE_S = 60.0  # for what waits or hangs; a busy host makes a program slow that is right
CPU_S = 10  # of a program; they don't depend on what else the machine does


def _can_drop() -> bool:
    # In a slot that maps a single id there is nobody else to become; there the work runs as the verifier's user.
    try:
        subprocess.run(["true"], user=NOBODY, group=NOBODY, extra_groups=[], check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


DROP = os.getuid() == 0 and _can_drop()


def _limits(cpu_s: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))


def _sweep() -> None:
    """Kill whatever the agent's programs left running under nobody's id."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if entry.stat().st_uid == NOBODY:
                    os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def started(
    argv, *, cwd, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=None, cpu_s=CPU_S
):
    """A program of the agent's, running until the block ends; then it and all it started are killed."""
    extra = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if DROP else {}
    process = subprocess.Popen(
        [str(part) for part in argv],
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(cwd), "LC_ALL": "C.UTF-8", **(env or {})},
        start_new_session=True,
        preexec_fn=lambda: _limits(cpu_s),  # noqa: PLW1509 (no threads here)
        **extra,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if DROP:
            _sweep()


def run(argv, *, cwd, text="", timeout_s=PATIENCE_S, env=None, cpu_s=CPU_S):
    """Run a program of the agent's; returns (exit code, stdout, stderr). A timeout raises."""
    with tempfile.TemporaryFile() as fed, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        fed.write(text if isinstance(text, bytes) else text.encode())
        fed.seek(0)
        with started(argv, cwd=cwd, stdin=fed, stdout=out, stderr=err, env=env, cpu_s=cpu_s) as process:
            code = process.wait(timeout=timeout_s)
        out.seek(0)
        err.seek(0)
        return code, out.read().decode(errors="replace"), err.read().decode(errors="replace")


def give(path: Path) -> None:
    """Hand a tree to nobody, without following links."""
    if DROP:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        for folder, names, files in os.walk(path):
            for name in names + files:
                os.chown(os.path.join(folder, name), NOBODY, NOBODY, follow_symlinks=False)


@contextlib.contextmanager
def copy_of(source: Path = WORK):
    """A throw-away copy of the workspace that nobody may write."""
    with tempfile.TemporaryDirectory(prefix="verify-") as folder:
        os.chmod(folder, 0o755)
        target = Path(folder) / "work"
        shutil.copytree(source, target, symlinks=True)
        give(target)
        yield target


def read(name: str, root: Path = WORK) -> str:
    """Text of a regular file that the agent made; a link is refused, for it could point at the tests."""
    path = root / name
    inner = root.resolve()
    if inner not in [path.parent.resolve(), *path.parent.resolve().parents]:
        raise AssertionError(f"{name} leads out of the workspace")
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise AssertionError(f"{name} is not a regular file")
        return file.read(MAX_BYTES).decode()


def wait_for(what, *, seconds=PATIENCE_S):
    """Ask until the answer is true; for a server that is coming up."""
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if answer := what():
                return answer
        if time.monotonic() > end:
            raise AssertionError("it did not answer in time")
        time.sleep(0.02)


def same(got, expected, what="answer") -> None:
    """Compare, and say what differs in the verifier's log."""
    if got != expected:
        raise AssertionError(f"{what}: got {got!r:.300}, expected {expected!r:.300}")


def main(*checks, partial=False) -> None:
    """Run the checks and write the reward: 1 when all pass; with `partial`, the share that passes."""
    passed = 0
    for check in checks:
        try:
            check()
        except Exception as problem:  # whatever the agent's work does to a check is the agent's failure
            print(f"FAIL {check.__name__}: {type(problem).__name__}: {problem}")
        else:
            passed += 1
            print(f"PASS {check.__name__}")
    reward = passed / len(checks) if partial else float(passed == len(checks))
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    REWARD.write_text(f"{reward:.4f}\n")
