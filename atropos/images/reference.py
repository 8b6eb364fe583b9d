"""Names of images: which transport, which registry, which tag or digest. Plain data, no I/O."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, Self, cast, get_args

from atropos.errors import ConfigError

Transport = Literal[
    "docker", "oci", "oci-archive", "docker-archive", "docker-daemon", "dir", "atropos-base", "atropos-build"
]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
SERVERS_OWN = ("docker", "atropos-base", "atropos-build")
"""What a sandbox server finds by itself; the others are read on the machine of the pool's owner."""
POOL_BASE = "atropos-base:default"
"""The root file system that slots start from where nothing else is named."""
_DIGEST = re.compile(r"^sha256:[0-9a-f]{64}$")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_PATH = rf"{_PART}(?:/{_PART})*"
_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
_NAME = re.compile(
    rf"^(?:(?P<host>{_HOST}(?::[0-9]+)?|\[[0-9a-fA-F:]+\](?::[0-9]+)?)/)?(?P<path>{_PATH})"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?$"
)
DEFAULT_HOST = "docker.io"


@dataclass(frozen=True)
class ImageSource:
    """Where an image comes from.

    Attributes:
        transport: `docker` is a registry, `atropos-base` a base of the server, `atropos-build` what was built from an
            image step by step; the others are found on the machine of the pool's owner.
        name: a full name with host and tag or digest, a path, a base's name, or the key of a build.
    """

    transport: Transport
    name: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `python:3.13-slim`, `docker://host/name@sha256:…`, `oci:FOLDER[:NAME]`, `docker-archive:FILE` and so on.

        Raises:
            ConfigError: it names no image; the message says what would.
        """
        transport, colon, rest = text.partition(":")
        if colon and transport in TRANSPORTS and transport != "docker":
            if not rest:
                raise ConfigError(f"image: {text!r} lacks a name after {transport}:")
            return cls(cast("Transport", transport), rest)
        return cls("docker", _full_name(text.removeprefix("docker://")))  # docker:dind is the image of that name

    def __str__(self) -> str:
        return f"docker://{self.name}" if self.transport == "docker" else f"{self.transport}:{self.name}"


def _full_name(name: str) -> str:
    """As Docker reads it: the first part is a host if it looks like one, else the name is Docker Hub's."""
    match = _NAME.match(name)
    host, path = (match["host"], match["path"]) if match else (None, "")
    if host is not None and not ("." in host or ":" in host or host == "localhost"):
        host, path = None, f"{host}/{path}"
    if match is None or not re.fullmatch(_PATH, path):
        raise ConfigError(
            f"image: {name!r:.200} is not a name of an image; NAME[:TAG][@sha256:DIGEST], HOST/NAME:TAG, or one of "
            f"{', '.join(f'{each}:' for each in TRANSPORTS if each not in SERVERS_OWN)} and a path"
        )
    if host is None and "/" not in path:
        path = f"library/{path}"
    tag, digest = match["tag"], match["digest"]
    # a digest alone decides
    suffix = f"@{digest}" if digest else f":{tag or 'latest'}"
    return f"{host or DEFAULT_HOST}/{path}{suffix}"


def is_built(source: str) -> bool:
    """Whether a source is what was built from an image."""
    return source.startswith("atropos-build:")


def base_name(source: str) -> str | None:
    """The name of a base by its source, `atropos-base:NAME`; None: the pool's default one."""
    return None if source == POOL_BASE else source.removeprefix("atropos-base:")


def check_digest(text: object) -> str:
    """The hex part of a `sha256:` digest.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(text, str) or not _DIGEST.match(text):
        raise ValueError(f"{text!r:.100} is no sha256 digest")
    return text.removeprefix("sha256:")
