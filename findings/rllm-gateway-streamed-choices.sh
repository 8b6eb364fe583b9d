#!/usr/bin/env bash
# rllm-model-gateway 0.1.0 records a streamed answer of two samples (n=2) as one: their tokens alternate in completion_token_ids, as
# the chunks came. A streamed tool call is recorded as one call a chunk, and only the first of them has a name. Neither is an error:
# the trainer gets a completion that no model sampled.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q rllm-model-gateway==0.1.0
cat >record.py <<'PYTHON'
from rllm_model_gateway.data_process import build_trace_record_from_chunks

def chunk(index, token, **delta):
    return {"choices": [{"index": index, "delta": delta, "token_ids": [token]}]}

def recorded(*chunks):
    return build_trace_record_from_chunks("session", {"messages": []}, list(chunks), 1.0)

two = recorded(
    chunk(0, 1, content="yes"), chunk(1, 8, content="no"), chunk(0, 2, content=", sure"), chunk(1, 9, content=", never")
)
print(two.response_message["content"], two.completion_token_ids)
call = recorded(
    chunk(0, 1, tool_calls=[{"index": 0, "id": "call", "function": {"name": "bash", "arguments": ""}}]),
    chunk(0, 2, tool_calls=[{"index": 0, "function": {"arguments": '{"command": '}}]),
    chunk(0, 3, tool_calls=[{"index": 0, "function": {"arguments": '"ls"}'}}]),
)
print([called["function"] for called in call.response_message["tool_calls"]])
PYTHON
found=$(venv/bin/python record.py)
wanted="yesno, sure, never [1, 8, 2, 9]
[{'name': 'bash', 'arguments': ''}, {'arguments': '{\"command\": '}, {'arguments': '\"ls\"}'}]"
echo "rllm-model-gateway 0.1.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
