"""The files of a task folder that people write: task.toml, the instruction and the tests' script."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from pydantic import ValidationError

from atropos.errors import ConfigError
from atropos.tasks.format.config import TaskConfig, explained

_CANARY = re.compile(r"\A\s*((<!--(?=[^\n]*canary)[^\n]*-->|#[^\n]*canary[^\n]*)[ \t]*(\n|\Z))+", re.IGNORECASE)
"""Marks at the head of published instructions, which no model is shown."""
MAX_TEXT_BYTES = 64 << 20
"""Longest text file that is read."""
MAX_YAML_CHARS = 4 << 20
"""Longest YAML that is read, with each alias written out."""


class _Loader(yaml.SafeLoader):
    """YAML as Docker Compose reads it: `yes`, `on` and dates are text, as in YAML 1.2."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in each if tag.rpartition(":")[2] not in {"bool", "timestamp"}]
    for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("true|True|TRUE|false|False|FALSE"), list("tTfF"))


def read_text(path: Path, cure: str) -> str:
    """A text file.

    Raises:
        ConfigError: it is missing, too long, or can't be read.
    """
    try:
        if path.exists() and not path.is_file():  # opening a FIFO would block
            raise ConfigError(f"{path}: is not a file; {cure}")
        if (size := path.stat().st_size) > MAX_TEXT_BYTES:
            raise ConfigError(f"{path}: has {size:,} bytes; at most {MAX_TEXT_BYTES:,} are read")
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: is missing; {cure}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {error}") from None


def parse_yaml(text: str) -> object:
    """The value that a YAML text holds.

    Raises:
        ValueError: it is no YAML, or holds what is no value: brackets a thousand deep, or aliases
            of aliases that are gigabytes when they are written out.
    """
    if len(text) > MAX_YAML_CHARS:
        raise ValueError(f"it is longer than {MAX_YAML_CHARS:,} characters")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _check_size(node)
        return loader.construct_document(node)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from None
    finally:
        loader.dispose()


def _check_size(node: yaml.Node) -> None:
    remaining, waiting = MAX_YAML_CHARS, [node]
    while waiting:
        one = waiting.pop()
        remaining -= 1
        if isinstance(one, yaml.ScalarNode):
            remaining -= len(one.value)
        elif isinstance(one, yaml.MappingNode):
            waiting += (part for pair in one.value for part in pair)
        else:
            waiting += one.value
        if remaining < 0:
            raise ValueError(f"with its aliases written out it is longer than {MAX_YAML_CHARS} characters")


def read_toml(path: Path, cure: str) -> dict[str, object]:
    """The table that a TOML file holds.

    Raises:
        ConfigError: it is missing or can't be read.
    """
    text = read_text(path, cure)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from None


def read_instruction(path: Path) -> str:
    """The prompt.

    Raises:
        ConfigError: there is none.
    """
    text = _CANARY.sub("", read_text(path, "say there what the agent is to do")).strip()
    if not text:
        raise ConfigError(f"{path}: is empty; describe the agent's task in it")
    return text


def check_script(path: Path) -> None:
    """Refuse a verifier without a script.

    Raises:
        ConfigError: it is missing or empty, or its first line names a program that ends in a carriage return.
    """
    if not read_text(path, "the verifier writes /logs/verifier/reward.txt").strip():
        raise ConfigError(f"{path}: is empty; the verifier writes /logs/verifier/reward.txt")
    with path.open("rb") as file:
        first = file.readline(256)
    if first.startswith(b"#!") and first.endswith(b"\r\n"):
        raise ConfigError(f"{path}: has CRLF line ends, so that its interpreter isn't found; convert them (dos2unix)")


def read_config(path: Path) -> TaskConfig:
    """task.toml.

    Raises:
        ConfigError: it can't be read, or holds what no slot can honour.
    """
    raw = read_toml(path, 'the smallest one is the line version = "1.0"')
    try:
        config = TaskConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explained(path, error)) from None
    refused = next(config.environment.refusals("environment"), None)
    if refused is not None:
        raise ConfigError(f"{path}: {refused}")
    return config
