#!/usr/bin/env bash
# openpipe-art 0.5.18 (ART) with its TinkerNativeBackend learns from the last turn of a trajectory alone: the tokens of every Choice before
# it are given as prompt, with a mask of 0. An agent that calls five tools and then answers is trained on its answer, and never on a
# call. Nothing says so: there is a datum for each trajectory.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python torch==2.15.0 transformers==5.23.0 tinker==0.38.0 \
  aiohttp fastapi fastuuid nest-asyncio openai pillow polars python-dotenv setproctitle tblib tiktoken uvicorn # these modules import them
venv/bin/uv pip install -q -p venv/bin/python --no-deps openpipe-art==0.5.18 tinker-cookbook==0.6.1 litellm==1.80.0
cat >turns.py <<'PYTHON'
from art import Trajectory, TrajectoryGroup
from art.tinker_native.data import trajectory_groups_to_datums
from openai.types.chat.chat_completion import Choice
from tinker_cookbook import renderers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = {letter: n for n, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"<end>": 256}
plain = Tokenizer(models.BPE(letters, []))
plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<end>", eos_token="<end>")

def sampled(text):
    tokens = [{"token": f"token_id:{n}", "logprob": -1.0, "top_logprobs": []} for n in tokenizer.encode(text)]
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "finish_reason": "stop", "message": message, "logprobs": {"content": tokens}}
    return Choice.model_validate(choice)

def trajectory(reward, *turns):
    messages = [{"role": "user", "content": "task"}]
    for turn in turns:
        messages += [sampled(turn), {"role": "user", "content": "output"}]
    return Trajectory(messages_and_choices=messages, reward=reward)

group = TrajectoryGroup([trajectory(1.0, "ls", "cat a", "done"), trajectory(0.0, "pwd", "rm a", "oops")])
for datum in trajectory_groups_to_datums([group], renderers.get_renderer("role_colon", tokenizer), tokenizer):
    targets, mask = (datum.loss_fn_inputs[name].data for name in ("target_tokens", "mask"))
    learned = tokenizer.decode([int(token) for token, counts in zip(targets, mask) if counts])
    print("of", repr(tokenizer.decode([int(token) for token in targets])), "learns", repr(learned))
PYTHON
found=$(venv/bin/python turns.py 2>/dev/null)
wanted="of 'User: task\n\nAssistant: ls\n\nUser: output\n\nAssistant: cat a\n\nUser: output\n\nAssistant:done' learns 'done'
of 'User: task\n\nAssistant: pwd\n\nUser: output\n\nAssistant: rm a\n\nUser: output\n\nAssistant:oops' learns 'oops'"
echo "openpipe-art 0.5.18:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
