"""`python -m atropos.sandbox --config FILE`: the sandbox server.

FILE (or `-` for stdin) is a `ServerConfig` in JSON. Prints one line of JSON on stdout when ready. Exit codes: 0 ended
as asked, 1 failed, 2 the configuration is wrong, 3 the isolation is not available; the reason is one line on stderr.

It runs twice: see `boot.root_phase`. What only the second run needs is imported there, since loading it takes most of a
start.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
from typing import TYPE_CHECKING

from atropos.errors import ConfigError, IsolationUnavailable, SandboxError
from atropos.sandbox.boot import root_phase
from atropos.sandbox.boot.root_phase import RootPhaseSettings

if TYPE_CHECKING:
    from atropos.config import ServerConfig

MAX_CONFIG_BYTES = 1024 * 1024


def read_text(name: str) -> bytes:
    """The configuration's text from a file or stdin.

    Raises:
        ConfigError: it can't be read.
    """
    try:
        if name == "-":
            text = sys.stdin.buffer.read(MAX_CONFIG_BYTES)
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)  # a file with the token must not be inherited
            os.close(nothing)
        else:
            with open(name, "rb") as file:
                text = file.read(MAX_CONFIG_BYTES)
    except OSError as error:
        raise ConfigError(f"--config: {name!r} can't be read ({error.strerror})") from None
    return text


def parse(text: bytes | str) -> ServerConfig:
    """The configuration, checked.

    Raises:
        ConfigError: in one line, which field is wrong and how.
    """
    # looking for plugins of pydantic reads the metadata of every package that is installed
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")
    from pydantic import ValidationError

    from atropos.config import ServerConfig

    try:
        return ServerConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the configuration"
        raise ConfigError(f"{where}: {first['msg']}") from None


def main(argv: list[str] | None = None) -> int:
    """Run the server; returns the exit code."""
    name = _config_name(sys.argv[1:] if argv is None else argv)
    gc.disable()  # until all is loaded: none of it is garbage
    try:
        passed = root_phase.passed_on()
        if passed is None:
            text = read_text(name)
            root_phase.enter(RootPhaseSettings.parse_unchecked(text) or RootPhaseSettings.of(parse(text)))
        try:
            return _second_stage(*passed)
        finally:
            root_phase.undo(passed[1])
    except ConfigError as error:
        return _fail(2, error)
    except IsolationUnavailable as error:
        return _fail(3, error)
    except SandboxError as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return 130


def _config_name(argv: list[str]) -> str:
    if len(argv) == 2 and argv[0] == "--config":
        return argv[1]
    import argparse

    parser = argparse.ArgumentParser(prog="python -m atropos.sandbox", description="The sandbox server.")
    parser.add_argument("--config", required=True, metavar="FILE", help="ServerConfig as JSON; - for stdin")
    return str(parser.parse_args(argv).config)


def _second_stage(text: str, entered: root_phase.Entered) -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # each slot takes half a dozen descriptors
    settings = RootPhaseSettings.parse_unchecked(text.encode()) or RootPhaseSettings.of(parse(text))

    from atropos.sandbox.boot.init import fork_from_init
    from atropos.sandbox.host.process import prestart

    fork_from_init()
    prestarted = prestart.prestart(entered.scratch, settings.base)
    config = parse(text)
    if config.tls is None:  # aiohttp would load it all the same, and read all certificates of the host for nothing
        sys.modules.setdefault("ssl", None)  # pyright: ignore[reportArgumentType]

    import asyncio
    import logging
    import mimetypes

    mimetypes.knownfiles.clear()  # a server has no files to answer with, for which aiohttp would read the host's types

    from atropos.sandbox.host.slot_host import SlotHost
    from atropos.sandbox.server.serve import Server

    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    with asyncio.Runner() as runner:
        code = runner.run(Server(config, lambda: SlotHost(config, entered, prestarted)).run())
        for number in (signal.SIGTERM, signal.SIGINT):  # repeated, they don't disturb what is left to undo
            runner.get_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)
    return code


def _fail(code: int, error: Exception) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
