#!/usr/bin/env bash
# verifiers 0.4.0: `compare_stdout_results`, for tasks whose programs print their answer, takes output of numbers alone for right where each
# is within 0.001 of the expected one, however small that is, and as a number: 0 is a right answer for 0.0009, so a program that computes
# small probabilities may print zeros, `10` is right where the bits 0010 are asked for, and a matrix may come in rows of another length.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python verifiers==0.4.0
cat >compare.py <<'PYTHON'
import verifiers.v1 as vf

for printed, expected in (("0", "0.0009"), ("10", "0010"), ("1 2 3\n4 5 6", "1 2\n3 4\n5 6"), ("1000.01", "1000"), ("Yes", "YES")):
    print(f"{printed!r} for {expected!r}: {'right' if vf.compare_stdout_results(printed, expected) else 'wrong'}")
PYTHON
found=$(venv/bin/python compare.py)
wanted="'0' for '0.0009': right
'10' for '0010': right
'1 2 3\n4 5 6' for '1 2\n3 4\n5 6': right
'1000.01' for '1000': wrong
'Yes' for 'YES': wrong"
echo "verifiers 0.4.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
