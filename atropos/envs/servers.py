"""An env's inference servers, as atroposlib's manager has them: made ready for our calls, asked for a token, ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from atropos.agent.model import EXACT, Model, ModelFailure, asking
from atropos.agent.template import Tokenizer
from atropos.aio import cancel_and_wait
from atropos.envs.adapter import APIConnectionError, APIServer, ServerManager
from atropos.envs.inference.server import InferenceServer
from atropos.errors import InferenceError

MODELS_TIMEOUT_S = 20.0
"""How long a server may take to list its models before an env starts."""
PROBE_SAID_S = 10.0
"""Time after which the log says that an env waits for a server's first token; one that is cold may take a minute."""
HISTORY_KEPT = 1000
"""Latest requests of a server that its statistics are made of. atroposlib would keep all, and read them for each
group."""
_HISTORIES = ("request_timings", "attempts_list", "eval_request_timings", "eval_attempts_list")
_WRAPPERS = ("_tokens_and_logprobs_completion_wrapper", "_chat_completion_wrapper", "_completion_wrapper")

_log = logging.getLogger(__name__)


def inference_of(one: object) -> InferenceServer:
    """What is known of a server."""
    return cast("Any", one).inference


def context_of(server: ServerManager) -> int | None:
    """Most tokens that every server's context holds, as far as they say."""
    known = [inference_of(one).context_tokens for one in servers_of(server) if hasattr(one, "inference")]
    return min((tokens for tokens in known if tokens is not None), default=None)


def servers_of(server: ServerManager) -> list[APIServer]:
    """The servers of a manager; with `testing`, atroposlib puts stand-ins there, which have no config."""
    return cast("list[APIServer]", server.servers)


def prepare_servers(server: ServerManager) -> None:
    """Let our own model calls see failures at once and decide about retries; bound the history of requests.

    An env's own use of the server sees failures and retries as ever.
    """
    for one in servers_of(server):
        config = getattr(one, "config", None)
        if config is None:
            continue
        client = getattr(one, "openai", None)
        if client is not None:
            client.max_retries = 0
        own = InferenceServer(config.base_url, config.server_type, config.model_name, config.api_key, config.timeout)
        one.inference = own  # pyright: ignore[reportAttributeAccessIssue] - ours, which `Model` looks for
        if config.server_type in EXACT:
            setattr(one, _WRAPPERS[0], _completions(one, own))
        for name in _HISTORIES:
            setattr(one, name, deque[float](maxlen=HISTORY_KEPT))
        for name in _WRAPPERS:
            original = getattr(one, name, None)
            if original is not None:
                setattr(one, name, _captured(original, own))


def _completions(one: Any, own: InferenceServer) -> Callable[..., Awaitable[object]]:
    """Atroposlib's wrapper, for whichever API the server speaks; our own calls also get the versions of the weights."""

    async def call(*, input_ids: Sequence[int] | None = None, prompt: str = "", **sampling: object) -> object:
        sampling.pop("model", None)  # the config's, which `own` has
        ids = one.tokenizer.encode(prompt) if input_ids is None else input_ids
        for name in ("max_new_tokens", "max_completion_tokens"):
            if name in sampling:
                sampling["max_tokens"] = sampling.pop(name)
        sampled = await own.complete(ids, sampling)
        answer = (ids, [s.ids for s in sampled], [s.logprobs for s in sampled], [s.finish_reason for s in sampled])
        return (*answer, [s.weights for s in sampled]) if asking.get() else answer

    return call


def _captured(original: Callable[..., Awaitable[object]], own: InferenceServer) -> Callable[..., Awaitable[object]]:
    async def call(**kwargs: object) -> object:
        model = asking.get()
        if model is None:
            return await original(**kwargs)
        began, halted_s = time.perf_counter(), own.halted_s
        model.lost_s += began - model.asked_at  # in atroposlib's queue, or until its health check passed
        try:
            with own.pending.waiting():
                return await original(**kwargs)
        except Exception as error:
            return ModelFailure(error)
        finally:
            model.lost_s += min(own.halted_s - halted_s, time.perf_counter() - began)

    return call


async def probe_servers(
    server: ServerManager, tokenizer: Tokenizer, timeout_s: float, chat_options: Mapping[str, object] | None = None
) -> None:
    """Ask every server for one token, for at most `timeout_s` each, before anything else is started.

    Raises:
        InferenceError: one line that names the server, what it did and the setting to look at.
    """
    for one in servers_of(server):
        config = getattr(one, "config", None)
        if config is None:
            continue
        own = inference_of(one)
        await _read_models(own, timeout_s)
        config.model_name = own.model
        text = f"the inference server at {config.base_url} has not answered the first request for {PROBE_SAID_S:g} s"
        timer = asyncio.get_running_loop().call_later(
            PROBE_SAID_S, _log.warning, "%s; it has %g s (model_timeout_s)", text, timeout_s
        )
        try:
            model = Model(_Direct(one), timeout_s=timeout_s, retries=2)
            if model.exact:
                await model.generate(tokenizer.encode("hi", add_special_tokens=False), max_tokens=1, temperature=0.0)
            else:
                await model.probe_chat(**(chat_options or {}))
            if own.context_tokens is None:  # llama.cpp's router loads a model at its first request
                await _read_models(own, timeout_s)
        except InferenceError as error:
            raise InferenceError(
                f"openai.base_url: {config.base_url} ({config.server_type}): {error}; "
                f"{_cure(error, config.server_type)}",
                status=error.status,
                retryable=error.retryable,
            ) from error
        finally:
            timer.cancel()


async def _read_models(own: InferenceServer, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):  # requests meet it, too
        async with asyncio.timeout(min(timeout_s, MODELS_TIMEOUT_S)):
            await own.read_models()


def _cure(error: InferenceError, kind: str) -> str:
    """The probable remedy for a server that fails its first request."""
    status = error.status
    if status in {401, 403}:
        return "set --openai.api_key"
    if status in {408, 429}:
        return "it has too much to do; start again later"
    if status is not None and status >= 500:
        return "its own log says why; where it loads models by name, --openai.model_name may be wrong"
    if status is None and isinstance(error.__cause__, OSError | APIConnectionError):
        return "start the server, or correct --openai.base_url"
    if kind in EXACT:
        those = "`vllm serve`, llama.cpp's or atroposlib's own" if kind == "vllm" else "SGLang's"
        return (
            f"{kind} means a server that reports token ids ({those}; docs/inference.md); correct --openai.base_url, or "
            "set --openai.server_type"
        )
    asked = "start the server with what its answer asks for, or " if status == 400 else ""
    return f"{asked}correct --openai.base_url, --openai.model_name or --openai.server_type"


class _Direct:
    """A server without its health check, which makes calls to a dead server wait."""

    def __init__(self, server: APIServer) -> None:
        self.config = server.config
        generate, chat = server._tokens_and_logprobs_completion_wrapper, server._chat_completion_wrapper  # noqa: SLF001 # pyright: ignore[reportPrivateUsage]
        self.tokens_and_logprobs_completion = partial(generate, model=self.config.model_name)
        self.chat_completion = partial(chat, model=self.config.model_name)


async def stop_servers(server: ServerManager) -> None:
    """End the health checks that atroposlib starts and never ends, and close the clients."""
    for one in servers_of(server):
        await cancel_and_wait([getattr(one, "check_task", None)])
        client = getattr(one, "openai", None)
        if client is not None:
            with contextlib.suppress(Exception):
                await client.close()
        if hasattr(one, "inference"):
            await inference_of(one).close()
