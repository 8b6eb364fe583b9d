"""From a command line and a YAML file to an env's config and servers.

atroposlib's own parsing lets raw strings override parsed values, ignores unknown YAML keys and turns `--env.n -1` into
1; so flags are read here, and whatever is wrong is one line that says what would be right.
"""

from __future__ import annotations

import difflib
import json
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, SecretStr, ValidationError

from atropos.errors import ConfigError

_FLAGS = {"config": str, "slurm": bool, "testing": bool}


@dataclass
class CommandLine:
    """What a command line and a YAML file said, as given: parsed but not yet checked."""

    command: str
    env: dict[str, Any] = field(default_factory=dict[str, Any])
    openai: dict[str, Any] = field(default_factory=dict[str, Any])
    servers: list[dict[str, Any]] | None = None
    slurm: bool = False
    testing: bool = False


def parse(argv: list[str], env_class: type[BaseModel], server_class: type[BaseModel]) -> CommandLine:
    """Flags over YAML.

    Raises:
        ConfigError: an unknown flag or key, a flag without a value or with more than one.
    """
    settings = CommandLine(argv[0])
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
            raise ConfigError(f"unknown flag --{name}; {nearest(name, known, '--')}")
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


def _read_yaml(settings: CommandLine, path: str, env_class: type[BaseModel], server_class: type[BaseModel]) -> None:
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
                f"{path}: unknown key {key!r}; {nearest(str(key), ['env', 'openai', 'slurm', 'testing'])}"
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
            raise ConfigError(f"{path}: unknown key {name}.{key}; {nearest(str(key), list(model.model_fields))}")
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


def nearest(word: str, known: typing.Iterable[str], prefix: str = "") -> str:
    """A hint: the known name that was probably meant, else all of them where they are few."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "known: " + ", ".join(prefix + name for name in names) if len(names) < 12 else "--help lists them all"


def build_config(cls: Any, settings: CommandLine, default: BaseModel) -> Any:
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


def build_servers(settings: CommandLine, default: Any) -> list[Any]:
    """The inference servers: the YAML's list, or the one of `config_init` with flags and YAML over it."""
    model = server_class(default)
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


def server_class(default: Any) -> Any:
    """The class of the inference servers' settings."""
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
        if item["type"] == "extra_forbidden":
            parts.append(f"{where}: there is no such setting")
            continue
        if item["loc"]:
            shown = "" if isinstance(item["input"], SecretStr) or "token" in where.rsplit(".", 1)[-1] else item["input"]
            parts.append(f"{where}: {text[:1].lower()}{text[1:]} (got {shown!r:.80})")
        else:
            parts.append(f"{space}.{text}" if ":" in text or "(" in text else f"{space}: {text}")
    return "; ".join(parts)
