"""`python -m atropos.slots.backends.ssh.far_end NAME`: a sandbox server that ends with its ssh connection.

NAME is the container's, for lists of processes. The first line on stdin is a `ServerConfig` in JSON; each later line
asks the server to end in order, and the end of input kills it: sshd closes stdin when the connection is lost. Prints
one line of JSON, `{"port": …}`, when the server listens. Exit codes and the last line on stderr are the server's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from pydantic import ValidationError

from atropos.aio import race
from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.slots.backends.local.backend import LocalServer, make_scratch, remove_scratch, remove_stale_scratch
from atropos.slots.backends.spec import BAD_CONFIG, NO_ISOLATION
from atropos.slots.backends.supervised import STOP_S
from atropos.wire.base import one_line

MAX_LINE_BYTES = 1024 * 1024
READY_S = 3600.0
"""Longer than the pool's `start_timeout_s`, which closes the connection."""


async def main() -> int:
    """Run the server until it ends, is asked to end, or loses the connection; returns the exit code."""
    stdin = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    # As a stream: its end is what says that the connection is lost.
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
    line = await stdin.readline()
    try:
        config = ServerConfig.model_validate_json(line)
    except ValidationError as error:
        sys.stderr.write(f"{one_line(error)}; is the same version of atropos installed on both sides?\n")
        return BAD_CONFIG
    # Of far ends that were killed: the pool can't remove them from afar.
    remove_stale_scratch()
    scratch = make_scratch()
    try:
        server = await LocalServer.launch(config, scratch)
        try:
            await race(_run(server), _follow(stdin, server))
        finally:
            await server.stop(STOP_S)
            await server.tidy()
    except (BackendUnavailable, ConfigError, IsolationUnavailable) as error:
        sys.stderr.write(f"{error}\n")
        if isinstance(error, BackendUnavailable):
            return 1
        return BAD_CONFIG if isinstance(error, ConfigError) else NO_ISOLATION
    finally:
        remove_scratch(scratch)
    return 0


async def _run(server: LocalServer) -> None:
    await server.ready(READY_S)
    sys.stdout.write(json.dumps({"port": server.port}) + "\n")
    sys.stdout.flush()
    why = await server.ended()
    # 0 is the end that was asked for.
    if server.returncode:
        raise why


async def _follow(stdin: asyncio.StreamReader, server: LocalServer) -> None:
    """Ask the server to end at each line; returns at the end of input."""
    while await stdin.readline():
        if server.returncode is None:
            os.kill(server.pid, signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
