"""The command line of an env: `serve`, `process`, `evaluate`, each with `--env.*`, `--openai.*` and a YAML file.

atroposlib's own lets raw strings override parsed values, ignores unknown YAML keys, turns `--env.n -1` into 1 and shows
tracebacks; so flags are read here, and whatever is wrong is one line that says what would be right.
"""

from __future__ import annotations

import asyncio
import difflib
import enum
import json
import logging
import os
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from atropos.errors import ConfigError, InferenceError, IsolationUnavailable, SandboxError

COMMANDS = {
    "serve": "run groups for a trainer, through the trajectory API (run-api)",
    "process": "run groups and write them to a JSONL file and a page to look at",
    "evaluate": "run the env's own evaluation",
}
EXIT_FAILED, EXIT_USAGE, EXIT_ISOLATION = 1, 2, 3
_FLAGS = {"config": str, "slurm": bool, "testing": bool}
_HINTS = {
    "tokenizer_name": "folder or model hub name of the tokenizer",
    "data_path_to_save_groups": "JSONL of the groups; the page stands beside it",
}


@dataclass
class Settings:
    """What a command line and a YAML file said, as given: parsed but not yet checked."""

    command: str
    env: dict[str, Any] = field(default_factory=dict[str, Any])
    openai: dict[str, Any] = field(default_factory=dict[str, Any])
    servers: list[dict[str, Any]] | None = None
    slurm: bool = False
    testing: bool = False


def main(cls: Any, argv: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process with its exit code: 0, 1 failed, 2 usage, 3 no isolation, 128+N signal N."""
    sys.exit(run(cls, list(sys.argv[1:] if argv is None else argv)))


def run(cls: Any, argv: list[str]) -> int:
    """Run a command; every foreseeable failure is one line on stderr."""
    try:
        default_env, default_servers = cls.config_init()
        if not argv or argv[0] in {"-h", "--help", "help"}:
            print(_usage(cls))
            return 0 if argv else _fail(f"a command is needed: {', '.join(COMMANDS)}", EXIT_USAGE)
        if argv[0] not in COMMANDS:
            return _fail(f"unknown command {argv[0]!r}; {_nearest(argv[0], COMMANDS)}", EXIT_USAGE)
        if any(word in {"-h", "--help"} for word in argv[1:]):
            print(_help(cls, argv[0], default_env, default_servers))
            return 0
        _logging()
        settings = parse(argv, type(default_env), _server_class(default_servers))
        config = build_config(cls, settings, default_env)
        servers = build_servers(settings, default_servers)
        env = cls(config=config, server_configs=servers, slurm=settings.slurm, testing=settings.testing)
    except ConfigError as error:
        return _fail(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    return _drive(env, settings.command)


def _drive(env: Any, command: str) -> int:
    from atropos.envs.rollout import GroupsDropped

    code, line = 0, ""
    try:
        asyncio.run(_manager(env, command))
    except GroupsDropped as error:
        code, line = EXIT_FAILED, str(error)
    except ConfigError as error:
        code, line = EXIT_USAGE, str(error)
    except IsolationUnavailable as error:
        code, line = EXIT_ISOLATION, str(error)
    except (InferenceError, SandboxError) as error:
        code, line = EXIT_FAILED, f"{type(error).__name__}: {error}"
    except (asyncio.CancelledError, KeyboardInterrupt):
        number = env.lifetime.signal
        name = number.name if number is not None else "SIGINT"
        code, line = 128 + int(number or 2), f"ended by {name}; everything was shut down"
    except Exception as error:
        inner = _innermost(error)
        logging.getLogger(__name__).debug("failed", exc_info=error)
        code, line = EXIT_FAILED, f"{type(inner).__name__}: {str(inner) or 'no detail'}"
        if not os.environ.get("ATROPOS_TRACEBACK"):
            line += "  (ATROPOS_TRACEBACK=1 shows where)"
        else:
            raise
    finally:
        env.close_files()
    if command == "process" and env.metrics.groups:
        _report(env)
    return _fail(line, code) if code else 0


async def _manager(env: Any, command: str) -> None:
    if command == "process":
        env.n_groups_to_process = env.config.total_steps
        env.group_size_to_process = env.config.group_size
        await env.process_manager()
    elif command == "serve":
        await env.env_manager()
    else:
        await env._run_evaluate()  # noqa: SLF001 (atroposlib's name)


def _report(env: Any) -> None:
    metrics = env.metrics
    scores = list(metrics.scores)
    mean = f", mean score {sum(scores) / len(scores):.3f}" if scores else ""
    print(f"{metrics.groups} groups, {metrics.trajectories} trajectories, {metrics.calls} calls{mean}")
    path = env.config.data_path_to_save_groups
    if path and Path(path).exists():
        print(f"groups: {path}\npage:   {Path(path).with_suffix('.html')}")


def _innermost(error: BaseException) -> BaseException:
    """Through tenacity's RetryError, which says nothing, to what happened."""
    for _ in range(5):
        attempt = getattr(error, "last_attempt", None)
        cause = attempt.exception() if attempt is not None else None
        if cause is None:
            return error
        error = cause
    return error


def _fail(line: str, code: int) -> int:
    print(f"error: {line}" if code < 128 else line, file=sys.stderr)
    return code


def _logging() -> None:
    """Warnings and our own progress to stderr; atroposlib's DEBUG output of whole items never."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    handler.setLevel(logging.INFO)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("atropos").setLevel(os.environ.get("ATROPOS_LOG_LEVEL", "INFO").upper())


# ------------------------------------------------------------------------------------------------------------- parsing


def parse(argv: list[str], env_class: type[BaseModel], server_class: type[BaseModel]) -> Settings:
    """Flags over YAML.

    Raises:
        ConfigError: an unknown flag or key, a flag without a value or with more than one.
    """
    settings = Settings(argv[0])
    flags = _flags(argv[1:], {"env": env_class, "openai": server_class})
    if "config" in flags:
        _read_yaml(settings, flags["config"], env_class, server_class)
    for name, text in flags.items():
        if name.startswith("env."):
            settings.env[name[4:]] = _value(name, text, env_class.model_fields[name[4:]].annotation)
        elif name.startswith("openai."):
            settings.openai[name[7:]] = _value(name, text, server_class.model_fields[name[7:]].annotation)
        elif name != "config":
            setattr(settings, name, _boolean(name, text))
    if settings.servers is not None and len(settings.servers) > 1 and settings.openai:
        first = next(iter(settings.openai))
        raise ConfigError(f"--openai.{first}: the YAML names {len(settings.servers)} servers; set it there, for each")
    return settings


def _flags(words: list[str], models: dict[str, type[BaseModel]]) -> dict[str, str]:
    known = [f"{space}.{name}" for space, model in models.items() for name in model.model_fields]
    known += list(_FLAGS)
    found: dict[str, str] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not word.startswith("--"):
            raise ConfigError(_stray(word, words[: index - 1]))
        name, has_value, text = word[2:].partition("=")
        if name not in known:
            raise ConfigError(f"unknown flag --{name}; {_nearest(name, known, '--')}")
        if not has_value:
            if index >= len(words) or words[index].startswith("--"):
                raise ConfigError(f"--{name} needs a value: --{name} VALUE")
            text = words[index]
            if text.startswith("-"):
                raise ConfigError(f"--{name} {text}: write a value that begins with a dash as --{name}={text}")
            index += 1
        found[name] = text
    return found


def _stray(word: str, before: list[str]) -> str:
    """A word that belongs to no flag: most often the second element of a list."""
    flag = next((at for at in range(len(before) - 1, -1, -1) if before[at].startswith("--")), None)
    if flag is None:
        return f"unexpected {word!r}; settings are flags, as --env.group_size 4"
    name, _, inline = before[flag].partition("=")
    given = [inline, *before[flag + 1 :]] if inline else before[flag + 1 :]
    listed = ",".join([*given, word])
    return f"{name} {' '.join([*given, word])}: a flag has one value; write lists with commas, as {name} {listed}"


def _read_yaml(settings: Settings, path: str, env_class: type[BaseModel], server_class: type[BaseModel]) -> None:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: no YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected keys env, openai, slurm, testing")
    data = cast("dict[str, Any]", content)
    for key in data:
        if key not in {"env", "openai", "slurm", "testing"}:
            raise ConfigError(
                f"{path}: unknown key {key!r}; {_nearest(str(key), ['env', 'openai', 'slurm', 'testing'])}"
            )
    settings.env.update(_section(path, "env", data.get("env"), env_class))
    openai: Any = data.get("openai")
    if isinstance(openai, list):
        sections = cast("list[Any]", openai)
        settings.servers = [_section(path, f"openai[{i}]", one, server_class) for i, one in enumerate(sections)]
    else:
        settings.openai.update(_section(path, "openai", openai, server_class))
    settings.slurm = bool(data.get("slurm", False))
    settings.testing = bool(data.get("testing", False))


def _section(path: str, name: str, value: Any, model: type[BaseModel]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {name} must be keys and values, not {type(value).__name__}")
    section = cast("dict[str, Any]", value)
    for key in section:
        if key not in model.model_fields:
            raise ConfigError(f"{path}: unknown key {name}.{key}; {_nearest(str(key), list(model.model_fields))}")
    return dict(section)


def _value(name: str, text: str, annotation: Any) -> Any:
    """A flag's text as the field's kind of value; scalars are left to the model."""
    kinds = _kinds(annotation)
    if text in {"None", "none", "null"} and type(None) in kinds:
        return None
    kind = next((one for one in kinds if one is not type(None)), str)
    if kind is bool:
        return _boolean(name, text)
    if kind in {list, tuple, set}:
        if text.lstrip().startswith("["):
            return _json(name, text, list, '["a", "b"]')
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return _json(name, text, dict, '{"key": 1}')
    return text


def _kinds(annotation: Any) -> list[Any]:
    """The plain types an annotation allows: `Annotated[list[str] | None, ...]` gives list and NoneType."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin is typing.Union or origin is types.UnionType:
        return [kind for part in typing.get_args(annotation) for kind in _kinds(part)]
    return [origin or annotation]


def _json(name: str, text: str, kind: type, example: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--{name}: no JSON ({error}); write --{name} '{example}'") from error
    if not isinstance(value, kind):
        raise ConfigError(f"--{name}: expected JSON as '{example}', not {text[:80]}")
    return value


def _boolean(name: str, text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"true", "yes", "1", "on"}:
        return True
    if lowered in {"false", "no", "0", "off"}:
        return False
    raise ConfigError(f"--{name}: expected true or false, not {text!r}")


def _nearest(word: str, known: typing.Iterable[str], prefix: str = "") -> str:
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "known: " + ", ".join(prefix + name for name in names) if len(names) < 12 else "--help lists them all"


# ------------------------------------------------------------------------------------------------------------- building


def build_config(cls: Any, settings: Settings, default: BaseModel) -> Any:
    """The env's config: flags and YAML over `config_init`, with what `process` and `evaluate` mean by default."""
    values = {name: getattr(default, name) for name in default.model_fields_set}
    if settings.command == "process":
        values["ensure_scores_are_not_same"] = False
        values["include_messages"] = True
        if values.get("data_path_to_save_groups") is None:
            values["data_path_to_save_groups"] = f"data/{cls.name or 'groups'}.jsonl"
    if settings.command in {"process", "evaluate"}:
        values["use_wandb"] = False  # only when asked
    if values.get("wandb_name") is None:
        values["wandb_name"] = cls.name or cls.__name__
    return _validated(type(default), {**values, **settings.env}, "env")


def build_servers(settings: Settings, default: Any) -> list[Any]:
    """The inference servers: the YAML's list, or the one of `config_init` with flags and YAML over it."""
    model = _server_class(default)
    if settings.servers is not None and len(settings.servers) != 1:
        return [_validated(model, one, f"openai[{index}]") for index, one in enumerate(settings.servers)]
    given = {**(settings.servers[0] if settings.servers else {}), **settings.openai}
    defaults = default if isinstance(default, list) else [default]
    if len(defaults) > 1:
        if given:
            first = next(iter(given))
            raise ConfigError(f"--openai.{first}: config_init gives {len(defaults)} servers; list them in YAML instead")
        return defaults
    values = {name: getattr(defaults[0], name) for name in defaults[0].model_fields_set} if defaults else {}
    return [_validated(model, {**values, **given}, "openai")]


def _server_class(default: Any) -> Any:
    from atropos.envs.adapter import APIServerConfig

    first = default[0] if isinstance(default, list) and default else default
    return type(first) if isinstance(first, APIServerConfig) else APIServerConfig


def _validated(model: type[BaseModel], values: dict[str, Any], space: str) -> Any:
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(one_line(error, space)) from None


def one_line(error: ValidationError, space: str) -> str:
    """A validation error in one line: each field with its flag's name, what is wrong, what was given."""
    parts: list[str] = []
    for item in error.errors(include_url=False):
        where = ".".join([space, *(str(place) for place in item["loc"])])
        text = item["msg"].removeprefix("Value error, ")
        if item["loc"]:
            shown = "" if isinstance(item["input"], SecretStr) or "token" in where.rsplit(".", 1)[-1] else item["input"]
            parts.append(f"{where}: {text[:1].lower()}{text[1:]} (got {shown!r:.80})")
        else:
            parts.append(f"{space}.{text}" if ":" in text or "(" in text else f"{space}: {text}")
    return "; ".join(parts)


# ----------------------------------------------------------------------------------------------------------------- help


def _usage(cls: Any) -> str:
    lines = [f"{cls.__name__}: {_first_line(cls)}", "", "commands:"]
    lines += [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join([*lines, "", "COMMAND --help lists a command's settings."])


def _first_line(cls: Any) -> str:
    return next(iter((cls.__doc__ or "").strip().splitlines()), "")


def _help(cls: Any, command: str, default_env: BaseModel, default_servers: Any) -> str:
    settings = Settings(command)
    env = build_config(cls, settings, default_env)
    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    lines = [
        f"{cls.__name__} {command}: {COMMANDS[command]}",
        "",
        "Settings are --env.NAME VALUE and --openai.NAME VALUE, or the same under env: and openai: in a YAML file.",
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
