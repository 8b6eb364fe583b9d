"""The sandbox container's entry point: puts the server's configuration together and becomes the server.

Environment:
    ATROPOS_CONFIG: the server's settings as JSON, without the token; or the path of a file that holds them.
    ATROPOS_TOKEN_FILE: where the bearer token is. Never an environment variable: those are shown by `docker inspect`.
    ATROPOS_TLS_FILE: certificate and key of the port in PEM; unset, or an empty file: plain HTTP.
    ATROPOS_HOST, ATROPOS_PORT: where to listen; they win over ATROPOS_CONFIG (a scheduler picks ports last).
"""

from __future__ import annotations

import json
import os
import sys

BAD_CONFIG = 2
"""Exit code of a wrong configuration, as the server itself uses it."""


def fail(message: str) -> None:
    """Say what is wrong on one line and end; the engine keeps it as the container's last words."""
    print(f"atropos-sandbox: {message}", file=sys.stderr, flush=True)
    os._exit(BAD_CONFIG)


def read_config() -> bytes:
    """The server's configuration with its token, as JSON."""
    text = os.environ.pop("ATROPOS_CONFIG", "") or "{}"
    try:
        if text.lstrip()[:1] != "{":
            with open(text, encoding="utf-8") as file:
                text = file.read()
        config = json.loads(text)
    except (OSError, ValueError) as error:
        fail(f"ATROPOS_CONFIG is neither a JSON object nor the path of one: {error}")
    if not isinstance(config, dict):
        fail(f"ATROPOS_CONFIG is neither a JSON object nor the path of one: the file holds a {type(config).__name__}")
    path = os.environ.pop("ATROPOS_TOKEN_FILE", "")
    try:
        with open(path, encoding="utf-8") as file:
            config["token"] = file.read().strip()
    except OSError as error:
        fail(f"ATROPOS_TOKEN_FILE {path!r} cannot be read: {error.strerror}")
    except ValueError as error:
        fail(f"ATROPOS_TOKEN_FILE {path!r} cannot be read: {error}")
    if not config["token"]:
        fail(f"ATROPOS_TOKEN_FILE {path!r} is empty")
    path = os.environ.pop("ATROPOS_TLS_FILE", "")
    try:
        if path:
            with open(path, encoding="ascii") as file:
                config["tls"] = file.read().strip() or None
    except (OSError, ValueError) as error:
        fail(f"ATROPOS_TLS_FILE {path!r} cannot be read: {error}")
    config["host"] = os.environ.get("ATROPOS_HOST") or config.get("host", "0.0.0.0")
    port = os.environ.get("ATROPOS_PORT")
    try:
        config["port"] = int(port) if port else config.get("port", 8787)
    except ValueError:
        fail(f"ATROPOS_PORT {port!r} is not a number")
    return json.dumps(config).encode()


def serve() -> None:
    """Become the server; its configuration is an anonymous file on its standard input."""
    config = os.memfd_create("config", 0)
    os.write(config, read_config())
    os.lseek(config, 0, os.SEEK_SET)
    os.dup2(config, 0)
    os.execv("/usr/bin/python3", ["/usr/bin/python3", "-u", "-m", "atropos.sandbox", "--config", "-"])  # noqa: S606 (it is to be replaced)


if __name__ == "__main__":
    serve()
