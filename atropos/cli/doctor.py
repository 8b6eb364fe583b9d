"""`atropos doctor`: what this host can isolate, tried for real, and the fix for each gap."""

from __future__ import annotations

import asyncio
import json
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from pydantic import SecretStr
from rich.console import Console
from rich.table import Table

from atropos.cli.options import Base
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError, SandboxError
from atropos.sandbox.linux import host_limits
from atropos.sandbox.linux.host_limits import HostLimit
from atropos.wire import Capabilities

START_LIMIT_S = 60.0
"""Longest that a server may take to start on a busy machine before doctor gives up."""
STOP_LIMIT_S = 20.0
"""How long it may take to end before it is killed."""
ANSWER_S = 2
"""How long an engine may take to answer."""


@dataclass
class DoctorFinding:
    """One line of the report.

    Attributes:
        needed: without it no slot starts.
        fix: empty where all is well, whatever is given.
    """

    name: str
    ok: bool
    needed: bool
    detail: str
    fix: str = ""

    def __post_init__(self) -> None:
        if self.ok:
            self.fix = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    base: Base = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Also say whether this host's limits allow so many.")] = None,
) -> None:
    """Try what this host can isolate, and name the fix for each gap.

    Ends with 0 when slots start with everything isolated, 1 when they start but something optional is missing,
    3 when they can't start.
    """
    features = [*programs(), *asyncio.run(isolation(base)), *engines()]
    if slots is not None:
        features += room_for(slots, host_limits.read())
    broken = any(item.needed and not item.ok for item in features)
    lacking = any(not item.ok and item.name not in OPTIONAL for item in features)
    if as_json:
        typer.echo(json.dumps({"ok": not broken, "findings": [asdict(item) for item in features]}, indent=2))
    else:
        show(features, broken=broken, lacking=lacking)
    raise typer.Exit(3 if broken else 1 if lacking else 0)


def programs() -> list[DoctorFinding]:
    """Whether the programs and the Python that slots need are there."""
    fits = (3, 11) <= sys.version_info[:2] < (3, 15)
    findings = [
        DoctorFinding("python", fits, needed=True, detail=platform.python_version(), fix="Python 3.11–3.14"),
        DoctorFinding("kernel", ok=True, needed=True, detail=platform.release()),
    ]
    for program, package, use in (
        ("bwrap", "bubblewrap", ""),
        ("git", "git", ""),
        ("zstd", "zstd", " for images' layers that are packed with it"),
    ):
        where = shutil.which(program)
        fix = f"install {package}{use} (Debian, Ubuntu: apt-get install {package})"
        findings.append(DoctorFinding(program, where is not None, program == "bwrap", where or "not found", fix))
    return findings


def room_for(slots: int, limits: Sequence[HostLimit]) -> list[DoctorFinding]:
    """Whether this many live slots fit this host's limits: the limits that are too low, or else the lowest one."""
    lowest, *others = host_limits.rooms(limits)
    return [
        DoctorFinding(
            limit.name,
            ok=limit.slots >= slots,
            needed=False,
            detail=f"room for {limit.slots} slots: {limit.used} of {limit.value} are used, "
            f"a slot takes {limit.per_slot:g}",
            fix=limit.fix,
        )
        for limit in (lowest, *(one for one in others if one.slots < slots))
    ]


async def isolation(base: str | None) -> list[DoctorFinding]:
    """Start a real sandbox server with one slot, and report what its probe found."""
    if shutil.which("bwrap") is None:
        return []
    try:
        capabilities = await probe(base)
    except (SandboxError, ConfigError) as error:
        busy = "" if isinstance(error, ConfigError) else host_limits.load()
        detail, fix = f"{error}{busy}", "see the reason on the left"
        return [DoctorFinding("slots", ok=False, needed=True, detail=detail, fix=fix)]
    return [
        DoctorFinding(feature.name, feature.ok, feature.required, feature.detail, feature.fix)
        for feature in capabilities.features
    ]


async def probe(base: str | None = None) -> Capabilities:
    """The capabilities of a server that is started for this question alone, as the local backend starts its own.

    Raises:
        SandboxError: it did not start; the message is its own last line.
    """
    import httpx

    from atropos.slots.backends.local.server_process import ServerProcess

    token = secrets.token_urlsafe(16)
    config = ServerConfig(
        token=SecretStr(token), slots=1, warm=0, base=base, drain_s=0, die_with_parent=True, allow_network=True
    )
    server = await ServerProcess.start(config)
    try:
        await server.ready(START_LIMIT_S)
        async with httpx.AsyncClient(trust_env=False, headers={"Authorization": f"Bearer {token}"}) as client:
            answer = await client.get(f"http://127.0.0.1:{server.port}/v1/capabilities")
            answer.raise_for_status()
            return Capabilities.model_validate_json(answer.content)
    finally:
        await server.stop(STOP_LIMIT_S)


OPTIONAL = ("docker", "nomad", "zstd")
"""What slots on this host's own root do without."""


def engines() -> list[DoctorFinding]:
    """Whether the other backends could be used from here; neither is needed for the local one."""
    return [_unless_missing(name, look) for name, look in (("docker", docker), ("nomad", nomad))]


def _unless_missing(name: str, look: Callable[[], DoctorFinding]) -> DoctorFinding:
    """What `look` finds, or that the backend's own packages are not installed."""
    from atropos.slots.backends.loading import load

    try:
        load("backend", name)
    except ConfigError as error:
        fix = f"pip install 'atropos[{name}]' (only for backend {name})"
        return DoctorFinding(name, ok=False, needed=False, detail=str(error), fix=fix)
    return look()


def docker() -> DoctorFinding:
    """Which engine answers at DOCKER_HOST, or at its default, and what it can't do."""
    from atropos.slots.backends.docker.engine import DockerEngine

    engine = DockerEngine("doctor")
    try:
        engine.connect(answer_s=ANSWER_S)
        detail, ok = f"{engine.facts} at {engine.address}{engine.facts.gaps()}", True
    except (BackendUnavailable, ConfigError) as error:
        detail, ok = str(error), False
    finally:
        engine.close()
    fix = "start a Docker engine or Podman's service, or set DOCKER_HOST (only for backend docker)"
    return DoctorFinding("docker", ok, needed=False, detail=detail, fix=fix)


def nomad() -> DoctorFinding:
    """Whether a Nomad agent answers, asked with the NOMAD_* variables of address and TLS as the backend asks it."""
    import httpx

    from atropos.slots.backends.nomad.access import NomadAccess

    address = "NOMAD_*"
    try:
        settings = NomadAccess.from_environment(None)
        address, name = settings.shown, settings.tls_server_name
        with httpx.Client(verify=settings.tls() or False, timeout=ANSWER_S, trust_env=False) as client:
            answer = client.get(
                f"{settings.address}/v1/status/leader", extensions={"sni_hostname": name} if name else {}
            )
        ok, detail = answer.status_code in {200, 403}, f"{address} answered {answer.status_code}"
    except (httpx.HTTPError, httpx.InvalidURL, ConfigError) as error:
        ok, detail = False, f"{address}: {error or type(error).__name__}"
    fix = "start an agent, or set NOMAD_ADDR (only for backend nomad)"
    return DoctorFinding("nomad", ok, needed=False, detail=detail, fix=fix)


def show(findings: list[DoctorFinding], *, broken: bool, lacking: bool) -> None:
    """The findings as a table, and one line that sums them up."""
    table = Table(title="What this host can isolate", title_justify="left", show_lines=False)
    for column in ("", "what", "detail", "fix"):
        table.add_column(column, overflow="fold")
    for item in findings:
        mark = "[green]✓[/]" if item.ok else "[red]✗[/]" if item.needed else "[yellow]–[/]"
        table.add_row(mark, item.name, item.detail.replace("[", "\\["), item.fix.replace("[", "\\["))
    console = Console()
    console.print(table)
    if broken:
        console.print("[red]Slots can't start here: mend the lines marked ✗.[/]")
    elif lacking:
        console.print(
            "[yellow]Slots start here; see the lines marked – (require_sandbox refuses a host that lacks isolation).[/]"
        )
    else:
        console.print("[green]Slots start here with every isolation feature.[/]")
