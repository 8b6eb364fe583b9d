"""What `--help` of an env says."""

from __future__ import annotations

import enum
import shutil
import textwrap
from typing import Any, cast

from pydantic import BaseModel

from atropos.envs.command_line.flags import CommandLine, build_config, build_servers

COMMANDS = {
    "serve": "run groups for a trainer, through the trajectory API (run-api)",
    "process": "run groups and write them to a JSONL file and a page to look at",
    "evaluate": "run the env's own evaluation",
}
_HINTS = {
    "tokenizer_name": "folder or model hub name of the tokenizer",
    "data_path_to_save_groups": "JSONL of the groups; the page stands beside it",
}


def usage(cls: Any) -> str:
    """The commands."""
    lines = [f"{cls.__name__}: {_first_line(cls)}", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "COMMAND --help lists a command's settings."])


def _first_line(cls: Any) -> str:
    return next(iter((cls.__doc__ or "").strip().splitlines()), "")


def command_help(cls: Any, command: str, default_env: BaseModel, default_servers: Any) -> str:
    """Every setting of a command with its meaning and default, the env's own first."""
    settings = CommandLine(command)
    env = build_config(cls, settings, default_env)
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    lines = [
        f"{cls.__name__} {command}: {COMMANDS[command]}",
        "",
        "CommandLine are --env.NAME VALUE and --openai.NAME VALUE, or the same under env: and openai: in a YAML file.",
        "Lists are comma-separated, dicts JSON; None clears an optional; write --env.NAME=-1 for a negative number.",
        "",
        "  --config FILE                    YAML settings; flags win over it",
    ]
    for owner in [one for one in type(env).__mro__ if issubclass(one, BaseModel) and one is not BaseModel]:
        own = [name for name in type(env).model_fields if name in owner.__annotations__]
        shown = [name for name in own if name not in _later(type(env), owner)]
        if shown:
            lines += ["", f"env ({owner.__name__}):"]
            lines += [line for name in shown for line in _field("env", name, env, width)]
    servers = build_servers(settings, default_servers)
    lines += ["", "openai (the inference server):"]
    lines += [line for name in type(servers[0]).model_fields for line in _field("openai", name, servers[0], width)]
    return "\n".join(lines)


def _later(cls: type[BaseModel], owner: type[BaseModel]) -> set[str]:
    """Fields that a class nearer to the env's own redefines: shown there."""
    names: set[str] = set()
    for one in cls.__mro__:
        if one is owner:
            return names
        if issubclass(one, BaseModel) and one is not BaseModel:
            names.update(one.__annotations__)
    return names


def _field(space: str, name: str, model: BaseModel, width: int) -> list[str]:
    info = type(model).model_fields[name]
    flag = f"  --{space}.{name}"
    text = " ".join((info.description or _HINTS.get(name, "")).split())
    text = f"{text} [{_shown(getattr(model, name))}]".strip()
    body = textwrap.wrap(text, max(30, width - 36))
    head = f"{flag:<35}" if len(flag) < 34 else flag
    if len(flag) >= 34:
        return [head, *(" " * 35 + line for line in body)]
    return [head + body[0], *(" " * 35 + line for line in body[1:])]


def _shown(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, list):
        return ",".join(str(one) for one in cast("list[Any]", value)) or "none"
    return str(value)
