"""Runs inside SWE-ReX's own environment, with SWE-ReX's own client: prints JSON samples. Started by `swe_rex.py`.

Usage: python swe_rex_driver.py PORT TOKEN COMMAND < one JSON order a line > one JSON answer a line An order:
{"parallel": N, "n": N, "bash": bool}. With `bash` the command runs in bash, as ours does; else as SWE-ReX runs a shell
command by itself, in sh, which starts faster. Or {"upload": PATH, "target": PATH}: a file or folder, once.
"""

import asyncio
import json
import logging
import sys
import time

from swerex.runtime.abstract import Command, UploadRequest
from swerex.runtime.remote import RemoteRuntime


async def main() -> None:
    port, token, command = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    runtime = RemoteRuntime(host="http://127.0.0.1", port=port, auth_token=token)
    logging.disable(logging.INFO)  # an upload is logged to stdout, where the answers go
    loop = asyncio.get_running_loop()

    async def worker(count: int, samples: list, what: Command) -> None:
        for _ in range(count):
            start = time.perf_counter()
            answer = await runtime.execute(what)
            samples.append(time.perf_counter() - start)
            assert answer.stdout == "hi\n", answer

    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        samples: list = []
        if "upload" in order:
            began = time.perf_counter()
            await runtime.upload(UploadRequest(source_path=order["upload"], target_path=order["target"]))
            print(json.dumps({"samples": samples, "seconds": time.perf_counter() - began}), flush=True)
            continue
        bash = Command(command=["/bin/bash", "-c", command], shell=False)
        what = bash if order["bash"] else Command(command=command, shell=True)
        began = time.perf_counter()
        await asyncio.gather(
            *(worker(order["n"] // order["parallel"], samples, what) for _ in range(order["parallel"]))
        )
        seconds = time.perf_counter() - began
        print(json.dumps({"samples": samples, "seconds": seconds}), flush=True)


asyncio.run(main())
