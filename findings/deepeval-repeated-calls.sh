#!/usr/bin/env bash
# deepeval 4.3.1: ToolCorrectnessMetric takes a call for matched already where an equal one was, so that an agent that makes the two equal
# calls that are expected of it, say the tests before and after an edit, has done one of them: the very trajectory that is asked for
# scores 2/3, under the threshold of a task that wants all. With `should_consider_ordering` it scores 1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python deepeval==4.3.1 pydantic==2.14.4 openai==3.57.0
cat >score.py <<'PYTHON'
from deepeval.metrics import ToolCorrectnessMetric
from deepeval.models import DeepEvalBaseLLM
from deepeval.test_case import LLMTestCase, ToolCall

class NoModel(DeepEvalBaseLLM):
    def load_model(self): ...
    def generate(self, prompt): ...
    async def a_generate(self, prompt): ...
    def get_model_name(self): return "none"

def calls():
    return [ToolCall(name=name, input_parameters={"of": "app"}) for name in ("test", "edit", "test")]

for ordered in False, True:
    metric = ToolCorrectnessMetric(model=NoModel(), should_consider_ordering=ordered, async_mode=False)
    task = LLMTestCase(input="mend it", actual_output="done", tools_called=calls(), expected_tools=calls())
    print(f"ordering {ordered}:", round(metric.measure(task, _show_indicator=False), 3))
PYTHON
found=$(DEEPEVAL_TELEMETRY_OPT_OUT=1 venv/bin/python score.py)
wanted="ordering False: 0.667
ordering True: 1.0"
echo "deepeval 4.3.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
