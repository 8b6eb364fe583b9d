#!/usr/bin/env bash
# outlines-core 0.2.14 drops `minimum` and `maximum` without a word, takes a `pattern` for the whole string where JSON Schema looks for
# it anywhere in it, and makes no string with a control character: `\u001b` of a terminal's colours is not allowed, nor is U+0085 as it
# is. llguidance 1.7.6 does all four as the schema says.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q outlines-core==0.2.14 llguidance==1.7.6
cat >limits.py <<'PYTHON'
import json
import re
from llguidance import LLMatcher, LLTokenizer
from outlines_core.json_schema import build_regex_from_schema

def llguidance(schema, text):
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()

for schema, text in (
    ({"type": "integer", "minimum": 1, "maximum": 5}, "9"),
    ({"type": "string", "pattern": r"\.py$"}, '"a.py"'),
    ({"type": "string"}, '"\\u001b[0m"'),
    ({"type": "string"}, '"\x85"'),
):
    schema = json.dumps(schema)
    print(schema, ascii(text), bool(re.fullmatch(build_regex_from_schema(schema), text)), llguidance(schema, text))
PYTHON
found=$(venv/bin/python limits.py 2>/dev/null)
wanted='{"type": "integer", "minimum": 1, "maximum": 5} '"'9'"' True False
{"type": "string", "pattern": "\\.py$"} '"'\"a.py\"'"' False True
{"type": "string"} '"'\"\\\\u001b[0m\"'"' False True
{"type": "string"} '"'\"\\x85\"'"' False True'
echo "outlines-core 0.2.14, llguidance 1.7.6:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
