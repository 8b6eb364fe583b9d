"""The keys file of an executor server: names, digests of keys, quotas. Written by `atropos keys`, or by hand."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter, ValidationError

from atropos.api.accounts.secrets import SecretSettings
from atropos.api.settings import read_file, wrong_settings
from atropos.errors import ConfigError
from atropos.slots.config import Quotas, SlotPoolConfig
from atropos.wire import MAX_SECRETS, LeaseLimits

_NAME = re.compile(r"^[a-z0-9][a-z0-9._-]{0,62}$")
_DIGEST = re.compile(r"^[0-9a-f]{64}$")


def _named(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError("is no name of a key: write a-z, 0-9, '.', '_' and '-', up to 63 of them")
    return name


def _digests(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _digest(value: str) -> str:
    if not _DIGEST.match(value):
        raise ValueError("write the SHA-256 of the key, 64 hexadecimal digits: `atropos keys add` makes both")
    return value


class KeySettings(Quotas):
    """A key: its digests, and what its holder may use."""

    sha256: Annotated[tuple[Annotated[str, AfterValidator(_digest)], ...], BeforeValidator(_digests)] = Field(
        default=(), description="SHA-256 of the key in hexadecimal; a list while one follows another; none: no access"
    )
    admin: bool = Field(
        default=False, description="whether it sees the whole server: /metrics, /status, everybody's /usage"
    )
    rate_per_s: float | None = Field(default=None, gt=0, description="requests a second on average; None: no bound")
    burst: int = Field(default=100, ge=1, description="requests above the rate that may come at once")
    limits: LeaseLimits | None = Field(default=None, description="of each of its slots, instead of the pool's `limits`")
    secrets: dict[str, SecretSettings] = Field(
        default_factory=dict,
        max_length=MAX_SECRETS,
        description="what its slots' requests get on their way out, by name",
    )


_FILE = TypeAdapter(dict[Annotated[str, AfterValidator(_named)], KeySettings])


def digest(key: bytes) -> str:
    """A key's SHA-256: keys are random, so that nothing slower is needed."""
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    """A random key in the form of E2B's, which old versions of its SDK insist on."""
    return f"e2b_{secrets.token_hex(20)}"


def read_keys(path: Path, pool: SlotPoolConfig | None = None) -> dict[str, KeySettings]:
    """The keys of a file, by name. `pool`: whose slots they lease.

    Raises:
        ConfigError: it can't be read, a setting is wrong, two names have one key, or no slot of the pool has a key's
            `limits`.
    """
    return _checked(path, read_file(path, "keys_file"), pool)


def _checked(path: Path, values: Mapping[str, object], pool: SlotPoolConfig | None = None) -> dict[str, KeySettings]:
    try:
        keys = _FILE.validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"keys_file: {path}: {wrong_settings(error)}") from None
    seen: dict[str, str] = {}
    for name, key in keys.items():
        for each in key.sha256:
            if (other := seen.setdefault(each, name)) != name:
                raise ConfigError(f"keys_file: {path}: {other} and {name} have the same key; make one of them anew")
        if pool is not None:
            _check_limits(f"keys_file: {path}: {name}", key, pool)
    return keys


def _check_limits(where: str, key: KeySettings, pool: SlotPoolConfig) -> None:
    limits = key.limits or LeaseLimits()
    if key.cpu is not None and limits.cpu_quota is None and pool.limits.cpu_quota is None:
        raise ConfigError(f"{where}.cpu counts the limit cpu_quota; set limits.cpu_quota")
    try:
        pool.check_room(limits, pool.slots_per_container)
    except ConfigError as error:
        raise ConfigError(f"{where}.{error}") from None


def change_keys(path: Path, changed: Mapping[str, KeySettings | None]) -> None:
    """Write a JSON file anew with other settings of these names; None: without the name.

    Readers find the old or the new one.

    Raises:
        ConfigError: it is no JSON file, a setting is wrong, or it can't be written.
    """
    if path.suffix != ".json":
        raise ConfigError(f"--file {path}: `atropos keys` writes JSON alone; change another format by hand")
    keys: dict[str, KeySettings | None] = {**(read_keys(path) if path.exists() else {}), **changed}
    plain = {
        name: {"sha256": list(key.sha256), **key.model_dump(mode="json", exclude_defaults=True, exclude={"sha256"})}
        for name, key in keys.items()
        if key is not None
    }
    _checked(path, plain)
    # In the same folder, as only there a rename replaces the file at once.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(json.dumps(plain, indent=2) + "\n")
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise ConfigError(f"--file {path}: {error.strerror}") from None
