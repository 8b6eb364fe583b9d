"""Runs scenarios against a real host, in a process that has been through the root phase.

The root phase changes the process for good, so pytest's own can't go through it. One driver serves a whole test
session: a line of JSON in (module, function), a line out (None or a traceback).
"""

import asyncio
import importlib
import json
import os
import sys
import traceback

from atropos.config import ServerConfig
from atropos.sandbox.boot import root_phase
from atropos.wire import SlotLimits
from tests.waiting import SLOWNESS

LIMITS = SlotLimits(memory_mib=96, pids=48, disk_mib=24, inodes=3000, output_bytes=100_000, open_files=256, wall_s=30)


def main() -> None:
    passed = root_phase.passed_on()
    if passed is None:
        config = ServerConfig(
            token="-",
            slots=8,
            limits=LIMITS,
            die_with_parent=True,
            bases=dict(zip(("tiny",), sys.argv[2:], strict=False)),
            volume=sys.argv[1],
        )
        root_phase.enter(root_phase.RootPhaseSettings.of(config))
    text, entered = passed
    asyncio.run(serve(ServerConfig.model_validate_json(text), entered))


async def serve(config: ServerConfig, entered: root_phase.Entered) -> None:
    from atropos.sandbox.host.process import prestart
    from atropos.sandbox.host.slot_host import SlotHost

    host = SlotHost(config, entered, prestart.prestart(entered.scratch, config.base))
    answer({"ready": os.geteuid()})
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        request = json.loads(line)
        scenario = getattr(importlib.import_module(request["module"]), request["scenario"])
        try:
            async with asyncio.timeout(60 * SLOWNESS):
                await scenario(host)
        except BaseException:
            answer({"failed": traceback.format_exc()})
        else:
            answer({"failed": None})
        for sandbox in list(host.state.live):
            await sandbox.stop()
    await host.aclose()


def answer(value: dict) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
