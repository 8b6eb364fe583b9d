"""`atropos dashboard`: pages over a JSONL of groups that `process` or `serve` writes, or has written."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer


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


def dashboard(
    jsonl: File,
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0: a free one")] = 7580,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    token: Annotated[
        str | None, typer.Option(envvar="ATROPOS_DASHBOARD_TOKEN", help="default: a new one, printed with the URL")
    ] = None,
) -> None:
    """Serve pages over a JSONL of groups until Ctrl-C; groups appended later are shown, too.

    An env has live pages of its own.
    """
    from atropos.dashboard.server import DashboardServer
    from atropos.dashboard.store import GroupFile, TrajectoryStore

    store = TrajectoryStore()
    file = GroupFile(jsonl, store)
    server = DashboardServer(jsonl.stem, store, host=host, port=port, token=token, refresh=file.refresh)

    async def serve() -> None:
        await asyncio.to_thread(file.refresh)
        await server.start()
        typer.echo(f"dashboard: {server.url}")
        try:
            await asyncio.Event().wait()
        finally:
            await server.close()

    asyncio.run(serve())
