"""What goes wrong between an env and a real server: calls that can't be read, refused names and prompts, broken
connections."""

from __future__ import annotations

import asyncio
import contextlib
import re

import pytest

from atropos.envs.inference import apis, server
from atropos.envs.running.rollout import GroupsDropped
from atropos.errors import ConfigError, InferenceError
from tests.faults.http_faults import HttpFaults
from tests.inference import dialogs
from tests.inference.envs import ENVS, make
from tests.inference.exactness import COUNTS, assert_agents_act, assert_exact, assert_logprobs, groups_of, members_of
from tests.inference.refusals import CASES, LONG, RECORDED, answer
from tests.inference.servers import CACHE, LLAMA, MODEL, llama, transformers, vllm
from tests.waiting import until

pytestmark = [
    pytest.mark.skipif(not CACHE.name, reason="needs real inference servers: make test-inference"),
    pytest.mark.timeout(3600),
]
GOOD, MISTAKEN = str(CACHE / "model"), str(CACHE / "mistaken")
TEXT = {"server_type": "openai", "max_token_length": 3000}


@pytest.fixture(scope="module")
def reading(tmp_path_factory):
    """vLLM, which reads the calls of its model."""
    log = tmp_path_factory.mktemp("reading") / "log"
    with vllm(log, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", model="mistaken") as running:
        yield running


@pytest.fixture(scope="module")
def serve(tmp_path_factory):
    """`transformers serve`."""
    with transformers(tmp_path_factory.mktemp("serve") / "log") as running:
        yield running


@pytest.fixture(scope="module")
def cpp(tmp_path_factory):
    """llama.cpp's server."""
    if LLAMA is None:
        pytest.skip("needs llama-server in PATH, or ATROPOS_LLAMA_SERVER")
    with llama(tmp_path_factory.mktemp("cpp") / "log") as running:
        yield running


# ------------------------------------------------------------------------------------------- calls that servers read


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(
    ("kind", "model"), [("reading", MODEL), ("serve", GOOD), ("cpp", MODEL)], ids=["vllm", "transformers", "llama.cpp"]
)
async def test_thinking_stays_with_calls(request, tmp_path, kind, model, name):
    path, running = tmp_path / "g.jsonl", request.getfixturevalue(kind)
    await make(name, running.url, path, groups=2, model=model, **TEXT).process_manager()
    assert_agents_act(path)
    for group in groups_of(path):
        turns = [one for messages in group["messages"] for one in messages if one["role"] == "assistant"]
        thoughts = [turn for turn in turns if turn.get("reasoning_content") or "<think>" in turn["content"]]
        assert len(thoughts) > len(turns) / 2  # now and then the tiny model doesn't think


@pytest.mark.parametrize("name", ENVS)
async def test_bad_call_is_the_models(reading, tmp_path, name):
    """vLLM's own parser leaves both in the text."""
    path = tmp_path / "g.jsonl"
    env = make(name, reading.url, path, groups=2, **TEXT)
    await env.process_manager()
    members = members_of(path)
    assert len([one for one in members if one["stop_reason"] == "final"]) > len(members) / 2
    assert env.metrics.tool_errors >= len(members) / 2
    for group in groups_of(path):
        for messages in group["messages"]:
            first = next(at for at, one in enumerate(messages) if one["role"] == "assistant")
            told = "\n".join(one["content"] for one in messages[first + 1 : first + 3])
            assert "not valid JSON" in told
            assert '"exit_code"' in told


@pytest.mark.parametrize("name", ENVS)
async def test_a_call_lost_in_silence_is_no_score(serve, tmp_path, caplog, name):
    """`transformers serve` answers 500 `Internal Server Error`, as to a fault of its own."""
    path, failed = tmp_path / "g.jsonl", serve.count(" 500 Internal")
    env = make(name, serve.url, path, groups=1, model=MISTAKEN, **TEXT)
    with pytest.raises(GroupsDropped):
        await env.process_manager()
    assert (groups_of(path), env.metrics.dropped) == ([], {"inference_error": 1})
    assert "can't read the call that its model wrote" in caplog.text
    assert serve.count(" 500 Internal") - failed <= 4 * (3 + 1), "each member's"


# -------------------------------------------------------------------------------------------- what servers refuse


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(
    ("kind", "says"),
    [("reading", "the server has no model 'nope'; it serves tiny"), ("serve", "answered 500 .*its own log says why")],
)
async def test_unknown_model_ends_start(request, tmp_path, kind, says, name):
    """`transformers serve` tries to load it; llama.cpp takes any name."""
    running = request.getfixturevalue(kind)
    with pytest.raises((ConfigError, InferenceError), match=says) as caught:
        await make(name, running.url, tmp_path / "g.jsonl", groups=1, model="nope", **TEXT).process_manager()
    assert "openai.model_name" in str(caught.value)


@pytest.mark.parametrize("case", CASES)
def test_refusals_are_as_recorded(request, case):
    kind, path, body = CASES[case]
    assert answer(request.getfixturevalue(kind).root + path, body) == RECORDED[case]


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize(
    ("kind", "settings", "code", "says", "most"),
    [
        ("reading", {"server_type": "openai"}, "prompt_too_long", r"the prompt has \d+ tokens and the context 4096", 0),
        ("cpp", {}, "prompt_too_long", r"the prompt has \d+ tokens and the context 4096", 0),
        (
            "own",
            {},
            "inference_error",
            r"500 .*, each time, to a prompt of \d+ tokens, and answers a short one",
            3 + 1 + 1,
        ),
    ],
)
async def test_long_prompt_drops_group(request, tmp_path, monkeypatch, caplog, kind, settings, code, says, most, name):
    """atroposlib's server doesn't tell how long its context is, and answers 500 `Internal Server Error`."""
    running = request.getfixturevalue(kind)
    failed = running.count(" 500 Internal")
    monkeypatch.setattr(dialogs, "task", lambda _rng: LONG[0]["content"])
    limit = {"max_token_length": 20_000} if kind == "own" else {}
    env = make(name, running.url, tmp_path / "g.jsonl", groups=1, agent_temperature=1.0, **settings, **limit)
    with pytest.raises(GroupsDropped):
        await env.process_manager()
    assert (env.metrics.dropped, env.metrics.retries) == ({code: 1}, {})
    assert re.search(says, caplog.text)
    assert running.count(" 500 Internal") - failed <= 4 * most, "each member's"


# --------------------------------------------------------------------------------------------- broken connections


@pytest.mark.parametrize("name", ENVS)
@pytest.mark.parametrize("api", ["completions", "generate"])
async def test_broken_connections_change_no_token(processed, tmp_path, monkeypatch, name, api):
    chosen = {"completions": apis.VllmCompletions(), "generate": apis.VllmGenerate()}[api]
    monkeypatch.setitem(server.APIS, "vllm", (chosen,))
    path, faults = tmp_path / "g.jsonl", HttpFaults(processed.root, rate=0.3, paths=(chosen.path,))
    async with faults.running() as url:
        env = make(name, f"{url}/v1", path, groups=4, agent_temperature=0.7, max_token_length=2000, model_retries=9)
        await env.process_manager()
    assert {*faults.struck} == {"503", "cut", "lost"}
    compared = assert_logprobs(path)
    if api == "generate":
        assert assert_exact(path, processed) == compared
    assert_agents_act(path)
    COUNTS[f"{name}, {api}, {faults.struck.total()} broken requests"] = compared


@pytest.mark.parametrize("name", ENVS)
async def test_ended_env_stops_it(processed, tmp_path, name):
    env = make(name, processed.url, tmp_path / "g.jsonl", groups=50, agent_temperature=0.7, max_token_length=2000)
    running = asyncio.create_task(env.process_manager())
    await until(lambda: processed.running_requests() > 0, "turns are generated")
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await until(lambda: processed.running_requests() == 0, "the server has broken them off")


@pytest.mark.parametrize("name", ENVS)
async def test_killed_server_loses_none(tmp_path, cpp, name):
    """llama.cpp's, since it starts in a second."""
    path, log = tmp_path / "g.jsonl", tmp_path / "log"
    with llama(log) as first:
        env = make(name, first.url, path, groups=8, agent_temperature=0.7, model_retries=9)
        running = asyncio.create_task(env.process_manager())
        await until(lambda: env.metrics.groups > 0, "a group is done")
        first.kill()
    with llama(log, port=first.port):
        await running
    assert len(groups_of(path)) == 8
    COUNTS[f"{name}, llama.cpp killed and started again"] = assert_logprobs(path)
