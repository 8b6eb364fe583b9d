#!/usr/bin/env bash
# swe-rex 1.4.0, the shell of SWE-agent, joins the lines of a command with ` ; `, so that a line that ends in `&` is a syntax error and
# nothing of the command runs, where bash runs it all. An agent that starts a server and asks it in one call is told that its shell is
# wrong; on one line it works.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps swe-rex==1.4.0 bashlex==0.18 pexpect==4.9.0 ptyprocess rich pygments markdown-it-py mdurl \
  pydantic==2.14.3 pydantic-core==2.50.4 annotated-types typing-extensions typing-inspection
cat >shell.py <<'PYTHON'
import asyncio
import subprocess
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
from swerex.runtime.local import LocalRuntime

async def main():
    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest(startup_timeout=60))
    for command in ("sleep 0 &\necho ready", "sleep 0 & echo ready"):
        plain = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        seen = await runtime.run_in_session(BashAction(command=command, timeout=60, check="ignore"))
        last = [line for line in seen.output.splitlines() if line and line[0] != "["][-1] # a notice of a job has [1]
        print(f"{command!r}: bash {plain.stdout!r}, swe-rex {last!r}")
    await runtime.close()

asyncio.run(main())
PYTHON
found=$(venv/bin/python shell.py 2>/dev/null)
wanted="'sleep 0 &\\necho ready': bash 'ready\\n', swe-rex \"bash: syntax error near unexpected token \`;'\"
'sleep 0 & echo ready': bash 'ready\\n', swe-rex 'ready'"
echo "swe-rex 1.4.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
