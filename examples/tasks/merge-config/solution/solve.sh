#!/bin/bash
set -e
cd /workspace
cat > merge.py <<'PY'
import json
import sys


def merge(base, over):
    result = dict(base)
    for key, value in over.items():
        if key.endswith("+"):
            name = key[:-1]
            old = result.get(name, [])
            if not isinstance(old, list) or not isinstance(value, list):
                raise ValueError(f"{key}: not a list")
            result[name] = old + value
        elif value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            old = result.get(key)
            result[key] = merge(old if isinstance(old, dict) else {}, value)
        else:
            result[key] = value
    return result


merged = {}
for name in sys.argv[1:]:
    try:
        with open(name, encoding="utf-8") as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("the top is not an object")
        merged = merge(merged, content)
    except (OSError, ValueError) as problem:
        print(f"merge.py: {name}: {problem}", file=sys.stderr)
        sys.exit(1)
print(json.dumps(merged, indent=2, sort_keys=True, ensure_ascii=False))
PY
python3 merge.py base.json local.json
