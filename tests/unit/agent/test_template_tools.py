"""Suffixes with tools and with thinking: equal to the whole conversation's rendering, or different as documented.

The templates are shortened from what Qwen3, Llama 3.1, Mistral v3 and DeepSeek R1 publish: tools told at the place and
in the form that each uses, tool results in its own role, thinking of earlier turns removed where it removes it.
"""

from __future__ import annotations

import re

import pytest
from transformers import AutoTokenizer

from atropos.agent import AgentConfig, Outcome
from atropos.envs.hermes.dialect import OpenAIDialect
from atropos.tools import ToolCall, ToolResult
from atropos.tools.parsers import get_parser
from examples.policy.tokenizer import FOLDER

QWEN3 = (
    "{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endif %}{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'tool' %}"
    "{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}"
    "{%- elif m.role == 'assistant' %}{%- set c = m.content %}"
    "{%- if '</think>' in c and loop.index0 < ns.last %}{%- set c = c.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>assistant\\n' + c + '<|im_end|>\\n' }}"
    "{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
LLAMA31 = (
    "{{- '<|begin_of_text|>' }}{%- for m in messages %}"
    "{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}"
    "{%- if loop.first and tools %}{%- for t in tools %}{{- t | tojson + '\\n' }}{%- endfor %}{%- endif %}"
    "{{- m.content + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
MISTRAL3 = (
    "{{- '<s>' }}{%- set ns = namespace(last=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- if tools and loop.index0 == ns.last %}"
    "{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- else %}{{- m.content + '</s>' }}{%- endif %}{%- endfor %}"
)
DEEPSEEK_R1 = (
    "{{- '<|bos|>' }}{%- if tools %}{{- tools | tojson }}{%- endif %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '<|User|>' + m.content + '<|Assistant|>' }}"
    "{%- elif m.role == 'tool' %}{{- '<|tool_output|>' + m.content + '<|tool_end|><|Assistant|>' }}"
    "{%- else %}{%- set c = m.content %}{%- if '</think>' in c %}{%- set c = c.split('</think>')[-1] %}{%- endif %}"
    "{{- c + '<|eos|>' }}{%- endif %}{%- endfor %}"
)
SPECIAL = {
    "qwen3": (QWEN3, []),
    "llama3.1": (LLAMA31, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]),
    "mistral3": (MISTRAL3, ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]),
    "deepseek-r1": (
        DEEPSEEK_R1,
        ["<|bos|>", "<|eos|>", "<|User|>", "<|Assistant|>", "<|tool_output|>", "<|tool_end|>"],
    ),
}
TOOLS = [{"type": "function", "function": {"name": "terminal", "description": "d", "parameters": {"type": "object"}}}]
THOUGHT = "<think>\nI look é\n</think>\n\n"
CALL = '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'


def rendered(name: str, later: list[dict[str, str]], *, thinking: bool) -> tuple[str, str]:
    """The text of the tokens turn by turn, and of the whole conversation by the template."""
    template, specials = SPECIAL[name]
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    tokenizer.chat_template = template
    dialect = OpenAIDialect(tokenizer, TOOLS, "hermes")
    renderer = dialect._renderer
    thought = THOUGHT if thinking else ""
    messages = [{"role": "user", "content": "count the files"}]
    ids = renderer.prompt(messages)
    end = renderer.placeholder("")
    for said, answer in zip([thought + CALL, thought + "seven", "bye"], [*later, None], strict=False):
        sampled = [*tokenizer(said, add_special_tokens=False)["input_ids"], *end]
        assert renderer.text(sampled) == said
        ids += sampled
        messages.append({"role": "assistant", "content": said})
        if answer is None:
            break
        ids += dialect.following([answer], sampled)
        messages.append(answer)
    whole = tokenizer.apply_chat_template(messages, tokenize=False, tools=TOOLS)
    return tokenizer.decode(ids).rstrip("\n"), whole.rstrip("\n")


RESULT = {"role": "tool", "tool_call_id": "a", "name": "terminal", "content": '{"output": "a\\nb é 日本"}'}
MORE = {"role": "user", "content": "and now?"}


@pytest.mark.parametrize("name", SPECIAL)
def test_turn_by_turn_equals_whole(name):
    ours, whole = rendered(name, [RESULT], thinking=False)
    assert ours == whole
    assert "terminal" in ours.partition("count the files")[0] + ours
    assert RESULT["content"] in ours


@pytest.mark.parametrize("name", ["qwen3", "llama3.1", "mistral3"])
def test_thinking_stays_by_calls(name):
    ours, whole = rendered(name, [RESULT], thinking=True)
    assert ours == whole
    assert ours.count("I look") == 2


@pytest.mark.parametrize(("name", "later"), [("qwen3", [RESULT, MORE]), ("deepseek-r1", [RESULT])])
def test_only_old_thinking_differs(name, later):
    """The model was given what it had said, and the trainer gets just that: history is never rewritten."""
    ours, whole = rendered(name, later, thinking=True)
    assert "I look" in ours
    assert "I look" not in whole
    cleaned = re.sub(r"<think>.*?</think>\s*", "", ours, flags=re.DOTALL)
    assert cleaned == re.sub(r"\n\n(?=<tool_call>|seven)", "", whole)


def test_mistral_repeats_the_tools():
    ours, whole = rendered("mistral3", [RESULT, MORE], thinking=False)
    assert (ours.count("[AVAILABLE_TOOLS]"), whole.count("[AVAILABLE_TOOLS]")) == (2, 1)
    first = ours[: ours.index("[INST]")].removeprefix("<s>")
    assert ours.replace(first, "", 1) == whole


STRICT = (
    "{%- set ns = namespace(index=0) %}{%- for m in messages %}{%- if m.role != 'tool' %}"
    "{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'assistant' %}{{- m.content + eos_token }}"
    "{%- elif m.tool_call_id|length != 9 %}{{- raise_exception('ids have length 9') }}"
    "{%- else %}{{- '[TOOL_RESULTS] ' + m.content + m.tool_call_id + '[/TOOL_RESULTS]' }}{%- endif %}{%- endfor %}"
)
"""What Mistral v0.3's template insists on."""


@pytest.mark.parametrize("tools", [True, False])
def test_alternating_roles_stay(tools):
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = STRICT if tools else STRICT.replace("m.tool_call_id|length != 9", "true")
    dialect = OpenAIDialect(tokenizer, TOOLS, "mistral")
    calls = [ToolCall(name="terminal", arguments={}), ToolCall(name="terminal", arguments={}, id="c0")]
    results = [*(Outcome(call, ToolResult(success=True, output="seen")) for call in calls)]
    results += [Outcome(None, ToolResult.failure("unread"))] * 2
    messages = dialect.results(results, AgentConfig())
    assert [m["role"] for m in messages] == ["tool", "tool", "user"]
    text = tokenizer.decode(dialect.following(messages, []))
    assert (text.count("seen"), text.count("unread"), text.count("[INST]")) == (2, 2, 1)
    assert text.count("[TOOL_RESULTS]") == 2 * tools
    assert not tools or (calls[0].id[-9:] + "[/TOOL" in text and "0000000c0[/TOOL" in text)


KIMI = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
    "{%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}<|im_end|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def test_kimi_results_are_calls():
    own = AutoTokenizer.from_pretrained(FOLDER)
    own.chat_template = KIMI
    dialect = OpenAIDialect(own, [], "kimi_k2")
    wrote = get_parser("kimi_k2").render_turn("", [ToolCall(name="terminal"), ToolCall(name="terminal")])
    turn = dialect.read(dialect._renderer.placeholder(wrote), cut_off=False)
    outcomes = [Outcome(one, ToolResult(success=True, output="x")) for one in turn.calls]
    text = own.decode(dialect.following(dialect.results(outcomes, AgentConfig()), turn.ids))
    assert re.findall("Return of (.*)", text) == ["functions.terminal:0", "functions.terminal:1"]


def test_call_ids_are_passed_on():
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    tokenizer.chat_template = STRICT.replace("m.tool_call_id|length != 9", "false")
    answer = {"role": "tool", "tool_call_id": "functions.terminal:0", "name": "terminal", "content": "seen "}
    dialect = OpenAIDialect(tokenizer, TOOLS, "hermes")
    assert "seen functions.terminal:0" in tokenizer.decode(dialect.following([answer], []))
