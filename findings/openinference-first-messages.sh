#!/usr/bin/env bash
# A span of OpenTelemetry's Python SDK 1.45.2 has room for 128 attributes and, being full, drops the oldest, where the specification
# drops what comes last. openinference-instrumentation-openai 0.1.66 takes two to four a message: after 25 tool calls the span has
# lost the system prompt, the task, the tools and `input.value`, and lists messages from the 17th on. It says so in the log alone.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q openinference-instrumentation-openai==0.1.66 openai==3.57.0 opentelemetry-sdk==1.45.2
cat >span.py <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from openai import OpenAI
from openinference.instrumentation.openai import OpenAIInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "done"}}
        answer = {"id": "a", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        pass

server = HTTPServer(("127.0.0.1", 0), Model)
threading.Thread(target=server.serve_forever, daemon=True).start()
spans = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
OpenAIInstrumentor().instrument(tracer_provider=provider)
client = OpenAI(api_key="none", base_url=f"http://127.0.0.1:{server.server_port}/v1")
for turns in 3, 25:
    messages = [{"role": "system", "content": "You mend code."}, {"role": "user", "content": "Mend it."}]
    for n in range(turns):
        call = {"id": f"call{n}", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call{n}", "content": "output"})
    tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
    client.chat.completions.create(model="m", messages=messages, tools=[tool])
    names = spans.get_finished_spans()[-1].attributes
    kept = {int(name.split(".")[2]) for name in names if name.startswith("llm.input_messages.")}
    rest = [name in names for name in ("input.value", "llm.tools.0.tool.json_schema")]
    print(f"{len(messages)} messages, {len(names)} attributes: message {min(kept)} to {max(kept)}, input and tools {rest}")
PYTHON
found=$(venv/bin/python span.py 2>/dev/null)
wanted="8 messages, 37 attributes: message 0 to 7, input and tools [True, True]
52 messages, 128 attributes: message 16 to 51, input and tools [False, False]"
echo "opentelemetry-sdk 1.45.2:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
