#!/usr/bin/env bash
# langchain 1.5.0: the shell of ShellToolMiddleware knows a command's end by a line of its own, which it doesn't see where the command's
# output ends without a newline, as `printf`, `curl` and `jq -j` leave it. The command has then "timed out" (after 30 seconds by default),
# its output is lost, though it was whole at once, and the new shell has neither the folder nor the variables of the old one.
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
for command in "cd src; echo v1.2", "basename $PWD", "printf v1.2", "basename $PWD":
    ended = shell.execute(command, timeout=5)
    folder = ended.output.replace(Path.cwd().name, "FOLDER")
    print(f"{command}: {folder!r}, status {ended.exit_code}, timed out: {ended.timed_out}")
shell.stop(5)
PYTHON
found=$(venv/bin/python shell.py 2>/dev/null)
wanted="cd src; echo v1.2: 'v1.2\n', status 0, timed out: False
basename \$PWD: 'src\n', status 0, timed out: False
printf v1.2: '', status None, timed out: True
basename \$PWD: 'FOLDER\n', status 0, timed out: False"
echo "langchain 1.5.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
