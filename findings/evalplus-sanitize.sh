#!/usr/bin/env bash
# evalplus 0.3.1 keeps of an answer's module its imports, classes, first assignments and those functions that have a `return`: a helper that
# changes a list in place is gone, and so is a loop that fills a table. A right answer fails with a NameError or a wrong result.
# `evalplus.codegen` writes, and so `evalplus.evaluate` tests, what is left; nothing says what was taken out.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python tree-sitter==0.26.1 tree-sitter-python==0.25.0 appdirs==1.4.4 datasets==5.2.0 \
  multipledispatch==1.0.0 numpy==2.4.6 tempdir==0.7.1 termcolor==3.3.0 tqdm==4.70.1 wget==3.2 # what the module imports
venv/bin/uv pip install -q -p venv/bin/python --no-deps evalplus==0.3.1
cat >answers.py <<'PYTHON'
from evalplus.sanitize import sanitize

PLACE = """
def swap(row, i, j):
    row[i], row[j] = row[j], row[i]

def answer():
    row = [1, 2]
    swap(row, 0, 1)
    return row
"""
TABLE = """
SQUARES = set()
for n in range(10):
    SQUARES.add(n * n)

def answer():
    return 49 in SQUARES
"""
for code in PLACE, TABLE:
    for kept in code, sanitize(code, "answer"):
        names = {}
        exec(kept, names)
        try:
            print(names["answer"]())
        except NameError as error:
            print(repr(error))
PYTHON
found=$(venv/bin/python answers.py)
wanted="[2, 1]
NameError(\"name 'swap' is not defined\")
True
False"
echo "evalplus 0.3.1, as written and as sanitized:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
