#!/usr/bin/env bash
# OpenHands' own packages against slots: `openhands.sh [PYTEST ARGUMENTS]`. The SDK and its tools go into one environment, its agent server into a copy of a
# minimal Debian, which is the slots' base; a gigabyte, made once as root, in ~/.cache/atropos/openhands.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$HOME/.cache/atropos/openhands
packages=(openhands-sdk==1.58.2 openhands-tools==1.58.2 openhands-agent-server==1.58.2)
ready=$folder/ready-$(sha256sum scripts/openhands.sh pyproject.toml | sha256sum | cut -c1-16)
if [ ! -e "$ready" ]; then
  rm -rf "$folder"
  for python in python3.1{2,3,4} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[234]*/bin/python; do
    "$python" -c '' 2>/dev/null && break # which the packages need
  done
  bash scripts/uv.sh venv --quiet --python "$python" "$folder/venv"
  bash scripts/uv.sh pip install --quiet --python "$folder/venv/bin/python" -r pyproject.toml --extra testing "${packages[@]:0:2}"
  PYTHONPATH=$PWD .venv/bin/python - "$folder/root" <<'PYTHON'
import subprocess, sys
from tests.debian import base
with base("trixie") as kept:
    subprocess.run(["cp", "-a", kept / "root", sys.argv[1]], check=True)
PYTHON
  bash scripts/uv.sh pip install --quiet --python-version 3.13 --target "$folder/root/opt/openhands" "${packages[@]}"
  touch "$ready"
fi
.venv/bin/pyright -p scripts/pyright-openhands.json --pythonpath "$folder/venv/bin/python"
export OPENHANDS_ROOT=$folder/root OPENHANDS_SUPPRESS_BANNER=1 LITELLM_LOCAL_MODEL_COST_MAP=True PYTHONPATH=$PWD
exec "$folder/venv/bin/python" -m pytest -p no:cacheprovider -o addopts= -W ignore tests/adapters/openhands.py "$@"
