#!/usr/bin/env bash
# gem-llm 0.1.0: MathEnv gives an answer one second to be graded, by the one process of its pool, which it does not end when the second is
# over: the next answers wait behind the slow one, their seconds pass, and right answers get 0 until it is through. One expression that
# takes sympy a minute (here a `sleep` stands for it) so costs up to sixty episodes their reward, as wrong ones, without a word.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python gem-llm==0.1.0 datasets==5.2.0 pylatexenc==2.10 # needs Python 3.10 or 3.11
cat >slow.py <<'PYTHON'
import time
from datasets import Dataset
from gem.envs.math_env import MathEnv

class Env(MathEnv):
    @staticmethod
    def check_correct(answer, truth):
        if "slow" in answer:
            time.sleep(30)
        return MathEnv.check_correct(answer, truth)

env = Env(dataset=Dataset.from_list([{"problem": "6 * 7?", "answer": "42"}] * 9))
for said in ("It is \\boxed{42}.", "It is \\boxed{42}.", "A slow one: \\boxed{41}.", "It is \\boxed{42}.", "It is \\boxed{42}."):
    env.reset()
    print(said, "reward", env.step(said)[1])
env.mp_pool.terminate()
PYTHON
found=$(venv/bin/python slow.py 2>/dev/null)
wanted='It is \boxed{42}. reward 1.0
It is \boxed{42}. reward 1.0
A slow one: \boxed{41}. reward 0
It is \boxed{42}. reward 0
It is \boxed{42}. reward 0'
echo "gem-llm 0.1.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
