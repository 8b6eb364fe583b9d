"""From a command line and a YAML file to an env's config and servers.

atroposlib's own parsing lets raw strings override parsed values, ignores unknown YAML keys and turns `--env.n -1` into
1. Here every setting is an option of click, and an error is one line with the remedy.
"""

from __future__ import annotations

import difflib
import enum
import json
import os
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import click
from click.core import ParameterSource
from pydantic import BaseModel, ValidationError

from atropos.api.settings import parse_yaml
from atropos.config import split_names
from atropos.errors import ConfigError
from atropos.wire.base import is_secret, one_line

if TYPE_CHECKING:
    from atropos.envs.adapter import APIServerConfig

Model = TypeVar("Model", bound=BaseModel)
HELP_WIDTH = 110
_HINTS = {
    "tokenizer_name": "folder or model hub name of the tokenizer",
    "data_path_to_save_groups": "JSONL of the groups; the page is written beside it",
}
"""Of settings that atroposlib doesn't describe."""


class EnvClass(Protocol):
    """What the defaults of a command need of an env's class."""

    __name__: str

    @property
    def name(self) -> str | None:
        """The env's name."""
        ...


@dataclass
class CommandLine:
    """The settings of a command line and a YAML file, parsed and not yet validated."""

    command: str
    env: dict[str, object] = field(default_factory=dict[str, object])
    openai: dict[str, object] = field(default_factory=dict[str, object])
    servers: list[dict[str, object]] | None = None
    slurm: bool = False
    testing: bool = False


class FieldType(click.ParamType):  # pyright: ignore[reportMissingTypeArgument] (generic since click 8.4 alone)
    """A flag's text as the kind of value that a field's annotation says; scalars are checked by the model."""

    def __init__(self, annotation: object) -> None:
        self._kinds = _kinds(annotation)
        self._kind = next((one for one in self._kinds if one is not type(None)), str)
        self.choices = [choice for kind in self._kinds for choice in _choices(kind)]
        """What the values may be; empty: they are not listed."""
        self.name = str(getattr(self._kind, "__name__", "value")).lower()
        if self._is_mapping or self._is_list:
            self.name = "json" if self._is_mapping else "list"

    @property
    def _is_mapping(self) -> bool:
        return self._kind is dict or (isinstance(self._kind, type) and issubclass(self._kind, BaseModel))

    @property
    def _is_list(self) -> bool:
        return any(self._kind is kind for kind in (list, tuple, set))

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> object:
        """The value that `value` spells.

        Raises:
            click.BadParameter: it spells none of this kind.
        """
        text = str(value)
        if text in {"None", "none", "null"} and type(None) in self._kinds:
            return None
        if self._kind is bool:
            return click.BOOL.convert(text, param, ctx)
        if self._is_mapping:
            return self._json(text, dict, '{"key": 1}', param, ctx)
        if not self._is_list:
            return text
        if text.lstrip().startswith("["):
            return self._json(text, list, '["a", "b"]', param, ctx)
        return split_names(text)

    def _json(
        self, text: str, kind: type, example: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            self.fail(f"no JSON ({error}); write it as '{example}'", param, ctx)
        if not isinstance(value, kind):
            self.fail(f"expected JSON as '{example}', not {text[:80]}", param, ctx)
        return value


def _kinds(annotation: object) -> list[object]:
    """The plain types an annotation allows: `Annotated[list[str] | None, ...]` gives list and NoneType."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _kinds(typing.get_args(annotation)[0])
    if origin is typing.Union or origin is types.UnionType:
        return [kind for part in typing.get_args(annotation) for kind in _kinds(part)]
    return [annotation if origin is typing.Literal else origin or annotation]


def _choices(kind: object) -> list[str]:
    """The values of a literal or an enumeration, as text."""
    if typing.get_origin(kind) is typing.Literal:
        return [str(value) for value in typing.get_args(kind)]
    return [str(one.value) for one in kind] if isinstance(kind, type) and issubclass(kind, enum.Enum) else []


class SettingsCommand(click.Command):
    """One command of an env: every setting of its config and of its inference server is an option.

    Args:
        name: `serve`, `process` or `evaluate`.
        summary: what it does, for the help.
        env: the env's config with its defaults.
        server: the first inference server's settings with their defaults.
        run: what to do with the settings; gives the exit code.
    """

    def __init__(
        self, name: str, summary: str, env: BaseModel, server: BaseModel, run: Callable[[CommandLine], int]
    ) -> None:
        self._sections = [*_by_owner(env), ("openai (the inference server)", _options("openai", server))]
        general = [
            click.Option(["--config"], metavar="FILE", help="YAML settings under env: and openai:; flags win over it"),
            click.Option(["--slurm"], type=click.BOOL, default=False, help="take the servers from Slurm's variables"),
            click.Option(["--testing"], type=click.BOOL, default=False, help="atroposlib's switch for its own tests"),
        ]
        super().__init__(
            name,
            params=[*general, *(option for _, options in self._sections for option in options)],
            help=f"{summary}.\n\nLists are comma-separated, dicts JSON; None clears an optional.",
            short_help=summary,
            context_settings={"max_content_width": HELP_WIDTH, "allow_extra_args": True},
        )
        self._general = general
        self._run = run
        self._env, self._server = type(env), type(server)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every option in the section of the class that defines it, the env's own first."""
        for title, options in [("options", self._general), *self._sections]:
            with formatter.section(title):
                formatter.write_dl([record for one in options if (record := one.get_help_record(ctx))])

    def invoke(self, ctx: click.Context) -> int:
        """Run with flags over YAML.

        Raises:
            ConfigError: an unknown key, or flags for one of several servers.
            click.UsageError: more than one value for a flag.
        """
        if ctx.args:
            raise click.UsageError(f"unexpected {' '.join(ctx.args)!r}; a flag has one value: write lists with commas")
        return self._run(self._settings(ctx))

    def _settings(self, ctx: click.Context) -> CommandLine:
        assert self.name is not None
        settings = CommandLine(self.name)
        values = {
            name: value
            for name, value in ctx.params.items()
            if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        }
        if "config" in values:
            _read_yaml(settings, values["config"], self._env, self._server)
        for name, value in values.items():
            space, _, setting = name.partition("__")
            if setting:
                getattr(settings, space)[setting] = value
            elif name != "config":
                setattr(settings, name, value)
        if settings.slurm and "SLURM_JOB_NODELIST" not in os.environ:
            raise ConfigError("--slurm: SLURM_JOB_NODELIST is not set; run this in a Slurm job, or set --slurm false")
        if settings.servers is not None and len(settings.servers) > 1 and settings.openai:
            first = next(iter(settings.openai))
            raise ConfigError(
                f"--openai.{first}: the YAML names {len(settings.servers)} servers; set it there, for each"
            )
        return settings


def _by_owner(env: BaseModel) -> list[tuple[str, list[click.Option]]]:
    """The env's options by the class that defines each last, the env's own class first."""
    options = {option.name: option for option in _options("env", env)}
    sections: list[tuple[str, list[click.Option]]] = []
    for owner in type(env).__mro__:
        names = [f"env__{name}" for name in getattr(owner, "__annotations__", {})]
        if own := [options.pop(name) for name in names if name in options]:
            sections.append((f"env ({owner.__name__})", own))
    return sections


def _options(space: str, defaults: BaseModel) -> list[click.Option]:
    options: list[click.Option] = []
    for name, info in type(defaults).model_fields.items():
        kind, shown = FieldType(info.annotation), _shown(name, getattr(defaults, name))
        text = " ".join((info.description or _HINTS.get(name, "")).split())
        options.append(
            click.Option(
                [f"{space}__{name}", f"--{space}.{name}"],
                type=kind,
                metavar="|".join(kind.choices) or None,
                help=f"{text}  [default: {shown}]",
            )
        )
    return options


def _shown(name: str, value: object) -> str:
    if is_secret(name) and value is not None:
        return "not shown"
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, list | tuple):
        return ",".join(map(str, cast("Collection[object]", value))) or "none"
    if isinstance(value, BaseModel):
        return value.model_dump_json(exclude_defaults=True)
    return str(value)


def _read_yaml(settings: CommandLine, path: str, env_class: type[BaseModel], server_class: type[BaseModel]) -> None:
    try:
        content = parse_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: expected keys env, openai, slurm, testing")
    data = cast("dict[str, object]", content)
    known = ("env", "openai", "slurm", "testing")
    for key in data:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key!r}; {nearest(str(key), known)}")
    settings.env.update(_section(path, "env", data.get("env"), env_class))
    openai = data.get("openai")
    if isinstance(openai, list):
        sections = cast("list[object]", openai)
        settings.servers = [_section(path, f"openai[{i}]", one, server_class) for i, one in enumerate(sections)]
    else:
        settings.openai.update(_section(path, "openai", openai, server_class))
    settings.slurm = _switch(path, "slurm", data.get("slurm"))
    settings.testing = _switch(path, "testing", data.get("testing"))


def _switch(path: str, name: str, value: object) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ConfigError(f"{path}: {name} is true or false, not {type(value).__name__}")
    return value


def _section(path: str, name: str, value: object, model: type[BaseModel]) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: {name} must be keys and values, not {type(value).__name__}")
    section = cast("dict[str, object]", value)
    for key in section:
        if key not in model.model_fields:
            raise ConfigError(f"{path}: unknown key {name}.{key}; {nearest(str(key), model.model_fields)}")
    return dict(section)


def nearest(word: str, known: Collection[str]) -> str:
    """A hint: the known name that was probably meant, else all of them where they are few."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if close:
        return f"did you mean {close[0]}?"
    return f"known: {', '.join(known)}" if len(known) < 12 else "--help lists them all"


def command_defaults(cls: EnvClass, command: str, default: Model) -> Model:
    """What `config_init` gives, with what `process` and `evaluate` mean by default."""
    changed: dict[str, object] = {}
    if command == "process":
        changed = {"ensure_scores_are_not_same": False, "include_messages": True}
        if getattr(default, "data_path_to_save_groups", None) is None:
            changed["data_path_to_save_groups"] = f"data/{cls.name or 'groups'}.jsonl"
    if command in {"process", "evaluate"}:
        changed["use_wandb"] = False  # only when asked
    if getattr(default, "wandb_name", None) is None:
        changed["wandb_name"] = cls.name or cls.__name__
    return default.model_copy(update=changed)


def build_config(defaults: Model, settings: CommandLine) -> Model:
    """The env's config: flags and YAML over `command_defaults`."""
    values = {name: getattr(defaults, name) for name in defaults.model_fields_set}
    return _validated(type(defaults), {**values, **settings.env}, "env")


def build_servers(settings: CommandLine, defaults: Sequence[APIServerConfig]) -> list[APIServerConfig]:
    """The inference servers: the YAML's list, or the one of `config_init` with flags and YAML over it."""
    model = type(defaults[0])
    if settings.servers is not None and len(settings.servers) != 1:
        return [_validated(model, one, f"openai[{index}]") for index, one in enumerate(settings.servers)]
    merged = {**(settings.servers[0] if settings.servers else {}), **settings.openai}
    if len(defaults) > 1:
        if merged:
            first = next(iter(merged))
            raise ConfigError(f"--openai.{first}: config_init gives {len(defaults)} servers; list them in YAML instead")
        return [*defaults]
    values = {name: getattr(defaults[0], name) for name in defaults[0].model_fields_set}
    return [_validated(model, {**values, **merged}, "openai")]


def _validated(model: type[Model], values: Mapping[str, object], space: str) -> Model:
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(one_line(error, space)) from None
