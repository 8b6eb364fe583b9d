#!/usr/bin/env bash
# What CI and pre-commit run.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
command -v node >/dev/null || ATROPOS_SYSTEM_PACKAGES=nodejs bash scripts/system.sh # pyright would fetch one
ruff format --check .
ruff check .
said=$(lint-imports --no-cache 2>&1) || { echo "$said"; exit 1; }
pyright --pythonpath .venv/bin/python &  # beside those of the adapters, which take as long together
own=$!
trap 'kill "$own" 2>/dev/null || true' EXIT
bash scripts/peers.sh
if .peers/bin/python -c "import harbor" 2>/dev/null; then
  pyright -p scripts/pyright-peers.json
  pyright -p scripts/pyright-verifiers.json
  pyright -p scripts/pyright-kits.json
else
  echo "no Python 3.12, which harbor needs: the types of atropos/adapters are not checked" >&2
fi
wait "$own"
