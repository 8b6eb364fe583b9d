#!/usr/bin/env bash
# smolagents 1.26.0: the interpreter that runs an agent's Python by default never runs a loop's `else`, ignores decorators, and makes a
# default argument anew in each call. What it has not (yield, match) it refuses; these three it lets pass, with another result.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q smolagents==1.26.0
cat >run.py <<'PYTHON'
from smolagents.local_python_executor import LocalPythonExecutor

texts = {
    "else": "found = 'set by no one'\nfor n in 4, 6:\n    if n % 2:\n        break\nelse:\n    found = 'no odd number'\nresult = found",
    "decorator": "def twice(f):\n    return lambda n: 2 * f(n)\n@twice\ndef same(n):\n    return n\nresult = same(5)",
    "default": "def kept(n, memo={}):\n    memo[n] = n\n    return len(memo)\nkept(1)\nresult = kept(2)",
}
for name, text in texts.items():
    python = {}
    exec(text, python)
    executor = LocalPythonExecutor([])
    executor.send_tools({})
    print(f"{name}: {executor(text + chr(10) + 'result').output!r}, in Python {python['result']!r}")
PYTHON
found=$(venv/bin/python run.py)
wanted="else: 'set by no one', in Python 'no odd number'
decorator: 5, in Python 10
default: 1, in Python 2"
echo "smolagents 1.26.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
