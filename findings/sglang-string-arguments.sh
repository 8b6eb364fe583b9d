#!/usr/bin/env bash
# sglang 0.5.23, `--tool-call-parser deepseekv32`: a string argument loses the blanks and newlines around it, though the format says that
# it stands as it is (`string="true"`): a file that the model writes has no last newline, and the line that it wants to edit no indentation.
# With `glm45` the same answer has other arguments whole than streamed: the string 1.50 is "1.5" in one and "1.50" in the other.
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
import json
import sys
from pathlib import Path
from types import ModuleType

folder = Path(importlib.util.find_spec("sglang").origin).parent
for name in ("", ".srt", ".srt.function_call", ".srt.entrypoints", ".srt.entrypoints.openai"):
    module = sys.modules["sglang" + name] = ModuleType("sglang" + name)  # without what its __init__ imports: torch, kernels
    module.__path__ = [str(folder.joinpath(*name.split(".")))]
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.deepseekv32_detector import DeepSeekV32Detector
from sglang.srt.function_call.glm4_moe_detector import Glm4MoeDetector

parameters = {"type": "object", "properties": {"text": {"type": "string"}}}
tools = [Tool(function=Function(name="write", parameters=parameters))]

def deepseek(text):
    call = f'<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="text" string="true">{text}</｜DSML｜parameter>\n</｜DSML｜invoke>'
    return f"<｜DSML｜function_calls>\n{call}\n</｜DSML｜function_calls>"

def glm(text):
    return f"<tool_call>write\n<arg_key>text</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"

def whole(detector, answer):
    return detector().detect_and_parse(answer, tools).calls[0].parameters

def streamed(detector, answer):
    reader = detector()
    pieces = [call for character in answer for call in reader.parse_streaming_increment(character, tools).calls]
    return "".join(piece.parameters or "" for piece in pieces)

for name, detector, form, texts in (
    ("deepseekv32", DeepSeekV32Detector, deepseek, ("import sys\n", "    return 1")),
    ("glm45", Glm4MoeDetector, glm, ("1.50", "null", "true")),
):
    for text in texts:
        print(name, json.dumps(text), "whole:", whole(detector, form(text)), "streamed:", streamed(detector, form(text)))
PYTHON
found=$(venv/bin/python calls.py)
wanted='deepseekv32 "import sys\n" whole: {"text": "import sys"} streamed: {"text": "import sys"}
deepseekv32 "    return 1" whole: {"text": "return 1"} streamed: {"text": "return 1"}
glm45 "1.50" whole: {"text": "1.5"} streamed: {"text": "1.50"}
glm45 "null" whole: {"text": "None"} streamed: {"text": "null"}
glm45 "true" whole: {"text": "True"} streamed: {"text": "true"}'
echo "sglang 0.5.23:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
