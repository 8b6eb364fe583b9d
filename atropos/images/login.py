"""Credentials of registries, as `docker login` and `skopeo login` keep them. Standard library only.

Sources: containers-auth.json(5); Docker's config.json; docker-credential-helpers, protocol of `get`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from atropos.images.manifests import parse

# A helper may ask a keyring or a cloud's token service.
HELPER_S = 30.0
_NAMES = {"docker.io": ("docker.io", "https://index.docker.io/v1/", "index.docker.io")}
"""Names of registries in these files, where they are others than their hosts'."""


class Login(NamedTuple):
    """User and password; or an identity token, and no user."""

    user: str
    secret: str


def find(auth_file: str | None, host: str, path: str) -> Login | None:
    """The credentials for a repository, from a store's file, or else from the user's own; none: None.

    Raises:
        ValueError: the file can't be read; says why.
    """
    for file in [Path(auth_file)] if auth_file else _users_own():
        try:
            data = parse(file.read_bytes(), str(file))
        except OSError as error:
            if auth_file:
                raise ValueError(f"image_store.auth_file: {file}: {error.strerror}") from None
            continue
        for name in _names(host, path):
            if (login := _of(data, name)) is not None:
                return login
    return None


def _users_own() -> Iterator[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime, "containers/auth.json")
    home = os.environ.get("HOME")
    if home:
        yield Path(os.environ.get("XDG_CONFIG_HOME") or Path(home, ".config"), "containers/auth.json")
        yield Path(home, ".docker/config.json")


def _names(host: str, path: str) -> Iterator[str]:
    """What a repository's credentials may be kept under, the nearest first."""
    parts = path.split("/")
    for name in _NAMES.get(host, (host, f"https://{host}", f"https://{host}/v1/", f"https://{host}/v2/")):
        yield from ("/".join((name, *parts[:count])) for count in range(len(parts), 0, -1))
        yield name


def _of(data: dict[str, Any], name: str) -> Login | None:
    # A helper before `auths`: `docker login` leaves an empty entry there for each registry that a helper has.
    helper = _table(data, "credHelpers").get(name) or data.get("credsStore")
    stored = _table(data, "auths").get(name)
    if isinstance(helper, str) and (login := _helped(helper, name)) is not None:
        return login
    if not isinstance(stored, dict):
        return None
    entry = cast("dict[str, object]", stored)
    # Before user and password: it is what the registry gave in exchange for them.
    if token := entry.get("identitytoken"):
        return Login("", str(token))
    with contextlib.suppress(ValueError):
        user, colon, secret = base64.b64decode(str(entry.get("auth") or "")).decode().partition(":")
        return Login(user, secret) if colon else None
    return None


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value = data.get(key)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _helped(helper: str, name: str) -> Login | None:
    """What a credential helper has."""
    command = [f"docker-credential-{helper}", "get"]
    # A helper exits with 1 where it has nothing, and may not be installed: then without credentials, as Docker does.
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, subprocess.SubprocessError):
        output = subprocess.run(
            command, input=name, capture_output=True, text=True, timeout=HELPER_S, check=True
        ).stdout
        answer = json.loads(output)
        user, secret = str(answer["Username"]), str(answer["Secret"])
        # The protocol's way to say that the secret is an identity token.
        return Login("" if user == "<token>" else user, secret)
    return None
