"""vLLM's parsers, where it is installed: calls are theirs, errors stay ours, and nothing they do breaks a turn.

vLLM and its GPU libraries are gigabytes and not part of the project's environment. A stand-in of its registry shows the
seam; in an environment that has the real one, the same tests run against that as well.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from transformers import AutoTokenizer

from atropos.tools import ToolCall
from atropos.tools.parsers import get_parser, installed, parser_for
from examples.policy.tokenizer import FOLDER

REAL = importlib.util.find_spec("vllm") is not None
SCHEMA = {
    "type": "function",
    "function": {"name": "terminal", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
}
CALLS = [ToolCall(name="terminal", arguments={"command": f"echo 'é' {n}"}) for n in range(3)]


class Request:
    def __init__(self, **fields):
        self.tools = fields["tools"]


class StandIn:
    """Reads Hermes' format as vLLM's does: all or nothing."""

    def __init__(self, tokenizer, tools):
        assert tokenizer
        assert tools == [SCHEMA]

    def extract_tool_calls(self, text, request):
        if "crash" in text:
            raise RuntimeError("of theirs")
        parsed = get_parser("hermes").parse(text)
        if parsed.errors or not parsed.calls:
            return SimpleNamespace(tools_called=False, tool_calls=[], content=text)
        calls = [
            SimpleNamespace(id=c.id, function=SimpleNamespace(name=c.name, arguments=json.dumps(c.arguments)))
            for c in parsed.calls
        ]
        return SimpleNamespace(tools_called=True, tool_calls=calls, content=parsed.content)


def stand_in(monkeypatch, place, protocol):
    def get(name):
        return {"hermes": StandIn}[name]

    modules = {"vllm": {}, place: {"ToolParserManager": SimpleNamespace(get_tool_parser=get)}}
    modules[protocol] = {"ChatCompletionRequest": Request}
    for name, content in modules.items():
        for depth in range(1, name.count(".") + 2):
            part = ".".join(name.split(".")[:depth])
            if part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules[name]).update(content)
    sys.modules["vllm"].__spec__ = importlib.util.spec_from_loader("vllm", None)


PLACES = {
    "new": ("vllm.tool_parsers", "vllm.entrypoints.openai.chat_completion.protocol"),
    "old": ("vllm.entrypoints.openai.tool_parsers", "vllm.entrypoints.openai.protocol"),
}


@pytest.fixture(params=[*(["real"] if REAL else PLACES)])
def vllm(request, monkeypatch):
    installed.vllm_registry.cache_clear()
    if request.param != "real":
        stand_in(monkeypatch, *PLACES[request.param])
    yield request.param
    installed.vllm_registry.cache_clear()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(str(FOLDER))


@pytest.mark.parametrize("name", ["hermes", "qwen"])
def test_theirs_reads_ours(vllm, tokenizer, name):
    parser = parser_for(name, tokenizer, [SCHEMA])
    assert isinstance(parser, installed.VllmParser)
    parsed = parser.parse(parser.render_turn("Look:", CALLS))
    assert [(call.name, call.arguments) for call in parsed.calls] == [(call.name, call.arguments) for call in CALLS]
    assert (parsed.content, parsed.errors) == ("Look:", ())
    assert parser.parse("nothing to do") == get_parser(name).parse("nothing to do")


def test_malformed_call_is_error(vllm, tokenizer):
    text = '<tool_call>\n{"name": "terminal", "arguments": {"command": }\n</tool_call>'
    parsed = parser_for("hermes", tokenizer, [SCHEMA]).parse(text)
    assert (parsed.calls, parsed.errors) == ((), get_parser("hermes").parse(text).errors)
    assert parsed.errors


def test_ours_does_the_rest(monkeypatch, tokenizer, caplog):
    installed.vllm_registry.cache_clear()
    stand_in(monkeypatch, *PLACES["new"])
    text = "crash " + get_parser("hermes").render(CALLS[0])
    assert parser_for("hermes", tokenizer, [SCHEMA]).parse(text).calls[0].arguments == CALLS[0].arguments
    assert "failed on a turn" in caplog.text
    assert type(parser_for("kimi_k2", tokenizer, [SCHEMA])) is type(get_parser("kimi_k2")), (
        "a format that this vLLM has not"
    )
    installed.vllm_registry.cache_clear()


def test_without_vllm_all_are_ours(tokenizer, monkeypatch):
    installed.vllm_registry.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert type(parser_for("hermes", tokenizer, [SCHEMA])) is type(get_parser("hermes"))
    installed.vllm_registry.cache_clear()
