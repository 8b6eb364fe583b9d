#!/usr/bin/env bash
# aider-chat 0.86.2, edit format "diff": an edit that takes all lines out of a file is taken for one that matched nothing, since the new text
# is empty, and is tried on the other files of the chat. One of them loses the lines, the named file keeps them, and the edit is a
# success. Where no other file has them, the model is told that its lines are not in the file.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps aider-chat==0.86.2
cat >edit.py <<'PYTHON'
import sys
import sysconfig
from pathlib import Path
from types import ModuleType, SimpleNamespace

folder = Path(sysconfig.get_path("purelib"))
for name in "aider", "aider.utils", "aider.coders", "aider.coders.base_coder":
    module = sys.modules[name] = ModuleType(name)  # without what they import: the clients of models
    module.__path__ = [str(folder.joinpath(*name.split(".")))]
sys.modules["aider"].utils = sys.modules["aider.utils"]
sys.modules["aider.coders.base_coder"].Coder = object
from aider.coders.editblock_coder import EditBlockCoder

def edit(**files):
    for name, text in files.items():
        Path(f"{name}.py").write_text(text)
    coder = EditBlockCoder()
    coder.fence = ("```", "```")
    coder.abs_fnames = {str(Path(f"{name}.py").resolve()) for name in files}
    coder.abs_root_path = lambda path: str(Path(path).resolve())
    coder.get_rel_fname = lambda path: Path(path).name
    coder.io = SimpleNamespace(read_text=lambda path: Path(path).read_text(), write_text=lambda path, text: Path(path).write_text(text))
    try:
        coder.apply_edits([("old.py", "import warnings\n", "")])
        print("success", {name: Path(f"{name}.py").read_text() for name in files})
    except ValueError as error:
        print(str(error).splitlines()[0], {name: Path(f"{name}.py").read_text() for name in files})

edit(old="import warnings\nimport sys\n")
edit(old="import warnings\n")
edit(old="import warnings\n", new="import warnings\nwarnings.warn('old')\n")
PYTHON
found=$(venv/bin/python edit.py)
wanted=$(cat <<'WANTED'
success {'old': 'import sys\n'}
# 1 SEARCH/REPLACE block failed to match! {'old': 'import warnings\n'}
success {'old': 'import warnings\n', 'new': "warnings.warn('old')\n"}
WANTED
)
echo "aider-chat 0.86.2:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
