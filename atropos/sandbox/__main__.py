"""`python -m atropos.sandbox --config FILE`: the sandbox server.

FILE (or `-` for stdin) is a `ServerConfig` in JSON. Prints one line of JSON on stdout when ready. Exit codes: 0 ended as
asked, 1 failed, 2 the configuration is wrong, 3 the isolation is not available; the reason is one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from pathlib import Path

from pydantic import ValidationError

from atropos.config import ServerConfig
from atropos.errors import ConfigError, IsolationUnavailable, SandboxError
from atropos.sandbox.init import fork_from_init

MAX_CONFIG_BYTES = 1024 * 1024


def read_config(name: str) -> ServerConfig:
    """The configuration from a file or stdin.

    Raises:
        ConfigError: in one line, which field is wrong and how.
    """
    try:
        if name == "-":
            text = sys.stdin.buffer.read(MAX_CONFIG_BYTES)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)  # a file with the token in it is nothing to inherit
            os.close(nothing)
        else:
            with Path(name).open("rb") as file:
                text = file.read(MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"--config: {name!r} can't be read ({error.strerror})") from None
    try:
        return ServerConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the configuration"
        raise ConfigError(f"{where}: {first['msg']}") from None


async def _serve(config: ServerConfig) -> int:
    from atropos.sandbox.host import SlotHost
    from atropos.sandbox.serve import Server

    return await Server(config, SlotHost.create).run()


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m atropos.sandbox", description="The sandbox server.")
    parser.add_argument("--config", required=True, metavar="FILE", help="ServerConfig as JSON; - for stdin")
    arguments = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        from atropos.sandbox import rootphase

        config = rootphase.inherited_config() or read_config(arguments.config)
        rootphase.enter(config)
        fork_from_init()
        gc.collect()
        gc.freeze()
        return asyncio.run(_serve(config))
    except ConfigError as error:
        return _fail(2, error)
    except IsolationUnavailable as error:
        return _fail(3, error)
    except SandboxError as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return 130


def _fail(code: int, error: Exception) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
