"""`atropos dashboard`: pages over a JSONL of groups that `process` or `serve` writes, or over a running server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer

from atropos.api.cli import EXECUTOR_TOKEN_VARIABLE

if TYPE_CHECKING:
    from atropos.dashboard.server import DashboardServer


def _of_groups(jsonl: Path) -> Path:
    from atropos.dashboard.store import groups_of

    if not jsonl.is_file():
        raise typer.BadParameter(f"{jsonl} is a pipe or device, which is read only once: name a file")
    with jsonl.open("rb") as lines:
        first = lines.readline()
    if first.endswith(b"\n") and not any(groups_of(first)):
        raise typer.BadParameter(f"{jsonl} holds no groups: its first line is no JSON object or list of them")
    return jsonl


File = Annotated[
    Path,
    typer.Argument(
        exists=True, dir_okay=False, callback=_of_groups, help="JSONL of groups, as data_path_to_save_groups"
    ),
]


def _groups_file(source: str) -> Path:
    return _of_groups(click.Path(exists=True, dir_okay=False, path_type=Path).convert(source, None, None))


def dashboard(
    source: Annotated[
        str,
        typer.Argument(metavar="FILE|URL", help="JSONL of groups, or the URL of an executor server or sandbox server"),
    ],
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: a free one")] = 7580,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="ATROPOS_DASHBOARD_TOKEN", help="default: a new one, printed with the URL")
    ] = None,
    key: Annotated[
        str | None, typer.Option(envvar=EXECUTOR_TOKEN_VARIABLE, help="the server's token, or an admin's key")
    ] = None,
) -> None:
    """Serve pages over a JSONL of groups, which may grow, or over what a server has open, until Ctrl-C.

    An env has live pages of its own.
    """
    from atropos.dashboard.server import DashboardServer

    pages = functools.partial(DashboardServer, host=host, port=port, token=token)
    asyncio.run(_serve_server(pages, source, key) if "://" in source else _serve_file(pages, _groups_file(source)))


async def _serve_file(pages: Callable[..., DashboardServer], jsonl: Path) -> None:
    from atropos.dashboard.store import GroupFile, TrajectoryStore

    store = TrajectoryStore()
    file = GroupFile(jsonl, store)
    await asyncio.to_thread(file.refresh)
    await _serve(pages(jsonl.stem, store, refresh=file.refresh), asyncio.Event().wait())


async def _serve_server(pages: Callable[..., DashboardServer], url: str, key: str | None) -> None:
    from atropos.cli.looking import ServerWatch, client_of

    async with client_of(url, key, "--key", EXECUTOR_TOKEN_VARIABLE) as client:
        watch = ServerWatch(client)
        await watch.look()
        await _serve(pages(watch.title, None, live=watch.view), watch.follow())


async def _serve(server: DashboardServer, until: Awaitable[object]) -> None:
    await server.start()
    typer.echo(f"dashboard: {server.url}")
    try:
        await until
    finally:
        await server.close()
