#!/usr/bin/env bash
# xgrammar 0.2.8 allows no escape in a string with `minLength`, `maxLength` or `pattern`: where a tool's `command` must not be empty,
# the model can write neither a quote nor a backslash nor a newline, and its logits are masked into another command. And a `pattern`
# holds for the whole string, not for a part as JSON Schema has it: with `\.py$` the only path is `.py`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q apache-tvm-ffi==0.1.15.post2 numpy pydantic transformers==5.19.0
venv/bin/pip install -q --no-deps xgrammar==0.2.8
cat >strings.py <<'PYTHON'
import json
import sys
from unittest.mock import MagicMock
import transformers
import tvm_ffi

sys.modules["torch"] = MagicMock()  # for masks alone: what the grammar allows is asked without
import xgrammar

end = 256
vocabulary = xgrammar.TokenizerInfo([bytes([byte]) for byte in range(end)] + [b"</s>"], stop_token_ids=[end])
compiler = xgrammar.GrammarCompiler(vocabulary)

def allowed(text, **limits):
    grammar = compiler.compile_json_schema(json.dumps({"type": "string", **limits}))
    matcher = xgrammar.GrammarMatcher(grammar)
    return all(matcher.accept_token(token) for token in (*json.dumps(text).encode(), end))

for limits in {}, {"minLength": 1}, {"maxLength": 4000}, {"pattern": "^[^;]*$"}:
    print(limits, *(allowed(text, **limits) for text in ("ls", 'echo "a"', "a\nb", "a\\b")))
print(*(allowed(text, pattern=r"\.py$") for text in (".py", "a.py")))
PYTHON
found=$(venv/bin/python strings.py 2>/dev/null)
wanted="{} True True True True
{'minLength': 1} True False False False
{'maxLength': 4000} True False False False
{'pattern': '^[^;]*$'} True False False False
True False"
echo "xgrammar 0.2.8:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
