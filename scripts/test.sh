#!/usr/bin/env bash
# Every test, on real parts; arguments go to pytest. ATROPOS_BACKENDS says which backends take part (default: all of
# local,docker,nomad; just "local" needs no engine). Engines that don't run are started for the tests and ended after.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH"
backends=${ATROPOS_BACKENDS:-local,docker,nomad}
exec python scripts/engines.py "$backends" pytest "$@"
