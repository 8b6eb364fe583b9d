#!/usr/bin/env bash
# openhands-tools 1.58.2: where `str_replace` does not find the old text it looks for it without the blanks around it, and puts the new text
# in with its own: the line comes to stand behind two indentations, and a Python file no longer parses, though the edit is a success.
# An edit of a symbolic link puts a file in its place and leaves its target as it was, so that what imports the target has no fix.
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
cat >edit.py <<'PYTHON'
from pathlib import Path
from openhands.tools.file_editor import file_editor

def edit(path, old, new):
    return "error" if file_editor(command="str_replace", path=str(Path.cwd() / path), old_str=old, new_str=new).is_error else "success"

Path("tabs.py").write_text("if True:\n\tx = 1\n\ty = 2\n")
print("tabs.py:", edit("tabs.py", "    x = 1\n", "    x = 3\n"), repr(Path("tabs.py").read_text()))
Path("target.py").write_text("x = 1\n")
Path("link.py").symlink_to("target.py")
print("link.py:", edit("link.py", "x = 1", "x = 3"), repr(Path("link.py").read_text()), "a link:", Path("link.py").is_symlink())
print("target.py:", repr(Path("target.py").read_text()))
PYTHON
found=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python edit.py 2>/dev/null | grep '\.py: ')
wanted="tabs.py: success 'if True:\n\t    x = 3\n\n\ty = 2\n'
link.py: success 'x = 3\n' a link: False
target.py: 'x = 1\n'"
echo "openhands-tools 1.58.2:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
