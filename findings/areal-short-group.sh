#!/usr/bin/env bash
# AReaL 1.0.4 goes on with the rest of a group where a rollout failed, and then normalises rewards by counting off rows: each later
# group is cut in the wrong place, so that answers are compared with another prompt's, and what is left over at the end is divided by
# `eps` alone. Three right answers to a question that all got right come to an advantage of 100000 each, where it should be 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python torch==2.15.0 transformers==5.23.0 ray==2.60.0 hydra-core==1.3.8 httpx==0.28.1 numpy==2.4.6 \
  aiofiles aiohttp colorlog einops flask lark numba openai orjson pillow psutil requests rich tenacity torchdata uvloop # these modules import them
venv/bin/uv pip install -q -p venv/bin/python --no-deps areal==1.0.4
cat >groups.py <<'PYTHON'
import asyncio
import logging
import torch
from areal.api.cli_args import NormConfig
from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
from areal.utils.data import Normalization

rewards = iter([1.0, 0.0, 1.0, None, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])  # three questions, four answers each; one failed

class Workflow:
    async def arun_episode(self, engine, data):
        if (reward := next(rewards)) is None:
            return None
        tokens = torch.ones(1, 2, dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": tokens.bool(), "rewards": torch.tensor([reward])}

async def main():
    grouped = GroupedRolloutWorkflow(Workflow(), 4, logging.getLogger())
    return [await grouped.arun_episode(None, {}) for _ in range(3)]

groups = [group["rewards"] for group in asyncio.run(main())]
normalised = Normalization(NormConfig(mean_level="group", std_level="group", group_size=4))(torch.cat(groups))
for rewards, advantages in zip(groups, normalised.split([len(group) for group in groups])):
    print(rewards.tolist(), [round(advantage, 2) for advantage in advantages.tolist()])
PYTHON
found=$(venv/bin/python groups.py 2>/dev/null)
wanted="[1.0, 0.0, 1.0] [0.5, -1.5, 0.5]
[1.0, 0.0, 0.0, 1.0] [0.5, -0.87, -0.87, 0.87]
[1.0, 1.0, 1.0, 1.0] [0.87, 100000.0, 100000.0, 100000.0]"
echo "AReaL 1.0.4, rewards and advantages:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
