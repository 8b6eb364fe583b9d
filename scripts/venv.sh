#!/usr/bin/env bash
# The Python environment from the lock file.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${ATROPOS_PYTHON:-}
if [ -z "$python" ]; then
  # That of the environment that is there; then the system's: distributions build theirs with profiles, which saves a
  # quarter of the CPU against pyenv's.
  used=$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2>/dev/null || true)
  for candidate in "$used" /usr/bin/python3.{11,12,13,14} python3.{11,12,13,14} python3; do
    if command -v "$candidate" >/dev/null 2>&1 \
      && "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
      python=$candidate; break
    fi
  done
fi
[ -n "$python" ] || { echo "Python 3.11, 3.12, 3.13 or 3.14 is needed (set ATROPOS_PYTHON to one)" >&2; exit 1; }
[ -e .venv ] || echo "installing the Python environment (a gigabyte, the first time)"
ATROPOS_PYTHON=$python bash scripts/uv.sh sync --frozen --quiet --all-extras --no-extra harbor --no-extra inspect --no-extra mini-swe-agent --no-extra nemo-gym --no-extra swerex --no-extra verifiers --python "$python"
# A sandbox server runs as a user that may not write here: without bytecode it would compile its libraries at each start.
.venv/bin/python -m compileall -q atropos \
  .venv/lib/python3*/site-packages/{aiohttp,aiosignal,aiohappyeyeballs,attr,frozenlist,idna,isal,multidict,propcache,pydantic,pydantic_core,annotated_types,typing_inspection,yarl} \
  .venv/lib/python3*/site-packages/{typing_extensions,pyseccomp}.py \
  || echo "bytecode could not be written; servers start a little slower" >&2
