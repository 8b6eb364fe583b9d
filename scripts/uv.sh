#!/usr/bin/env bash
# uv, with the arguments that are given: one that runs, on PATH or as a module of a Python; pip installs it where there is none.
# `uv.sh --find` installs nothing: it fails where there is neither uv nor pip.
set -euo pipefail
PATH=$PATH:$HOME/.local/bin # where pip puts it for a user
if uv --version >/dev/null 2>&1; then
  [ "${1:-}" != --find ] || exit 0
  exec uv "$@"
fi
venv=$(dirname "$0")/../.venv/bin/python
own=$("$venv" -c 'import sys; print(sys._base_executable)' 2>/dev/null || true)
python_with() { # python_with MODULE: prints the first Python that has it
  local candidate
  for candidate in "${ATROPOS_PYTHON:-$own}" python3 /usr/bin/python3; do
    if [ -n "$candidate" ] && "$candidate" -m "$1" --version >/dev/null 2>&1; then
      echo "$candidate"
      return
    fi
  done
  return 1
}
if ! python=$(python_with uv); then
  python=$(python_with pip) || { echo "neither uv nor pip is installed; see the uv documentation, then run make again" >&2; exit 1; }
  [ "${1:-}" != --find ] || exit 0
  echo "installing uv with pip" >&2
  pip=("$python" -m pip install --quiet --root-user-action=ignore)
  "${pip[@]}" uv 2>/dev/null || "${pip[@]}" --user --break-system-packages uv \
    || { echo "uv could not be installed with pip; see the uv documentation, then run make again" >&2; exit 1; }
fi
[ "${1:-}" != --find ] || exit 0
exec "$python" -m uv "$@"
