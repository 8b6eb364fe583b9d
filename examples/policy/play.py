"""The scripted policy's answers: a pure function of the conversation and the request's seed.

Three kinds of prompt are known:

* a task of `examples/tasks` (its instruction stands in the first user message): look around, play the solution, finish.
  Now and then it errs, so that the scores of a group differ: gives up, stops half-way, or stumbles and recovers.
* a message with a fenced block ```policy [turn, turn, ...]```: turn i is answered to the i-th turn. A string is the
  answer itself, an object `{"text": ..., "calls": [{"name", "arguments"}]}` is rendered.
* anything else: a short text, so that the trajectory ends.

What makes the members of a group differ is the request's `seed` where it has one, else the output of the first call
(the policy asks the machine for a random number): the answer still follows from the prompt.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TASKS = Path(__file__).resolve().parents[1] / "tasks"
SCRIPT = re.compile(r"```policy\n(.*?)\n```", re.DOTALL)
LOOK = "echo draw $(od -An -N4 -tu4 /dev/urandom); pwd; ls -la"


@dataclass(frozen=True)
class Turn:
    """One answer: text, then calls."""

    text: str = ""
    calls: tuple[dict[str, Any], ...] = field(default=())

    def render(self) -> str:
        """As a model writes it in the hermes format."""
        blocks = [f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>" for call in self.calls]
        return "\n".join([*([self.text] if self.text else []), *blocks])


def terminal(command: str, text: str = "") -> Turn:
    """A turn with one terminal call."""
    return Turn(text, ({"name": "terminal", "arguments": {"command": command}},))


class Policy:
    """Knows the tasks in a folder.

    Args:
        tasks: a folder of task folders, each with instruction.md and solution/solve.sh.
        mistakes: how many of the trajectories err, 0 to 1.
    """

    def __init__(self, tasks: Path = TASKS, *, mistakes: float = 0.4) -> None:
        self.mistakes = mistakes
        self.solutions: list[tuple[str, str]] = []
        for solution in sorted(tasks.glob("*/solution/solve.sh")):
            instruction = (solution.parents[1] / "instruction.md").read_text().strip()
            self.solutions.append((instruction, solution.read_text()))
        self.solutions.sort(key=lambda pair: -len(pair[0]))

    def answer(self, messages: list[dict[str, Any]], seed: int | None = None) -> Turn:
        """The next turn of this conversation."""
        first = next((_text(m) for m in messages if m["role"] == "user"), "")
        turn = sum(m["role"] == "assistant" for m in messages)
        script = SCRIPT.search("\n".join(_text(m) for m in messages if m["role"] in {"system", "user"}))
        if script:
            return _scripted(script[1], turn)
        for instruction, solution in self.solutions:
            if instruction in first:
                plan = self._plan(instruction, solution, messages, seed)
                return plan[min(turn, len(plan) - 1)]
        return Turn("I have nothing to do here.")

    def _plan(self, instruction: str, solution: str, messages: list[dict[str, Any]], seed: int | None) -> list[Turn]:
        look = terminal(LOOK, "Let me look around first.")
        draw = str(seed) if seed is not None else _first_result(messages)
        rng = random.Random(hashlib.sha256(f"{instruction}\0{draw}".encode()).digest())
        done = Turn("Done. The work is in place.")
        solve = terminal(solution, "Now I can do it.")
        if rng.random() >= self.mistakes:
            if rng.random() < 0.5:
                script = {"path": "/tmp/solve.sh", "content": solution}
                write = Turn("I write it down first.", ({"name": "write_file", "arguments": script},))
                return [look, write, terminal("bash /tmp/solve.sh"), done]
            return [look, solve, done]
        kind = rng.choice(("gives up", "half-way", "bad json", "unknown tool", "wrong argument"))
        if kind == "gives up":
            return [look, Turn("I believe that nothing needs to be done.")]
        if kind == "half-way":
            lines = solution.splitlines()
            return [look, terminal("\n".join(lines[: len(lines) // 2])), Turn("That should do.")]
        stumble = {
            "bad json": Turn('<tool_call>\n{"name": "terminal", "arguments": {"command": "ls\n</tool_call>'),
            "unknown tool": Turn("", ({"name": "shell", "arguments": {"cmd": "ls"}},)),
            "wrong argument": Turn("", ({"name": "terminal", "arguments": {"cmd": "ls", "timeout": "soon"}},)),
        }[kind]
        return [look, stumble, solve, done]


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _first_result(messages: list[dict[str, Any]]) -> str:
    """The result of the first call: everything between the first two answers."""
    seen = 0
    for message in messages:
        seen += message["role"] == "assistant"
        if seen == 1 and message["role"] != "assistant":
            return _text(message)
    return ""


def _scripted(block: str, turn: int) -> Turn:
    try:
        turns = json.loads(block)
    except json.JSONDecodeError:
        return Turn("The script is not JSON.")
    if turn >= len(turns):
        return Turn("The script is over.")
    step = turns[turn]
    return Turn(step) if isinstance(step, str) else Turn(step.get("text", ""), tuple(step.get("calls", ())))
