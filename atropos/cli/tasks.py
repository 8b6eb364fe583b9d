"""`atropos tasks`: which tasks of a folder are sound on these slots, and what they fetch."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from atropos.cli.options import AsJson, AuthFile, Base, InsecureRegistries, Mirrors, Store, image_store, pair
from atropos.cli.task_report import TaskReport
from atropos.config import split_names
from atropos.errors import ConfigError
from atropos.tasks.check import Agent, CheckConfig, TaskFinding, check
from atropos.tasks.fit import STAND_INS, Policy
from atropos.tasks.folder import TaskSet, read_folders, task_folders
from atropos.tasks.format.datasets import dataset_folders
from atropos.tasks.format.task import Task
from atropos.tasks.mirror import fetch
from atropos.tasks.needs import needs
from atropos.terminal import visible
from atropos.wire import ImageState

tasks_app = typer.Typer(help="Task folders in the Harbor and terminal-bench layouts.", no_args_is_help=True)


@tasks_app.callback()
def root() -> None:
    """Task folders in the Harbor and terminal-bench layouts."""


Paths = Annotated[list[Path], typer.Argument(help="Folders of tasks, or single tasks.")]
Agents = Annotated[
    list[str] | None, typer.Option(help="oracle, nop or script; again for more. Default: oracle and nop.")
]
Script = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="What the agent `script` runs, with bash.")
]
Names = Annotated[list[str] | None, typer.Option(help="Pattern of task names; again for more.")]
Dataset = Annotated[str | None, typer.Option(help="NAME or NAME@VERSION of the data set in PATH.")]
Backend = Annotated[Literal["local", "docker", "nomad"], typer.Option(help="What runs the containers.")]
Slots = Annotated[
    int | None, typer.Option(min=1, help="Attempts at once. Default: two a core, as far as the memory goes.")
]
MemoryMib = Annotated[
    int | None,
    typer.Option(
        "--slot-memory-mib",
        "--memory-mib",
        min=32,
        help="Memory of every slot in MiB. Default: its share of this machine, or what a task asks for.",
    ),
]
Volume = Annotated[
    Literal["auto", "memory", "disk"],
    typer.Option(help="Where slots keep files; auto: on disk what doesn't fit in memory."),
]
Limits = Annotated[Policy, typer.Option(help="Sizes beyond a slot's: old, clamp or refuse.")]
Images = Annotated[list[str] | None, typer.Option(help="Pattern of images that the base replaces; again for more.")]
Pull = Annotated[
    bool, typer.Option("--pull", help="Pull every image but those given by --image; the base replaces no other.")
]
Variables = Annotated[list[str] | None, typer.Option(help="NAME=VALUE for ${NAME} in task files.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(help="Image or Dockerfile whose files the tests find, and no agent; again for more."),
]
Network = Annotated[bool, typer.Option("--network", help="Filtered egress for tasks that allow it.")]
EgressAllow = Annotated[
    list[str] | None,
    typer.Option(help="Host, *.suffix or network that tasks may reach, with --network; again for more."),
]
Page = Annotated[Path | None, typer.Option("--html", help="Write a page of the results as well.")]


@tasks_app.command("check")
def check_command(
    paths: Paths,
    agent: Agents = None,
    script: Script = None,
    name: Names = None,
    dataset: Dataset = None,
    backend: Backend = "local",
    base: Base = None,
    slots: Slots = None,
    memory_mib: MemoryMib = None,
    volume: Volume = "auto",
    limits: Limits = "old",
    image: Images = None,
    pull: Pull = False,
    variable: Variables = None,
    verifier_layer: Layers = None,
    store: Store = None,
    auth_file: AuthFile = None,
    insecure_registry: InsecureRegistries = None,
    mirror: Mirrors = None,
    network: Network = False,
    egress_allow: EgressAllow = None,
    as_json: AsJson = False,
    page: Page = None,
) -> None:
    """Prepare every task, run its solution and a do-nothing agent, and report which tasks are sound.

    Results come as they are found; Ctrl-C ends the check, and keeps them. The exit code is 0 when every task is sound,
    1 when some task is not, and 130 after Ctrl-C.
    """
    agents: tuple[Agent, ...] = tuple(dict.fromkeys(_agent(one) for one in agent or ("oracle", "nop")))
    config = CheckConfig(
        agents=agents,
        script=script,
        backend=backend,
        base=base,
        slots=slots,
        memory_mib=memory_mib,
        volume=volume,
        network=network or bool(egress_allow),
        egress=tuple(host for text in egress_allow or () for host in cast("list[str]", split_names(text))),
        images=(*(() if pull else STAND_INS), *(image or ())),
        limits=limits,
        layers=tuple(verifier_layer or ()),
        image_store=image_store(store, auth_file, insecure_registry, mirror),
    )
    _check_page(page)
    tasks = _read(paths, name or (), dataset, variable or ())
    report = TaskReport(tasks, agents, page=page, as_json=as_json)
    ended = _check_with_progress(tasks, config, report)
    report.finish()
    if not ended:
        typer.echo(f"stopped: {len(report.findings)} of {report.total} tasks were checked", err=True)
        raise typer.Exit(130)
    raise typer.Exit(0 if all(finding.status == "sound" for finding in report.findings) else 1)


@tasks_app.command("mirror")
def mirror_command(
    path: Annotated[Path, typer.Argument(help="Folder of tasks, or a single one.")],
    folder: Annotated[Path, typer.Argument(help="What is filled, for a web server of a site without a network.")],
    name: Names = None,
    dataset: Dataset = None,
    variable: Variables = None,
    auth_file: AuthFile = None,
    insecure_registry: InsecureRegistries = None,
    mirror: Mirrors = None,
    python: Annotated[
        str,
        typer.Option(
            "--python",
            help="Python that wheels are for where a set names none, such as 3.12; without it, this machine's.",
        ),
    ] = "",
    only_list: Annotated[bool, typer.Option("--list", help="Print what they need, and fetch nothing.")] = False,
) -> None:
    """Fetch what a set of tasks needs into a folder: its images, and the wheels and uv that its tests install.

    Served by any web server, the folder is a registry for --mirror and an index for pip and uv (docs/tasks.md). What
    apt installs and other addresses are listed only. The exit code is 1 where something could not be had.
    """
    if python and not re.fullmatch(r"3\.\d+", python):
        raise ConfigError(f"--python: {python!r} is no version; write one like 3.12")
    tasks = _read([path], name or (), dataset, variable or ())
    for task, reason in tasks.refused.items():
        typer.echo(visible(f"{task}: left out: {reason}"), err=True)
    downloads = needs(tasks.tasks)
    for kind, each in downloads.lines():
        typer.echo(f"{kind}\t{visible(each)}")
    if only_list:
        return
    store = image_store(None, auth_file, insecure_registry, mirror)
    failed = fetch(downloads, folder, store, lambda text: typer.echo(visible(f"fetching {text}"), err=True), python)
    for each in failed:
        typer.echo(visible(each), err=True)
    raise typer.Exit(1 if failed else 0)


def _check_page(page: Path | None) -> None:
    """Ask before the long work."""
    if page is not None and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise ConfigError(f"--html: {page} can't be written; name a file in a folder that is there")


def _check_with_progress(tasks: TaskSet, config: CheckConfig, report: TaskReport) -> bool:
    """Check them, with a row of progress for each task whose image is being prepared; whether that came to its end."""
    # on one terminal both are one console's, or the display would be drawn over the results
    console = report.console if sys.stdout.isatty() and not report.as_json else Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as progress:
        bar = progress.add_task("checking tasks", total=report.total)
        rows: dict[str, TaskID] = {}

        def show(task: Task, state: ImageState) -> None:
            if state.phase in {"ready", "failed"}:
                if task.name in rows:
                    progress.remove_task(rows.pop(task.name))
                return
            text = f"  {task.name}: {state}"
            if task.name not in rows:
                rows[task.name] = progress.add_task(text, total=None)
            else:
                progress.update(rows[task.name], description=text, completed=state.step, total=state.steps or None)

        def done(finding: TaskFinding) -> None:
            report.add(finding)
            progress.advance(bar)

        try:
            asyncio.run(check(tasks, config, done=done, progress=show))
        except KeyboardInterrupt:
            return False
        return True


def _agent(text: str) -> Agent:
    if text not in get_args(Agent):
        raise ConfigError(f"--agent {text}: is none of {', '.join(get_args(Agent))}")
    return cast("Agent", text)


def _read(paths: Sequence[Path], names: Sequence[str], dataset: str | None, variables: Sequence[str]) -> TaskSet:
    folders = [
        folder
        for path in paths
        for folder in (task_folders(path, names) if dataset is None else dataset_folders(path, dataset, names))
    ]
    return read_folders(folders, variables=dict(pair("--variable", text) for text in variables))
