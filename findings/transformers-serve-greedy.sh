#!/usr/bin/env bash
# `transformers serve` 5.19.0 takes a request's `temperature` and decodes greedily all the same, where the model's
# generation_config.json has no `do_sample`: six answers at temperature 2 are one text. With `do_sample` in the file they differ.
# A client that trains on what the server sampled sees one trajectory a group, and no error.
set -euo pipefail
folder=$(mktemp -d)
server=
trap '[ -z "$server" ] || { kill "$server"; wait "$server" || true; }; rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q "transformers[serving]==5.19.0" torch==2.13.0 accelerate requests # `serve` itself imports the last one
cat >model.py <<'PYTHON'
import json
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

words = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<end>": 256}
plain = Tokenizer(models.BPE(words, []))
plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
template = "{% for message in messages %}{{ message.content }}{% endfor %}"
set_seed(1)
shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
model = LlamaForCausalLM(LlamaConfig(vocab_size=257, eos_token_id=256, bos_token_id=None, **shape))
for name, more in {"plain": {}, "sampling": {"do_sample": True}}.items():
    model.save_pretrained(name)
    PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", chat_template=template).save_pretrained(name)
    with open(f"{name}/generation_config.json", "w") as file:
        json.dump({"eos_token_id": 256, **more}, file)
PYTHON
venv/bin/python model.py 2>/dev/null
cat >ask.py <<'PYTHON'
import json, sys, time, urllib.error, urllib.request

port, model = sys.argv[1:]
body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "temperature": 2.0, "max_tokens": 16}
request = urllib.request.Request(
    f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
)
def answer():
    for _ in range(120):
        try:
            with urllib.request.urlopen(request) as response:
                return json.load(response)["choices"][0]["message"]["content"]
        except urllib.error.HTTPError:
            raise
        except OSError:
            time.sleep(1)
    sys.exit("the server did not start")
print(len({answer() for _ in range(6)}))
PYTHON
export HF_HUB_OFFLINE=1
port=$(venv/bin/python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
different() {
  venv/bin/transformers serve "$folder/$1" --device cpu --host 127.0.0.1 --port "$port" >"$1.log" 2>&1 &
  server=$!
  venv/bin/python ask.py "$port" "$folder/$1" >"$1.texts"
  kill "$server"
  wait "$server" || true
  server=
}
different plain
different sampling
plain=$(cat plain.texts) sampling=$(cat sampling.texts)
echo "transformers 5.19.0: $plain text of 6 at temperature 2, and $sampling with do_sample in generation_config.json"
[ "$plain" = 1 ] && [ "$sampling" -gt 1 ]
