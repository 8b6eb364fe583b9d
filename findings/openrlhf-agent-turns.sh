#!/usr/bin/env bash
# OpenRLHF 0.11.2: with an agent of several turns, `--rollout.max_new_tokens` bounds nothing. It cuts the prompt, so as to leave room for
# that many tokens, and each turn may then sample all that is left of `--data.max_len`. A model that rambles in its first turn takes
# the whole window, and the rollout has no other turn.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q aiohttp==3.14.5 numpy==2.4.6
venv/bin/pip install -q --no-deps openrlhf==0.11.2
cat >turns.py <<'PYTHON'
import asyncio
import importlib.util
import sys
import types
from types import SimpleNamespace
import numpy

where = importlib.util.find_spec("openrlhf").submodule_search_locations[0]
sys.modules["openrlhf.utils"] = types.ModuleType("openrlhf.utils")  # the real one imports torch, for other modules of it
sys.modules["openrlhf.utils"].__path__ = [f"{where}/utils"]
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class Agent(AgentInstanceBase):
    def __init__(self):
        pass

    async def step(self, state, **_):
        return {"rewards": numpy.array(0.0), "environment_feedback": "go on", "done": False}

class Rambling:
    async def generate(self, tokens, sampling, **_):
        sampled = [7] * sampling.max_tokens
        print(f"turn from token {len(tokens)}: {sampling.max_tokens} new tokens allowed")
        return SimpleNamespace(outputs=[SimpleNamespace(token_ids=sampled, text="", finish_reason="length")])

def words(text, **_):
    return {"input_ids": [numpy.array([1 for _ in text.split()])]}

sampling = SimpleNamespace(max_tokens=8, logprobs=None)  # what max_new_tokens=8 comes to
rollout = MultiTurnAgentExecutor(Agent).execute("please fix it", None, sampling, 100, words, Rambling())
print("turns:", len(asyncio.run(rollout)["action_ranges"]))
PYTHON
found=$(venv/bin/python turns.py)
wanted="turn from token 3: 97 new tokens allowed
turns: 1"
echo "OpenRLHF 0.11.2, max_new_tokens 8, max_len 100:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
