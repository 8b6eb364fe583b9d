#!/usr/bin/env bash
# openhands-tools 1.58.2: `view` of a file of more than 16,000 characters cuts its middle out and numbers what is left, so that each line
# after the gap has a wrong number: of 1000 lines the last is number 372. An agent that takes the numbers at their word inserts
# its code, or looks with `view_range`, hundreds of lines too early. The notice in the gap says nothing of it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
for python in python3 python3.{12,13,14} "$HOME"/.pyenv/versions/3.1[2-4]*/bin/python; do
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null && break # it needs 3.12
done
"$python" -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python openhands-tools==1.58.2 openhands-sdk==1.58.2
cat >view.py <<'PYTHON'
from pathlib import Path
from openhands.tools.file_editor import file_editor

path = Path("settings.py").resolve()
path.write_text("".join(f"value_{number} = {number}  # a line like many others\n" for number in range(1, 1001)))
lines = file_editor(command="view", path=str(path)).text.splitlines()
print("\n".join(lines[1:3] + ["..."] + lines[-2:]))
file_editor(command="insert", path=str(path), insert_line=int(lines[-1].split()[0]), new_str="last = True")
print("inserted after the last line: line", path.read_text().split("\n").index("last = True") + 1, "of 1001")
PYTHON
found=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python view.py 2>/dev/null | grep -A9 value_1)
wanted="     1	value_1 = 1  # a line like many others
     2	value_2 = 2  # a line like many others
...
   371	value_999 = 999  # a line like many others
   372	value_1000 = 1000  # a line like many others
inserted after the last line: line 373 of 1001"
echo "openhands-tools 1.58.2:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
