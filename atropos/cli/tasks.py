"""`atropos tasks check`: which tasks of a folder are sound on these slots."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, cast, get_args

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TaskID
from rich.table import Table

from atropos.cli.options import AsJson, AuthFile, Base, InsecureRegistries, Mirrors, Store, image_store, pair
from atropos.errors import ConfigError
from atropos.tasks.check import Agent, Attempt, CheckConfig, TaskFinding, check
from atropos.tasks.fit import STAND_INS, Policy
from atropos.tasks.folder import TaskSet, read_folders, task_folders
from atropos.tasks.format.datasets import dataset_folders
from atropos.tasks.format.task import Task
from atropos.terminal import visible
from atropos.wire import ImageState

tasks_app = typer.Typer(help="Task folders in the Harbor and terminal-bench layouts.", no_args_is_help=True)
_STYLE = {"sound": "green", "unsound": "red", "broken": "red", "refused": "yellow"}
_HEADINGS = ("task", "status", "image", "prepared", "size", "verifier", "remarks")


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
Slots = Annotated[int, typer.Option(min=1, help="Attempts at once.")]
MemoryMib = Annotated[
    int | None, typer.Option(min=32, help="Memory of a slot in MiB. Default: what the largest task asks for.")
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
    slots: Slots = 4,
    memory_mib: MemoryMib = None,
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
    as_json: AsJson = False,
    page: Page = None,
) -> None:
    """Prepare every task, run its solution and a do-nothing agent, and report which tasks are sound.

    The exit code is 0 when every task is, 1 when some task is not.
    """
    agents: tuple[Agent, ...] = tuple(dict.fromkeys(_agent(one) for one in agent or ("oracle", "nop")))
    config = CheckConfig(
        agents=agents,
        script=script,
        backend=backend,
        base=base,
        slots=slots,
        memory_mib=memory_mib,
        network=network,
        images=(*(() if pull else STAND_INS), *(image or ())),
        limits=limits,
        layers=tuple(verifier_layer or ()),
        image_store=image_store(store, auth_file, insecure_registry, mirror),
    )
    _check_page(page)
    tasks = _read(paths, name or (), dataset, variable or ())
    findings = _check_with_progress(tasks, config)
    if page is not None:
        page.write_text(_page(findings, agents), encoding="utf-8")
    _print(findings, agents, as_json=as_json)
    raise typer.Exit(0 if all(finding.status == "sound" for finding in findings) else 1)


def _check_page(page: Path | None) -> None:
    """Ask before the long work."""
    if page is not None and (page.is_dir() or not os.access(page.parent, os.W_OK)):
        raise ConfigError(f"--html: {page} can't be written; name a file in a folder that is there")


def _check_with_progress(tasks: TaskSet, config: CheckConfig) -> list[TaskFinding]:
    """Check them, with a row of the progress display for each task whose image is being prepared."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("checking tasks", total=len(tasks.tasks) + len(tasks.refused))
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

        return asyncio.run(check(tasks, config, done=lambda _: progress.advance(bar), progress=show))


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


# ------------------------------------------------------------------------------------------------------------- results


def _cells(finding: TaskFinding, agents: Sequence[str]) -> list[str]:
    """A row, in the order of the headings with the agents' rewards after the status."""
    attempts = finding.attempts or {}
    prepared = [one.prepared_s for one in attempts.values() if one.prepared_s is not None]
    sizes = [one.size_bytes for one in attempts.values() if one.size_bytes is not None]
    verifier = [one.verifier_s for one in attempts.values() if one.verifier_s is not None]
    why = [] if finding.verifier is None else [f"{finding.verifier.mode}: {finding.verifier.reason}"]
    remarks = [*_remarks(finding), *why]
    cells = [
        finding.name,
        finding.status,
        *(_reward(attempts.get(agent)) for agent in agents),
        finding.image or "the slots' base",
        f"{max(prepared):.2f} s" if prepared else "",
        f"{max(sizes) / (1 << 20):.1f} MiB" if sizes else "",
        ", ".join(filter(None, [_mode(finding), f"{max(verifier):.2f} s" if verifier else ""])),
        "\n".join(remarks),
    ]
    return [visible(cell) for cell in cells]


def _remarks(finding: TaskFinding) -> list[str]:
    runs = [] if finding.runs is None else [f"its tests run the agent's code: {finding.runs}"]
    return [*finding.problems, *(f"lowered: {text}" for text in finding.clamped), *runs]


def _mode(finding: TaskFinding) -> str:
    return "" if finding.verifier is None else finding.verifier.mode


def _reward(attempt: Attempt | None) -> str:
    return "" if attempt is None else "none" if attempt.reward is None else f"{attempt.reward:g}"


def _headings(agents: Sequence[str]) -> list[str]:
    return [*_HEADINGS[:2], *agents, *_HEADINGS[2:]]


def _summary(found: Sequence[TaskFinding]) -> str:
    counts = {status: sum(finding.status == status for finding in found) for status in _STYLE}
    lowered = sum(len(finding.clamped) for finding in found)
    parts = [f"{count} {status}" for status, count in counts.items() if count]
    text = f"{len(found)} task{'s' * (len(found) != 1)}: {', '.join(parts)}"
    shared = sum(_mode(finding) == "shared" for finding in found)
    if shared:
        text += (
            f"; {shared} ({shared / len(found):.0%}) judged in the agent's slot (shared), where a reward can be rigged"
        )
    return f"{text}; {lowered} limits lowered" if lowered else text


def _notes(found: Sequence[TaskFinding]) -> list[str]:
    """What is different here, once for all the tasks that it concerns."""
    counts = Counter(("note", note) for finding in found for note in finding.notes)
    counts.update((one.verifier.mode, one.verifier.reason) for one in found if one.verifier is not None)
    return [f"{kind}, {count} task{'s' * (count > 1)}: {note}" for (kind, note), count in counts.most_common()]


def _print(found: Sequence[TaskFinding], agents: Sequence[str], *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([finding.json() for finding in found], indent=2))
        return
    console = Console(emoji=False)
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    rows = [_cells(finding, agents)[:-1] for finding in found]
    columns = list(zip(_headings(agents)[:-1], *rows, strict=True))
    widths = [max(map(len, texts)) for texts in columns]
    # one line for each task, also on 80 columns: names are cut; --json has them in full
    names, image = 0, columns.index(next(texts for texts in columns if texts[0] == "image"))
    room = console.width - sum(widths) - len(widths) + widths[names] + widths[image]
    widths[image] = min(widths[image], max(room // 2, room - widths[names], len("image")))
    widths[names] = min(widths[names], max(room - widths[image], len("task")))
    for texts, width in zip(columns, widths, strict=True):
        table.add_column(texts[0], no_wrap=True, overflow="ellipsis", width=width)
    for finding, row in zip(found, rows, strict=True):
        cells = [escape(text) for text in row]
        cells[1] = f"[{_STYLE[finding.status]}]{cells[1]}[/]"
        table.add_row(*cells)
    console.print(table)
    for finding in found:
        for line in _remarks(finding):
            named = line if line.startswith(f"{finding.name}:") else f"{finding.name}: {line}"
            console.print(visible(named), markup=False)
    for line in _notes(found):
        console.print(visible(line), markup=False)
    console.print(_summary(found))


def _page(found: Sequence[TaskFinding], agents: Sequence[str]) -> str:
    from atropos.dashboard.render import STYLE, render

    headings, colours = _headings(agents), {"green": "good", "red": "bad", "yellow": "mid"}
    rows = [
        (colours[_STYLE[finding.status]], list(zip(headings, _cells(finding, agents), strict=True)))
        for finding in found
    ]
    return render("tasks.html", style=STYLE, headings=headings, rows=rows, summary=_summary(found), notes=_notes(found))
