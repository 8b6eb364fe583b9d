"""`atropos tool-server`, `executor-server` and `mcp`: settings from a file, flags and the environment."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from atropos.api.settings import read_file
from atropos.errors import ConfigError

if TYPE_CHECKING:
    from atropos.api.executor.models import ExecutorServerSettings

TOKEN_VARIABLE = "ATROPOS_TOOL_SERVER_TOKEN"
BACKEND = typer.Option("--backend", help="A backend's name: local, docker, nomad …")


def read_token(path: Path | None, variable: str) -> str:
    """The bearer token, from a file or the environment.

    Raises:
        ConfigError: there is none, or the file can't be read.
    """
    if path is not None:
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise ConfigError(f"--token-file: {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--token-file: {path}: it is not UTF-8 text") from None
    else:
        token = os.environ.get(variable, "").strip()
    if not token:
        raise ConfigError(f"token: missing; set {variable}, or pass --token-file")
    return token


@contextlib.contextmanager
def server_extra(what: str) -> Generator[None]:
    """Around the imports of a service (`what`).

    Raises:
        ConfigError: what the extra `server` brings is not installed.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs the extra `server`: pip install 'atropos[server]' ({error})") from error


def with_flags(values: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Settings with the flags that were given in their place."""
    return {**values, **{name: value for name, value in given.items() if value is not None}}


def tool_server(
    config: Annotated[Path | None, typer.Option(help="Settings, TOML, YAML or JSON.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback unless asked.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="0: any free one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help=f"The bearer token; else {TOKEN_VARIABLE}.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Offer only this tool or toolset; may be given again.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help="External tools of your own, module:attribute.")] = None,
    allow_host: Annotated[list[str] | None, typer.Option(help="A private destination tools may reach.")] = None,
) -> None:
    """Serve external tools (web, browser, MCP servers, your own) to executors."""
    with server_extra("atropos tool-server"):
        from atropos.api.serve import run
        from atropos.api.tool_server import create_app
    from atropos.api.settings import ToolServerSettings, parse_settings, search_from_environment
    from atropos.net.admission import BearerToken

    flags = {"host": host, "port": port, "only": only or None, "tools": tool or None, "allow_hosts": allow_host or None}
    values = with_flags(read_file(config), flags)
    if token_file is not None or "token" not in values:
        values["token"] = read_token(token_file, TOKEN_VARIABLE)
    settings = parse_settings(ToolServerSettings, values, "tool server")
    if settings.search is None:
        settings = settings.model_copy(update={"search": search_from_environment()})
    settings.check_listening()
    app = create_app(settings)
    known = None if settings.token is None else BearerToken(settings.token.get_secret_value())
    drain = partial(app.state.host.drain, settings.drain_s)
    code = run(app, host=settings.host, port=settings.port, name="ToolServer", credentials=known, drain=drain)
    raise typer.Exit(code)


EXECUTOR_TOKEN_VARIABLE = "ATROPOS_EXECUTOR_TOKEN"


def executor_server(
    config: Annotated[Path | None, typer.Option(help="Settings, TOML, YAML or JSON; `pool` as SlotPoolConfig.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on; loopback unless asked.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65_535, help="0: any free one.")] = None,
    token_file: Annotated[Path | None, typer.Option(help=f"The bearer token; else {EXECUTOR_TOKEN_VARIABLE}.")] = None,
    keys_file: Annotated[str | None, typer.Option(help="Keys of several users: `atropos keys`.")] = None,
    audit_file: Annotated[str | None, typer.Option(help="Gets a JSON line for each thing done.")] = None,
    backend: Annotated[str | None, BACKEND] = None,
    slots_per_container: Annotated[int | None, typer.Option(help="Slots in a container.")] = None,
    max_containers: Annotated[int | None, typer.Option(help="Containers at most.")] = None,
    toolset: Annotated[list[str] | None, typer.Option(help="An enabled toolset; may be given again.")] = None,
    tool_server_url: Annotated[
        str | None, typer.Option(help=f"A ToolServer's URL, or inprocess; its token: {TOKEN_VARIABLE}.")
    ] = None,
) -> None:
    """Serve trajectories to agents in other processes or languages."""
    with server_extra("atropos executor-server"):
        from atropos.api.e2b.app import TOKEN_HEADERS, needs_no_token
        from atropos.api.e2b.ports import SandboxHosts, UpgradeRelay
        from atropos.api.executor_api import create_executor_app, drain
        from atropos.api.serve import run

    flags = {
        "host": host,
        "port": port,
        "keys_file": keys_file,
        "audit_file": audit_file,
        "enabled_toolsets": toolset or None,
        "tool_server_url": tool_server_url,
    }
    pool = {"backend": backend, "slots_per_container": slots_per_container, "max_containers": max_containers}
    settings = _executor_settings(config, flags, pool, token_file)
    app = create_executor_app(settings)
    hosts: SandboxHosts = app.state.hosts
    for name in ("atropos.api.accounts", "atropos.api.tenants"):
        logging.getLogger(name).setLevel(logging.INFO)
    code = run(
        app,
        host=settings.host,
        port=settings.port,
        name="executor API",
        credentials=app.state.tenants,
        token_headers=TOKEN_HEADERS,
        admits=lambda request: needs_no_token(app.state.e2b, request) or hosts.needs_no_token(request),
        upgraded=None if hosts.domain is None else partial(UpgradeRelay, hosts),
        trusted_proxies=settings.trusted_proxies,
        drain=partial(drain, app, settings.drain_s),
    )
    raise typer.Exit(code)


def _executor_settings(
    config: Path | None, flags: Mapping[str, object], pool: Mapping[str, object], token_file: Path | None
) -> ExecutorServerSettings:
    """The settings of a file with those of the command line over them; `pool`: the pool's flags."""
    from atropos.api.executor.models import ExecutorServerSettings
    from atropos.api.settings import parse_settings

    values = with_flags(read_file(config), flags)
    if isinstance(in_file := values.get("pool", {}), dict):  # anything else is refused with the other settings
        values["pool"] = with_flags(cast("dict[str, object]", in_file), pool)
    several = values.get("keys_file") is not None
    if token_file is not None or ("token" not in values and (not several or os.environ.get(EXECUTOR_TOKEN_VARIABLE))):
        values["token"] = read_token(token_file, EXECUTOR_TOKEN_VARIABLE)
    values.setdefault("tool_server_token", os.environ.get(TOKEN_VARIABLE) or None)
    return parse_settings(ExecutorServerSettings, values, "executor server")


def mcp(
    backend: Annotated[str, BACKEND] = "local",
    toolset: Annotated[list[str] | None, typer.Option(help="A toolset to offer; may be given again.")] = None,
    network: Annotated[bool, typer.Option("--network", help="Allow filtered egress.")] = False,
) -> None:
    """Offer a slot's tools to an MCP client, over stdin and stdout."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("atropos mcp: the package mcp is not installed (pip install 'atropos[mcp]')")
    from atropos.api.mcp_server import serve

    asyncio.run(serve(backend, toolset or ["default"], network=network))
