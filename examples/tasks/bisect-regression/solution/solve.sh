#!/bin/bash
set -e
cd /workspace/calc
git bisect start main "$(git rev-list --max-parents=0 main)"
git bisect run bash -c '[ "$(python3 calc.py "- 2 + 5")" = 3 ]' > /tmp/bisect.log
git rev-parse refs/bisect/bad > /workspace/culprit.txt
git bisect reset
python3 - <<'PY'
text = open("calc.py").read()
text = text.replace("    left = number(words)\n", '    if words and words[0] == "-":\n        words.pop(0)\n        left = -number(words)\n    else:\n        left = number(words)\n', 1)
open("calc.py", "w").write(text)
PY
rm -rf __pycache__
git commit -q -am "Accept a sign at the start again"
cat /workspace/culprit.txt
git status --short
