#!/usr/bin/env bash
# strands-agents-tools 0.8.10: the `editor` tool keeps a file's text from the first look at it and makes each edit on that text, so that
# what a formatter, a `git checkout` or any other command has written since is undone, and the edit is a success. It also leaves a
# copy of the file beside it, NAME.bak, which an agent's patch then holds.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python strands-agents-tools==0.8.10 strands-agents==1.62.0
printf 'x=1\n' >work.py
cat >edit.py <<'PYTHON'
from pathlib import Path
from strands_tools.editor import editor

path = Path("work.py").resolve()
editor(command="view", path=str(path))
path.write_text("x = 1\ny = 2\n")  # as another command would
print(editor(command="str_replace", path=str(path), old_str="x=1", new_str="x=3")["status"])
PYTHON
found=$(BYPASS_TOOL_CONSENT=true STRANDS_TOOL_CONSOLE_MODE=disabled venv/bin/python edit.py 2>/dev/null)
found="$found: $(head work.py*)"
wanted="success: ==> work.py <==
x=3

==> work.py.bak <==
x = 1
y = 2"
echo "strands-agents-tools 0.8.10:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
