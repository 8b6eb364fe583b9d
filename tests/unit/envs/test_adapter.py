"""What a user is told of an inference server that is no use: what it did, and what would help against just that."""

from __future__ import annotations

import asyncio
import contextlib

import huggingface_hub
import pytest
from aiohttp import web

from atropos.envs.adapter import check_tokenizer
from atropos.envs.servers import probe_servers, stop_servers
from atropos.errors import ConfigError, InferenceError
from tests.unit.envs.support import ScriptEnv, make
from tests.web_app import serving

pytestmark = pytest.mark.waits


@contextlib.asynccontextmanager
async def server(handle=None, **answer):
    async def same(request):
        return web.json_response({"status": "ok"}) if request.method == "GET" else web.Response(**answer)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle or same)
    async with serving(app) as url:
        yield f"{url}/v1"


JSON = {"content_type": "application/json"}


@pytest.mark.parametrize(
    ("answer", "kind", "says"),
    [
        (
            {"text": '{"text": ["hi"], "finish_reasons": ["stop"]}', **JSON},
            "vllm",
            "answer has no 'choices'.*vllm means",
        ),
        ({"text": '{"text": "hi"}', **JSON}, "sglang", "answer has no 'meta_info'.*sglang means"),
        (
            {"text": "<html>log in", "content_type": "text/html"},
            "vllm",
            "sent an invalid answer.*correct --openai.base_url",
        ),
        ({"status": 404}, "vllm", "answered 404.*set --openai.server_type"),
        ({"status": 401}, "vllm", "answered 401.*set --openai.api_key"),
        ({"status": 401}, "openai", "answered 401.*set --openai.api_key"),
        ({"status": 429}, "openai", "answered 429.*too much to do"),
        ({"status": 500}, "vllm", "answered 500.*its own log says why"),
        (
            {"text": "<html>log in", "content_type": "text/html"},
            "openai",
            "sent an invalid answer.*--openai.model_name",
        ),
    ],
)
async def test_a_useless_server_is_named(answer, kind, says):
    async with server(**answer) as url:
        env = make(ScriptEnv, url, None, server_type=kind)
        with pytest.raises(InferenceError, match=f"(?s)openai.base_url: {url}.*{says}"):
            await env.process_manager()
        assert not env.backend.running


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_busy_server_asked_again(kind, faulty_policy):
    async with faulty_policy(fault="503", fault_rate=0.33) as policy:  # the first two requests
        env = make(ScriptEnv, policy.url, None, server_type=kind)
        await probe_servers(env.server, env.tokenizer, 20)
        await stop_servers(env.server)


@pytest.mark.parametrize("kind", ["vllm", "openai"])
async def test_missing_server_is_advised(kind):
    env = make(ScriptEnv, "http://127.0.0.1:9/v1", None, server_type=kind)
    with pytest.raises(InferenceError, match=r"start the server, or correct --openai\.base_url"):
        await env.process_manager()


async def test_gated_tokenizer_is_found(monkeypatch, tmp_path):
    """`hf auth login` writes the token to a file; a variable is the other way."""

    async def gated(request):
        return web.Response(status=200 if request.headers.get("Authorization") == "Bearer hf_mine" else 401)

    (tmp_path / "token").write_text("hf_mine\n")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    async with server(gated) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="answers 401 for 'org/gated'"):
            await asyncio.to_thread(check_tokenizer, "org/gated", field="env.tokenizer_name")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        await asyncio.to_thread(check_tokenizer, "org/gated", field="env.tokenizer_name")
