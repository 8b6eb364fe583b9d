"""Settings of a ToolServer, and how both services read theirs."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar, cast

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from atropos.errors import ConfigError
from atropos.wire.base import one_line

Port = Annotated[int, Field(ge=0, le=65_535, description="0: any free one, which the first line names")]


class SettingsModel(BaseModel):
    """Base of the settings: frozen, unknown ones are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ServiceSettings(SettingsModel):
    """What every HTTP service of ours has. Times in seconds."""

    host: str = Field(default="127.0.0.1", description="address to listen on; beyond loopback only when asked")
    drain_s: float = Field(default=30, ge=0, description="time for running calls to finish after SIGTERM")


class Bounds(SettingsModel):
    """Limits on concurrency and rate."""

    concurrency: int = Field(default=64, ge=1, description="calls running at once")
    queue: int = Field(default=256, ge=0, description="calls waiting for their turn; one more is answered 429")
    rate_per_s: float | None = Field(default=None, gt=0, description="calls a second on average; None: no bound")
    burst: int = Field(default=20, ge=1, description="calls above the rate that may come at once")


class SearchSettings(SettingsModel):
    """The provider of `web_search`."""

    provider: Literal["searxng", "brave", "tavily"] = Field(default="searxng", description="searxng, brave or tavily")
    url: str | None = Field(default=None, description="the provider's address; None: its public one (SearXNG has none)")
    api_key: SecretStr | None = Field(default=None, description="Brave and Tavily need one")

    @model_validator(mode="after")
    def _complete(self) -> SearchSettings:
        if self.provider == "searxng" and not self.url:
            raise ValueError("search.url: the address of a SearXNG instance is needed")
        if self.provider != "searxng" and self.api_key is None:
            raise ValueError(f"search.api_key: {self.provider} needs a key")
        return self


class BrowserSettings(SettingsModel):
    """The browser behind the `browser_*` tools."""

    executable: str | None = Field(default=None, description="Chromium's path; None: found on PATH")
    max_contexts: int = Field(default=32, ge=1, description="trajectories that may have a browser open at once")
    max_pages: int = Field(default=8, ge=1, description="pages (pop-ups included) of one trajectory")
    navigation_timeout_s: float = Field(default=30, gt=0, description="longest that a page may take to load")
    snapshot_chars: int = Field(default=40_000, ge=500, description="longest snapshot shown to a model")


class McpServerSettings(SettingsModel):
    """One MCP server whose tools are offered as the toolset `mcp-NAME`."""

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,40}$", description="its toolset is mcp-NAME")
    command: str | None = Field(default=None, description="a program to start and talk to over stdio")
    args: tuple[str, ...] = Field(default=(), description="the program's arguments")
    env: dict[str, str] = Field(default_factory=dict, description="the program's further variables")
    url: str | None = Field(default=None, description="or the address of a streamable HTTP server")
    headers: dict[str, SecretStr] = Field(default_factory=dict, description="sent with each request to `url`")
    tools: tuple[str, ...] | None = Field(default=None, description="only these of its tools; None: all")
    timeout_s: float = Field(default=60, gt=0, description="longest that a call of its tools may take")

    @model_validator(mode="after")
    def _one_transport(self) -> McpServerSettings:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"mcp server {self.name!r}: give either command or url")
        return self


class ToolServerSettings(ServiceSettings):
    """A ToolServer. Times in seconds, sizes in bytes."""

    port: Port = 8460
    token: SecretStr | None = Field(default=None, description="bearer token; needed to listen, None only in-process")
    tools: tuple[str, ...] = Field(
        default=(), description="external tools of your own: module:attribute, a Tool or a list of them"
    )
    only: tuple[str, ...] | None = Field(default=None, description="offer only these tools or toolsets; None: all")
    search: SearchSettings | None = Field(
        default=None, description="None: of SEARXNG_URL, BRAVE_API_KEY and TAVILY_API_KEY the first that is set"
    )
    browser: BrowserSettings = Field(default=BrowserSettings(), description="the browser behind the browser tools")
    mcp: tuple[McpServerSettings, ...] = Field(default=(), description="MCP servers whose tools are offered")
    allow_hosts: tuple[str, ...] = Field(
        default=(),
        description="private destinations that tools may reach: host, host:port, *.suffix, or address range",
    )
    tool_bounds: Bounds = Field(default=Bounds(), description="of each tool")
    tool_overrides: dict[str, Bounds] = Field(default_factory=dict, description="bounds of single tools, by name")
    trajectory_bounds: Bounds = Field(default=Bounds(concurrency=1, queue=64), description="of each trajectory")
    timeout_s: float = Field(default=60, gt=0, le=3600, description="of a tool that has none of its own")
    max_timeout_s: float = Field(
        default=300,
        gt=0,
        le=3600,
        description="longest a caller may ask for, where a tool has no longer one of its own",
    )
    result_bytes: int = Field(
        default=200_000, ge=1000, description="longest output of a result; head and tail are kept"
    )
    data_bytes: int = Field(default=4_000_000, ge=1000, description="longest structured answer of a result")
    fetch_bytes: int = Field(default=10_000_000, ge=1000, description="most that web_extract downloads of one address")
    trajectory_ttl_s: float = Field(
        default=900, gt=0, description="idle time after which a trajectory's state is discarded"
    )
    max_trajectories: int = Field(default=4096, ge=1, description="trajectories kept at once")
    journal_calls: int = Field(default=20_000, ge=1, description="finished calls kept for resends")
    journal_bytes: int = Field(default=64_000_000, ge=1000, description="memory of those answers")
    journal_ttl_s: float = Field(default=600, gt=0, description="how long they are kept at most")

    def check_listening(self) -> None:
        """Refuse to listen without a token.

        Raises:
            ConfigError: there is no token.
        """
        if self.token is None or not self.token.get_secret_value():
            raise ConfigError("tool server: token is missing; set ATROPOS_TOOL_SERVER_TOKEN or pass --token-file")


def _refuse_twice(names: Iterable[object]) -> None:
    """As TOML does; other readers take the last of two settings, or of two keys, with one name."""
    if twice := [name for name, times in Counter(names).items() if times > 1]:
        raise ValueError(f"{twice[0]!r:.80} stands there twice")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    _refuse_twice(name for name, _ in pairs)
    return dict(pairs)


class _YamlLoader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        _refuse_twice(str(name.value) for name, _ in node.value)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str | bytes) -> object:
    """What a settings file has.

    Raises:
        ValueError: it is no YAML, or a name stands in it twice; without the line itself, which may hold a secret.
    """
    try:
        return yaml.load(text, _YamlLoader)  # noqa: S506 (a safe one)
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"no YAML: {line}{error.problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"no YAML: {' '.join(str(error).split())[:200]}") from None


READERS: dict[str, Callable[[str], object]] = {
    ".json": partial(json.loads, object_pairs_hook=_object),
    ".yaml": parse_yaml,
    ".yml": parse_yaml,
}
"""By the ending of a settings file's name; any other is TOML."""


def read_file(path: Path | None, what: str = "--config") -> dict[str, object]:
    """A settings file, TOML, YAML or JSON by its name.

    Raises:
        ConfigError: it can't be read; begins with `what`.
    """
    if path is None:
        return {}
    try:
        text = path.read_text("utf-8")  # whatever this process's locale is
        value: object = READERS.get(path.suffix, tomllib.loads)(text)
    except OSError as error:
        raise ConfigError(f"{what}: {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{what}: {path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{what}: {path}: write an object with the settings")
    return cast("dict[str, object]", value)


Settings = TypeVar("Settings", bound=BaseModel)


def parse_settings(model: type[Settings], values: Mapping[str, object], what: str) -> Settings:
    """Settings of a service (`what`) from a parsed file or flags.

    Raises:
        ConfigError: a value is wrong; names each field.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{what} settings: {wrong_settings(error)}") from None


def wrong_settings(error: ValidationError) -> str:
    """Each wrong setting of a file, and why, without the value, which may hold a secret."""
    return re.sub(r"a valid dictionary( or instance of \w+)?", "a table of settings", one_line(error, shown=False))


def search_from_environment() -> SearchSettings | None:
    """The search provider that the environment names: the first of SEARXNG_URL, BRAVE_API_KEY, TAVILY_API_KEY."""
    if url := os.environ.get("SEARXNG_URL"):
        return SearchSettings(provider="searxng", url=url)
    if key := os.environ.get("BRAVE_API_KEY"):
        return SearchSettings(provider="brave", api_key=SecretStr(key))
    if key := os.environ.get("TAVILY_API_KEY"):
        return SearchSettings(provider="tavily", api_key=SecretStr(key))
    return None
