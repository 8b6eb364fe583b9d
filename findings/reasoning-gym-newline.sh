#!/usr/bin/env bash
# reasoning-gym 0.1.25 gives an answer that holds the right one the share of its characters that are right: `-4` and a newline is
# 2/3 in basic_arithmetic, and "The answer is -4" an eighth, so the same sentence earns more where the number is longer. chain_sum,
# sums as well, strips the newline.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q reasoning-gym==0.1.25
cat >scores.py <<'PYTHON'
import reasoning_gym

for name in "basic_arithmetic", "chain_sum":
    questions = reasoning_gym.create_dataset(name, size=1, seed=1)
    entry = questions[0] | {"answer": "-4"}
    said = "-4", "-4\n", "The answer is -4"
    print(name, *(round(questions.score_answer(answer, entry), 3) for answer in said))
PYTHON
found=$(venv/bin/python scores.py)
wanted="basic_arithmetic 1.0 0.667 0.125
chain_sum 1.0 1.0 0.125"
echo "reasoning-gym 0.1.25:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
