#!/usr/bin/env bash
# litellm 1.105.7: `stream_chunk_builder` makes one answer of a stream's two samples (n=2), their pieces in turn, and drops the
# log-probabilities, which each piece of the stream had; that the second sample was cut off is lost, too. Whoever records streamed
# rollouts with it gets texts that no model wrote, with no logprobs to train on. The same request without `stream` has it all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python litellm==1.105.7
cat >stream.py <<'PYTHON'
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import litellm

litellm.suppress_debug_info = True

def logprobs(*words):
    return {"content": [{"token": word, "logprob": -0.5, "bytes": None, "top_logprobs": []} for word in words]}

class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = {"id": "answer", "created": 1, "model": "model", "object": "chat.completion"}
        texts = ("two four", "three five")
        choices = [{"index": index, "message": {"role": "assistant", "content": text}, "finish_reason": ("stop", "length")[index],
                    "logprobs": logprobs(*text.split())} for index, text in enumerate(texts)]
        body = json.dumps(answer | {"choices": choices})
        if request.get("stream"):
            pieces = [{"index": index, "delta": {"content": word + " "}, "finish_reason": None, "logprobs": logprobs(word)}
                      for words in zip(*(text.split() for text in texts)) for index, word in enumerate(words)]
            pieces += [{"index": index, "delta": {}, "finish_reason": ("stop", "length")[index]} for index in (0, 1)]
            chunks = [json.dumps(answer | {"object": "chat.completion.chunk", "choices": [piece]}) for piece in pieces]
            body = "".join(f"data: {chunk}\n\n" for chunk in chunks + ["[DONE]"])
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if request.get("stream") else "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *rest):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
threading.Thread(target=server.serve_forever, daemon=True).start()

def ask(stream):
    return litellm.completion("hosted_vllm/model", [{"role": "user", "content": "go"}], api_base=f"http://127.0.0.1:{server.server_port}",
                              api_key="none", n=2, logprobs=True, stream=stream)

def show(name, answer):
    for choice in answer.choices:
        known = getattr(choice, "logprobs", None)
        print(f"{name}: {choice.message.content.strip()!r}, {choice.finish_reason}, logprobs {len(known.content) if known else None}")

show("whole", ask(False))
chunks = list(ask(True))
print("pieces with logprobs:", sum(bool(getattr(chunk.choices[0], "logprobs", None)) for chunk in chunks if chunk.choices))
show("streamed", litellm.stream_chunk_builder(chunks))
server.shutdown()
PYTHON
found=$(LITELLM_LOCAL_MODEL_COST_MAP=True venv/bin/python stream.py 2>/dev/null)
wanted="whole: 'two four', stop, logprobs 2
whole: 'three five', length, logprobs 2
pieces with logprobs: 4
streamed: 'two three four five', stop, logprobs None"
echo "litellm 1.105.7:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
