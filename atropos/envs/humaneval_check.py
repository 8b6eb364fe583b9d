"""Runs in a slot, with the standard library alone: does a solution pass a HumanEval problem's tests?

    python3 -I check.py PROBLEM.json SOLUTION.py

The tests run here; the solution runs in a child process, as another user, which answers one call at a time. So it can
neither end the tests early nor see what they expect. Prints one line of JSON, `{"passed": ..., "detail": ...}`.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import select
import subprocess
import sys
from collections.abc import Callable
from typing import cast

SOLVER = 1
"""User and group of the solution: any but the tests'. Where /etc/subuid gives a server few ids, a slot has no 65534."""
CALL_S = 10.0
"""CPU time that one call of the solution may take; one that waits ends with the whole check."""
LOOK_S = 0.5
"""How often it is looked at."""
MAX_ANSWER = 10_000_000

CHILD = r"""
import ast, math, os, sys
asked, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)

def encode(value):
    kind = type(value)
    if isinstance(value, (bool, type(None), str, bytes)):
        return repr(kind(value) if kind in (bool, str, bytes) else None)
    if isinstance(value, int):
        return repr(int(value))
    if isinstance(value, float):
        if math.isinf(value):
            return "1e999" if value > 0 else "-1e999"
        if math.isnan(value):
            raise TypeError("returned NaN")
        return repr(float(value))
    if isinstance(value, complex):
        return repr(value)
    if isinstance(value, list):
        return "[" + ",".join(map(encode, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(encode(v) + "," for v in value) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(encode(k) + ":" + encode(v) for k, v in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ",".join(map(encode, value)) + "}" if value else "set()"
    raise TypeError("returned " + kind.__name__)

def answer(text):
    data = text.encode("utf-8", "surrogatepass").hex().encode()
    answers.write(data + b"\n")
    answers.flush()

name, source = ast.literal_eval(bytes.fromhex(asked.readline().strip().decode()).decode())
space = {"__name__": "solution"}
try:
    exec(compile(source, "solution.py", "exec"), space)
    function = space[name]
    answer("'ready'")
except BaseException as error:
    answer("!" + type(error).__name__ + ": " + str(error)[:500])
    os._exit(1)
for line in asked:
    try:
        arguments = ast.literal_eval(bytes.fromhex(line.strip().decode()).decode("utf-8", "surrogatepass"))
        answer(encode(function(*arguments)))
    except BaseException as error:
        answer("!" + type(error).__name__ + ": " + str(error)[:500])
"""


class SolutionError(Exception):
    """The solution raised, ended, hung, or returned what isn't plain data."""


class Solution:
    """The child process that holds the solution."""

    def __init__(self) -> None:
        process = start()
        assert process.stdin is not None
        assert process.stdout is not None
        self.process, self.asks, self.answers = process, process.stdin, process.stdout
        self.buffer = b""

    def __call__(self, *arguments: object) -> object:
        """Call the solution."""
        return self.ask(arguments)

    def ask(self, value: object) -> object:
        """Send one tuple of plain data and await one value of plain data.

        Raises:
            SolutionError: the solution raised, ended, hung, or returned something else.
        """
        try:
            self.asks.write(repr(value).encode("utf-8", "surrogatepass").hex().encode() + b"\n")
            self.asks.flush()
        except OSError:
            raise SolutionError("the solution ended") from None
        text = bytes.fromhex(self.line().decode()).decode("utf-8", "surrogatepass")
        if text.startswith("!"):
            raise SolutionError(text[1:])
        return set() if text == "set()" else ast.literal_eval(text)

    def line(self) -> bytes:
        """One line of the child, in time. It is CPU time: a host that is busy says nothing about a solution."""
        end = self.cpu_s() + CALL_S
        while b"\n" not in self.buffer:
            if not select.select([self.answers], [], [], LOOK_S)[0]:
                if self.cpu_s() > end:
                    raise SolutionError(f"a call took more than {CALL_S:g} s of CPU time")
                continue
            piece = os.read(self.answers.fileno(), 65536)
            if not piece or len(self.buffer) > MAX_ANSWER:
                raise SolutionError("the solution ended" if not piece else "the answer is too long")
            self.buffer += piece
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def cpu_s(self) -> float:
        """CPU time of the child so far, in seconds."""
        with open(f"/proc/{self.process.pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End the child and all it started."""
        try:
            os.killpg(self.process.pid, 9)
        except OSError:
            pass
        self.process.wait()


def start() -> subprocess.Popen[bytes]:
    """Start the child process; raises where there is no second user, from whom alone the tests are safe."""
    return subprocess.Popen(
        [sys.executable, "-I", "-c", CHILD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/tmp",
        env={"PATH": "/usr/bin:/bin"},
        start_new_session=True,
        preexec_fn=limits,  # noqa: PLW1509 (no threads here)
        user=SOLVER,
        group=SOLVER,
        extra_groups=[],
    )


def limits() -> None:
    """Bounds of the solution's process."""
    resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 24, 1 << 24))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def judge(problem: dict[str, str], source: str) -> dict[str, object]:
    """Run the problem's tests against a solution.

    The verdict has `broken` where they can't be run, which judges none.
    """
    # The prompt's own helpers (and imports) belong to the tests; its unfinished function gets an empty body.
    space: dict[str, object] = {"__name__": "tests"}
    try:
        exec(compile(problem["prompt"] + "\n    pass\n", "prompt.py", "exec"), space)  # noqa: S102
        exec(compile(problem["test"], "test.py", "exec"), space)  # noqa: S102
        check = cast("Callable[[Solution], object]", space["check"])
    except Exception as error:
        return {"broken": f"{type(error).__name__}: {error}"[:500]}
    solution = Solution()
    try:
        solution.ask((problem["entry_point"], source))
        space[problem["entry_point"]] = solution  # some tests call it by name
        check(solution)
    except Exception as error:
        return {"passed": False, "detail": f"{type(error).__name__}: {error}"[:500]}
    finally:
        solution.close()
    return {"passed": True, "detail": ""}


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        asked = json.load(file)
    with open(sys.argv[2], encoding="utf-8", errors="replace") as file:
        source = file.read()
    verdict = judge(asked, source)
    print(json.dumps(verdict))
