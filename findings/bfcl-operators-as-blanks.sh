#!/usr/bin/env bash
# bfcl-eval 2026.3.23: where an argument is a string, the checker of calls leaves out of both sides not only blanks but also
# `, . / - _ * ^`: a formula with another operator, the negative number, ten times the number and another path are right answers. `+` and
# `:` count, and so do the parts' order and a list's.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps bfcl-eval==2026.3.23
cat >check.py <<'PYTHON'
import sys
from types import ModuleType

models = sys.modules["bfcl_eval.constants.model_config"] = ModuleType("model_config")  # without the clients of all models
models.MODEL_CONFIG_MAPPING = {}
from bfcl_eval.constants.enums import Language
from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

function = [{"name": "call", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}]
for given, wanted in (("3*x", "3^x"), ("x-2", "x/2"), ("x+2", "x-2"), ("-5", "5"), ("1.5", "15"), ("src/main.py", "src_main.py"), ("10:30", "1030")):
    answer = [{"call": {"text": [wanted]}}]
    print(given, "for", wanted, ast_checker(function, [{"call": {"text": given}}], answer, Language.PYTHON, "simple", "model")["valid"])
PYTHON
found=$(venv/bin/python check.py)
wanted="3*x for 3^x True
x-2 for x/2 True
x+2 for x-2 False
-5 for 5 True
1.5 for 15 True
src/main.py for src_main.py True
10:30 for 1030 False"
echo "bfcl-eval 2026.3.23:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
