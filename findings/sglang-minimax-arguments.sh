#!/usr/bin/env bash
# sglang 0.5.23, `--tool-call-parser minimax-m2`: each argument whose schema allows null arrives as null, whatever the model wrote, and so
# does a string that is `None` or `nil`. A tool with `path: str | None = None`, as pydantic describes it, is called without its path.
# Two calls that end in one piece of a stream (`--stream-interval`, speculative decoding) both come with the second's arguments.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python pydantic==2.13.5 openai==3.57.0 msgspec==0.22.0 numpy==2.4.6 orjson==3.13.0 \
  partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 requests==2.34.2 ipython==9.18.1 tqdm==4.70.1 # these modules import them
venv/bin/uv pip install -q -p venv/bin/python --no-deps sglang==0.5.23
cat >calls.py <<'PYTHON'
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from pydantic import create_model

folder = Path(importlib.util.find_spec("sglang").origin).parent
for name in ("", ".srt", ".srt.function_call", ".srt.entrypoints", ".srt.entrypoints.openai"):
    module = sys.modules["sglang" + name] = ModuleType("sglang" + name)  # without what its __init__ imports: torch, kernels
    module.__path__ = [str(folder.joinpath(*name.split(".")))]
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.minimax_m2 import MinimaxM2Detector

arguments = create_model("search", pattern=(str, ...), path=(str | None, None), limit=(int | None, None))
tools = [Tool(function=Function(name="search", parameters=arguments.model_json_schema()))]

def written(*calls):
    lines = ["<minimax:tool_call>"]
    for call in calls:
        lines += ['<invoke name="search">', *(f'<parameter name="{key}">{value}</parameter>' for key, value in call.items()), "</invoke>"]
    return "\n".join(lines + ["</minimax:tool_call>"])

for call in ({"pattern": "def main", "path": "src", "limit": 5}, {"pattern": "None"}):
    print("whole:", MinimaxM2Detector().detect_and_parse(written(call), tools).calls[0].parameters)
pieces = MinimaxM2Detector().parse_streaming_increment(written({"pattern": "one"}, {"pattern": "two"}), tools).calls
for call in (0, 1):
    print("streamed:", "".join(piece.parameters or "" for piece in pieces if piece.tool_index == call))
PYTHON
found=$(venv/bin/python calls.py)
wanted='whole: {"pattern": "def main", "path": null, "limit": null}
whole: {"pattern": null}
streamed: {"pattern": "two"}
streamed: {"pattern": "two"}'
echo "sglang 0.5.23, minimax-m2:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
