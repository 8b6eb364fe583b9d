#!/usr/bin/env bash
# mistral-common 1.13.1, tokeniser v3 (Nemo's tekken): what a tool printed is read as JSON where it is JSON and written anew, so `1.50`
# is in the prompt as 1.5 and `1e3` as 1000.0; and the tools stand before the last user message alone, so that with the next one all
# tokens from the first message on are others. Token ids kept from one turn are no prefix of the next turn's prompt.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mistral-common==1.13.1
cat >prompts.py <<'PYTHON'
import re
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

tool = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}
call = {"id": "aaaaaaaaa", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
tokenizer = MistralTokenizer.v3(is_tekken=True)

def encoded(messages):
    return tokenizer.encode_chat_completion(ChatCompletionRequest.from_openai(messages=messages, tools=[tool]))

for printed in "1.50", "1e3", "v1.50":
    messages = [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "aaaaaaaaa", "name": "bash", "content": printed},
    ]
    one = encoded(messages)
    print(printed, "->", re.search(r'"content": ([^,]*),', one.text)[1])
two = encoded([*messages, {"role": "assistant", "content": "done"}, {"role": "user", "content": "second"}])
same = next(n for n, pair in enumerate(zip(one.tokens, two.tokens)) if pair[0] != pair[1])
print(f"the same at the start: {same} token")
PYTHON
found=$(venv/bin/python prompts.py)
wanted='1.50 -> 1.5
1e3 -> 1000.0
v1.50 -> "v1.50"
the same at the start: 1 token'
echo "mistral-common 1.13.1:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
