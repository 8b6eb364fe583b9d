"""Which API a server speaks, whose logprobs it gives and how much it holds are found out at the start, with real
answers' shapes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from atropos.agent.model import Model
from atropos.agent.transcript import WeightSpan
from atropos.envs import servers
from atropos.envs.inference import apis
from atropos.envs.inference.server import InferenceServer, Refused
from atropos.envs.reporting import watch
from atropos.envs.running.lifecycle import beside
from atropos.envs.servers import probe_servers, stop_servers
from atropos.errors import ConfigError, InferenceError
from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer
from tests.e2e import hermes_support
from tests.e2e.test_exact_tokens import Hermes
from tests.inference.refusals import CASES, LONG, RECORDED
from tests.settings import shows
from tests.unit.envs.support import ScriptEnv, make
from tests.waiting import until
from tests.web_app import serving

pytestmark = pytest.mark.waits

VLLM = json.loads((Path(__file__).parents[2] / "inference/vllm.json").read_text())
"""Answers of vLLM 0.32, as tests/inference/record.py wrote them."""
LOGITS = {3: 2.0, 4: 1.0, 5: 0.0}


def logprobs(temperature: float) -> dict[int, float]:
    total = math.log(sum(math.exp(logit / temperature) for logit in LOGITS.values()))
    return {token: logit / temperature - total for token, logit in LOGITS.items()}


def vllm_completions(body, told):
    tops = sorted(told.items(), key=lambda pair: -pair[1])[: body["logprobs"]]
    entry = {
        "tokens": ["x"],
        "token_logprobs": [told[5]],
        "top_logprobs": [{str(t): lp for t, lp in [(5, told[5]), *tops]}],
    }
    choice = {"token_ids": [5], "prompt_token_ids": body["prompt"], "finish_reason": "length", "logprobs": entry}
    return {"choices": [choice]}


def vllm_generate(body, told):
    tops = [{"token_id": 5, "logprob": told[5]}, *({"token_id": t, "logprob": told[t]} for t in (3, 4))]
    content = [{"token_id": 5, "logprob": told[5], "top_logprobs": tops[: body["sampling_params"]["logprobs"]]}]
    spans = [{"version": "7", "start": 0, "end": 1}]
    choice = {"token_ids": [5], "finish_reason": "length", "weight_versions": spans, "logprobs": {"content": content}}
    return {"prompt_token_ids": body["token_ids"], "choices": [choice]}


def atroposlib(body, told):
    position = {5: told[5], **dict(sorted(told.items(), key=lambda pair: -pair[1])[: body["logprobs"]])}
    return {
        "logprobs": [[[position]]],
        "finish_reasons": ["length"],
        "prompt_token_ids": body["prompt"]["prompt_token_ids"],
    }


def sglang(body, told):
    tops = [[lp, token, None] for token, lp in told.items()][: body["top_logprobs_num"]]
    entries = {"output_token_logprobs": [[told[5], 5, None]], "output_top_logprobs": [tops]}
    return {"meta_info": {**entries, "finish_reason": {"type": "length", "length": 1}, "weight_version": "7"}}


def llama(body, told):
    tops = [{"id": token, "prob": math.exp(lp)} for token, lp in told.items()][: body["n_probs"]]
    entry = {"id": 5, "prob": math.exp(told[5]), "top_probs": tops}
    return {"completion_probabilities": [entry], "stop_type": "limit", "tokens": [5]}


SERVERS = {
    "vllm": ("vllm", apis.VllmCompletions(), vllm_completions),
    "vllm, scale-out": ("vllm", apis.VllmGenerate(), vllm_generate),
    "atroposlib": ("vllm", apis.AtroposlibGenerate(), atroposlib),
    "llama.cpp": ("vllm", apis.LlamaCompletion(), llama),
    "sglang": ("sglang", apis.SglangGenerate(), sglang),
}


@contextlib.asynccontextmanager
async def server(api, answer, *, raw=False):
    """A server with one API, and vLLM's list of models. It samples token 5."""
    bodies = []

    async def generate(request):
        body = await request.json()
        bodies.append(body)
        temperature = body.get("sampling_params", body)["temperature"]
        return web.json_response(answer(body, logprobs(1.0 if raw else temperature)))

    async def models(_request):
        return web.json_response(VLLM["models"]["body"])

    app = web.Application()
    app.router.add_get("/v1/models", models)
    app.router.add_post(api.path, generate)
    async with serving(app) as url:
        yield f"{url}/v1", bodies


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("name", SERVERS)
async def test_the_api_is_found_out(name, raw):
    kind, api, answer = SERVERS[name]
    async with server(api, answer, raw=raw) as (url, _):
        one = InferenceServer(url, kind, "default", "x", 20)
        await one.read_models()
        [found] = await one.complete([1, 2], {"n": 1, "max_tokens": 1, "temperature": 0.5})
        await one.close()
    assert type(one.api) is type(api)
    assert (one.model, one.context_tokens, one.raw_logprobs) == ("tiny", 4096, raw)
    assert found.ids == [5]
    assert found.logprobs == pytest.approx([logprobs(1.0 if raw else 0.5)[5]])
    assert list(found.weights) == ([WeightSpan(0, 1, "7")] if name in {"vllm, scale-out", "sglang"} else [])


@pytest.mark.parametrize(
    ("status", "spoken"),
    [*((status, False) for status in (400, 403, 404, 405, 415, 422, 501)), (401, True), (429, True), (500, True)],
)
async def test_another_api_is_tried_where_one_is_not_spoken(monkeypatch, status, spoken):
    """A server that speaks it, and fails, would fail in another as well, or hide the reason: it is asked again."""
    (kind, api, answer), pauses = SERVERS["vllm"], []

    async def answered(_method, path, body=None, _timeout=None):
        if path != api.path:
            raise Refused(path, status, {}, b"no")
        return answer(body, logprobs(body["temperature"]))

    one = InferenceServer("http://x", kind, "tiny", "x", 20)
    monkeypatch.setattr(one, "_answer", answered)
    monkeypatch.setattr("atropos.envs.inference.server.backoff_s", lambda tries, **_: pauses.append(tries) or 0)
    with pytest.raises(Refused) if spoken else contextlib.nullcontext():
        await one.find([1, 2])
    assert (one.api is None, pauses) == (spoken, [1, 2] * spoken)


@pytest.mark.parametrize("name", ["vllm", "vllm, scale-out"])
async def test_broken_probe_is_repeated(name):
    """As at the start of an env while weights change."""
    kind, api, answer = SERVERS[name]
    asked = []

    def aborting(body, told):
        asked.append(body)
        found = answer(body, told)
        if len(asked) % 2:
            [choice] = found["choices"]
            choice |= {"token_ids": [], "finish_reason": "abort"}
            choice["logprobs"] = {"content": [], "token_logprobs": [], "top_logprobs": []}
        return found

    async with server(api, aborting) as (url, _):
        one = InferenceServer(url, kind, "tiny", "x", 20)
        await one.find([1, 2])
        await one.close()
    assert (type(one.api), one.raw_logprobs, len(asked)) == (type(api), False, 4)


@pytest.mark.parametrize("name", SERVERS)
async def test_whole_distribution_wanted(name):
    kind, api, answer = SERVERS[name]
    async with server(api, answer) as (url, bodies):
        one = InferenceServer(url, kind, "tiny", "x", 20)
        await one.complete([1, 2], {"n": 1, "max_tokens": 1, "temperature": 0.5})
        await one.close()
    for body in bodies:
        fields = body.get("sampling_params", body)
        assert (fields["top_p"], fields["min_p"]) == (1.0, 0.0)
        assert fields["top_k"] in {-1, 0}
        assert fields["presence_penalty"] == fields["frequency_penalty"] == 0.0
        assert fields.get("repetition_penalty", fields.get("repeat_penalty")) == 1.0
        if name == "llama.cpp":  # whose flags set these
            assert (fields["samplers"], fields["mirostat"], fields["dynatemp_range"]) == (["temperature"], 0, 0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"agent_temperature": 0.7}, r"env\.agent_temperature: 0\.7, but .*--logprobs-mode processed_logprobs"),
        (
            {"agent_temperature": 1.0, "max_token_length": 5000},
            r"env\.max_token_length: 5000 is more than .* 4096 tokens",
        ),
    ],
)
async def test_contradicted_settings_are_refused(settings, says):
    _, api, answer = SERVERS["vllm"]
    async with server(api, answer, raw=True) as (url, _):
        env = make(ScriptEnv, url, None, **settings)
        env.server.servers[0].inference.model = "default"
        with pytest.raises(ConfigError, match=says):
            await env.process_manager()
        assert not env.backend.running


async def test_unknown_model_is_refused():
    _, api, answer = SERVERS["vllm"]
    async with server(api, answer) as (url, _):
        env = make(ScriptEnv, url, None)
        with pytest.raises(ConfigError, match=r"openai\.model_name: .*it serves tiny"):
            await env.process_manager()


@shows("allow_raw_logprobs")
@pytest.mark.parametrize(
    "settings", [{"agent_temperature": 1.0}, {"agent_temperature": 0.7, "allow_raw_logprobs": True}]
)
async def test_raw_logprobs_on_request(settings):
    _, api, answer = SERVERS["vllm"]
    async with server(api, answer, raw=True) as (url, _):
        env = make(ScriptEnv, url, None, **settings)
        env.server.servers[0].inference.model = "default"
        await env.setup()
        assert env.context_tokens == 4096
        await env._close()


class Raw(ScriptEnv):
    """Its server's logprobs are of temperature 1, and build_agent_config chooses another."""

    def build_agent_config(self, item):
        return replace(super().build_agent_config(item), temperature=0.7)

    async def setup_agent_env(self):
        self.server.servers[0].inference.raw_logprobs = True

    async def evaluate(self, *_args, **_kwargs):
        self.scored, _ = await self.collect_trajectory(self.items[0])


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_evaluation_may_be_raw(policy, temperature):
    env = make(Raw, policy.url, None, agent_temperature=temperature)
    await env._run_evaluate()
    assert env.scored["overrides"]["logprobs"] == "raw"


async def test_evaluation_in_training_may_be_raw(policy):
    env = make(Raw, policy.url, None, agent_temperature=1.0)
    async with env.running():
        await env.evaluate()
    assert env.scored["overrides"]["temperature"] == 0.7


async def test_raw_group_ends_the_run(policy):
    with pytest.raises(ConfigError, match=r"temperature: 0\.7, but"):
        await make(Raw, policy.url, None, agent_temperature=1.0).process_manager()


@pytest.mark.parametrize("allowed", [False, True])
async def test_greedy_tokens_are_no_samples(policy, allowed):
    """vLLM's logprobs are of temperature 1 then, also with `processed_logprobs`."""
    env = make(ScriptEnv, policy.url, None, agent_temperature=0, allow_raw_logprobs=allowed)
    with contextlib.nullcontext() if allowed else pytest.raises(ConfigError, match="0 takes the likeliest token"):
        await env.setup()
    if allowed:
        scored, _ = await env.collect_trajectory(env.items[0])
        assert (scored["overrides"]["temperature"], scored["overrides"]["logprobs"]) == (0, "raw")
    await env._close()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_adapter_has_its_models_context(kind):
    cards = [
        {"id": "base", "owned_by": kind, "max_model_len": 4096, "parent": None},
        {"id": "lora", "owned_by": kind, "max_model_len": None, "parent": "base"},
    ]

    async def models(_request):
        return web.json_response({"data": cards})

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with serving(app) as url:
        one = InferenceServer(f"{url}/v1", kind, "lora", "x", 20)
        refused = pytest.raises(ConfigError, match=r"openai\.model_name: 'lora' is an adapter")
        with refused if kind == "sglang" else contextlib.nullcontext():
            await one.read_models()
        await one.close()
    assert (one.model, one.context_tokens) == ("lora", 4096 if kind == "vllm" else None)


@contextlib.asynccontextmanager
async def llama_cpp(models):
    """A llama.cpp server with those answers to `/v1/models`: its address, and the models that completions named."""
    loaded = []

    async def completion(request):
        body = await request.json()
        loaded.append(body["model"])
        return web.json_response(llama(body, logprobs(body["temperature"] or 1.0)))

    async def listed(_request):
        return web.json_response({"data": await models(loaded)})

    app = web.Application()
    app.router.add_get("/v1/models", listed)
    app.router.add_post("/completion", completion)
    async with serving(app) as url:
        yield f"{url}/v1", loaded


async def test_router_loads_a_named_model():
    """As llama.cpp's, which says what a model's context is once it is loaded."""

    async def models(loaded):
        return [{"id": "m", **({"meta": {"n_ctx": 4096}} if loaded else {})}]

    async with llama_cpp(models) as (url, loaded):
        env = make(ScriptEnv, url, None)
        env.server.servers[0].inference.model = "default"
        await probe_servers(env.server, env.tokenizer, 20)
        await stop_servers(env.server)
    assert {*loaded} == {"m"}
    assert env.context_tokens == 4096


async def test_models_may_hang(monkeypatch):
    monkeypatch.setattr(servers, "MODELS_TIMEOUT_S", 0.2)

    async def models(_loaded):
        await asyncio.Event().wait()

    async with llama_cpp(models) as (url, _):
        env = make(ScriptEnv, url, None)
        await probe_servers(env.server, env.tokenizer, 20)
        await stop_servers(env.server)


async def test_changed_prompt_is_refused():
    def doubled(body, told):
        return vllm_completions({**body, "prompt": [0, *body["prompt"]]}, told)

    async with server(apis.VllmCompletions(), doubled) as (url, _):
        one = InferenceServer(url, "vllm", "tiny", "x", 20)
        with pytest.raises(InferenceError, match="changed the prompt's tokens"):
            await one.complete([1, 2], {"n": 1, "max_tokens": 1, "temperature": 1.0})
        await one.close()


@pytest.mark.parametrize("name", ["completions", "generate"])
def test_real_answers_are_read(name):
    api = {"completions": apis.VllmCompletions(), "generate": apis.VllmGenerate()}[name]
    body = VLLM[name]["body"]
    [found] = api.read(body)
    assert list(api.prompt(body)) == [1, 872, 198, 77, 78]
    assert len(found.ids) == len(found.logprobs) == 3
    assert found.finish_reason == "length"


async def test_stand_in_has_real_shape():
    def shape(value, real):
        """What the stand-in has that the real one lacks, or has in another type."""
        if isinstance(value, dict):
            return [
                f"{key}.{more}" for key in value for more in (shape(value[key], real[key]) if key in real else ["?"])
            ]
        if isinstance(value, list):
            return shape(value[0], real[0]) if value and real else []
        return [] if type(value) is type(real) or None in {value, real} else [f"{value!r}"]

    async with serving(PolicyServer(Policy(TASKS)).application()) as url:
        one = InferenceServer(url, "vllm", "x", "x", 20)
        body = apis.VllmCompletions().body("x", [1, 872, 198], {"n": 1, "max_tokens": 3, "temperature": 1.0}, top=0)
        answer = await one._answer("POST", "/v1/completions", body)
        await one.close()
    (choice,) = answer["choices"]
    (real,) = VLLM["completions"]["body"]["choices"]
    del choice["logprobs"]["top_logprobs"], real["logprobs"]["top_logprobs"]  # keyed by text
    assert shape(answer, VLLM["completions"]["body"]) == []


class Halting:
    """vLLM that can be paused, and tells so, if not at its first look."""

    def __init__(self, *, tells=True):
        self.looks, self.running, self.tells = 0, asyncio.Event(), tells

    def application(self):
        async def generate(request):
            body = await request.json()
            await self.running.wait()
            return web.json_response(vllm_completions(body, logprobs(body["temperature"] or 1.0)))

        async def health(_request):
            return web.Response()

        async def is_halted(request):
            self.looks += 1
            if not self.tells or self.looks == 1:  # a proxy before it, or no development mode
                return web.Response(status=503 if self.tells else 404)
            return web.json_response({request.path[1:]: not self.running.is_set()})

        app = web.Application()
        app.router.add_post("/v1/completions", generate)
        app.router.add_get("/health", health)
        for path in ("/is_paused", "/is_sleeping"):  # vLLM 0.32 says both of a server that is paused
            app.router.add_get(path, is_halted)
        return app


async def test_pause_is_not_agent_s_time(monkeypatch, caplog):
    monkeypatch.setattr(watch, "HEALTH_S", 0.05)
    monkeypatch.setattr(watch, "SILENT_S", 0.5)
    halting = Halting()
    async with serving(halting.application()) as url:
        env = make(ScriptEnv, f"{url}/v1", None)
        halting.running.set()
        model = Model(env.server)
        await model.generate([1, 2], max_tokens=1, temperature=1.0)
        assert (model.lost_s, halting.looks) == (pytest.approx(0, abs=0.5), 0)
        halting.running.clear()
        async with beside(watch.watch_inference(env.server, 60)), asyncio.TaskGroup() as tasks:
            began, before = time.perf_counter(), model.lost_s
            tasks.create_task(model.generate([1, 2], max_tokens=1, temperature=1.0))
            await until(lambda: "is paused or asleep; each call waits up to" in caplog.text, "the log says so")
            halting.running.set()
        waited = time.perf_counter() - began
        assert waited / 2 < model.lost_s - before <= waited
        await stop_servers(env.server)


async def test_one_of_two_is_paused(monkeypatch, caplog):
    """As where a trainer updates one server after the other."""
    monkeypatch.setattr(watch, "HEALTH_S", 0.05)
    monkeypatch.setattr(watch, "SILENT_S", 0.5)
    halting, other = Halting(), Halting()
    async with serving(halting.application()) as url, serving(other.application()) as far:
        env = make(ScriptEnv, f"{url}/v1", None)
        env.server.servers += make(ScriptEnv, f"{far}/v1", None).server.servers
        halting.running.set()
        other.running.set()
        models = [Model(server) for server in env.server.servers]
        for model in models:
            await model.generate([1, 2], max_tokens=1, temperature=1.0)
        halting.running.clear()

        async def keep_asking():
            while True:
                await models[1].generate([1, 2], max_tokens=1, temperature=1.0)

        async with beside(watch.watch_inference(env.server, 60)), asyncio.TaskGroup() as tasks:
            began, before = time.perf_counter(), models[0].lost_s
            tasks.create_task(models[0].generate([1, 2], max_tokens=1, temperature=1.0))
            busy = tasks.create_task(keep_asking())
            await until(lambda: "it is paused or asleep; each call waits up to" in caplog.text, "the log says so")
            halting.running.set()
            busy.cancel()
        waited = time.perf_counter() - began
        assert waited / 2 < models[0].lost_s - before <= waited
        assert f"{url}/v1 passes its health check, but none of 1 calls" in caplog.text
        assert far not in caplog.text
        await stop_servers(env.server)


async def test_silence_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(watch, "HEALTH_S", 0.05)
    monkeypatch.setattr(watch, "SILENT_S", 0.5)
    caplog.set_level("INFO", watch.__name__)

    def said():
        return [record.getMessage() for record in caplog.records if record.name == watch.__name__]

    halting = Halting(tells=False)
    async with serving(halting.application()) as url:
        env = make(ScriptEnv, f"{url}/v1", None)
        model = Model(env.server)
        halting.running.set()
        async with beside(watch.watch_inference(env.server, 60)), asyncio.TaskGroup() as tasks:
            await model.generate([1, 2], max_tokens=1, temperature=1.0)
            assert said() == []
            halting.running.clear()
            for _ in range(2):
                tasks.create_task(model.generate([1, 2], max_tokens=1, temperature=1.0))
            await until(lambda: len(said()) == 2, "it is said again after twice the time")
            text = "but none of 2 calls was answered for"
            assert all(text in line and "it is paused or asleep, or its turns take so long" in line for line in said())
            halting.running.set()
            await until(lambda: len(said()) == 3, "it answers again")
        assert "answers again, after" in said()[-1]
        await stop_servers(env.server)


async def test_pause_may_be_unknown(monkeypatch):
    _, api, answer = SERVERS["vllm"]
    async with server(api, answer) as (url, _):
        one = InferenceServer(url, "vllm", "tiny", "x", 20)
        await one.look(1)
        assert (one.halted, one.halted_s) == (False, 0)
    await one.look(1)  # it would fail: nobody answers
    await one.close()


async def test_a_server_must_take_tools(tmp_path):
    """As `vllm serve` without `--enable-auto-tool-choice`."""
    why = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'

    async def chat(request):
        message = {"role": "assistant", "content": "hi"}
        answer = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "length"}]}
        refused = "tools" in await request.json()
        return web.json_response({"error": {"message": why}} if refused else answer, status=400 if refused else 200)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    async with serving(app) as url:
        env = hermes_support.make(Hermes, (f"{url}/v1", None), tmp_path, [], server_type="openai")
        with pytest.raises(InferenceError, match=f"(?s){why}.*start the server with what its answer asks for"):
            await env.process_manager()
        plain = make(ScriptEnv, f"{url}/v1", None, server_type="openai")
        await probe_servers(plain.server, plain.tokenizer, 20)
        await stop_servers(plain.server)


REFUSALS = {
    **{name: (CASES[name][1], recorded) for name, recorded in RECORDED.items()},
    **{
        f"vLLM, {name}": ("/v1/completions", {**VLLM[name], "type": "application/json", "text": json.dumps(VLLM[name]["body"])})
        for name in ("unknown model", "beyond the context")
    },
}  # fmt: skip
"""Paths and answers of real servers, as they were recorded."""


@pytest.mark.parametrize("case", REFUSALS)
async def test_refused_requests_are_not_repeated(case):
    """It answers what is short: what an env asks at its start, and to find out whether the server is well."""
    path, refusal = REFUSALS[case]
    answers = {
        "/v1/chat/completions": lambda _body: {
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "length"}]
        },
        "/v1/completions": lambda body: vllm_completions(body, logprobs(1.0)),
        "/generate": lambda body: atroposlib(body, logprobs(1.0)),
    }
    refused = []

    async def respond(request):
        body = await request.json()
        if len(str(body)) < 1000:
            return web.json_response(answers[path](body))
        refused.append(body)
        return web.Response(body=refusal["text"], status=refusal["status"], headers={"Content-Type": refusal["type"]})

    async def health(_request):
        return web.Response()

    app = web.Application()
    app.router.add_get("/health", health)
    app.router.add_post(path, respond)
    async with serving(app) as url:
        kind = "openai" if "chat" in path else "vllm"
        env = make(ScriptEnv, f"{url}/v1", None, server_type=kind)
        await probe_servers(env.server, env.tokenizer, 20)
        model = Model(env.server, retries=2)
        with pytest.raises(InferenceError) as caught:
            if model.exact:
                await model.generate([77] * 5000, max_tokens=3, temperature=1.0)
            else:
                await model.chat(LONG)
        await stop_servers(env.server)
    said = str(caught.value)
    assert not caught.value.retryable
    if refusal["status"] == 500:
        assert "each time" in said
        assert len(refused) == 3 + 1
    else:
        assert json.loads(refusal["text"])["error"]["message"][:60] in said
        assert len(refused) == 1


async def test_cold_server_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(servers, "PROBE_SAID_S", 0.2)
    halting = Halting()
    async with serving(halting.application()) as url:
        env = make(ScriptEnv, f"{url}/v1", None)
        probing = asyncio.create_task(probe_servers(env.server, env.tokenizer, 60))
        await until(lambda: "has not answered the first request for 0.2 s; it has 60 s" in caplog.text, "it is said")
        halting.running.set()
        await probing
        await stop_servers(env.server)
