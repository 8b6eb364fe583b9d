"""`atropos pool`: a pool's containers as an operator sees them: status, watch, drain, purge."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from atropos.cli.options import DEFAULT_JOB, Address, AsJson, Job
from atropos.cli.redraw import redrawn
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.loading import open_survey
from atropos.slots.backends.survey import Survey, SurveyedContainer
from atropos.terminal import visible

T = TypeVar("T")
pool_app = typer.Typer(no_args_is_help=True, help="Look at a pool's containers; drain or purge them.")

Backend = Annotated[str, typer.Option(help="docker, nomad, or a plug-in's name")]
SUCCESSOR_S = 60.0
"""How long the next container is not drained because the last one's successor does not answer yet, in seconds."""


def _run(backend: str, job_id: str, address: str | None, work: Callable[[Survey], Awaitable[T]]) -> T:
    async def run() -> T:
        async with await open_survey(backend, job_id, address=address) as survey:
            return await work(survey)

    return asyncio.run(run())


@pool_app.command()
def status(
    backend: Backend = "nomad", job_id: Job = DEFAULT_JOB, address: Address = None, as_json: AsJson = False
) -> None:
    """Containers with their slots, clients and leases. Ends with 1 when there are none, or the engine is in trouble."""
    seen, trouble = _run(backend, job_id, address, Survey.look)
    if as_json:
        typer.echo(json.dumps(_plain(job_id, seen, trouble), indent=2))
    else:
        Console().print(_table(job_id, seen, trouble))
    raise typer.Exit(1 if trouble or not seen else 0)


@pool_app.command()
def watch(
    backend: Backend = "nomad",
    job_id: Job = DEFAULT_JOB,
    address: Address = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.1, help="seconds between looks")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """As `status`, again and again until Ctrl-C, also while the engine doesn't answer; with --json, one line a look."""

    async def follow(survey: Survey) -> None:
        seen, trouble = await survey.look()
        with redrawn(Console()) as show:
            while True:
                if as_json:
                    typer.echo(json.dumps(_plain(job_id, seen, trouble)))
                else:
                    show(_table(job_id, seen, trouble))
                await asyncio.sleep(interval_s)
                try:
                    seen, trouble = await survey.look()
                except BackendUnavailable as error:
                    trouble = f"{error}; these are the last numbers"

    _run(backend, job_id, address, follow)


@pool_app.command()
def drain(
    index: Annotated[list[int] | None, typer.Argument(help="indexes of the containers")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="every container, each once the last one's successor answers")
    ] = False,
    deadline_s: Annotated[
        float, typer.Option("--deadline", min=0, help="longest a container's leases may go on")
    ] = 3600,
    backend: Backend = "nomad",
    job_id: Job = DEFAULT_JOB,
    address: Address = None,
    as_json: AsJson = False,
) -> None:
    """Let containers finish their leases and end them; a live pool, or Nomad, replaces each (to upgrade images)."""
    if bool(index) == everything:
        raise typer.BadParameter("give the indexes of containers, or --all")

    async def work(survey: Survey) -> list[int]:
        seen, _ = await survey.look()
        if missing := {*(index or ())} - {each.container.index for each in seen}:
            known = ", ".join(str(each.container.index) for each in seen) or "none"
            raise ConfigError(f"{job_id} has no container {min(missing)}; it has: {known}")
        chosen = [each for each in seen if everything or each.container.index in (index or [])]
        answering = sum(each.status is not None for each in seen)
        for number, each in enumerate(sorted(chosen, key=lambda each: -each.container.index)):
            if number and not await survey.until_answering(answering, within_s=SUCCESSOR_S):
                typer.echo(f"no successor answers after {SUCCESSOR_S:.0f} s: going on", err=True)
            leased = each.status.leased if each.status else 0
            typer.echo(f"draining container {each.container.index} ({leased} leases)", err=True)
            await survey.drain(each, deadline_s=deadline_s)
        return [each.container.index for each in chosen]

    drained = _run(backend, job_id, address, work)
    typer.echo(json.dumps({"job_id": job_id, "drained": drained}) if as_json else f"{len(drained)} containers drained")
    raise typer.Exit(0 if drained else 1)


@pool_app.command()
def purge(
    backend: Backend = "nomad",
    job_id: Job = DEFAULT_JOB,
    address: Address = None,
    force: Annotated[bool, typer.Option("--force", help="also when live clients work in it")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a pool's containers, job and secret. Refused, with exit code 1, while a live client works in it."""

    async def work(survey: Survey) -> tuple[list[SurveyedContainer], int]:
        seen, _ = await survey.look()
        used = [] if force else await survey.in_use(seen)
        if not used:
            await survey.purge()
        return used, len(seen)

    used, count = _run(backend, job_id, address, work)
    in_use = [each.container.index for each in used]
    if as_json:
        typer.echo(json.dumps({"job_id": job_id, "purged": not used, "containers": count, "in_use": in_use}))
    elif used:
        indexes = ", ".join(map(str, in_use))
        typer.echo(f"not purged: live clients work in container {indexes} (--force purges all the same)", err=True)
    else:
        typer.echo(
            f"{job_id} is purged" if count else f"{job_id} had no container; what else there was of it is purged"
        )
    raise typer.Exit(1 if used else 0)


def _plain(job_id: str, seen: list[SurveyedContainer], trouble: str) -> dict[str, object]:
    """For scripts; tokens stay out."""
    return {
        "job_id": job_id,
        "trouble": trouble,
        "containers": [
            {
                "id": each.container.id,
                "index": each.container.index,
                "state": each.container.state,
                "url": each.container.url,
                "status": each.status.model_dump(mode="json") if each.status else None,
            }
            for each in seen
        ],
    }


def _table(job_id: str, seen: list[SurveyedContainer], trouble: str) -> Table:
    total = sum(each.status.slots for each in seen if each.status)
    leased = sum(each.status.leased for each in seen if each.status)
    title = f"{job_id}: {len(seen)} containers, {leased} of {total} slots leased"
    table = Table(title=escape(title), caption=escape(visible(trouble)) or None, caption_style="red")
    table.add_column("container")
    table.add_column("state", no_wrap=True)
    for column in ("slots", "free", "leased", "retired", "clients", "snapshots", "up s"):
        table.add_column(column, justify="right")
    for each in seen:
        status = each.status
        state = each.container.state
        if status is None:
            state = "no answer" if state == "running" else state
        elif status.draining:
            state = "draining"
        numbers = (
            [status.slots, status.free, status.leased, status.retired, len(status.live), len(status.snapshots)]
            if status
            else ["-"] * 6
        )
        uptime = f"{status.uptime_s:.0f}" if status else "-"
        table.add_row(f"{each.container.index}  {each.container.id}", state, *map(str, numbers), uptime)
    return table
