#!/usr/bin/env bash
# pydantic-monty 1.4.0, a Python of its own for agents' code, refuses what it has not (yield, del) and differs silently in small things:
# `|=` makes a new set, so that a caller's set stays as it was; a generator expression has run before it is asked; `__len__` doesn't
# count for truth; and round(2.675, 2) is 2.68.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q pydantic-monty==1.4.0
cat >run.py <<'PYTHON'
from pydantic_monty import Monty

texts = {
    "|=": "def add(seen):\n    seen |= {2}\nkept = {1}\nadd(kept)\nlen(kept)",
    "generator": "calls = []\nlater = (calls.append(n) for n in range(3))\nlen(calls)",
    "truth": "class Empty:\n    def __len__(self):\n        return 0\nbool(Empty())",
    "round": "round(2.675, 2)",
}
with Monty() as pool:
    for name, text in texts.items():
        with pool.checkout() as session:
            *lines, last = text.splitlines()
            python = {}
            exec("\n".join(lines), python)
            print(f"{name}: {session.feed_run(text)}, in Python {eval(last, python)}")
PYTHON
found=$(venv/bin/python run.py)
wanted="|=: 1, in Python 2
generator: 3, in Python 0
truth: True, in Python False
round: 2.68, in Python 2.67"
echo "pydantic-monty 1.4.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
