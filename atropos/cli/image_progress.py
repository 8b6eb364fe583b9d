"""Progress of preparing images, on stderr: bars on a terminal, a line for each phase elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn

if TYPE_CHECKING:
    from atropos.slots import SlotPool
    from atropos.slots.pool.images import Progress as Report
    from atropos.tasks.format.task import Task
    from atropos.wire import ImageState


def image_or_task(name: str, pool: SlotPool) -> str | Task:
    """An image's name on the command line; a task's folder or a Dockerfile is read, to be built in a pool."""
    from atropos.tasks.folder import is_task, load_task

    path = Path(name)
    return load_task(path, architecture=pool.architecture) if path.is_file() or is_task(path) else name


@contextlib.contextmanager
def progress_display() -> Generator[Callable[[str], Report]]:
    """A function that makes the callback of `SlotPool.prepare` for an image's name."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.fields[image]}"), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def of(image: str) -> Report:
            rows: dict[str, TaskID] = {}
            printed: dict[str, str] = {}

            def report(container: str, state: ImageState) -> None:
                if console.is_terminal:
                    row = rows.get(container)
                    if row is None:
                        row = rows[container] = bars.add_task("", total=1.0, image=escape(image))
                    done = state.step / state.steps if state.steps else state.done or 0.0
                    bars.update(row, description=str(state), completed=1.0 if state.phase == "ready" else done)
                elif printed.get(container) != (line := str(state) if state.steps else state.phase):
                    printed[container] = line
                    typer.echo(f"{image}: {line}", err=True)

            return report

        yield of
