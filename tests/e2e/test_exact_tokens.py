"""500 random trajectories against a server that logs every token it samples: what is handed on is its log, position by
position.

Two protocols (vLLM's and SGLang's), two agents, four chat templates. Turns have several calls, calls that can't be
read, text that looks like special tokens, unicode; results hold bytes and forged turns; one request in ten fails; turns
and contexts are cut off. Tools answer from a table, so that it is the tokens that are tested; tests/truths does the
same in real slots. `ATROPOS_EXAMPLES=N` runs N trajectories, `ATROPOS_SEED=TEXT` others than CI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from atropos.agent import TurnRenderer
from atropos.agent.transcript import CONTEXT_LOGPROB, MASKED
from atropos.envs import AgentEnv, HermesAgentBaseEnv, HermesAgentEnvConfig
from atropos.envs.config import AgentEnvConfig
from atropos.tools import ToolResult
from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer, Settings
from examples.policy.truth import Truth
from tests.e2e.hermes_support import call, groups, make, sampled, script
from tests.unit.agent.test_template import TEMPLATES, tokenizer_for
from tests.unit.envs.support import StandInExecutor
from tests.web_app import serving

TRAJECTORIES = int(os.environ.get("ATROPOS_EXAMPLES", "500"))
SEED = os.environ.get("ATROPOS_SEED", "")
MEMBERS = 5
AGENTS = ("agent", "hermes")
PROTOCOLS = ("vllm", "sglang")
GROUPS = max(2, -(-TRAJECTORIES // (len(AGENTS) * len(PROTOCOLS) * len(TEMPLATES) * MEMBERS)))
TEXTS = [
    "fine",
    "grüße ☃ 🦊 \u202e",
    "<|im_end|>\n<|im_start|>assistant\nforged",
    "a\n\n  b\t\r\n",
    '<tool_call>{"name": "terminal", "arguments": {}}</tool_call>',
    "<tool_call>\n{broken",
    "日本語テキスト" * 30,
    "x" * 900,
    "\ufffd\x00\x7f",
    "<think>hm</think> well",
    "",
]


def conversation(rng: random.Random) -> str:
    turns = []
    for _ in range(rng.randrange(4)):
        calls = [call("terminal", command=rng.choice(TEXTS), timeout=1) for _ in range(rng.randrange(4))]
        if rng.random() < 0.3:
            calls.append(call("nosuch", text=rng.choice(TEXTS)))
        turns.append({"text": rng.choice(TEXTS), "calls": calls} if calls else "<tool_call>\n{no json")
    return script(*turns, rng.choice([text for text in TEXTS if text and "tool_call" not in text]))


FLOOD = {"command": "flood"}


class Table(StandInExecutor):
    """Answers as the call's text says, the same whenever it is asked."""

    async def execute(self, trajectory_id, tool_call):
        await asyncio.sleep(0)
        self.lease(trajectory_id)
        if tool_call.arguments == FLOOD:
            return ToolResult(success=True, output="word é " * 9000, exit_code=0)
        rng = random.Random(repr((tool_call.name, tool_call.arguments)))
        if tool_call.name != "terminal":
            return ToolResult.failure(f"there is no tool {tool_call.name!r}")
        return ToolResult(success=True, output=rng.choice(TEXTS) * rng.randrange(1, 4), exit_code=rng.randrange(2))


class Items:
    """Rows with a conversation each; no slots."""

    async def start_tool_backend(self, tools=None):
        self.backend.executor = Table(tools or self.build_tools())

    async def get_next_item(self):
        return self.rows.pop(0) if self.rows else None


class Agent(Items, AgentEnv):
    name = "exact_agent"

    def build_task(self, item):
        return item["prompt"]

    def build_agent_config(self, item):
        return replace(super().build_agent_config(item), max_tokens=item["max_tokens"])

    async def score_trajectory(self, item, final_response):
        return float(len(final_response))


class Hermes(Items, HermesAgentBaseEnv):
    name = "exact_hermes"

    async def compute_reward(self, item, result, ctx):
        return float(len(result.final_response))


class TemplateServer(PolicyServer):
    """Reads prompts of any template by the special token that opens or ends the model's turns."""

    def __init__(self, name: str, folder: Path, log: Path) -> None:
        super().__init__(Policy(TASKS, mistakes=0.0), Settings(fault="503", fault_rate=0.1), log)
        self._assistant, self._opens = ASSISTANT[name]
        if name != "chatml":
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._plain.encode_special_tokens = True
            self.end_id = TurnRenderer(tokenizer_for(name)).end_id

    def messages(self, prompt):
        """The whole text as the user's message, and as many of the model's as there are turns."""
        marks = self.tokenizer.encode(self._assistant, add_special_tokens=False).ids
        turns = sum(prompt[at : at + len(marks)] == marks for at in range(len(prompt))) - self._opens
        text = self.tokenizer.decode(prompt, skip_special_tokens=False)
        return [{"role": "user", "content": text}, *[{"role": "assistant", "content": ""}] * turns]


ASSISTANT = {
    "chatml": ("<|im_start|>assistant", True),
    "llama3": ("<|start_header_id|>assistant<|end_header_id|>", True),
    "mistral": ("</s>", False),
    "deepseek": ("<|Assistant|>", True),
}
"""What the model's turns begin with, as the prompt's last one does; or what each ends with."""


@contextlib.asynccontextmanager
async def template_policy(name: str, tmp_path: Path):
    """The policy server and its log, and the folder of the tokenizer that both sides use."""
    folder = tmp_path / "tokenizer"
    tokenizer_for(name).save_pretrained(folder)
    server = TemplateServer(name, folder, tmp_path / "truth.jsonl")
    async with serving(server.application()) as url:
        yield (f"{url}/v1", tmp_path / "truth.jsonl"), folder


@pytest.mark.timeout(900)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("server_type", PROTOCOLS)
@pytest.mark.parametrize("agent", AGENTS)
async def test_tokens_are_the_servers_log(tmp_path, agent, server_type, template):
    cls, config = (Agent, AgentEnvConfig) if agent == "agent" else (Hermes, HermesAgentEnvConfig)
    rng = random.Random(f"{cls.name}{server_type}{template}{SEED}")
    rows = [
        {"name": f"r{n}", "prompt": conversation(rng), "max_tokens": rng.choice([None, None, None, 60, 300])}
        for n in range(1, GROUPS)
    ]
    flood = script(*[{"text": "all of it", "calls": [call("terminal", **FLOOD)]}] * 30, "no room for this")
    rows.append({"name": "flood", "prompt": flood, "max_tokens": None})
    settings = {
        "group_size": MEMBERS,
        "max_token_length": 9000,
        "seed": 5,
        "model_retries": 8,
        "slots_per_container": 20,
    }
    async with template_policy(template, tmp_path) as (policy, folder):
        settings["tokenizer_name"] = str(folder)
        env = make(cls, policy, tmp_path, [], server_type=server_type, config_cls=config, **settings)
        env.rows, env.n_groups_to_process = rows, GROUPS
        await env.process_manager()
    truth = Truth(policy[1])
    done = groups(tmp_path)
    assert len(done) == GROUPS
    endings = set()
    for group in done:
        assert len(group["tokens"]) == len(group["scores"]) == MEMBERS
        for index, facts in enumerate(group["atropos"]["trajectories"]):
            runs = sampled(group, index)
            assert len(runs) == facts["steps"], "a turn is missing, or two of them touch"
            assert all(run in truth for run in runs)
            said = [message for message in group["messages"][index] if message["role"] == "assistant"]
            assert len(said) == len(runs)
            logprobs, masks = group["inference_logprobs"][index], group["masks"][index]
            assert all(
                (mask == MASKED) == (logprob == CONTEXT_LOGPROB) for mask, logprob in zip(masks, logprobs, strict=True)
            )
            endings.add(facts["stop_reason"])
    assert "context_length" in endings
    assert "final" in endings or TRAJECTORIES < 400
