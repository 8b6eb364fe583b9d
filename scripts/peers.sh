#!/usr/bin/env bash
# The packages that adapters serve, from the lock file, in an environment of their own: .peers. Harbor needs Python 3.12.
set -euo pipefail
cd "$(dirname "$0")/.."
python=
for candidate in python3.12 python3.13 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python python3.11 python3.14 python3; do
  if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 15))' 2>/dev/null; then
    python=$(command -v "$candidate"); break
  fi
done
[ -n "$python" ] || { echo "no Python from 3.11 to 3.14" >&2; exit 1; }
uv=(bash scripts/uv.sh)
UV_PROJECT_ENVIRONMENT=.peers "${uv[@]}" sync --frozen --quiet --no-default-groups --python "$python" \
  --extra testing --extra harbor --extra inspect --extra mini-swe-agent --extra swerex
# NeMo Gym's pins exclude the others'; Ray and MLflow, which its command line needs, are a gigabyte.
UV_PROJECT_ENVIRONMENT=.peers/nemo-gym "${uv[@]}" sync --frozen --quiet --no-default-groups --python "$python" --extra testing --extra nemo-gym
# The newer one in the lock, which has terminals and endpoints, says that it needs a newer Python; its sandbox API doesn't, and needs
# few of its dependencies.
"${uv[@]}" export --frozen --quiet --no-default-groups --no-hashes --no-annotate --extra nemo-gym |
  grep -oE '^(nemo-gym|omegaconf|antlr4-python3-runtime)==[0-9.]+' | sort -V | awk -F== '{ newest[$1] = $0 } END { for (name in newest) print newest[name] }' \
    >.peers/nemo-gym.txt
"${uv[@]}" pip install --quiet --no-deps --python-version 3.13.14 --python .peers/bin/python --target .peers/share/nemo-gym -r .peers/nemo-gym.txt
# Harbor's `--env e2b` needs these two beside it.
[ -e .peers/share/harbor-e2b/e2b-2.63.0.dist-info ] ||
  "${uv[@]}" pip install --quiet --python .peers/bin/python --target .peers/share/harbor-e2b e2b==2.63.0 dockerfile-parse==2.0.1
# verifiers' pins exclude most others'.
UV_PROJECT_ENVIRONMENT=.peers/verifiers "${uv[@]}" sync --frozen --quiet --no-default-groups --python "$python" --extra testing --extra verifiers
# Kits for agents, which have no extra: whoever uses one has it. Their pins exclude some of the others'.
kits=(deepagents==0.7.32 google-adk==2.13.0 openai-agents==0.24.0 pydantic-ai-slim==2.68.0)
ready=.peers/kits/ready-$(cat pyproject.toml <(echo "$python" "${kits[@]}") | sha256sum | cut -c1-16)
if [ ! -e "$ready" ]; then
  rm -rf .peers/kits
  "${uv[@]}" venv --quiet --python "$python" .peers/kits
  "${uv[@]}" pip install --quiet --python .peers/kits/bin/python -r pyproject.toml --extra testing "${kits[@]}"
  touch "$ready"
fi
# The oldest SDK that docs/adapters/e2b.md names; the newest is in .venv.
if [ ! -x .peers/e2b-2.7.0/bin/python ]; then
  "${uv[@]}" venv --quiet --python "$python" .peers/e2b-2.7.0
  "${uv[@]}" pip install --quiet --python .peers/e2b-2.7.0/bin/python e2b==2.7.0
fi
# What builds on that SDK, langchain-e2b with the deepagents that it takes.
clients=(e2b==2.63.0 e2b-code-interpreter==2.11.5 langchain-e2b==0.0.6 deepagents==0.6.12 openai-agents==0.24.0 pytest==9.2.0 pytest-asyncio==1.5.0)
ready=.peers/e2b-clients/ready-$(echo "$python" "${clients[@]}" | sha256sum | cut -c1-16)
if [ ! -e "$ready" ]; then
  rm -rf .peers/e2b-clients
  "${uv[@]}" venv --quiet --python "$python" .peers/e2b-clients
  "${uv[@]}" pip install --quiet --python .peers/e2b-clients/bin/python "${clients[@]}"
  touch "$ready"
fi
# npm's: the oldest version that the page names, and the newest; the tests ask for the newest.
if npm=$(command -v npm) && node -e 'process.exit(parseInt(process.versions.node) < 20 ? 1 : 0)' 2>/dev/null; then
  for version in 2.14.1 2.51.0; do
    [ -e .peers/npm/$version/node_modules/e2b ] ||
      "$npm" install --silent --no-audit --no-fund --prefix .peers/npm/$version e2b@$version ||
      { echo "npm's e2b could not be had: its tests are skipped" >&2; break; }
  done
fi
# SWE-ReX's tests come with its source distribution alone; without it they are skipped.
version=$(.peers/bin/python -c 'from importlib.metadata import version; print(version("swe-rex"))')
if [ ! -d ".peers/share/swe-rex-$version" ]; then
  sources=$(mktemp -d)
  trap 'rm -rf "$sources"' EXIT
  if "${uv[@]}" run --quiet --no-project --python "$python" --with pip --with setuptools \
    python -m pip download --quiet --no-deps --no-binary swe-rex --no-build-isolation -d "$sources" "swe-rex==$version"
  then
    mkdir -p ".peers/share/swe-rex-$version"
    tar -xzf "$sources"/swe_rex-*.tar.gz --strip-components 1 -C ".peers/share/swe-rex-$version"
    ln -sfn "swe-rex-$version" .peers/share/swe-rex
  else
    echo "the source distribution of swe-rex could not be had: its own tests are skipped" >&2
  fi
fi
# As in scripts/venv.sh: servers of these packages' pools can't write bytecode.
for site in .peers{,/verifiers,/kits}/lib/python3*/site-packages; do
  "${site%/lib/*}/bin/python" -m compileall -q atropos \
    "$site"/{aiohttp,aiosignal,aiohappyeyeballs,attr,frozenlist,idna,multidict,propcache,pydantic,pydantic_core,annotated_types,typing_inspection,yarl} \
    "$site"/{typing_extensions,pyseccomp}.py || echo "bytecode could not be written; servers start a little slower" >&2
done
