"""A small real tokenizer: byte-level BPE with ChatML's special tokens, saved as a Hugging Face folder.

The folder `tokenizer/` beside this file is committed; `python -m examples.policy.tokenizer OUT` builds it again from
the repository's own text. Byte-level means that every text survives encode and decode unchanged.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).with_name("tokenizer")
VOCABULARY = 2048
IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions. Their signatures, within <tools></tools>:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call answer a JSON object within <tool_call></tool_call>:\\n<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message['role'] == 'system' and loop.first %}
{%- elif message['role'] == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message['content'] %}{{- message['content'] }}{%- endif %}
{%- if message['tool_calls'] %}
{%- for call in message['tool_calls'] %}
{%- if not loop.first or message['content'] %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' }}
{%- if call['function']['arguments'] is string %}{{- call['function']['arguments'] }}{%- else %}{{- call['function']['arguments'] | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- elif message['role'] == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message['content'] + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""  # noqa: E501


def build(folder: Path, corpus: list[str]) -> None:
    """Train on `corpus` and write tokenizer.json and tokenizer_config.json into `folder`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": IM_END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131_072,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def repository_text() -> list[str]:
    """The repository's own Python, Markdown and shell files, in a fixed order."""
    root = Path(__file__).resolve().parents[2]
    kinds = {".py", ".md", ".sh"}
    files = sorted(
        path
        for top in ("atropos", "examples", "docs")
        for path in (root / top).rglob("*")
        if path.suffix in kinds and path.is_file()
    )
    return [path.read_text(errors="replace") for path in [root / "README.md", *files]]


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER, repository_text())
