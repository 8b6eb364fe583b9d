#!/usr/bin/env bash
# SkyRL 0.3.0 with `reinforce++` takes a tool's output for tokens of the answer where it normalises advantages, though their loss mask is
# 0: a rollout of two tokens that read a file of 1000 has most of the batch's mean and variance. The same two answers, right and wrong,
# come to 0.87 and -0.87 without the file and to 22.37 and -0.04 with it, and the gradient's size goes by what tools printed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python torch==2.15.0 transformers==5.23.0 ray==2.60.0 datasets==5.2.0 accelerate aiohttp cloudpickle \
  httpx jaxtyping loguru numpy omegaconf torchdata uvloop # these modules import them
venv/bin/uv pip install -q -p venv/bin/python --no-deps skyrl==0.3.0 skyrl-gym==0.4.0
cat >outputs.py <<'PYTHON'
import typing
import typing_extensions
typing.TypedDict = typing_extensions.TypedDict  # pydantic wants it before Python 3.12
from types import SimpleNamespace
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors
from skyrl.train.trainer import RayPPOTrainer

config = SkyRLTrainConfig()
config.trainer.algorithm.advantage_estimator = "reinforce++"

def advantages(output):
    """Of sampled tokens: two rollouts of two each, the second's with a tool's output between them."""
    masks = [[1, 1], [1] + [0] * output + [1]]
    rewards = [[0.0] * (len(mask) - 1) + [reward] for mask, reward in zip(masks, (1.0, 0.0))]
    tokens = [[5] * len(mask) for mask in masks]
    tokenizer = SimpleNamespace(pad_token_id=0)
    rows = convert_prompts_responses_to_batch_tensors(tokenizer, [[1], [1]], tokens, rewards, masks)
    names = ("sequences", "attention_mask", "response_mask", "rewards", "loss_mask")
    batch = TrainingInputBatch({**dict(zip(names, rows)), "values": None})
    batch.metadata = {"uids": ["task", "task"], "avg_response_length": 0.0}
    RayPPOTrainer.compute_advantages_and_returns(SimpleNamespace(cfg=config, all_metrics={}), batch)
    return [round(value, 2) for value in batch["advantages"][batch["loss_mask"].bool()].tolist()]

for output in (0, 100, 1000):
    print(f"{output} tokens of output: {advantages(output)}")
PYTHON
found=$(venv/bin/python outputs.py 2>/dev/null | grep 'tokens of output')
wanted="0 tokens of output: [0.87, 0.87, -0.87, -0.87]
100 tokens of output: [7.11, 7.11, -0.14, -0.14]
1000 tokens of output: [22.37, 22.37, -0.04, -0.04]"
echo "SkyRL 0.3.0, advantages of sampled tokens:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
