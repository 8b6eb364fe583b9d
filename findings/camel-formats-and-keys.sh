#!/usr/bin/env bash
# camel-ai 0.2.90: InternalPythonInterpreter, which runs the code of its EmbodiedAgent and, unless told otherwise, of its
# CodeExecutionToolkit, ignores the format in an f-string, and gives for a key that a dict does not have the value of a similar one:
# `prices["Total"]` is the `total`, where Python raises a KeyError. What it has not (`while`, slices, `and`) it refuses.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q --no-deps camel-ai==0.2.90
cat >interpret.py <<'PYTHON'
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

folder = Path(sysconfig.get_path("purelib"))
for name in "camel", "camel.interpreters":
    module = sys.modules[name] = ModuleType(name)  # without what its __init__ imports: clients of services
    module.__path__ = [str(folder.joinpath(*name.split(".")))]
from camel.interpreters.base import BaseInterpreter
from camel.interpreters.interpreter_error import InterpreterError

sys.modules["camel.interpreters"].BaseInterpreter = BaseInterpreter
sys.modules["camel.interpreters"].InterpreterError = InterpreterError
from camel.interpreters.internal_python_interpreter import InternalPythonInterpreter

prices = {"total": 12.5, "tax": 2}
for code in 'f"{2 / 3:.2f}"', 'f"{7:03d}"', 'f"{tax!r}"', 'prices["total"]', 'prices["Total"]', 'prices["taxes"]':
    try:
        python = eval(code, {"prices": prices, "tax": "2"})
    except KeyError as error:
        python = type(error).__name__
    interpreter = InternalPythonInterpreter()
    interpreter.execute('prices = {"total": 12.5, "tax": 2}\ntax = "2"')
    print(f"{code}: {interpreter.run(code, 'python')}, Python: {python}")
PYTHON
found=$(venv/bin/python interpret.py)
wanted='f"{2 / 3:.2f}": 0.6666666666666666, Python: 0.67
f"{7:03d}": 7, Python: 007
f"{tax!r}": 2, Python: '"'2'"'
prices["total"]: 12.5, Python: 12.5
prices["Total"]: 12.5, Python: KeyError
prices["taxes"]: 2, Python: KeyError'
echo "camel-ai 0.2.90:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
