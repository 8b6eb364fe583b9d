"""Parsers: what a model writes comes back as calls, and nothing it can write breaks them.

ATROPOS_EXAMPLES says how many texts are drawn for each parser (60 to 150 in CI; thousands by hand).
"""

from __future__ import annotations

import json
import os
import time
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos.errors import ConfigError
from atropos.tools import ToolCall
from atropos.tools.arguments import coerce
from atropos.tools.parsers import get_parser, parser_for, parser_names
from atropos.tools.parsers.shapes import call_shaped

NAMES = ("hermes", "mistral", "llama3_json", "llama4_pythonic", "qwen", "qwen3_coder", "deepseek_v3",
         "deepseek_v3_1", "glm45", "kimi_k2")  # fmt: skip
TYPELESS = {"qwen3_coder", "glm45"}
TOKENS = [
    "<tool_call>", "</tool_call>", '{"name": "a", "arguments": {', "}}", '"', "{", "}", "[", "]", "\\", "\n", "é", "😀",
    "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|python_start|>", "[f(a=1", ")]", "'", "'''", "<function=f>",
    "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "```json\n", "```",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", '"\\ud800"', "1e999",
    "terminal", " ", ",", ":", ";", "NaN", "-", "0" * 50, "text",
]  # fmt: skip

text_values = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
    | text_values,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text_values, inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
keys = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
tool_names = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True)


def same(call, parsed):
    return (call.name, call.arguments) == (parsed.name, parsed.arguments)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=int(os.environ.get("ATROPOS_EXAMPLES", "60")))
@given(call_name=tool_names, arguments=st.dictionaries(keys, json_values, max_size=4))
def test_rendered_is_parsed_back(name, call_name, arguments):
    if name in TYPELESS:
        arguments = {key: "".join(c for c in json.dumps(one) if c != "<") for key, one in arguments.items()}
    call = ToolCall(name=call_name, arguments=arguments)
    parsed = get_parser(name).parse(get_parser(name).render(call))
    assert not parsed.errors
    assert len(parsed.calls) == 1
    assert same(call, parsed.calls[0])
    assert parsed.content == ""


@pytest.mark.parametrize("name", NAMES)
def test_calls_keep_their_order(name):
    calls = [
        ToolCall(name="terminal", arguments={"command": 'echo "a" && cat <<EOF\n{"x": [1]}\nEOF'}),
        ToolCall(name="read_file", arguments={"path": "näïve/😀.txt"}),
        ToolCall(name="terminal", arguments={"command": "printf '\\t%s' \"$HOME\" # {}[]"}),
    ]
    parser = get_parser(name)
    parsed = parser.parse(parser.render_turn("First I look.", calls))
    assert not parsed.errors
    assert parsed.content == "First I look."
    assert all(same(one, other) for one, other in zip(calls, parsed.calls, strict=True))
    assert len({one.id for one in parsed.calls}) == 3


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=int(os.environ.get("ATROPOS_EXAMPLES", "150")),
)
@given(pieces=st.lists(st.sampled_from(TOKENS) | st.text(max_size=5), max_size=25))
def test_no_text_breaks_a_parser(name, pieces):
    parsed = get_parser(name).parse("".join(pieces))
    for call in parsed.calls:
        call.name.encode()
        assert call.name
    for error in parsed.errors:
        f"{error.message}{error.text}".encode()


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40)
@given(data=st.data())
def test_cut_turn_is_no_other_call(name, data):
    call = ToolCall(name="write_file", arguments={"path": "a.txt", "content": "one\ntwo }} ]] \"q\" 'z'"})
    text = get_parser(name).render(call)
    cut = data.draw(st.integers(0, len(text)))
    for parsed in get_parser(name).parse(text[:cut]).calls:
        assert same(call, parsed)


@pytest.mark.parametrize("name", NAMES)
def test_time_is_linear(name):
    parser = get_parser(name)

    def seconds(size):
        started = time.process_time()
        for token in TOKENS:
            parser.parse(token * (size // len(token)))
        parser.parse(("".join(TOKENS)) * (size // 500))
        return time.process_time() - started

    seconds(1000)
    small, large = seconds(10_000), seconds(80_000)
    # Eight times the text: quadratic work would take 64 times as long.
    assert large < max(small, 0.05) * 30


FILLERS = (" ", "\n", "0,", "{},", '{"name": 1},', "a", "\\", "''", "[", '"', "1", "f(", "a=1,", "<", ":1", "`")


@pytest.mark.parametrize("name", NAMES)
def test_unended_calls_are_bounded(name):
    """What opens a call, then the same over and over, then something else: nothing is looked at again and again."""
    parser = get_parser(name)
    openings = [one for one in TOKENS if one[:1] in "<[{" and len(one) > 1]

    def seconds(size):
        started = time.process_time()
        for opening in openings:
            for filler in FILLERS:
                for inner in ("", "["):
                    parsed = parser.parse(opening + inner + filler * (size // len(filler)) + "x")
                    assert len(parsed.calls) + len(parsed.errors) <= 129
        return time.process_time() - started

    seconds(250)
    small, large = seconds(2_000), seconds(16_000)
    assert large < max(small, 0.05) * 30


def test_deep_json_is_an_error():
    for depth in (70, 5000, 200_000):
        text = '<tool_call>{"name": "a", "arguments": {"x": ' + "[" * depth + "]" * depth + "}}</tool_call>"
        parsed = get_parser("hermes").parse(text)
        assert not parsed.calls
        assert len(parsed.errors) == 1
    pythonic = get_parser("llama4_pythonic").parse("[f(a=" + "[" * 5000 + "]" * 5000 + ")]")
    assert "nested" in pythonic.errors[0].message


class TestHermes:
    parse = staticmethod(lambda text: get_parser("hermes").parse(text))

    def test_tag_within_string_is_text(self):
        parsed = self.parse('<tool_call>{"name": "t", "arguments": {"c": "echo </tool_call> <tool_call>"}}</tool_call>')
        assert parsed.calls[0].arguments == {"c": "echo </tool_call> <tool_call>"}
        assert not parsed.errors

    def test_missing_end_is_forgiven(self):
        parsed = self.parse('a <tool_call>{"name": "t", "arguments": {}}<tool_call>{"name": "u"}</tool_call> b')
        assert [one.name for one in parsed.calls] == ["t", "u"]
        assert parsed.content == "a  b"

    def test_malformed_has_its_place(self):
        parsed = self.parse(
            '<tool_call>{"name": "a"}</tool_call><tool_call>{"name": b}</tool_call><tool_call>{"name": "c"}</tool_call>'
        )
        assert [one.name for one in parsed.calls] == ["a", "c"]
        assert [(one.position, one.text) for one in parsed.errors] == [(1, '{"name": b}')]
        assert "<tool_call>{" in parsed.errors[0].message

    def test_raw_line_breaks_pass(self):
        parsed = self.parse('<tool_call>\n{"name": "t", "arguments": {"c": "a\nb"}}}\n</tool_call>')
        assert parsed.calls[0].arguments == {"c": "a\nb"}
        assert parsed.content == ""

    def test_text_arguments_stay_text(self):
        parsed = self.parse('<tool_call>{"name": "t", "arguments": "{\\"a\\": 1}"}</tool_call>')
        assert parsed.calls[0].arguments == '{"a": 1}'

    @pytest.mark.parametrize("body", ["", "null", "3", '"x"', "{}", '{"name": 3}', '{"name": "a", "arguments": [1]}'])
    def test_what_is_no_call_is_error(self, body):
        parsed = self.parse(f"<tool_call>{body}</tool_call>")
        assert not parsed.calls
        assert len(parsed.errors) == 1
        assert parsed.content == ""

    def test_several_in_one_tag(self):
        parsed = self.parse('<tool_call>\n{"name": "a"}\n{"name": "b"},{"name": "c"}\n</tool_call> after')
        assert [one.name for one in parsed.calls] == ["a", "b", "c"]
        assert (parsed.content, parsed.errors) == ("after", ())
        cut = self.parse('<tool_call>{"name": "a"}{"name": "b", "argu')
        assert [one.name for one in cut.calls] == ["a"]
        assert "cut off" in cut.errors[0].message

    @pytest.mark.parametrize("rest", ["and b", '[{"name": "b"}]', '{"name": b}', "{}"])
    def test_trailing_text_in_a_tag(self, rest):
        parsed = self.parse(
            f'<tool_call>{{"name": "a"}} {rest}</tool_call> after <tool_call>{{"name": "z"}}</tool_call>'
        )
        assert [one.name for one in parsed.calls] == ["a", "z"]
        assert [(one.position, one.text) for one in parsed.errors] == [(1, rest)]
        assert parsed.content == "after"

    def test_calls_of_turn_are_bounded(self):
        parsed = self.parse('<tool_call>{"name": "a"}</tool_call>' * 1000)
        assert len(parsed.calls) == 128
        assert "more than 128" in parsed.errors[-1].message

    def test_no_name_has_surrogates(self):
        parsed = self.parse('<tool_call>{"name": "a\\ud800"}</tool_call>')
        assert parsed.calls[0].name == "a?"


def test_mistral_two_generations():
    parser = get_parser("mistral")
    old = parser.parse('ok [TOOL_CALLS] [{"name": "a", "arguments": {"x": 1}}, {"name": "b", "arguments": {}}]')
    assert [one.name for one in old.calls] == ["a", "b"]
    assert old.content == "ok"
    new = parser.parse('[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]q1w2e3r4t[ARGS]{"y": [2]}')
    assert [(one.name, one.arguments) for one in new.calls] == [("a", {"x": 1}), ("b", {"y": [2]})]
    for several in ('{"name": "a"} {"name": "b"}', '[{"name": "a"}], [{"name": "b"}]\n'):
        parsed = parser.parse(f"ok [TOOL_CALLS] {several} [1] says so")
        assert [one.name for one in parsed.calls] == ["a", "b"]
        assert "".join(parsed.content.split()) == "ok[1]saysso"
        assert not parsed.errors
    assert parser.parse('[TOOL_CALLS] {"name": "a"} {"name": b}').errors[0].text == '{"name": b}'


def test_llama3_leaves_other_json():
    parser = get_parser("llama3_json")
    tagged = parser.parse(
        '<|python_tag|>{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}<|eom_id|>'
    )
    assert [one.name for one in tagged.calls] == ["a", "b"]
    plain = parser.parse('The file holds:\n{"version": 1}\nand no more.')
    assert (plain.calls, plain.errors) == ((), ())
    assert plain.content.startswith("The file holds")


def test_llama4_python_literals():
    text = "<|python_start|>[f(a='x', b=[1, -2.5, {'k': None}], c=True), pkg.g(s=\"\"\"two\nlines\"\"\", t='a' 'b')]<|python_end|>"
    parsed = get_parser("llama4_pythonic").parse(text)
    assert not parsed.errors
    assert parsed.calls[0].arguments == {"a": "x", "b": [1, -2.5, {"k": None}], "c": True}
    assert parsed.calls[1].name == "pkg.g"
    assert parsed.calls[1].arguments == {"s": "two\nlines", "t": "ab"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of an escape that is none
        escapes = get_parser("llama4_pythonic").parse("[f(a='\\d+\\n', b=r'\\d\nx', c=r\"\"\"\\s\"\"\", d='\\'')]")
    assert escapes.calls[0].arguments == {"a": "\\d+\n", "b": "\\d\nx", "c": "\\s", "d": "'"}
    lists = get_parser("llama4_pythonic").parse("[f(a=1)] [g()]\nand [1] more")
    assert [one.name for one in lists.calls] == ["f", "g"]
    assert (lists.content, lists.errors) == ("and [1] more", ())
    wrong = get_parser("llama4_pythonic").parse("[f(1)]")
    assert wrong.errors
    assert not wrong.calls


def test_the_schema_types_values():
    parsed = get_parser("qwen3_coder").parse(
        "<tool_call>\n<function=f>\n<parameter=n>\n5\n</parameter>\n<parameter=s>\n5\n</parameter>\n"
        '<parameter=l>\n["a", 1]\n</parameter>\n<parameter=b>\nTrue\n</parameter>\n</function>\n</tool_call>'
    )
    schema = {
        "properties": {
            "n": {"type": "integer"},
            "s": {"type": "string"},
            "l": {"type": "array"},
            "b": {"type": "boolean"},
        }
    }
    assert coerce(parsed.calls[0].arguments, schema) == {"n": 5, "s": "5", "l": ["a", 1], "b": True}


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        ({"$defs": {"P": {"type": "object"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}, {"x": 1}),
        (
            {"definitions": {"P": {"type": "object"}}, "properties": {"p": {"allOf": [{"$ref": "#/definitions/P"}]}}},
            {"x": 1},
        ),
        ({"$defs": {"P": {"enum": ["a"]}}, "properties": {"p": {"$ref": "#/$defs/P"}}}, None),
        ({"$defs": {"P": {"$ref": "#/$defs/P"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}, None),
        ({"properties": {"p": {"anyOf": 5, "type": [{}]}}}, None),
        ({"properties": None}, None),
    ],
)
def test_type_found_in_any_schema(schema, read):
    """An MCP server's, which nobody has checked."""
    written = '{"x": 1}'
    assert coerce({"p": written}, schema) == {"p": read or written}


def test_qwen3_forgives_parameters():
    """As vLLM does. The next parameter, or all of the next call, became part of the value, and the call was run so."""
    open_call = "<tool_call>\n<function=t>\n<parameter=a>\nTX\n"
    rest = "<parameter=b>\n</parameter\n</parameter>\n</function>\n</tool_call>"
    closed = "</function>\n</tool_call>"
    read = get_parser("qwen3_coder").parse(f"{open_call}{rest}\n{open_call}{closed}\n{open_call}{closed}")
    assert [one.arguments for one in read.calls] == [{"a": "TX", "b": "</parameter"}, {"a": "TX"}, {"a": "TX"}]
    assert (read.content, read.errors) == ("", ())
    example = "<tool_call>\n<function=b>\n</function>\n</tool_call>"  # in a file that is written
    call = ToolCall(name="t", arguments={"a": example, "b": "x"})
    parser = get_parser("qwen3_coder")
    assert same(call, parser.parse(parser.render(call)).calls[0])


def test_qwen3_values_hold_calls():
    """The inner call's arguments overwrote the outer one's."""
    parser = get_parser("qwen3_coder")
    inner = ToolCall(name="search", arguments={"path": "/etc/passwd", "q": "x"})
    twice = parser.render_turn("Two:", [inner, ToolCall(name="w", arguments={"path": parser.render(inner)})])
    for content in (f"How a call looks:\n{parser.render(inner)}\nThat is all.", parser.render(inner), twice):
        call = ToolCall(name="write_file", arguments={"path": "README.md", "content": content, "mode": "w"})
        parsed = parser.parse(parser.render_turn("So:", [call, inner, call]))
        assert all(same(one, other) for one, other in zip([call, inner, call], parsed.calls, strict=True))
        assert (parsed.content, parsed.errors) == ("So:", ())
    mention = ToolCall(name="w", arguments={"a": "see <function=f> and <function=f><parameter=x> there", "b": "y"})
    assert [one.arguments for one in parser.parse(parser.render_turn("", [mention, inner])).calls] == [
        mention.arguments,
        inner.arguments,
    ]


def test_qwen3_parameter_twice_is_error():
    parser = get_parser("qwen3_coder")
    call = ToolCall(name="t", arguments={"a": "x"})
    twice = parser.render(call).replace("</function>", "<parameter=a>\ny\n</parameter>\n</function>")
    parsed = parser.parse(f"{twice}\n{parser.render(call)}")
    assert [one.arguments for one in parsed.calls] == [{"a": "x"}]
    assert "'a' is there twice" in parsed.errors[0].message
    assert parsed.content == ""


def test_qwen3_open_calls_in_linear_time():
    def seconds(count):
        started = time.process_time()
        rows = "".join(f"<parameter=a{n}>\n<function=f>\n" for n in range(count))
        get_parser("qwen3_coder").parse(f"<tool_call>\n<function=f>\n{rows}")
        return time.process_time() - started

    seconds(100)
    small, large = seconds(1000), seconds(8000)
    assert large < max(small, 0.05) * 30


def test_deepseek_and_kimi():
    v3 = get_parser("deepseek_v3").parse(
        "x<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n```json\n"
        '{"a": "```"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    assert (v3.content, v3.calls[0].name, v3.calls[0].arguments) == ("x", "get", {"a": "```"})
    kimi = get_parser("kimi_k2").parse(
        '<|tool_calls_section_begin|><|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{"a": 1}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    assert (kimi.calls[0].name, kimi.calls[0].arguments) == ("get", {"a": 1})


def test_promised_parsers_exist():
    assert set(NAMES) <= set(parser_names())
    with pytest.raises(ConfigError, match="hermes"):
        get_parser("herms")


def shapes():
    """A call in each format, and in some that have no parser here."""
    call = ToolCall(name="terminal", arguments={"command": "ls"})
    made = {name: get_parser(name).render_turn("", [call]) for name in NAMES}
    json_call = json.dumps({"name": call.name, "arguments": call.arguments})
    return made | {
        "bare JSON": json_call,
        "JSON in a sentence": f"I will run it: {json_call}",
        "a JSON list": f"[{json_call}]",
        "OpenAI's nesting": json.dumps({"tool_calls": [{"type": "function", "function": json.loads(json_call)}]}),
        "a code block": f"```json\n{json_call}\n```",
        "cut off": json_call[:-8],
        "a tag that is no format's": f"<function_call>{json_call}</function_call>",
        "an end tag alone": f"{json_call}\n</tool_call>",
        "an empty tag": "<tool_call></tool_call>",
        "an opening tag": "Now:\n<tool_call>",
        "a function with JSON": '<function=terminal>{"command": "ls"}</function>',
        "MiniMax": '<minimax:tool_call><invoke name="terminal"><parameter name="command">ls</parameter></invoke></minimax:tool_call>',
        "gpt-oss": '<|channel|>commentary to=functions.terminal <|constrain|>json<|message|>{"command": "ls"}',
        "Gemma": '```tool_code\nterminal(command="ls")\n```',
        "ReAct": "Action: terminal\nAction Input: ls",
        "a tag with the name": '<tool_call name="terminal"><command>ls</command></tool_call>',
        "a function by attribute": '<function name="terminal"><parameter name="command">ls</parameter></function>',
        "blanks in the tag": "<function = terminal>\n<parameter = command>ls</parameter></function>",
        "arguments first": '{"arguments": {"command": "ls"}, "name": "terminal"}',
        "an id first": json.dumps({"id": "call_1", "type": "function", **json.loads(json_call)}),
        "a dict of Python": repr(json.loads(json_call)),
        "LangChain": '{"action": "terminal", "action_input": {"command": "ls"}}',
        "Anthropic": '{"type": "tool_use", "id": "t1", "name": "terminal", "input": {"command": "ls"}}',
        "sections alone": "<｜tool▁calls▁begin｜><|tool_calls_section_begin|>",
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", shapes())
def test_shape_is_never_ignored(name, shape):
    parsed = get_parser(name).parse(f"First this.\n{shapes()[shape]}")
    assert parsed.calls or parsed.errors
    assert all(error.message for error in parsed.errors)
    if name == "mistral" and not parsed.calls:
        assert '[TOOL_CALLS] [{"name": "tool"' in parsed.errors[0].message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "answer",
    [
        "42",
        '{"name": "Ada", "age": 36}',
        '{"name": "get_weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}',
        '{"name": "get_weather", "parameters": {"type": "object", "properties": {}}}',
        "See [main()](src/main.py) and [f(x=1)](a.md).\n[main()](x)\n[1] a list",
        "```python\n[Point(x=1) for _ in range(3)]\n```",
        "The parser reads `<tool_call>` tags, and `<function=name>` too.",
        "Action: none needed",
        '{"parameters": {"x": 1}, "name": "a model", "loss": 0.5}',
        '{"action": "move", "to": "b3"}',
        '{"id": "m1", "name": "llama", "parameters": 8000000000}',
        "{'name': 'plot', 'args': ['x', 'y']}",
        "{'id': 7, 'name': 'Ada', 'parameters': []}",
        "The tag <function> and the word tool_use.",
        '{"name": "main", "parameters": {"x": [{"returns": 1}]}, "returns": "int"}',
        "{'name': 'main', 'args': {'x': 1}, 'it\\'s': {'name': 'f', 'args': {}}}",
        '{"name": "f", "parameters": {"$schema": "http://json-schema.org/schema"}}',
        '{"name": "f", "parameters": {"properties": {"x": {}}, "type": "object"}}',
        '{"name": "f", "parameters": {"required": ["x"], "properties": {"x": {}}}}',
        "def call(function_name, arguments):\n    return tools[function_name](**arguments)",
    ],
)
def test_no_call_is_an_answer(name, answer):
    if name.startswith("llama") and answer[0] in "{[S`":
        pytest.skip("in this format a line may begin with a bare call")
    if name in {"hermes", "qwen", "glm45", "qwen3_coder"}:  # the tags are theirs wherever they stand
        answer = answer.replace("<tool_call>", "those").replace("<function=name>", "these")
    parsed = get_parser(name).parse(answer)
    assert (parsed.calls, parsed.errors) == ((), ())


SCHEMAS = [{"type": "function", "function": {"name": "terminal", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", shapes())
def test_shape_of_an_offered_tool(name, shape):
    parsed = parser_for(name, None, SCHEMAS).parse(f"First this.\n{shapes()[shape]}")
    assert parsed.calls or parsed.errors


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "resnet50", "args": {"lr": 0.1}}',
        '{"name": "main", "parameters": {"x": 1}, "returns": "int"}',
        "{'name': 'main', 'parameters': {'x': 1}}",
        '{"id": "7", "name": "ls", "args": "-l"}',
        '{"parameters": {"x": 1}, "name": "main"}',
        '{"action": "move", "action_input": "b3"}',
        '{"type": "tool_use", "id": "t1", "name": "ls", "input": {}}',
        '<function name="add">',
        '{"name": "terminal", "parameters": {"$schema": "http://json-schema.org/schema"}}',
    ],
)
def test_other_names_are_answers(name, answer):
    parser = parser_for(name, None, SCHEMAS)
    if not (name.startswith("llama") and answer[0] == "{"):  # its own format
        parsed = parser.parse(answer)
        assert (parsed.content, parsed.calls, parsed.errors) == (answer, (), ())
    call = '{"id": "7", "name": "terminal", "args": {}}'
    assert parser.parse(f"So: {answer}\n{call}").errors[0].text == call


@pytest.mark.parametrize("tools", [(), ("terminal",)])
def test_shapes_take_linear_time(tools):
    def seconds(size):
        started = time.process_time()
        for piece in (
            '{"name": "a", "args": {',
            '{"name": "a", "args": {}, "b": 1}',
            "{'name': 'a', 'args': '",
            '"',
            "\\",
            '\\"',
            "\\'",
        ):
            call_shaped('{"name": "a", "b": 1, ' + piece * (size // len(piece)), frozenset(tools))
            call_shaped('{"name": "a", "args": {}, "b": ' + piece * (size // len(piece)), frozenset(tools))
        return time.process_time() - started

    seconds(1000)
    small, large = seconds(40_000), seconds(320_000)
    assert large < max(small, 0.05) * 30


@pytest.mark.parametrize("inside", ['{"name": "terminal", "arguments": {"command": "ls"}}', "", "terminal(ls)"])
def test_qwen3_needs_a_function(inside):
    good = "<tool_call>\n<function=t>\n</function>\n</tool_call>"
    parsed = get_parser("qwen3_coder").parse(
        f"Look:\n{good}\n<tool_call>\n{inside}\n</tool_call>\n{good}\n<tool_call>{inside}"
    )
    assert [call.name for call in parsed.calls] == ["t", "t"]
    assert [error.position for error in parsed.errors] == [1, 2]
    assert all("<function=tool>" in error.message and inside in error.text for error in parsed.errors)
    assert parsed.content == "Look:"
