#!/usr/bin/env bash
# What trainers beside atroposlib's do with an env's groups: `trainers.sh [PYTEST ARGUMENTS]`. Their packages, torch among them, are
# installed once, some gigabytes, into ~/.cache/atropos/trainers.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$HOME/.cache/atropos/trainers
ready=$folder/ready-$(sha256sum scripts/trainers.sh uv.lock | sha256sum | cut -c1-16)
export VIRTUAL_ENV=$folder
install() { bash scripts/uv.sh pip install --quiet "$@"; }
if [ ! -e "$ready" ]; then
  rm -rf "$folder"
  bash scripts/uv.sh venv --quiet --python .venv/bin/python "$folder"
  bash scripts/uv.sh export --quiet --frozen --all-extras --no-extra harbor --no-extra inspect --no-extra mini-swe-agent \
    --no-extra nemo-gym --no-extra swerex --no-extra verifiers --no-hashes --no-emit-project >"$folder/ours.txt"
  install -r "$folder/ours.txt" torch trl==1.16.0 accelerate tinker==0.38.0 chz blobfile \
    ray loguru jaxtyping codetiming cachetools
  # They pin engines and packages of a GPU host, which their functions here don't use, and another antlr; SkyRL says that it needs
  # Python 3.12.
  install --no-deps hydra-core==1.3.8 omegaconf==2.3.1 antlr4-python3-runtime==4.9.3 tensordict torchdata peft orjson pyvers cloudpickle tml-renderers tinker-cookbook==0.6.1 verl==0.9.1 skyrl-gym==0.4.0
  install --no-deps --python-version 3.12 --target "$("$folder/bin/python" -c 'import site; print(site.getsitepackages()[0])')" skyrl==0.3.0
  touch "$ready"
fi
.venv/bin/pyright -p scripts/pyright-trainers.json --pythonpath "$folder/bin/python"
PYTHONPATH=$PWD exec "$folder/bin/python" -m pytest -p no:cacheprovider -p no:xdist --timeout 1800 -W ignore tests/trainers/{packages,sandboxes,environments}.py "$@"
