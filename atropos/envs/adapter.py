"""All contact with atroposlib (0.4.0): its classes, and workarounds for them.

Its traps, each worked around here: root logging that turns on DEBUG output of whole items; retries of retries (27
requests for one 503) and endless waits for an unhealthy server; health checks that never end; an unknown tokenizer that
costs 49 s; servers that need a loadable model name.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import time
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from atropos.agent.model import EXACT, Model, ModelFailure, asking
from atropos.agent.template import Tokenizer
from atropos.aio import cancel_and_wait
from atropos.envs.inference.server import InferenceServer
from atropos.errors import ConfigError, InferenceError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Nothing of what is loaded now is ever garbage, and looking for some takes a fifth of the time.
_collecting = gc.isenabled()
gc.disable()
try:
    from atroposlib.envs import base
    from atroposlib.envs.base import BaseEnv, BaseEnvConfig, ScoredDataGroup
    from atroposlib.envs.server_handling import server_baseline, sglang_server, trl_vllm_server, vllm_server
    from atroposlib.envs.server_handling.server_baseline import (
        VALID_REASONING_EFFORTS as REASONING_EFFORTS,
    )
    from atroposlib.envs.server_handling.server_baseline import APIServer, APIServerConfig, ServerBaseline
    from atroposlib.envs.server_handling.server_manager import ServerManager
    from atroposlib.type_definitions import Item
    from openai import APIConnectionError
    from transformers import AutoTokenizer
except ModuleNotFoundError as error:
    raise ImportError(f"the environments need the extra `env`: pip install 'atropos[env]' ({error})") from error
finally:
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = [
    "REASONING_EFFORTS",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "Item",
    "ScoredDataGroup",
    "ServerBaseline",
    "ServerConfigs",
    "ServerManager",
    "context_of",
    "inferences_of",
    "prepare_server_configs",
    "prepare_servers",
    "probe_servers",
    "quiet_logging",
    "stop_servers",
    "tokenizers",
]

server_baseline.np.percentile([0.0], 99)  # imports numpy.ma, which held the event loop of a run for 60 to 90 ms

ServerConfigs = ServerBaseline | APIServerConfig | Sequence[APIServerConfig]
"""The inference servers as an env takes them."""
MODELS_TIMEOUT_S = 20.0
"""How long a server may take to list its models before an env starts."""
PROBE_SAID_S = 10.0
"""Time after which the log says that an env waits for a server's first token; one that is cold may take a minute."""
HUB_TIMEOUT_S = 4.0
"""How long the model hub may take to answer at all."""

_log = logging.getLogger(__name__)

_HISTORIES = ("request_timings", "attempts_list", "eval_request_timings", "eval_attempts_list")
HISTORY_KEPT = 1000
"""Latest requests of a server that its statistics are made of. atroposlib would keep all, and read them for each
group."""
_WRAPPERS = ("_tokens_and_logprobs_completion_wrapper", "_chat_completion_wrapper", "_completion_wrapper")


def quiet_logging() -> None:
    """Keep atroposlib's DEBUG lines (whole items, every config) away from root handlers."""
    for name in ["atroposlib", *(name for name in logging.root.manager.loggerDict if name.startswith("atroposlib."))]:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="Trainer requested to ignore max length")
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    for name in ("httpx", "openai", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


# ----------------------------------------------------------------------------------------------------------- tokenizers


def check_tokenizer(name: str, *, field: str) -> None:
    """Find out quickly whether a tokenizer will load.

    Raises:
        ConfigError: it will not; one line that says why.
    """
    cure = f"give a folder with tokenizer.json, or a name on the model hub, in {field}"
    if not name or name == "none":
        raise ConfigError(f"{field}: no tokenizer is named; {cure}")
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        files = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
        if not any(os.access(os.path.join(path, file), os.R_OK) for file in files):
            raise ConfigError(f"{field}: the folder {name} holds no tokenizer that can be read; {cure}")
        return
    if os.path.isabs(path) or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(f"{field}: there is no folder {name}; {cure}")
    if _cached(name) or _on_hub(name, field, cure):
        return
    raise ConfigError(f"{field}: {name!r} is not in the local cache and the model hub can't be reached; {cure}")


def load_tokenizer(name: str, *, field: str) -> Tokenizer:
    """A tokenizer, or one line that says why not, quickly.

    Raises:
        ConfigError: it can't be loaded.
    """
    check_tokenizer(name, field=field)
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # transformers raises nearly anything on a damaged file
        text = " ".join(str(error).split())[:300]
        raise ConfigError(f"{field}: {name!r} can't be loaded: {type(error).__name__}: {text}") from error


@contextlib.contextmanager
def tokenizers(name: str) -> Generator[dict[str, object]]:
    """Within, atroposlib uses the tokenizers in this dict, at first the env's, instead of loading one for each server.

    Raises:
        ConfigError: it can't be loaded.
    """
    loaded: dict[str, object] = {name: load_tokenizer(name, field="env.tokenizer_name")}

    class Loaded:
        @staticmethod
        def from_pretrained(name: str, *args: object, **options: object) -> object:
            return loaded[name] if name in loaded else AutoTokenizer.from_pretrained(name, *args, **options)

    modules = cast("list[Any]", [base, vllm_server, sglang_server, trl_vllm_server])
    before = [module.AutoTokenizer for module in modules]
    for module in modules:
        module.AutoTokenizer = Loaded
    try:
        yield loaded
    finally:
        for module, original in zip(modules, before, strict=True):
            module.AutoTokenizer = original


def _cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    try:
        return any(
            isinstance(try_to_load_from_cache(name, file), str) for file in ("tokenizer.json", "tokenizer_config.json")
        )
    except ValueError:
        return False


def _on_hub(name: str, field: str, cure: str) -> bool:
    """Whether the hub knows the name; False when it can't be reached or must not be asked."""
    import httpx
    from huggingface_hub import get_token

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes"}:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    token = get_token()
    try:
        answer = httpx.head(
            f"{endpoint}/{name}/resolve/main/tokenizer_config.json",
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=HUB_TIMEOUT_S,
        )
    except httpx.HTTPError:
        return False
    if answer.status_code < 400:
        return True
    if answer.status_code in {401, 403, 404}:
        raise ConfigError(f"{field}: the model hub answers {answer.status_code} for {name!r}; {cure}")
    return False


# -------------------------------------------------------------------------------------------------------------- servers


def prepare_server_configs(
    configs: ServerConfigs, tokenizer_name: str, loaded: dict[str, object]
) -> list[APIServerConfig]:
    """The servers as the list that atroposlib needs: it prints a single config and then ignores it.

    Servers that load a tokenizer of their own get the env's where they name none; the tokenizers are added to those
    loaded.

    Raises:
        ConfigError: no server, servers of several types, a URL is missing, or a tokenizer can't be loaded.
    """
    if isinstance(configs, APIServerConfig):
        configs = [configs]
    elif isinstance(configs, ServerBaseline):
        raise ConfigError("openai.base_url: name the inference server, as --openai.base_url http://host:port/v1")
    if not configs:
        raise ConfigError("openai: config_init gives no inference server; return (config, [APIServerConfig(...)])")
    kinds = {config.server_type for config in configs}
    if len(kinds) > 1:
        raise ConfigError(f"openai.server_type: all servers must be of one type, not {', '.join(sorted(kinds))}")
    prepared: list[APIServerConfig] = []
    for config in configs:
        url = (config.base_url or "").rstrip("/")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"openai.base_url: {config.base_url!r} is no URL; write http://host:port/v1")
        for name in ("num_max_requests_at_once", "num_requests_for_eval"):
            if getattr(config, name) < 1:
                raise ConfigError(f"openai.{name}: must be at least 1, not {getattr(config, name)}")
        changes: dict[str, object] = {"base_url": url, "api_key": config.api_key or "x"}
        if config.server_type in EXACT and config.tokenizer_name == "none":
            changes["tokenizer_name"] = tokenizer_name
        server = config.model_copy(update=changes)
        field = {"trl": "model_name"}.get(server.server_type, "tokenizer_name")
        needed = getattr(server, field)
        if server.server_type != "openai" and needed not in loaded:
            loaded[needed] = load_tokenizer(needed, field=f"openai.{field}")
        prepared.append(server)
    return prepared


def inference_of(one: object) -> InferenceServer:
    """What is known of a server."""
    return cast("Any", one).inference


def inferences_of(server: ServerManager) -> list[InferenceServer]:
    """What is known of each server."""
    return [inference_of(one) for one in servers_of(server) if hasattr(one, "inference")]


def context_of(server: ServerManager) -> int | None:
    """Most tokens that every server's context holds, as far as they say."""
    known = [own.context_tokens for own in inferences_of(server)]
    return min((tokens for tokens in known if tokens is not None), default=None)


def servers_of(server: ServerManager) -> list[APIServer]:
    """The servers of a manager; with `testing`, atroposlib puts stand-ins there, which have no config."""
    return cast("list[APIServer]", server.servers)


def prepare_servers(server: ServerManager) -> None:
    """Let our own model calls see failures at once and decide about retries; bound the history of requests.

    An env's own use of the server sees failures and retries as ever.
    """
    for one in servers_of(server):
        client = getattr(one, "openai", None)
        if client is not None:
            client.max_retries = 0
        config, own = getattr(one, "config", None), None
        if config is not None:
            own = InferenceServer(
                config.base_url, config.server_type, config.model_name, config.api_key, config.timeout
            )
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


def _captured(
    original: Callable[..., Awaitable[object]], own: InferenceServer | None
) -> Callable[..., Awaitable[object]]:
    async def call(**kwargs: object) -> object:
        model = asking.get()
        if model is None:
            return await original(**kwargs)
        began, halted_s = time.perf_counter(), own.halted_s if own else 0.0
        model.lost_s += began - model.asked_at  # in atroposlib's queue, or until its health check passed
        try:
            return await original(**kwargs)
        except Exception as error:
            return ModelFailure(error)
        finally:
            if own:
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
        with contextlib.suppress(TimeoutError):  # which the request below meets too
            async with asyncio.timeout(min(timeout_s, MODELS_TIMEOUT_S)):
                await own.read_models()
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
        except InferenceError as error:
            raise InferenceError(
                f"openai.base_url: {config.base_url} ({config.server_type}): {error}; "
                f"{_cure(error, config.server_type)}",
                status=error.status,
                retryable=error.retryable,
            ) from error
        finally:
            timer.cancel()


def _cure(error: InferenceError, kind: str) -> str:
    """The probable remedy for a server that fails its first request."""
    status = error.status
    if status in {401, 403}:
        return "set --openai.api_key"
    if status in {408, 429}:
        return "it has too much to do; start again later"
    if status is not None and status >= 500:
        return "its own log says why"
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
