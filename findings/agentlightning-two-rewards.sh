#!/usr/bin/env bash
# agentlightning 0.3.0: TracerTraceToTriplet, its default, gives a call of the model the first reward behind it, by its
# own words. Where two rewards follow, say a part's and then the whole task's, the second goes to the call before: the
# last call keeps the part's, which the trainer takes for the rollout's, and the whole one's is the reward of an earlier
# step. A link to a response, with which emit_reward says what a reward is for, counts for nothing: two linked rewards
# arrive exchanged.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python agentops==0.4.21 fastapi==0.165.0 opentelemetry-exporter-otlp==1.45.2
venv/bin/uv pip install -q -p venv/bin/python --no-deps agentlightning==0.3.0
cat >rewards.py <<'PYTHON'
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

folder = Path(sysconfig.get_path("purelib"))
for name in "", ".adapter", ".emitter", ".store", ".tracer", ".utils":
    name = f"agentlightning{name}"
    module = sys.modules[name] = ModuleType(name)  # without what its __init__ imports: servers and trainers
    module.__path__ = [str(folder.joinpath(*name.split(".")))]
from agentlightning.adapter.triplet import TracerTraceToTriplet
from agentlightning.emitter.reward import emit_reward
from agentlightning.utils.otel import make_link_attributes
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import set_span_in_context

def rollout(*events):
    """The reward of each response; an event is a response's id, a reward, or a reward and the id it is linked to."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("rollout")
    root = tracer.start_span("rollout", start_time=10**9)
    for time, event in enumerate(events, 2):
        name, attributes = "openai.chat.completion", {"gen_ai.response.id": event}
        if not isinstance(event, str):
            reward, *to = event if isinstance(event, tuple) else (event,)
            link = make_link_attributes({"gen_ai.response.id": to[0]}) if to else None
            emitted = emit_reward(reward, attributes=link, propagate=False)
            name, attributes = emitted.name, emitted.attributes
        start = time * 10**9  # nanoseconds
        tracer.start_span(name, set_span_in_context(root), start_time=start, attributes=attributes).end(start + 10**8)
    root.end((len(events) + 2) * 10**9)
    steps = TracerTraceToTriplet().adapt(spans.get_finished_spans())
    return {step.metadata["response_id"]: step.reward for step in steps}

print("a reward a call:", rollout("first", 0.1, "second", 0.2))
print("two at the end:", rollout("first", "second", 0.1, 1.0))
print("linked:", rollout("first", "second", (0.1, "first"), (1.0, "second")))
PYTHON
found=$(venv/bin/python rewards.py 2>/dev/null)
wanted="a reward a call: {'first': 0.1, 'second': 0.2}
two at the end: {'first': 1.0, 'second': 0.1}
linked: {'first': 1.0, 'second': 0.1}"
echo "agentlightning 0.3.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
