"""`atropos trajectories`: export, stats and grep over a JSONL of groups."""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer

from atropos.cli.dashboard import File
from atropos.cli.options import AsJson
from atropos.dashboard.export import atif
from atropos.dashboard.pass_at import PassRates
from atropos.dashboard.records import as_text
from atropos.dashboard.replay import asciicast
from atropos.dashboard.sampled import sampled_of
from atropos.dashboard.store import Details, Query, StoredTrajectory, entry_of, item_of, members, read_groups
from atropos.dashboard.text import number
from atropos.errors import ConfigError
from atropos.terminal import visible

trajectories_app = typer.Typer(no_args_is_help=True, help="Export, count or search the trajectories of a JSONL.")

Item = Annotated[str, typer.Option(help="part of the item's name")]
Least = Annotated[float | None, typer.Option(help="lowest score")]
Most = Annotated[float | None, typer.Option(help="highest score")]
Error = Annotated[str, typer.Option(help="a stop reason, or `tools`: with failed calls")]
Tool = Annotated[str, typer.Option(help="called this tool")]


def _chosen(jsonl: Path, query: Query) -> Iterator[tuple[dict[str, object], StoredTrajectory, Details]]:
    """Each matching trajectory, as in the file and parsed; lines that hold no group are reported at the end."""
    left_out: list[int] = []
    for group in read_groups(jsonl, left_out.append):
        item = item_of(group)
        for member in members(group):
            entry, details = entry_of(member, item=item)
            if query.admits(entry):
                yield member, entry, details
    if left_out:
        lines = number(len(left_out), "line")
        typer.echo(f"{jsonl}: {lines} left out, as no whole group, the first is line {left_out[0]}", err=True)


@trajectories_app.command()
def export(
    jsonl: File,
    form: Annotated[Literal["atif", "cast", "sft"], typer.Option("--format", help="what is written")] = "atif",
    to: Annotated[
        Path | None, typer.Option(help="folder for atif and cast; file for sft, default: standard output")
    ] = None,
    item: Item = "",
    least: Least = None,
    most: Most = None,
    error: Error = "",
    tool: Tool = "",
) -> None:
    """Write trajectories as ATIF or as replays for asciinema, a file each, or as JSONL of messages for SFT.

    Those without messages are left out.
    """
    if form != "sft" and to is None:
        raise typer.BadParameter(f"{form} writes a file per trajectory: name a folder with --to")
    if form == "sft" and to is not None and to.exists() and to.samefile(jsonl):
        raise ConfigError(f"--to {to}: this is the file that is read")
    chosen = _chosen(jsonl, Query(item=item, least=least, most=most, error=error, tool=tool))
    try:
        done, left_out = _export(chosen, form, to)
    except OSError as failed:
        if to is None:
            raise
        raise ConfigError(f"--to {to}: {failed.strerror}") from None
    typer.echo(
        f"{done} trajectories exported" + (f", {left_out} without messages left out" if left_out else ""), err=True
    )
    raise typer.Exit(0 if done else 1)


def _export(
    chosen: Iterator[tuple[dict[str, object], StoredTrajectory, Details]], form: str, to: Path | None
) -> tuple[int, int]:
    """Write the chosen; how many were written, and how many left out for want of messages."""
    done = left_out = 0
    with contextlib.ExitStack() as stack:
        out = None if to is None or form != "sft" else stack.enter_context(to.open("w", encoding="utf-8"))
        for member, entry, details in chosen:
            if not details.messages:
                left_out += 1
                continue
            done += 1
            if form == "sft":
                typer.echo(json.dumps({"messages": member["messages"]}), file=out)
                continue
            assert to is not None
            to.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^A-Za-z0-9_.-]+", "-", entry.trajectory_id)[:100]
            if form == "cast":
                (to / f"{done:06d}-{name}.cast").write_text(asciicast(entry, details))
                continue
            value = atif(entry, details, sampled_of(member), agent="atropos", version=version("atropos"))
            (to / f"{done:06d}-{name}.json").write_text(json.dumps(value, indent=1) + "\n")
    return done, left_out


@trajectories_app.command()
def stats(
    jsonl: File,
    as_json: AsJson = False,
    item: Item = "",
    least: Least = None,
    most: Most = None,
    error: Error = "",
    tool: Tool = "",
    passing: Annotated[float, typer.Option(help="lowest score of a pass, for pass@k")] = 1.0,
    by_item: Annotated[bool, typer.Option("--by-item", help="a line for each item too")] = False,
) -> None:
    """Count trajectories, scores, endings, calls by tool, and seconds by phase; pass@k of all items and of each."""
    rates = PassRates(passing)
    numbers = _numbers(_chosen(jsonl, Query(item=item, least=least, most=most, error=error, tool=tool)), rates)
    if as_json:
        typer.echo(
            json.dumps({**numbers, "by_item": {name: rate.numbers() for name, rate in rates.items.items()}}, indent=2)
        )
        return
    for name, value in numbers.items():
        shown = "  ".join(f"{visible(key)} {n}" for key, n in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name.replace('_', ' '):<17} {shown if shown not in (None, '') else '-'}")
    for name, rate in rates.items.items() if by_item else ():
        typer.echo(visible(f"{name}  {rate}"))


def _numbers(
    chosen: Iterable[tuple[dict[str, object], StoredTrajectory, Details]], rates: PassRates
) -> dict[str, object]:
    """The numbers of `stats`; scores are added to `rates`."""
    scores: list[float] = []
    stops: Counter[str] = Counter()
    tools: Counter[str] = Counter()
    phases: defaultdict[str, float] = defaultdict(float)
    failed = 0
    for _, entry, details in chosen:
        scores.append(entry.score)
        rates.add(entry.item, entry.score)
        stops[entry.stop_reason] += 1
        failed += entry.tool_errors
        tools.update(part.name for message in details.messages for part in message.parts if part.name)
        for phase, seconds in entry.phases.items():
            phases[phase] += seconds
    return {
        "trajectories": len(scores),
        "items": len(rates.items),
        "mean_score": round(sum(scores) / len(scores), 4) if scores else None,
        "pass_at": rates.mean(),
        "failed_calls": failed,
        "endings": dict(stops.most_common()),
        "calls_by_tool": dict(tools.most_common()),
        "seconds_by_phase": {name: round(seconds, 3) for name, seconds in phases.items()},
    }


@trajectories_app.command()
def grep(
    jsonl: File,
    pattern: Annotated[str, typer.Argument(help="regular expression")],
    ignore_case: Annotated[bool, typer.Option("-i", "--ignore-case")] = False,
    as_json: AsJson = False,
    item: Item = "",
    least: Least = None,
    most: Most = None,
    error: Error = "",
    tool: Tool = "",
) -> None:
    """Print lines of messages and verifier output that match; with --json, an object a line.

    Ends with 1 when none does.
    """
    try:
        expression = re.compile(pattern, re.IGNORECASE if ignore_case else 0)
    except re.error as wrong:
        raise typer.BadParameter(f"{pattern!r} is no regular expression: {wrong}") from None
    matched = False
    for _, entry, details in _chosen(jsonl, Query(item=item, least=least, most=most, error=error, tool=tool)):
        for where, line in _lines(details):
            if expression.search(line):
                matched = True
                fields = {"trajectory_id": entry.trajectory_id, "score": entry.score, "where": where, "line": line}
                shown = f"{entry.trajectory_id} ({entry.score:.2f}) {where}: {line}"
                typer.echo(json.dumps(fields) if as_json else visible(shown))
    raise typer.Exit(0 if matched else 1)


def _lines(details: Details) -> Iterator[tuple[str, str]]:
    """Each line with its place: the message's number and role, or the verifier's key."""
    for place, message in enumerate(details.messages, 1):
        for part in message.parts:
            for line in f"{part.name}\n{part.text}".splitlines():
                yield f"{place} {message.role}", line
    for key, value in details.info.items():
        for line in as_text(value).splitlines():
            yield f"verification {key}", line
