#!/usr/bin/env bash
# lm-format-enforcer 0.11.3 takes an enum's text for its JSON: where a value has a newline the model can only write it as it is, which is no
# JSON, and a value with a quote cannot be written at all. An array without `maxItems` ends at 20 items, and an object takes no
# property beside those of its schema, though `additionalProperties` is true.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q interegular==0.3.3 packaging==26.3 pydantic==2.13.5 pyyaml==6.0.4
venv/bin/pip install -q --no-deps lm-format-enforcer==0.11.3
cat >enforce.py <<'PYTHON'
import json
from lmformatenforcer import JsonSchemaParser

def allowed(schema, text):
    parser = JsonSchemaParser(schema)
    for character in text:
        if character not in parser.get_allowed_characters():
            return False
        parser = parser.add_character(character)
    return parser.can_end()

def is_json(text):
    try:
        return bool(json.loads(text))
    except ValueError:
        return False

lines = {"type": "object", "properties": {"end": {"enum": ["a\nb", 'a"b']}}}
numbers = {"type": "array", "items": {"type": "integer"}}
some = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True}
for schema, text in (
    (lines, r'{"end": "a\nb"}'),
    (lines, '{"end": "a\nb"}'),
    (lines, r'{"end": "a\"b"}'),
    (lines, '{"end": "a"b"}'),
    (numbers, json.dumps([1] * 20)),
    (numbers, json.dumps([1] * 21)),
    (some, '{"a": 1, "b": 2}'),
):
    print(ascii(text[:20]), "JSON:", is_json(text), "allowed:", allowed(schema, text))
PYTHON
found=$(venv/bin/python enforce.py 2>/dev/null)
wanted=$(cat <<'WANTED'
'{"end": "a\\nb"}' JSON: True allowed: False
'{"end": "a\nb"}' JSON: False allowed: True
'{"end": "a\\"b"}' JSON: True allowed: False
'{"end": "a"b"}' JSON: False allowed: False
'[1, 1, 1, 1, 1, 1, 1' JSON: True allowed: True
'[1, 1, 1, 1, 1, 1, 1' JSON: True allowed: False
'{"a": 1, "b": 2}' JSON: True allowed: False
WANTED
)
echo "lm-format-enforcer 0.11.3:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
