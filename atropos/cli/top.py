"""`atropos top`: what runs now, in a terminal: an env, a sandbox or executor server by its URL, or a whole pool."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import termios
import tty
from collections.abc import Awaitable, Callable, Generator
from typing import Annotated, NoReturn

import typer
from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from atropos.cli import looking
from atropos.cli.looking import Look
from atropos.cli.options import DEFAULT_JOB, Address, Job
from atropos.cli.redraw import redrawn
from atropos.dashboard.live import ContainerSlots, LiveView
from atropos.dashboard.text import figure
from atropos.errors import BackendUnavailable
from atropos.slots.backends.loading import open_survey
from atropos.terminal import visible as visible_lines

TOKEN_VARIABLE = "ATROPOS_DASHBOARD_TOKEN"
STATES = (("leased", "green"), ("others", "blue"), ("free", "bright_black"), ("retired", "red"))
SPARKS = "▁▂▃▄▅▆▇█"
CHARTS = (
    ("trajectories/min", "trajectories_per_min"),
    ("calls/s", "calls_per_s"),
    ("call p50 s", "call_p50_s"),
    ("call p99 s", "call_p99_s"),
    ("leased", "leased"),
    ("waiting", "waiting"),
)
NARROW, WIDE = 60, 110
"""Columns below which, and from which on, less and more of a trajectory is shown."""

Asked = Callable[[], Awaitable[Look]]


def top(
    url: Annotated[
        str | None,
        typer.Argument(
            help="an env's dashboard (as it printed it), a sandbox server or an executor server; default: the pool of "
            "--job-id"
        ),
    ] = None,
    token: Annotated[str | None, typer.Option(envvar=TOKEN_VARIABLE, help="where the URL doesn't carry it")] = None,
    backend: Annotated[str, typer.Option(help="docker, nomad, or a plug-in's name; without a URL")] = "nomad",
    job_id: Job = DEFAULT_JOB,
    address: Address = None,
    interval_s: Annotated[float, typer.Option("--interval", min=0.2, help="seconds between looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print one look and end")] = False,
) -> None:
    """Containers, trajectories, faults and rates of what runs now, until q or Ctrl-C."""

    async def run() -> None:
        if url is not None:
            async with looking.client_of(url, token, "--token", TOKEN_VARIABLE) as client:
                await _show(lambda: looking.remote(client), interval_s, once=once)
        else:
            async with await open_survey(backend, job_id, address=address) as survey:
                await _show(lambda: looking.pool(survey, job_id), interval_s, once=once)

    asyncio.run(run())


async def _show(look: Asked, interval_s: float, *, once: bool) -> None:
    console = Console()
    if once:
        console.print(LookScreen(await look(), rows=10_000))
        return
    shown = asyncio.timeout(None)
    try:
        async with shown:
            with redrawn(console, screen=True) as show, _quit_key(shown, wanted=console.is_terminal):
                await _follow(look, interval_s, console, show)
    except TimeoutError:
        if not shown.expired():
            raise


async def _follow(look: Asked, interval_s: float, console: Console, show: Callable[[RenderableType], None]) -> NoReturn:
    seen: Look | None = None
    while True:
        try:
            seen = await look()
            show(LookScreen(seen, rows=console.height))
        except BackendUnavailable as error:
            if seen is None:
                raise
            notice = Text(f"{error}; these are the last numbers", "red", no_wrap=True, overflow="ellipsis")
            show(Group(notice, LookScreen(seen, rows=console.height - 1)))
        await asyncio.sleep(interval_s)


@contextlib.contextmanager
def _quit_key(shown: asyncio.Timeout, *, wanted: bool) -> Generator[None]:
    """`q` ends the display, whatever it waits for; meanwhile the terminal passes on each key at once, without echo."""
    if not wanted or not sys.stdin.isatty():
        yield
        return
    keys, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(keys)

    def read() -> None:
        try:
            typed = os.read(keys, 1024)
        except OSError:
            typed = b""
        if not typed or b"q" in typed:
            loop.remove_reader(keys)
            shown.reschedule(loop.time())

    tty.setcbreak(keys)
    loop.add_reader(keys, read)
    try:
        yield
    finally:
        loop.remove_reader(keys)
        termios.tcsetattr(keys, termios.TCSADRAIN, before)


# ------------------------------------------------------------------------------------------------------------- drawing


class LookScreen:
    """A look, drawn for the available width in at most `rows` lines."""

    def __init__(self, look: Look, rows: int) -> None:
        self._look, self._rows = look, rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view, width = self._look.view, options.max_width
        head = self._head(view, width)
        fleet = [_bar(each, width) for each in view.containers]
        faults = sorted(view.faults, key=lambda each: -each[2])[:5]
        room = max(4, self._rows - len(head) - len(faults) - 4)
        shown = fleet[: max(2, room // 2)]
        if len(fleet) > len(shown):
            shown.append(_line(f"… and {len(fleet) - len(shown)} containers more", width, "bright_black"))
        yield from head
        yield from shown
        yield _flight(view, width, max(1, room - len(shown) - 1))
        for kind, code, count in faults:
            yield _line(f"{count} x {kind}: {visible(code)}", width, "yellow")

    def _head(self, view: LiveView, width: int) -> list[RenderableType]:
        leased = sum(each.leased for each in view.containers)
        total = sum(each.leased + each.free + each.retired + each.others for each in view.containers)
        lines: list[RenderableType] = [
            _line(
                f"{visible(self._look.title)}: {len(view.containers)} containers, {leased} of {total} slots leased, "
                f"{len(view.in_flight)} in flight, {view.waiting} waiting",
                width,
                "bold",
            )
        ]
        if view.numbers:
            hidden = ("in flight", "slots leased")
            pairs = [f"{name} {value}" for name, value in view.numbers.items() if name not in hidden]
            lines += [_line(text, width, "none") for text in _packed(pairs, width)]
        if view.history:
            series = {name: [getattr(each, field) for each in view.history] for name, field in CHARTS}
            values = {name: [float(n or 0) for n in each] for name, each in series.items() if None not in each}
            each_width = max(8, width // (2 if width < NARROW else 3) - 24)
            cells = [f"{name:>16} {_spark(each, each_width)} {figure(each[-1]):<6}" for name, each in values.items()]
            across = 1 if width < NARROW else 2 if width < WIDE else 3
            lines += [_line("".join(cells[at : at + across]), width, "cyan") for at in range(0, len(cells), across)]
        if view.trouble:
            lines.append(_line(visible(view.trouble), width, "red"))
        return lines


def _bar(container: ContainerSlots, width: int) -> Text:
    """A container as one cell a slot; more slots than room are drawn to scale."""
    counts = [(getattr(container, name), colour) for name, colour in STATES]
    total = sum(count for count, _ in counts)
    room = max(8, min(24, width // 4))
    label = visible(container.name)[:room]
    text = Text(f"{label:<{room}} {container.leased:>4}/{total:<4} ", no_wrap=True, overflow="crop")
    if not container.ready:
        text.append("closed ", "red")
    cells = max(4, width - len(text))
    for count, colour in counts:
        text.append("■" * (count if total <= cells else -(-count * cells // total)), colour)
    return text


def _flight(view: LiveView, width: int, rows: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=True, show_edge=False)
    room = width // (5 if width >= WIDE else 3)
    table.add_column("trajectory", no_wrap=True)
    if width >= WIDE:
        table.add_column("item", no_wrap=True, max_width=room)
    table.add_column("age", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("doing", no_wrap=True, ratio=1)
    table.add_column("for", justify="right", no_wrap=True)
    oldest = sorted(view.in_flight, key=lambda each: -each.age_s)
    for each in oldest[:rows]:
        cells = [
            _middle_cut(visible(f"{each.key} {each.trajectory_id}".strip()), room),
            f"{each.age_s:.0f}s",
            visible(": ".join(filter(None, (each.state, each.doing)))),
            f"{each.doing_s:.0f}s",
        ]
        if width >= NARROW:
            cells.insert(2, str(each.calls))
        if width >= WIDE:
            cells.insert(1, visible(each.item or each.image))
        table.add_row(*(Text(cell, overflow="ellipsis", no_wrap=True) for cell in cells))
    if len(oldest) > rows:
        table.caption = f"and {len(oldest) - rows} more, younger ones"
    return table


def _middle_cut(text: str, width: int) -> str:
    """A name of at most `width` cells, cut in its middle: siblings differ at the end."""
    if cell_len(text) <= width:
        return text
    head = set_cell_size(text, width // 2 - 1)
    return f"{head}…{set_cell_size(text[::-1], width - cell_len(head) - 1)[::-1]}"


def visible(text: object) -> str:
    """As on the pages, in one line: nothing that a program wrote reaches the terminal as a control character."""
    return visible_lines(text).replace("\n", "␊").replace("\t", " ")


def _line(text: str, width: int, style: str) -> Text:
    line = Text(text, style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _packed(parts: list[str], width: int) -> list[str]:
    """Parts in as few lines as the width allows."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _spark(values: list[float], cells: int) -> str:
    most = max(values) or 1.0
    drawn = "".join(SPARKS[min(7, int(8 * value / most))] for value in values[-cells:])
    return f"{drawn:>{cells}}"
