"""A pool of an ordinary user's: run as a program, by `test_ordinary_user`; prints what it found as JSON."""

from __future__ import annotations

import asyncio
import json
import os
import time

from atropos.slots import SlotPool, SlotPoolConfig


async def main() -> None:
    config = SlotPoolConfig(slots_per_container=2, max_containers=2)
    async with SlotPool(config) as pool:
        async with pool.lease("a") as a:
            who = await a.exec("id -u; pwd; echo kept > f")
            async with await a.snapshot() as snapshot, pool.lease("b", snapshot=snapshot) as b:
                fork = await b.exec("cat f; ls -A")
        slots = await asyncio.gather(*(pool.acquire(f"t{n}") for n in range(4)))
        fresh = [(await slot.exec("ls -A")).output for slot in slots]
        os.kill(int(slots[0].container.partition("-")[0]), 9)
        while pool.stats().lost == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        lost = [slot.lost is not None for slot in slots]
        await asyncio.gather(*(slot.release() for slot in slots))
        async with pool.lease("again") as slot:
            again = (await slot.exec("echo again")).output
        began = time.monotonic()
    found = {
        "uid": os.getuid(),
        "who": who.output,
        "fork": fork.output,
        "fresh": fresh,
        "lost": sum(lost),
        "again": again,
    }
    print(json.dumps(found | {"stop_s": time.monotonic() - began}))


if __name__ == "__main__":
    asyncio.run(main())
