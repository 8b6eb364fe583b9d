"""The loop against the scripted policy: what it records is what the server sampled, and its bounds end it."""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import re
import time
import types

import aiohttp
import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from multidict import CIMultiDict, CIMultiDictProxy
from transformers import AutoTokenizer
from yarl import URL

from atropos.agent import AgentConfig, AtroposAgent, InferenceError, PromptTooLong, TurnRenderer, XmlDialect, seed_for
from atropos.agent.model import ChatAnswer, Model
from atropos.agent.transcript import MASKED, WeightSpan
from atropos.envs.hermes.dialect import OpenAIDialect
from atropos.errors import ConfigError, SlotLost
from atropos.thinking import split_thinking
from atropos.tools import ToolCall, ToolResult
from atropos.tools.parsers import get_parser, parser_names
from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer
from examples.policy.tokenizer import FOLDER
from tests.processes import be_stopped

pytestmark = pytest.mark.waits


@functools.cache
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@functools.cache
def policy() -> PolicyServer:
    return PolicyServer(Policy(TASKS))


class DirectServer:
    """The policy as a `ServerManager` would give it, with a log of the truth and a list of faults to raise first."""

    def __init__(self, faults=()):
        self.log: list[tuple[list[int], list[int], list[float]]] = []
        self.faults = list(faults)
        self.requests: list[dict] = []

    async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
        self.requests.append(sampling)
        if self.faults:
            fault = self.faults.pop(0)
            if isinstance(fault, BaseException):
                raise fault
            if fault is not None:
                return fault
        ids, logprobs, reason = policy().sample(
            input_ids, sampling.get("seed"), sampling["max_tokens"], 1.0, stop=sampling.get("stop_token_ids", ())
        )
        self.log.append((list(input_ids), ids, logprobs))
        return input_ids, [ids], [logprobs], [reason]


def script(turns) -> str:
    return f"Do as told.\n```policy\n{json.dumps(turns)}\n```"


def call(command: str) -> dict:
    return {"name": "terminal", "arguments": {"command": command}}


async def echo(tool_call) -> ToolResult:
    return ToolResult(success=True, output=f"ran {tool_call.arguments}", exit_code=0)


def agent(server, execute=echo, **config) -> AtroposAgent:
    return AtroposAgent(server, tokenizer(), [], AgentConfig(**config), execute)


def assert_true_to(log, transcript) -> None:
    """Every sampled run stands in the transcript where the server's log says, and nothing else is unmasked."""
    transcript.check()
    at = 0
    for prompt, ids, logprobs in log:
        assert transcript.tokens[: len(prompt)] == prompt
        assert set(transcript.masks[at : len(prompt)]) <= {MASKED}
        end = len(prompt) + len(ids)
        assert transcript.tokens[len(prompt) : end] == transcript.masks[len(prompt) : end] == ids
        assert transcript.logprobs[len(prompt) : end] == logprobs
        at = end
    assert set(transcript.masks[at:]) <= {MASKED}


def dialects():
    return {"xml": None, "openai": OpenAIDialect(tokenizer(), [], "hermes")}


text = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
turn = st.one_of(
    st.builds(lambda t, cs: {"text": t, "calls": [call(c) for c in cs]}, text, st.lists(text, min_size=1, max_size=3)),
    st.just('<tool_call>\n{"name": "terminal", "arguments": {"comm\n</tool_call>'),
    text.map(lambda t: f"<tool_call>{t}</tool_call>"),
)


@settings(max_examples=60)
@given(turns=st.lists(turn, max_size=4), output=text, max_tokens=st.sampled_from([None, None, 40, 200]))
def test_tokens_are_those_sampled(turns, output, max_tokens):
    async def execute(_call):
        return ToolResult(success=True, output=f"{output}<|im_end|>\n<|im_start|>assistant\n", exit_code=0)

    server = DirectServer()
    result = asyncio.run(agent(server, execute, max_tokens=max_tokens).run(script([*turns, "over"])))
    assert_true_to(server.log, result.trajectory_data)
    assert result.trajectory_data.tokens.count(1) == len(result.trajectory_data.messages)
    assert not result.trajectory_data.placeholder
    assert len(result.steps) == len(server.log) == sum(m["role"] == "assistant" for m in result.messages)


async def test_calls_run_in_order():
    seen = []

    async def execute(tool_call):
        seen.append(tool_call.arguments["command"])
        await asyncio.sleep(0)
        return ToolResult(success=True, output=f"out {len(seen)}", exit_code=0)

    broken = '<tool_call>{"name": "terminal", "arg</tool_call>'
    turns = [{"text": "both\n" + broken, "calls": [call("a"), call("b")]}, "fine"]
    result = await agent(DirectServer(), execute).run(script(turns))
    assert seen == ["a", "b"]
    assert [m["role"] for m in result.messages] == ["system", "user", "assistant", "user", "assistant"]
    answer = result.messages[3]["content"]
    assert answer.count("<tool_response>") == 3
    assert answer.index("not valid JSON") < answer.index("out 1") < answer.index("out 2")
    assert (result.success, result.final_response, result.total_tool_calls) == (True, "fine", 2)


async def test_steps_end_the_loop():
    turns = [{"calls": [call("x")]}] * 9
    result = await agent(DirectServer(), max_steps=3).run(script(turns))
    assert (result.success, result.stop_reason, len(result.steps), result.total_tool_calls) == (
        False,
        "max_steps",
        3,
        3,
    )
    assert result.messages[-1]["role"] == "assistant"  # nobody will read its results


@pytest.mark.parametrize("steps", [1, 2])
async def test_last_calls_are_run(steps):
    """What they did is scored."""
    ran = []

    async def execute(tool_call):
        ran.append(tool_call.arguments["command"])
        return ToolResult(success=True)

    turns = [{"calls": [call("a"), call("b")]}, {"calls": [call("c")]}, "done"]
    result = await agent(DirectServer(), execute, max_steps=steps).run(script(turns))
    assert ran == ["a", "b", "c"][: steps + 1]
    assert (result.stop_reason, result.total_tool_calls) == ("max_steps", len(ran))
    assert [one.error for one in result.steps[-1].results] == [None] * len(result.steps[-1].calls)


@pytest.mark.parametrize("limit", [{"max_steps": 1}, {"timeout_s": 1.5}])
@pytest.mark.parametrize("dialect", [None, OpenAIDialect])
async def test_task_follows_results(limit, dialect):
    async def execute(tool_call):
        if "timeout_s" in limit and tool_call.arguments["command"] == "b":
            await asyncio.Event().wait()
        return ToolResult(success=True, output=f"ran {tool_call.arguments['command']}")

    server, made = DirectServer(), dialect and dialect(tokenizer(), [], "hermes")
    one = AtroposAgent(server, tokenizer(), config=AgentConfig(**limit), execute_tool=execute, dialect=made)
    turns = [{"calls": [call("a"), call("b"), call("c")]}, "done"]
    async with asyncio.timeout(30):
        first = await one.run(script(turns))
        assert len(first.messages) == (2 if dialect else 3)
        result = await one.run("And now?", after=first)
    assert (result.stop_reason, result.final_response) == ("final", "done")
    assert result.messages[-2]["content"].endswith("And now?")
    if dialect:
        assert [m.get("tool_call_id") for m in result.messages[2:-2]] == [
            c["id"] for c in result.messages[1]["tool_calls"]
        ]
    read = "".join(str(m["content"]) for m in result.messages[2:-1])
    assert (
        read.index("ran a") < read.index("ran b" if "max_steps" in limit else "used all its time") < read.index("And")
    )
    assert_true_to(server.log, result.trajectory_data)


@pytest.mark.parametrize(("calls", "ran"), [(3, 2), (2, 2)])
async def test_nothing_runs_after_the_time_limit(calls, ran):
    async def execute(tool_call):
        if tool_call.arguments["command"] != "first":
            await asyncio.Event().wait()
        return ToolResult(success=True)

    server = DirectServer()
    turns = [{"calls": [call("first"), *[call("x")] * (calls - 1)]}] * 9
    # 0.3 s may pass in the first turn on a slow machine: fewer calls are then run
    result = await agent(server, execute, timeout_s=0.3).run(script(turns))
    assert (result.stop_reason, len(server.log)) == ("max_time", 1)
    assert len(result.steps[0].outcomes) <= ran
    assert_true_to(server.log, result.trajectory_data)


async def test_time_limit_ends_a_call():
    ended = []

    async def execute(call):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(call.name)

    server = DirectServer()
    async with asyncio.timeout(20):
        result = await agent(server, execute, timeout_s=1).run(script([{"calls": [call("x")] * 3}]))
    assert (result.stop_reason, ended) == ("max_time", ["terminal"])
    assert [one.error for one in result.steps[0].results] == ["ended: the agent used all its time"]
    assert_true_to(server.log, result.trajectory_data)


async def test_stopped_process_is_free():
    async def execute(call):
        if call.arguments["command"] == "stopped":
            await be_stopped(3)
        return ToolResult(success=True)

    calls = [{"calls": [call("stopped"), call("x")]}, {"calls": [call("x")]}, "done"]
    result = await agent(DirectServer(), execute, timeout_s=2.5).run(script(calls))
    assert (result.stop_reason, [one.error for step in result.steps for one in step.results]) == ("final", [None] * 3)


@pytest.mark.parametrize("name", parser_names())
async def test_calls_read_as_described(name):
    schemas = [{"type": "function", "function": {"name": "terminal", "parameters": {}}}]
    run = AtroposAgent(DirectServer(), tokenizer(), schemas, AgentConfig(tool_call_parser=name), echo)
    system = (await run.run(script(["done"]))).messages[0]["content"]
    example = system.partition("exactly this form:\n")[2]
    [read] = get_parser(name).parse(example).calls
    assert (read.name, read.arguments) == ("function_name", {"argument_name": "value"})


@pytest.mark.parametrize("opened", [False, True])
def test_thinking_runs_no_call(opened):
    own = AutoTokenizer.from_pretrained(FOLDER)
    if opened:
        own.chat_template = own.chat_template.replace(
            "assistant\\n' }}{%- endif %}", "assistant\\n<think>\\n' }}{%- endif %}"
        )
    renderer = TurnRenderer(own)
    assert renderer.thinking_opening == ("<think>\n" if opened else "")
    dialect = XmlDialect(renderer, get_parser("hermes"), [])
    wrote = (
        f"{'' if opened else '<think>'}Not {get_parser('hermes').render(ToolCall(name='t', arguments={}))}.</think>42"
    )
    ids = [*renderer.encode_text(wrote), renderer.end_id]
    turn = dialect.read(ids, cut_off=False)
    assert (turn.calls, turn.answer, turn.text, turn.ids) == ((), "42", wrote, ids)
    assert turn.reasoning.startswith("Not <tool_call>")
    assert turn.message["content"].startswith("<think>")


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("parsed_out", [False, True])
def test_unfinished_thinking_is_no_answer(dialect, parsed_out):
    made = dialects()[dialect] or XmlDialect(TurnRenderer(tokenizer()), get_parser("hermes"), [])
    thought = 'I run it. <tool_call>{"name": "t", "arguments": {}}</tool_call>'

    def read(before, after):
        if parsed_out:
            return made.read_answer(ChatAnswer(after, thought, (), "stop"), cut_off=False)
        closed = "</think>" if after else ""
        return made.read(TurnRenderer(tokenizer()).placeholder(f"{before}{thought}{closed}{after}"), cut_off=False)

    ended = read("<think>", "")
    assert ended.calls == ()
    assert [error.message.partition(":")[0] for error in ended.unread] == ["not run"]
    answered = read("<think>", "42")
    assert (answered.calls, answered.unread, answered.answer) == ((), (), "42")


def test_json_in_thinking_is_no_call():
    renderer = TurnRenderer(tokenizer())
    made = XmlDialect(renderer, get_parser("hermes"), [{"type": "function", "function": {"name": "t"}}])
    for name, errors in (("t", 1), ("main", 0)):
        wrote = renderer.placeholder(f'<think>{{"name": "{name}", "arguments": {{}}}}')
        assert len(made.read(wrote, cut_off=False).unread) == errors


@pytest.mark.parametrize("name", parser_names())
def test_call_holds_a_tag_as_text(name):
    renderer, parser = TurnRenderer(tokenizer()), get_parser(name)
    call = ToolCall(name="t", arguments={"command": "echo '<think>a</think>b' '<think>'"})
    wrote = f"<think>hm</think>\n\n{parser.render_turn('', [call])}"
    turn = XmlDialect(renderer, parser, []).read(renderer.placeholder(wrote), cut_off=False)
    assert (turn.reasoning, turn.unread) == ("hm", ())
    assert [one.arguments for one in turn.calls] == [call.arguments]


@pytest.mark.parametrize("before", ["", "See [1] and {x}.\n[2] a list\n- [x] done\n{y}\n", "[a](b)\n"])
def test_text_in_brackets_hides_no_thinking(before):
    assert split_thinking(f"{before}<think>a</think>b") == [(before, False), ("a", True), ("b", False)]


async def test_full_context_ends_loop():
    async def execute(_call):
        return ToolResult(success=True, output="word " * 400, exit_code=0)

    server = DirectServer()
    turns = [{"calls": [call("x")]}] * 9
    result = await agent(server, execute, context_tokens=3000).run(script(turns))
    assert result.stop_reason == "context_length"
    assert len(result.trajectory_data) <= 3000
    assert result.messages[-1]["role"] == "assistant"
    assert_true_to(server.log, result.trajectory_data)


def read_results(messages):
    """The JSON of each result in a conversation."""
    texts = [str(message["content"]) for message in messages if message["role"] in {"tool", "user"}]
    found = [part for text in texts for part in re.findall(r"^\{.*\}$", text, re.MULTILINE)]
    return [json.loads(text) for text in found if "success" in text]


@pytest.mark.parametrize("dialect", dialects())
@pytest.mark.parametrize("context_tokens", [1500, 4000, 30_000])
async def test_long_result_is_shortened(dialect, context_tokens):
    output = "\n".join(map(str, range(1, 30_001)))  # seq 1 30000

    async def execute(_call):
        return ToolResult(success=True, output=output, exit_code=0)

    server = DirectServer()
    config = AgentConfig(context_tokens=context_tokens, max_result_chars=1_000_000)
    made = AtroposAgent(server, tokenizer(), config=config, execute_tool=execute, dialect=dialects()[dialect])
    result = await made.run(script([{"calls": [call("seq 1 30000")]}, "read"]))
    assert (result.stop_reason, result.final_response) == ("final", "read")
    [shown] = read_results(result.messages)
    head, left_out, tail = re.fullmatch(
        r"(.*)\n\[… ([\d,]+) characters left out: the context is nearly full …\]\n(.*)", shown["output"], re.DOTALL
    ).groups()
    dropped = int(left_out.replace(",", ""))
    assert (len(head) + dropped + len(tail), shown["dropped_bytes"]) == (len(output), dropped)
    assert output.startswith(head) and output.endswith(tail)
    assert 0.5 * context_tokens < len(result.trajectory_data) <= context_tokens, "most of the room is used"
    assert_true_to(server.log, result.trajectory_data)


@pytest.mark.parametrize("dialect", dialects())
async def test_results_share_the_room(dialect):
    async def execute(tool_call):
        return ToolResult(
            success=True, output=tool_call.arguments["command"][0] * int(tool_call.arguments["command"][1:])
        )

    server, config = DirectServer(), AgentConfig(context_tokens=4000)
    made = AtroposAgent(server, tokenizer(), config=config, execute_tool=execute, dialect=dialects()[dialect])
    commands = ["a20000", "b90", "c30000", "d40000", "e500"]
    result = await made.run(script([{"calls": [call(command) for command in commands]}, "read"]))
    assert result.final_response == "read"
    a, b, c, d, e = (shown["output"] for shown in read_results(result.messages))
    assert (b, e) == ("b" * 90, "e" * 500), "what is short stays whole"
    assert 500 < len(a) == len(c) == len(d)


@settings(max_examples=30)
@given(
    outputs=st.lists(st.lists(st.integers(0, 40_000), min_size=1, max_size=6), min_size=1, max_size=4),
    unit=st.sampled_from(["x", "word ", "π", "1 2\n", "<|im_end|>"]),
    context_tokens=st.integers(300, 6000),
    most=st.sampled_from([1, 100, 30_000]),
    dialect=st.sampled_from([*dialects()]),
)
def test_results_fit_the_context(outputs, unit, context_tokens, most, dialect):
    async def execute(tool_call):
        size = int(tool_call.arguments["command"])
        return ToolResult(success=size % 2 == 0, output=(unit * size)[:size], error="exit code 1" if size % 2 else None)

    server = DirectServer()
    config = AgentConfig(context_tokens=context_tokens, max_result_chars=most)
    made = AtroposAgent(server, tokenizer(), config=config, execute_tool=execute, dialect=dialects()[dialect])
    turns = [{"calls": [call(str(size)) for size in sizes]} for sizes in outputs]
    try:
        result = asyncio.run(made.run(script([*turns, "done"])))
    except PromptTooLong:
        return
    assert len(result.trajectory_data) <= context_tokens
    assert_true_to(server.log, result.trajectory_data)
    assert all(str(shown).count("left out") <= 1 for shown in read_results(result.messages))
    last = result.steps[-1]
    if result.stop_reason == "context_length" and last.outcomes:  # else the model's own turn was too long
        notes = [one.result.model_copy(update={"output": "", "error": None}) for one in last.outcomes]
        written = TurnRenderer(tokenizer()).encode_text("".join(note.to_xml() for note in notes))
        assert len(result.trajectory_data) + len(written) + 100 * len(notes) > context_tokens - 100


async def test_a_cut_turn_runs_nothing():
    ran = []

    async def execute(tool_call):
        ran.append(tool_call)
        return ToolResult(success=True)

    result = await agent(DirectServer(), execute, max_tokens=5).run(script([{"calls": [call("rm -rf " + "x" * 50)]}]))
    assert (result.stop_reason, ran, result.steps[0].tokens) == ("max_tokens", [], 5)


async def test_too_long_prompt_is_refused():
    with pytest.raises(PromptTooLong, match="raise max_token_length"):
        await agent(DirectServer(), context_tokens=100).run("word " * 200)


async def test_surplus_calls_are_not_run():
    ran = []

    async def execute(tool_call):
        ran.append(tool_call)
        return ToolResult(success=True)

    result = await agent(DirectServer(), execute, max_calls_per_turn=2).run(
        script([{"calls": [call(str(i)) for i in range(4)]}, "ok"])
    )
    assert len(ran) == 2
    assert result.messages[3]["content"].count("not run") == 2


async def test_results_are_cut_in_middle():
    async def execute(_call):
        return ToolResult(success=True, output="<" + "x" * 5000 + ">")

    result = await agent(DirectServer(), execute, max_result_chars=200).run(script([{"calls": [call("x")]}, "ok"]))
    answer = result.messages[3]["content"]
    assert "4,802 characters left out" in answer
    assert '"dropped_bytes": 4802' in answer
    assert len(answer) < 700


async def test_sandbox_failure_passes():
    async def execute(_call):
        raise SlotLost("gone")

    with pytest.raises(SlotLost):
        await agent(DirectServer(), execute).run(script([{"calls": [call("x")]}]))


class HttpError(Exception):
    headers = (("Server", "of another library"),)

    def __init__(self, status):
        self.status = status


@pytest.mark.parametrize(
    "fault",
    [HttpError(503), HttpError(429), ConnectionResetError(), KeyError("logprobs"), ([1], [[1]], [[0.0]]), None, ()],
    ids=str,
)
async def test_passing_fault_no_trace(fault):
    server = DirectServer([fault])
    result = await agent(server).run(script(["ok"]))
    assert result.final_response == "ok"
    assert_true_to(server.log, result.trajectory_data)


async def test_bad_http_is_no_refusal():
    """aiohttp gives it the status 400, which would not be tried again."""

    class Server(DirectServer):
        async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
            if not self.requests:
                self.requests.append(sampling)
                async with aiohttp.ClientSession() as session, session.post(url) as answer:
                    await answer.json()
            return await super().tokens_and_logprobs_completion(input_ids, n, **sampling)

    async def answer_nonsense(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'"]}\r\n\r\n')
        writer.close()

    async with await asyncio.start_server(answer_nonsense, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/generate"
        assert (await agent(Server()).run(script(["ok"]))).final_response == "ok"
        with pytest.raises(InferenceError, match="sent an invalid answer") as caught:
            await agent(Server(), model_retries=0).run(script(["ok"]))
        assert (caught.value.status, caught.value.retryable) == (None, True)


def busy(kind, retry_after):
    """What the client libraries raise for a 429."""
    headers = {"retry-after": retry_after}
    if kind == "openai":
        response = httpx.Response(429, headers=headers, request=httpx.Request("POST", "http://x/"))
        return openai.RateLimitError("slow down", response=response, body=None)
    asked = aiohttp.RequestInfo(URL("http://x/"), "POST", CIMultiDictProxy(CIMultiDict()))
    return aiohttp.ClientResponseError(asked, (), status=429, headers=CIMultiDict(headers))


@pytest.mark.parametrize("kind", ["openai", "aiohttp"])
async def test_retry_after_is_honoured(kind):
    server = DirectServer([busy(kind, "1")])
    began = time.monotonic()
    assert (await agent(server).run(script(["ok"]))).final_response == "ok"
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(
    "asked",
    [
        *("", "soon", "3600", "-3", "nan", "inf"),
        *("Wed, 01 Jan 2998 00:00:00 GMT", "Thu, 01 Jan 1970 00:00:00 GMT", f"Thu, 01 Jan 1970 00:00:00 +{10**20}"),
    ],
)
async def test_bad_retry_after_ignored(asked):
    assert (await agent(DirectServer([busy("aiohttp", asked)])).run(script(["ok"]))).final_response == "ok"


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (HttpError(400), "answered 400"),
        (([1, 2], [[1]], [[0.0]], ["stop"]), "changed the prompt's tokens"),
    ],
)
async def test_hopeless_is_not_retried(fault, why):
    server = DirectServer([fault])
    with pytest.raises(InferenceError, match=why) as caught:
        await agent(server).run(script(["ok"]))
    assert not caught.value.retryable
    assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("ids", "logprobs", "why"),
    [
        ([], [], "no token"),
        ([5, 6], [-0.1], "2 tokens came with 1"),
        ([5], [float("nan")], "infinite"),
        (["five"], [-0.1], "invalid answer"),
        ([-1], [-0.1], "invalid answer"),
        ([1 << 32], [-0.1], "invalid answer"),
    ],
)
async def test_nonsense_is_an_error(ids, logprobs, why):
    class Server:
        async def tokens_and_logprobs_completion(self, input_ids, **_):
            return input_ids, [ids], [logprobs], ["stop"]

    with pytest.raises(InferenceError, match=why):
        await agent(Server(), model_retries=0).run("x")


async def test_versions_at_their_tokens():
    class Server(DirectServer):
        async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
            answer = await super().tokens_and_logprobs_completion(input_ids, n, **sampling)
            spans.append((len(input_ids), len(answer[1][0])))
            return *answer, [[WeightSpan(0, 2, f"v{len(spans)}"), WeightSpan(2, spans[-1][1] + 9, "next")]]

    spans = []
    found = (await agent(Server()).run(script([{"calls": [call("ls")]}, "over"]))).trajectory_data
    (first, length), (second, last) = spans
    assert found.weights == [
        (first, first + 2, "v1"),
        (first + 2, first + length, "next"),
        (second, second + 2, "v2"),
        (second + 2, second + last, "next"),
    ]


async def test_tokens_cost_no_collection():
    """A full collection that did stopped the loop of 256 trajectories for a sixth of a second."""

    class Server(DirectServer):
        async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
            assert not gc.is_tracked(input_ids)
            return await super().tokens_and_logprobs_completion(input_ids, n, **sampling)

    server = Server()
    found = (await agent(server).run(script(["one"]))).trajectory_data
    assert server.log and len(found.tokens) > 10
    assert [gc.is_tracked(values) for values in (found.tokens, found.masks, found.logprobs)] == [False] * 3


async def test_silence_meets_deadline():
    class Server:
        async def tokens_and_logprobs_completion(self, **_):
            await asyncio.Event().wait()

    with pytest.raises(InferenceError, match=r"no answer within 0.05 s"):
        await agent(Server(), model_timeout_s=0.05).run("x")


async def test_aborted_generations_cost_no_time():
    """As at each update of its weights: a trajectory that was cut by its time for that would be scored."""

    class Aborting(DirectServer):
        async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
            if len(self.requests) % 2 == 0:
                self.requests.append(sampling)
                await asyncio.sleep(2)
                return input_ids, [[]], [[]], ["abort"]
            return await super().tokens_and_logprobs_completion(input_ids, n, **sampling)

    server = Aborting()
    result = await agent(server, timeout_s=3).run(script([{"calls": [call("x")]}, {"calls": [call("y")]}, "done"]))
    assert (result.stop_reason, len(server.requests)) == ("final", 6)
    assert_true_to(server.log, result.trajectory_data)


async def test_aborted_goes_on():
    requests = []

    class Aborting:
        async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
            requests.append((list(input_ids), sampling))
            at = len(requests)
            weights = [[WeightSpan(0, 2, f"v{at}")]]
            return input_ids, [[at, at]], [[-0.1 * at] * 2], ["stop" if at == 3 else "abort"], weights

    sampled = await Model(Aborting(), retries=0).generate([7, 8], max_tokens=9, seed=5, stop_token_ids=[2])
    assert (sampled.ids, sampled.finish_reason) == ([1, 1, 2, 2, 3, 3], "stop")
    assert sampled.logprobs == pytest.approx([-0.1, -0.1, -0.2, -0.2, -0.3, -0.3])
    assert sampled.weights == (WeightSpan(0, 2, "v1"), WeightSpan(2, 4, "v2"), WeightSpan(4, 6, "v3"))
    assert [ids for ids, _ in requests] == [[7, 8], [7, 8, 1, 1], [7, 8, 1, 1, 2, 2]]
    assert [(sampling["max_tokens"], sampling["seed"]) for _, sampling in requests] == [(9, 5), (7, 7), (5, 9)]


class Overflowing(DirectServer):
    """Answers 500 to long prompts, as atroposlib's own server does, or to all of them."""

    def __init__(self, longest):
        super().__init__()
        self.longest = longest

    async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
        if len(input_ids) > self.longest:
            self.requests.append(sampling)
            raise HttpError(500)
        return await super().tokens_and_logprobs_completion(input_ids, n, **sampling)


async def test_overflow_is_not_passing():
    server = Overflowing(50)
    with pytest.raises(InferenceError, match=r"answered 500 .* it can't take this prompt") as caught:
        await agent(server, model_retries=2).run("word " * 60)
    assert not caught.value.retryable
    assert len(server.requests) == 3 + 1 + 1, "its tries, a short prompt, and once more"
    with pytest.raises(InferenceError, match="answered 500") as caught:
        await agent(Overflowing(0), model_retries=0).run("x")
    assert caught.value.retryable, "a server that answers nothing may recover"


async def test_probe_tells_passing():
    server = DirectServer([HttpError(500)] * 3)
    assert (await agent(server, model_retries=2).run(script(["ok"]))).final_response == "ok"


async def test_blocked_loop_is_ours():
    class Server(DirectServer):
        async def tokens_and_logprobs_completion(self, input_ids, n, **sampling):
            asyncio.get_running_loop().call_soon(time.sleep, 2.5)  # as a hook of another trajectory does
            await asyncio.sleep(0.1)
            return await super().tokens_and_logprobs_completion(input_ids, n, **sampling)

    assert (await agent(Server(), model_timeout_s=1.5, model_retries=0).run(script(["one"]))).final_response == "one"


async def test_cancellation_is_no_error():
    asked = asyncio.Event()

    class Server:
        async def tokens_and_logprobs_completion(self, **_):
            asked.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(agent(Server()).run("x"))
    await asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def chat_answer(content, tool_calls=None, reason="stop"):
    message = types.SimpleNamespace(content=content, tool_calls=tool_calls)
    return types.SimpleNamespace(choices=[types.SimpleNamespace(message=message, finish_reason=reason)])


class ChatServer:
    config = types.SimpleNamespace(server_type="openai")

    def __init__(self, answers):
        self.answers = list(answers)

    async def chat_completion(self, messages, **options):
        self.options, self.messages = options, messages
        return self.answers.pop(0)


async def test_placeholders_are_marked():
    function = types.SimpleNamespace(name="terminal", arguments='{"command": "ls"}')
    calls = [types.SimpleNamespace(id="1", function=function)]
    server = ChatServer([chat_answer(None, calls, "tool_calls"), chat_answer("done")])
    result = await agent(server).run("x")
    assert result.trajectory_data.placeholder
    assert result.total_tool_calls == 1
    assert '"command": "ls"' in result.messages[2]["content"]
    assert "max_tokens" not in server.options  # None would go out as null


async def test_parsed_thinking_is_kept():
    answer = chat_answer("done")
    answer.choices[0].message.reasoning_content = "let me see"
    result = await agent(ChatServer([answer])).run("x")
    assert (result.steps[0].reasoning, result.final_response) == ("let me see", "done")


@pytest.mark.parametrize("depth", [300, *range(970, 990), 1_500])  # from where on json fails depends on the stack
async def test_deep_arguments_no_fault(depth):
    function = types.SimpleNamespace(name="terminal", arguments='{"a":' * depth + "1" + "}" * depth)
    calls = [types.SimpleNamespace(id="1", function=function)]
    server = ChatServer([chat_answer(None, calls, "tool_calls"), chat_answer("done")])
    result = await agent(server).run("x")
    assert (result.final_response, result.total_tool_calls) == ("done", 1)
    assert result.steps[0].calls[0].arguments == function.arguments


@pytest.mark.parametrize("parser", ["hermes", "qwen3_coder"])
@pytest.mark.parametrize("dialect", [XmlDialect, OpenAIDialect])
async def test_half_surrogate_no_fault(parser, dialect):
    if dialect is XmlDialect:
        made = XmlDialect(TurnRenderer(tokenizer()), get_parser(parser), [])
    else:
        made = OpenAIDialect(tokenizer(), [], parser)
    function = types.SimpleNamespace(name="terminal", arguments='{"command": "echo \\ud83d"}')
    calls = [types.SimpleNamespace(id="1", function=function)]
    server = ChatServer([chat_answer(None, calls, "tool_calls"), chat_answer("done")])
    result = await AtroposAgent(server, tokenizer(), execute_tool=echo, dialect=made).run("x")
    assert (result.final_response, result.total_tool_calls) == ("done", 1)
    json.dumps(result.messages, ensure_ascii=False).encode()


async def test_half_surrogate_is_a_mark():
    async def half(_call):
        return ToolResult(success=True, output="half \ud83d")

    server = DirectServer()
    await agent(server, half).run(f"\ud83d {script([{'calls': [call('x')]}, 'ok'])}")
    shown = tokenizer().decode(server.log[-1][0])
    assert "? Do as told" in shown
    assert "half ?" in shown
    chat = ChatServer([chat_answer("done")])
    await agent(chat).run("\ud83d x")
    assert chat.messages[-1]["content"] == "? x"


async def test_no_message_is_an_error():
    with pytest.raises(InferenceError, match="without a message"):
        await agent(ChatServer([chat_answer(None)] * 3), model_timeout_s=20).run("x")


def test_bad_settings_are_refused_by_name():
    for settings_ in (
        {"max_steps": 0},
        {"max_tokens": 0},
        {"max_result_chars": 0},
        {"temperature": -1.0},
        {"model_timeout_s": 0.0},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings_))):
            AgentConfig(**settings_)
    with pytest.raises(ConfigError, match="unknown 'nope'"):
        agent(DirectServer(), tool_call_parser="nope")


def test_seeds_follow_from_names():
    assert seed_for(1, "a", 0) == seed_for(1, "a", 0) != seed_for(1, "a", 1)
    assert 0 <= seed_for(3, "x") < 2**31


@pytest.mark.parametrize(("kind", "name"), [("vllm", "seed"), ("sglang", "sampling_seed")])
async def test_seed_by_the_server_s_name(kind, name):
    server = DirectServer()
    server.config = types.SimpleNamespace(server_type=kind)
    await agent(server, echo, seed=7).run(script(["done"]))
    assert {field: value for field, value in server.requests[0].items() if "seed" in field} == {name: 7}


def test_renderer_is_shared():
    renderer = TurnRenderer(tokenizer())
    made = AtroposAgent(DirectServer(), None, [], AgentConfig(), echo, renderer=renderer)
    assert made is not None


async def test_stop_tokens_go_with_each_request():
    server = DirectServer()
    await agent(server).run(script([{"calls": [call("x")]}, "ok"]))
    assert [request["stop_token_ids"] for request in server.requests] == [
        sorted(TurnRenderer(tokenizer()).stop_ids)
    ] * 2
    assert TurnRenderer(tokenizer()).end_id in server.requests[0]["stop_token_ids"]


@pytest.mark.parametrize("reason", ["stop", "length"])
async def test_no_tokens_after_the_end(reason):
    """A server that ignores stop tokens: the call after the end is neither run nor in the transcript."""
    renderer = TurnRenderer(tokenizer())
    said = tokenizer()("all done", add_special_tokens=False)["input_ids"]
    beyond = tokenizer()('<tool_call>{"name": "terminal", "arguments": {}}</tool_call>')["input_ids"]
    ids = [*said, renderer.end_id, *beyond, renderer.end_id]
    ran = []

    class Server:
        async def tokens_and_logprobs_completion(self, input_ids, **_):
            return input_ids, [ids], [[-0.5] * len(ids)], [reason]

    async def execute(tool_call):
        ran.append(tool_call)
        return ToolResult(success=True)

    result = await agent(Server(), execute).run("x")
    assert (ran, result.stop_reason, result.final_response) == ([], "final", "all done")
    sampled = [token for token in result.trajectory_data.masks if token != MASKED]
    assert sampled == [*said, renderer.end_id]
    result.trajectory_data.check()


async def test_read_errors_are_counted():
    async def execute(tool_call):
        if tool_call.arguments["command"] == "bad":
            return ToolResult.failure("no")
        return ToolResult(success=False, output="", exit_code=1)  # a program that failed is no error of a tool

    turns = [
        {"text": "<tool_call>{broken</tool_call>", "calls": [call("bad"), call("exit 1"), call("one too many")]},
        "over",
    ]
    result = await agent(DirectServer(), execute, max_calls_per_turn=2).run(script(turns))
    assert (result.total_tool_calls, result.tool_errors) == (3, 3)
