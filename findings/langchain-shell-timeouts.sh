#!/usr/bin/env bash
# langchain 1.5.0: where a command takes longer than it may, the shell of ShellToolMiddleware gives none of what the command had printed, and
# ends itself with the command: the next one runs in a new shell, in the folder of the start and without the variables that were set.
# An agent whose build was too slow looks for its errors in vain, and then works in another folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python langchain==1.5.0 langchain-core==1.8.3 langgraph==1.2.24
cat >shell.py <<'PYTHON'
import os
from pathlib import Path
from langchain.agents.middleware.shell_tool import HostExecutionPolicy, ShellSession

os.mkdir("src")
shell = ShellSession(Path.cwd(), HostExecutionPolicy(), ("/bin/bash",), dict(os.environ))
shell.start()
for command in "cd src; MODE=fast", "basename $PWD; echo $MODE", "echo error: no such module; sleep 20", "basename $PWD; echo $MODE":
    ended = shell.execute(command, timeout=5)
    folder = ended.output.replace(Path.cwd().name, "FOLDER")
    print(f"{command}: {folder!r}, status {ended.exit_code}, timed out: {ended.timed_out}")
shell.stop(5)
PYTHON
found=$(venv/bin/python shell.py 2>/dev/null)
wanted='cd src; MODE=fast: '"''"', status 0, timed out: False
basename $PWD; echo $MODE: '"'src\nfast\n'"', status 0, timed out: False
echo error: no such module; sleep 20: '"''"', status None, timed out: True
basename $PWD; echo $MODE: '"'FOLDER\n\n'"', status 0, timed out: False'
echo "langchain 1.5.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
