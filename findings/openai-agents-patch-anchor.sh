#!/usr/bin/env bash
# openai-agents 0.24.0: `apply_diff` ignores an anchor (`@@ def …`) that the file does not have, and patches the first place where the
# lines fit, here another function; of two such places it takes the first without a word. Nothing tells the agent.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q openai-agents==0.24.0
cat >patch.py <<'PYTHON'
from agents import apply_diff

text = "def first():\n    x = 1\n    return x\n\ndef second():\n    x = 1\n    return x\n"
change = "     x = 1\n-    return x\n+    return 2\n"
for anchor in "@@ def second():", "@@ def missing():", "@@":
    patched = apply_diff(text, f"{anchor}\n{change}")
    print(f"{anchor} -> {patched[: patched.index('return 2')].count('def ')}")
PYTHON
found=$(venv/bin/python patch.py)
wanted="@@ def second(): -> 2
@@ def missing(): -> 1
@@ -> 1"
echo "openai-agents 0.24.0, which function was patched:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
