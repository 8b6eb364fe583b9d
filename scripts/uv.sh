#!/usr/bin/env bash
# uv, with the arguments that are given: one that runs, on PATH or as a module of ATROPOS_PYTHON (else of the Python that .venv
# was made from); pip installs it there where there is none.
set -euo pipefail
PATH=$PATH:$HOME/.local/bin # where pip puts it for a user
uv --version >/dev/null 2>&1 && exec uv "$@"
venv=$(dirname "$0")/../.venv/bin/python
python=${ATROPOS_PYTHON:-$("$venv" -c 'import sys; print(sys._base_executable)' 2>/dev/null || echo python3)}
if ! "$python" -m uv --version >/dev/null 2>&1; then
  echo "installing uv with pip" >&2
  "$python" -m pip install --quiet --root-user-action=ignore uv 2>/dev/null \
    || "$python" -m pip install --quiet --user --break-system-packages uv \
    || { echo "uv could not be installed with pip; see the uv documentation, then run make again" >&2; exit 1; }
fi
exec "$python" -m uv "$@"
