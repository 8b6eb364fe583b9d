"""`atropos keys`: the keys file of an executor server; `atropos usage`: what its keys have used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import httpx
import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atropos.api.accounts.keys import KeySettings, change_keys, digest, new_key, read_keys
from atropos.api.cli import EXECUTOR_TOKEN_VARIABLE
from atropos.api.executor.models import UsageReport
from atropos.api.settings import parse_settings
from atropos.cli.looking import refuse
from atropos.cli.options import AsJson
from atropos.dashboard.text import figure
from atropos.errors import BackendUnavailable, ConfigError
from atropos.terminal import visible

keys_app = typer.Typer(no_args_is_help=True, help="Keys of an executor server, with quotas: its keys_file.")
File = Annotated[Path, typer.Option("--file", help="The keys file, JSON; the server follows it.")]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]
_FILE = Path("keys.json")
_ASK_S = 10.0


@keys_app.command("add")
def add(
    name: Name,
    file: File = _FILE,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="SETTING=VALUE, as slots=20 or admin=true; again for more.")
    ] = None,
    rotate: Annotated[
        bool, typer.Option(help="A further key of a name that has one; `drop-old` ends the others.")
    ] = False,
) -> None:
    """Make a key and print it, once: the file has its SHA-256.

    An existing name needs --rotate, and keeps its settings.
    """
    before = read_keys(file).get(name) if file.exists() else None
    if before is not None and not rotate:
        raise ConfigError(f"{name} has a key in {file}; --rotate gives it a further one")
    fields: dict[str, object] = {} if before is None else before.model_dump(exclude_defaults=True)
    for each in settings or ():
        setting, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f"--set {each}: write SETTING=VALUE")
        fields[setting] = _value(value)
    key = new_key()
    fields["sha256"] = (*(() if before is None else before.sha256), digest(key.encode()))
    change_keys(file, {name: parse_settings(KeySettings, fields, "key")})
    typer.echo(key)


def _value(text: str) -> object:
    try:
        # Numbers and true are JSON, and so are objects, as `limits` is; a word that is none stays text.
        return json.loads(text)
    except ValueError:
        return text


@keys_app.command("drop-old")
def drop_old(name: Name, file: File = _FILE) -> None:
    """Refuse all keys of a name but the latest."""
    key = _known(name, file)
    change_keys(file, {name: key.model_copy(update={"sha256": key.sha256[-1:]})})


@keys_app.command("remove")
def remove(name: Name, file: File = _FILE) -> None:
    """Refuse a name's keys; a running server ends its sandboxes within seconds."""
    _known(name, file)
    change_keys(file, {name: None})


@keys_app.command("list")
def show(file: File = _FILE, as_json: AsJson = False) -> None:
    """Names, the number of their keys, and their settings."""
    keys = read_keys(file)
    plain = {name: key.model_dump(mode="json", exclude={"sha256"}, exclude_defaults=True) for name, key in keys.items()}
    if as_json:
        typer.echo(json.dumps(plain, indent=2))
        return
    table = Table("name", "keys", "settings")
    for name, settings in plain.items():
        text = ", ".join(f"{setting}={json.dumps(value)}" for setting, value in settings.items())
        table.add_row(name, str(len(keys[name].sha256)), Text(text))
    Console().print(table)


def _known(name: str, file: Path) -> KeySettings:
    keys = read_keys(file)
    if name not in keys:
        raise ConfigError(f"{file} has no key {name!r}; it has: {', '.join(keys) or 'none'}")
    return keys[name]


def usage(
    url: Annotated[str, typer.Argument(help="The executor server.")] = "http://127.0.0.1:8461",
    token: Annotated[str | None, typer.Option(envvar=EXECUTOR_TOKEN_VARIABLE, help="A key, or an admin's.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a key has used since its server's start, by image, and its quotas; with an admin's key, those of all."""
    if not token:
        raise ConfigError(f"token: missing; set {EXECUTOR_TOKEN_VARIABLE}, or pass --token")
    report = _asked(url, token)
    if as_json:
        typer.echo(report.model_dump_json(indent=2))
        return
    table = Table("key", "image", "leases", "slot hours", "CPU hours", "egress MiB")
    for row in report.usage:
        numbers = (row.slot_s / 3600, row.cpu_s / 3600, row.egress_bytes / (1 << 20))
        table.add_row(row.key, visible(row.image), str(row.leases), *(f"{number:,.2f}" for number in numbers))
    console = Console()
    console.print(table)
    if report.quotas:
        quotas = Table("key", "quota", "used now", "of")
        for each in report.quotas:
            quotas.add_row(each.key, each.quota, figure(each.used), figure(each.most))
        console.print(quotas)


def _asked(url: str, token: str) -> UsageReport:
    try:
        # No proxy of the environment's: it would get the key.
        answer = httpx.get(
            f"{url.rstrip('/')}/usage", headers={"Authorization": f"Bearer {token}"}, timeout=_ASK_S, trust_env=False
        )
    except (httpx.TransportError, httpx.InvalidURL, UnicodeEncodeError) as error:
        raise BackendUnavailable(f"{url} does not answer: {error or type(error).__name__}") from None
    if answer.status_code != 200:
        refuse(url, answer)
    try:
        return UsageReport.model_validate_json(answer.content)
    except ValidationError:
        raise ConfigError(f"{url} answers as no executor server of this version does") from None
