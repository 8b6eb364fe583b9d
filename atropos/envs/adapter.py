"""All contact with atroposlib (0.4.0): its classes, and workarounds for them; those for its servers: `servers.py`.

Its traps, each worked around in one of the two: root logging that turns on DEBUG output of whole items; retries of
retries (27 requests for one 503) and endless waits for an unhealthy server; health checks that never end; an unknown
tokenizer that costs 49 s; servers that need a loadable model name.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import warnings
from collections.abc import Generator, Sequence
from typing import Any, cast

from atropos.agent.model import EXACT
from atropos.agent.template import Tokenizer
from atropos.envs.lazy_imports import import_lazily
from atropos.errors import ConfigError

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Nothing of what is loaded now is ever garbage, and looking for some takes a fifth of the time.
_collecting = gc.isenabled()
gc.disable()
try:
    import_lazily()
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
    "APIConnectionError",
    "APIServer",
    "APIServerConfig",
    "BaseEnv",
    "BaseEnvConfig",
    "Item",
    "ScoredDataGroup",
    "ServerBaseline",
    "ServerConfigs",
    "ServerManager",
    "prepare_server_configs",
    "quiet_logging",
    "tokenizers",
]

server_baseline.np.percentile([0.0], 99)  # imports numpy.ma, which held the event loop of a run for 60 to 90 ms

ServerConfigs = ServerBaseline | APIServerConfig | Sequence[APIServerConfig]
"""The inference servers as an env takes them."""
HUB_TIMEOUT_S = 4.0
"""How long the model hub may take to answer at all."""


def quiet_logging() -> None:
    """Keep atroposlib's DEBUG lines (whole items, every config) away from root handlers."""
    for name in ["atroposlib", *(name for name in logging.root.manager.loggerDict if name.startswith("atroposlib."))]:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="Trainer requested to ignore max length")
    if not logging.getLogger().handlers:
        logging.getLogger().addHandler(logging.NullHandler())
    for name in ("httpx", "openai", "urllib3", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)


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
