#!/usr/bin/env bash
# lighteval 0.13.0: `avg@n` looks at the whole answer where `pass@k` looks at what is left of it without the reasoning: of the same four
# samples one says 0 and the other 1, or, where the right number stands in the thoughts alone, 1 and 0.
# The `maj@4` of its MATH tasks never reads their `normalize_pred`, so it compares whole solutions as text: right answers score 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python lighteval==0.13.0 torch==2.15.0 transformers==5.23.0 inspect-ai==0.3.285 datasets==5.2.0
cat >scores.py <<'PYTHON'
from lighteval.metrics.metrics import Metrics
from lighteval.models.model_output import ModelResponse
from lighteval.tasks.requests import Doc
from lighteval.tasks.tasks.math import math_algebra

def show(name, metric, gold, whole, left=None):
    answer = ModelResponse(text=[whole] * 4, text_post_processed=left and [left] * 4)
    print(name, float(metric.sample_level_fn.compute(doc=Doc(query="1 + 1?", choices=[gold], gold_index=0), model_response=answer)))

average, passed = {"n": 4}, {"k": 1, "n": 4}
reasoned = "<think>1 + 1</think>2", "2"
show("avg@4", Metrics.avg_at_n(average), "2", *reasoned)
show("pass@1", Metrics.pass_at_k(passed), "2", *reasoned)
unsure = "<think>So $\\boxed{2}$?</think>I can't tell.", "I can't tell."
show("avg@4 of math", Metrics.avg_at_n_math(average), "2", *unsure)
show("pass@1 of math", Metrics.pass_at_k_math(passed), "2", *unsure)
show("maj@4 of math:algebra", math_algebra.metrics[0], " The sum is $\\boxed{2}$.", "It is $\\boxed{2}$.")
PYTHON
found=$(HF_HUB_OFFLINE=1 venv/bin/python scores.py 2>/dev/null | grep '@')
wanted="avg@4 0.0
pass@1 1.0
avg@4 of math 1.0
pass@1 of math 0.0
maj@4 of math:algebra 0.0"
echo "lighteval 0.13.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
