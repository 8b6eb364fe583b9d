#!/usr/bin/env bash
# Every test, on real parts, side by side; arguments go to pytest. ATROPOS_BACKENDS says which backends take part (default: all of
# local,docker,nomad; just "local" needs no engine). Engines that don't run are started for the tests and ended after.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH="$PWD/.venv/bin:$PATH:$HOME/.local/bin" # where pip puts uv for a user, which some tests run
# Container images often set it; then each of some hundred processes compiles its libraries anew, two seconds of CPU an env.
unset PYTHONDONTWRITEBYTECODE
unset PYTHONUNBUFFERED # nor do users have that one, without which a pipe gets what was printed at the end
PATH=$PATH:/usr/sbin:/sbin # where some programs are, which an ordinary user may not have
# asked as the tests ask, which are skipped where there is none
if ! python -c 'import sys; from atropos.api.external.browser import browser_available as lacks
from atropos.api.settings import BrowserSettings; sys.exit(bool(lacks(BrowserSettings())))'; then
  ATROPOS_SYSTEM_PACKAGES=chromium bash scripts/system.sh \
    || echo "no Chromium: the tests of the browser tools are skipped" >&2
fi
ATROPOS_SYSTEM_PACKAGES="debootstrap skopeo docker-registry prometheus openssh-server" bash scripts/system.sh \
  || echo "not all of debootstrap, skopeo, docker-registry, prometheus and openssh-server: tests of fresh machines, of images, of monitoring/ or of ssh are skipped" >&2
if [ -n "${CI:-}" ]; then # elsewhere they would stay, and some start services: their tests are skipped
  RUNLEVEL=1 ATROPOS_SYSTEM_PACKAGES="firefox-esr gdb mariadb-server nginx-light postgresql rr strace sudo tmux valgrind" \
    bash scripts/system.sh || echo "not all real programs could be installed: their tests are skipped" >&2
fi
bash scripts/peers.sh || echo "not all packages of adapters could be installed: their tests are skipped" >&2
backends=${ATROPOS_BACKENDS:-local,docker,nomad}
exec python scripts/engines.py "$backends" python scripts/every_test.py "$@"
