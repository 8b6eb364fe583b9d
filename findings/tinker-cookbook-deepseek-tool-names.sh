#!/usr/bin/env bash
# tinker-cookbook 0.6.1: the renderer for DeepSeek V3 reads a tool call only where the tool's name is letters, digits and
# underscores. A call of `run-tests`, as DeepSeek's own API and MCP servers name tools, stays in the answer's text; beside
# another call it is gone from the text, too, and is no unparsed call either: the environment runs one call of two, and
# the next prompt, which is made of the parsed message, lacks tokens that the model sampled. No error says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python tinker==0.38.0 pillow==12.0.0
venv/bin/uv pip install -q -p venv/bin/python --no-deps tinker-cookbook==0.6.1
cat >parse.py <<'PYTHON'
import sys
from types import ModuleType

import transformers

sys.modules["torch"] = ModuleType("torch")  # the renderer needs it for training data alone
sys.modules["torch"].Tensor = list
from tinker_cookbook.renderers.deepseek_v3 import DeepSeekV3DisableThinkingRenderer

class Letters:
    """A token for each letter, and one for the end."""

    def encode(self, text, add_special_tokens=False):
        return [0] if text.startswith("<｜end") else [ord(letter) for letter in text]

    def decode(self, tokens):
        return "".join(map(chr, tokens))

def call(name):
    return "<｜tool▁call▁begin｜>" + name + "<｜tool▁sep｜>{}<｜tool▁call▁end｜>"

renderer = DeepSeekV3DisableThinkingRenderer(Letters())
for names in ("read_file", "run_tests"), ("read_file", "run-tests"), ("run-tests",):
    answer = "Now.<｜tool▁calls▁begin｜>" + "".join(map(call, names)) + "<｜tool▁calls▁end｜>"
    message, end = renderer.parse_response([*Letters().encode(answer), 0])
    calls = [call.function.name for call in message.get("tool_calls", [])]
    text = "whole" if message["content"] == answer else repr(message["content"])
    print(f"{', '.join(names)}: {calls}, unparsed {len(message.get('unparsed_tool_calls', []))}, text {text}, {end}")
PYTHON
found=$(venv/bin/python parse.py 2>/dev/null)
wanted="read_file, run_tests: ['read_file', 'run_tests'], unparsed 0, text 'Now.', stop_sequence
read_file, run-tests: ['read_file'], unparsed 0, text 'Now.', stop_sequence
run-tests: [], unparsed 0, text whole, stop_sequence"
echo "tinker-cookbook 0.6.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
