#!/usr/bin/env bash
# ragas 0.4.3: ToolCallAccuracy, which by its own words and its warning compares the calls that both have and takes off
# for the rest, scores 0 as soon as one call of five is missing, or a sixth is made, in either order. An argument that
# the reference doesn't have costs nothing: `rm` with `recursive` is right where it was not asked for. And values are
# compared as Python prints them: 1 is right for "1", 1.0 is wrong for 1, and so is an object whose keys are in another
# order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q pydantic==2.14.4
venv/bin/pip install -q --no-deps ragas==0.4.3
cat >score.py <<'PYTHON'
import asyncio
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

folder = Path(sysconfig.get_path("purelib"))
for name in "ragas", "ragas.metrics", "ragas.metrics.collections", "ragas.metrics.collections.tool_call_accuracy":
    module = sys.modules[name] = ModuleType(name)  # without what its __init__ imports: clients of models
    module.__path__ = [str(folder.joinpath(*name.split(".")))]
base = sys.modules["ragas.metrics.collections.base"] = ModuleType("base")
base.BaseMetric = type("BaseMetric", (), {"__init__": lambda self, name: None})  # this metric needs no model
from ragas.messages import AIMessage, ToolCall
from ragas.metrics.collections.tool_call_accuracy.metric import ToolCallAccuracy

def score(made, wanted, **how):
    made, wanted = ([ToolCall(name=name, args=args) for name, args in calls] for calls in (made, wanted))
    return asyncio.run(ToolCallAccuracy(**how).ascore([AIMessage(content="", tool_calls=made)], wanted)).value

five = [("read", {"path": path}) for path in "abcde"]
print("4, 5 and 6 calls of 5:", score(five[:4], five), score(five, five), score([*five, five[0]], five))
print("4 of 5 in any order:", score(five[:4], five, strict_order=False))
print("one argument more:", score([("rm", {"path": "a", "recursive": True})], [("rm", {"path": "a"})]))
for made, wanted in (1, "1"), (1.0, 1), ({"from": 1, "to": 2}, {"to": 2, "from": 1}):
    print(f"{made!r} for {wanted!r}:", score([("look", {"at": made})], [("look", {"at": wanted})]))
PYTHON
found=$(venv/bin/python score.py 2>/dev/null)
wanted="4, 5 and 6 calls of 5: 0.0 1.0 0.0
4 of 5 in any order: 0.0
one argument more: 1.0
1 for '1': 1.0
1.0 for 1: 0.0
{'from': 1, 'to': 2} for {'to': 2, 'from': 1}: 0.0"
echo "ragas 0.4.3:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
