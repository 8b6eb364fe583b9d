"""The conversations that the tiny model learns: thinking, two calls at once, their results, one call, its result, the
answer.

They are rendered by the two agents' own dialects, so that the model continues what it is given in the tests. A second model learns to
write the second of the first two calls so that it can't be read.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from atropos.agent import AgentConfig, Dialect, Outcome, TurnRenderer
from atropos.agent.dialect import XmlDialect
from atropos.envs.hermes.dialect import OpenAIDialect
from atropos.tools import ToolCall, ToolRegistry, ToolResult, build_tool_registry
from atropos.tools.parsers import parser_for
from examples.policy.tokenizer import FOLDER

SYSTEM = "You look at files."
FILES = ("notes", "ledger", "plan", "letters", "orders", "names", "dates", "sums")
COMMANDS = ("cat", "wc -l", "head", "tail", "sort")
COUNT = 3000
SHORT = 0.93
"""Share of the conversations of which only the end of the system message is kept: it says the same in all of them."""


def task(rng: random.Random) -> str:
    """What the user asks."""
    return f"Look at {rng.choice(FILES)} and {rng.choice(FILES)}, then count {rng.choice(FILES)}."


def tools() -> ToolRegistry:
    """The terminal alone, which keeps prompts short."""
    return ToolRegistry(tool for tool in build_tool_registry(["terminal"]) if tool.name == "terminal")


def result(call: ToolCall) -> ToolResult:
    """What a call gives, the same whenever it is asked."""
    rng = random.Random(repr((call.name, call.arguments)))
    if call.name != "terminal":
        return ToolResult.failure(f"there is no tool {call.name!r}")
    text = " ".join(rng.choice(FILES) for _ in range(rng.randrange(1, 6)))
    return ToolResult(success=True, output=text, exit_code=rng.choice((0, 0, 0, 1)))


def dialects() -> list[Dialect]:
    """Those of `AgentEnv` and of `HermesAgentBaseEnv`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(FOLDER)
    schemas = tools().schemas()
    return [
        XmlDialect(TurnRenderer(tokenizer), parser_for("hermes", tokenizer, schemas), schemas),
        OpenAIDialect(tokenizer, schemas, "hermes"),
    ]


def turns(rng: random.Random, *, mistaken: bool) -> list[str]:
    """What the model writes, in order."""

    def call() -> str:
        return json.dumps({"name": "terminal", "arguments": {"command": f"{rng.choice(COMMANDS)} {rng.choice(FILES)}"}})

    bodies = [[call(), call()[:-2] if mistaken else call()], [call()]]
    written = ["\n".join(f"<tool_call>\n{block}\n</tool_call>" for block in body) for body in bodies]
    return [
        f"<think>\n{rng.choice(('I look at', 'Next is', 'So it is', 'Then'))} {rng.choice(FILES)}.\n</think>\n\n{body}"
        for body in [*written, f"There are {rng.randrange(1, 10)}."]
    ]


def conversation(
    dialect: Dialect, tokenizer: Any, rng: random.Random, *, mistaken: bool
) -> tuple[list[int], list[int]]:
    """Token ids, and for each whether it is the model's."""
    config = AgentConfig(system_prompt=SYSTEM)
    ids = dialect.prompt(dialect.opening(task(rng), config, exact=True))
    if rng.random() < SHORT:
        ids = ids[-rng.randrange(20, 60) :]
    own = [0] * len(ids)
    for text in turns(rng, mistaken=mistaken):
        sampled = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids, own = [*ids, *sampled], [*own, *[1] * len(sampled)]
        turn = dialect.read(sampled, cut_off=False)
        outcomes = [Outcome(call, result(call)) for call in turn.calls]
        outcomes += [Outcome(None, ToolResult.failure(error.message)) for error in turn.unread]
        if outcomes:
            context = dialect.following(dialect.results(outcomes, config), sampled)
            ids, own = [*ids, *context], [*own, *[0] * len(context)]
    return ids, own


def main() -> None:
    """Write `COUNT` conversations, a JSON line each, to the file that is named; with a second argument, mistaken ones."""
    path, mistaken = Path(sys.argv[1]), len(sys.argv) > 2
    rng = random.Random(46)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    both = dialects()
    with path.open("w") as file:
        for number in range(COUNT):
            file.write(json.dumps(conversation(both[number % 2], tokenizer, rng, mistaken=mistaken)) + "\n")


if __name__ == "__main__":
    main()
