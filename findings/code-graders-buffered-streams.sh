#!/usr/bin/env bash
# skyrl-gym 0.4.0 (its `lcb` environment) and verl 0.9.1 (`prime_code`): they run a program in their own process with text streams in
# place of stdin and stdout, which have no `buffer`. Right programs that read `sys.stdin.buffer` or write `sys.stdout.buffer`, as fast ones
# do, are wrong answers; `open(0)` is one for verl alone. An exit status other than 0 after the right output is right for both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps skyrl-gym==0.4.0 verl==0.9.1
venv/bin/pip install -q --no-warn-conflicts numpy==2.4.6 pandas==3.1.1 requests==2.34.2
cat >check.py <<'PYTHON'
import glob
import sys

sys.path.append(glob.glob("venv/lib/python3*/site-packages/verl/utils/reward_score")[0])  # without what verl's own __init__ imports
from prime_code import compute_score as verl
from skyrl_gym.envs.lcb.livecodebench import compute_score as skyrl

programs = {
    "sys.stdin": "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
    "input()": "print(int(input()) + int(input()))",
    "sys.stdin.buffer": "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))",
    "sys.stdout.buffer": "import sys\nsys.stdout.buffer.write(b'%d\\n' % sum(map(int, sys.stdin.read().split())))",
    "open(0)": "print(sum(map(int, open(0).read().split())))",
    "exit status 1": "print(int(input()) + int(input()))\nraise SystemExit(1)",
}
given, wanted = "20\n40\n", "60\n"
for name, program in programs.items():
    answer = f"```python\n{program}\n```"
    by_skyrl = skyrl(answer, [{"input": given, "output": wanted, "testtype": "stdin"}])[1]
    by_verl = verl(answer, {"inputs": [given], "outputs": [wanted]}, continuous=True)[0]
    print(f"{name}: {float(by_skyrl)} {float(by_verl)}", flush=True)
PYTHON
found=$(venv/bin/python check.py 2>/dev/null | grep -E '^[a-z].*: [01]\.0 [01]\.0$')
wanted="sys.stdin: 1.0 1.0
input(): 1.0 1.0
sys.stdin.buffer: 0.0 0.0
sys.stdout.buffer: 0.0 0.0
open(0): 1.0 0.0
exit status 1: 1.0 1.0"
echo "skyrl-gym 0.4.0 and verl 0.9.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
