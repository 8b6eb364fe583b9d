"""`atropos exec`: one command in a fresh slot, as a smoke test and for scripts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from atropos.cli.image_progress import image_or_task, progress_display
from atropos.cli.options import BackendName, Base
from atropos.errors import ConfigError
from atropos.wire import SlotLimits

if TYPE_CHECKING:
    from atropos.slots import ExecResult


def execute(
    command: Annotated[str, typer.Argument(help="A shell command line.")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds before it is killed.")] = 60.0,
    backend: BackendName = "local",
    base: Base = None,
    image: Annotated[str | None, typer.Option(help="An image to start from, as `atropos image prepare` takes.")] = None,
    upload: Annotated[Path | None, typer.Option(help="A file or folder to put into /workspace first.")] = None,
    memory_mib: Annotated[int | None, typer.Option(help="Memory of the slot in MiB.")] = None,
    network: Annotated[bool, typer.Option("--network", help="Allow filtered egress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the whole result as JSON.")] = False,
) -> None:
    """Run one command in a fresh, isolated slot; its exit code becomes this command's (124 when it timed out)."""
    if upload is not None and not upload.exists():
        raise ConfigError(f"--upload: there is no {upload}")
    settings: dict[str, object] = {
        "backend": backend,
        "job_id": f"atropos-exec-{secrets.token_hex(4)}",
        "slots_per_container": 1,
        "min_containers": 1,
        "max_containers": 1,
        "allow_network": network,
        "limits": SlotLimits() if memory_mib is None else SlotLimits(memory_mib=memory_mib),
        "base": base,
    }
    if memory_mib is None:  # what slots lack is for whoever asks: for a limit, or by `atropos doctor`
        logging.getLogger("atropos.slots.limits").setLevel(logging.ERROR)
    stdin = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer
    data = stdin.read() if stdin is not None and not _is_empty(stdin) else None
    result = asyncio.run(_run(command, timeout_s, settings, image, upload, data, split=not as_json))
    if as_json:
        names = ("exit_code", "output", "timed_out", "truncated", "limit", "duration_s")
        typer.echo(json.dumps({name: getattr(result, name) for name in names}))
    else:
        _print(result, min(timeout_s, SlotLimits().wall_s))
    raise typer.Exit(_exit_code(result))


def _is_empty(stream: BinaryIO) -> bool:
    """Whether stdin is /dev/null or closed, which need not be sent."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), os.stat("/dev/null"))
    except (OSError, ValueError):
        return True


async def _run(
    command: str,
    timeout_s: float,
    settings: Mapping[str, object],
    image: str | None,
    upload: Path | None,
    stdin: bytes | None,
    *,
    split: bool,
) -> ExecResult:
    from atropos.slots import SlotPool, SlotPoolConfig

    async with SlotPool(SlotPoolConfig.model_validate(settings)) as pool:
        if image is not None:
            with progress_display() as progress_of:
                prepared = await pool.prepare(image_or_task(image, pool), progress=progress_of(image))
            image = prepared.source if prepared is not None and prepared.source.startswith("atropos-build:") else image
        async with pool.lease("atropos-exec", image=image) as slot:
            if upload is not None:
                try:
                    await slot.upload(upload, "/workspace" if upload.is_dir() else f"/workspace/{upload.name}")
                except OSError as error:
                    raise ConfigError(f"--upload {upload}: {error.strerror}: {error.filename}") from None
            return await slot.exec(command, timeout_s=timeout_s, stdin=stdin, split=split)


def _print(result: ExecResult, most_s: float) -> None:
    """What the command wrote, each stream in its place, and how it was ended, if it was."""
    typer.echo(result.stdout_bytes or b"", nl=False)
    typer.echo(result.stderr_bytes or b"", nl=False, err=True)
    if result.exit_code is None:
        typer.echo(f"atropos: {result.output.rstrip()}", err=True)
    if result.truncated:
        typer.echo(f"atropos: {result.dropped_bytes} bytes are missing in the middle of the output", err=True)
    if result.timed_out:
        typer.echo(f"atropos: timed out after {most_s:g} s", err=True)
    elif result.limit not in (None, "output"):
        typer.echo(f"atropos: stopped by the slot's {result.limit} limit", err=True)


def _exit_code(result: ExecResult) -> int:
    """As a shell has it: 128+N where signal N ended the command, 124 where it timed out."""
    if result.timed_out:
        return 124
    code = result.exit_code if result.exit_code is not None else 1
    return 128 - code if code < 0 else code
