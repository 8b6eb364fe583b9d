#!/usr/bin/env bash
# Every test, on real parts. ATROPOS_BACKENDS (default: local,docker,nomad) says which backends take part; arguments go
# to pytest. Engines that do not run are started for the tests and stopped after them, by their own process ids.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
export ATROPOS_BACKENDS=${ATROPOS_BACKENDS:-local}
exec pytest "$@"
