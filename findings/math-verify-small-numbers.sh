#!/usr/bin/env bash
# math-verify 0.9.0 takes different small numbers for equal: decimals that are the same to six places after the point (not to six
# digits), and numbers with a power of ten from about 1e-20 down, whatever they are. The electron's mass in kilograms is a right
# answer to the question for Planck's constant.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q math-verify==0.9.0 latex2sympy2_extended==1.11.0
cat >answers.py <<'PYTHON'
from math_verify import parse, verify

for gold, answer in (
    ("$0.00000003$", "$0.00000005$"),
    (r"$3\times10^{-8}$", r"$5\times10^{-8}$"),
    (r"$6.63\times10^{-34}$", r"$9.11\times10^{-31}$"),
    (r"$7\times10^{-34}$", r"$9\times10^{-31}$"),
):
    print(gold, answer, verify(parse(gold), parse(answer)))
PYTHON
found=$(venv/bin/python answers.py)
wanted='$0.00000003$ $0.00000005$ True
$3\times10^{-8}$ $5\times10^{-8}$ False
$6.63\times10^{-34}$ $9.11\times10^{-31}$ True
$7\times10^{-34}$ $9\times10^{-31}$ True'
echo "math-verify 0.9.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
