#!/usr/bin/env bash
# dulwich 1.2.21 sees no change of the executable bit alone: after `chmod +x` of a tracked script its status is clean and
# `porcelain.add()` of the whole tree stages nothing, where git, with core.filemode as dulwich itself set it, says modified. A patch
# taken so lacks the agent's chmod.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q dulwich==1.2.21
cat >status.py <<'PYTHON'
import os
from dulwich import porcelain

porcelain.init("tree")
os.chdir("tree")
with open("run.sh", "w") as file:
    file.write("#!/bin/sh\n")
porcelain.add(".", ["run.sh"])
porcelain.commit(".", b"first", author=b"a <a@example.com>", committer=b"a <a@example.com>")
os.chmod("run.sh", 0o755)
status = porcelain.status(".")
porcelain.add(".")
print("unstaged", status.unstaged, "staged after add", porcelain.status(".").staged["modify"])
PYTHON
found=$(venv/bin/python status.py)
git="$(git -C tree config core.filemode), $(git -C tree status --short)"
echo "dulwich 1.2.21: $found; git: $git"
[ "$found" = "unstaged [] staged after add []" ] && [ "$git" = "true,  M run.sh" ]
