"""`python -m examples.policy [--port N]`: one line of JSON when ready, then serves until SIGTERM or Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from examples.policy.play import TASKS, Policy
from examples.policy.server import FAULTS, MODEL, PolicyServer, Settings
from examples.policy.tokenizer import FOLDER


def main() -> int:
    """Parse, bind, serve."""
    parser = argparse.ArgumentParser(prog="python -m examples.policy", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one; the ready line has it")
    parser.add_argument("--tasks", type=Path, default=TASKS, help="folder of tasks whose solutions are played")
    parser.add_argument("--mistakes", type=float, default=0.4, help="part of the trajectories that err")
    parser.add_argument("--fault", choices=FAULTS, default="none", help="what goes wrong, for tests")
    parser.add_argument("--fault-rate", type=float, default=1.0)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds an answer takes")
    parser.add_argument(
        "--delay-spread", type=float, default=0.0, help="part of --delay by which answers differ, 0 to 1"
    )
    parser.add_argument("--log", type=Path, help="append every sampled answer's tokens here, as JSON lines")
    args = parser.parse_args()
    if not args.tasks.is_dir():
        parser.error(f"--tasks {args.tasks}: no such folder")
    settings = Settings(
        fault=args.fault, fault_rate=args.fault_rate, delay_s=args.delay, delay_spread=args.delay_spread
    )
    try:
        server = PolicyServer(Policy(args.tasks, mistakes=args.mistakes), settings, args.log)
    except OSError as error:
        parser.error(f"--log {args.log}: {error.strerror}")
    return asyncio.run(serve(server, args.host, args.port))


async def serve(server: PolicyServer, host: str, port: int) -> int:
    """Serve until a signal."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except (OSError, OverflowError) as error:
            print(f"--port {port}: {getattr(error, 'strerror', None) or error}; choose another", file=sys.stderr)
            return 1
        real = runner.addresses[0][1]
        ready = {"ready": True, "port": real, "base_url": f"http://{host}:{real}/v1", "model": MODEL}
        try:
            line = json.dumps({**ready, "tokenizer": str(FOLDER)})
            os.write(sys.stdout.fileno(), f"{line}\n".encode())  # what a buffer kept would fail once more at the end
        except BrokenPipeError:  # who started it has ended meanwhile
            return 1
        await stop.wait()
    finally:
        await runner.cleanup()
    return 0


if __name__ == "__main__":
    sys.exit(main())
