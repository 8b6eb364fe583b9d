#!/usr/bin/env bash
# inspect-ai 0.3.285: in a Docker sandbox a command that ends with status 124 has "timed out after 600 seconds", one second after its
# start, since that is what the `timeout` around it would say; but `timeout 1 make` in an agent's or a scorer's own command says it, too.
# The model is told of a limit that it is far from, and a scorer that bounds its tests so gets an exception in place of a failed test.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python inspect-ai==0.3.285
cat >docker <<'SHELL'
#!/bin/sh
# `docker compose … exec … box COMMAND` runs the command here, with its own status
while [ "$1" != box ]; do shift; done
shift
exec "$@"
SHELL
chmod +x docker
cat >run.py <<'PYTHON'
import asyncio
from inspect_ai.util._sandbox.docker.docker import DockerSandboxEnvironment
from inspect_ai.util._sandbox.docker.util import ComposeProject

async def main():
    box = DockerSandboxEnvironment("box", ComposeProject("project", None, None, None, None), "/")
    for command in ("exit 3", "timeout 1 sleep 9"):
        try:
            ended = (await box.exec(["bash", "-c", command], timeout=600)).returncode
        except TimeoutError as error:
            ended = repr(error)
        print(f"{command}: {ended}")

asyncio.run(main())
PYTHON
found=$(PATH="$PWD:$PATH" venv/bin/python run.py)
wanted="exit 3: 3
timeout 1 sleep 9: TimeoutError('Command timed out after 600 seconds')"
echo "inspect-ai 0.3.285:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
