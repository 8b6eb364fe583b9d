"""`python -m benchmarks.gpu`: a real NVIDIA GPU in slots of the local backend, in a minute or two.

`nvidia-smi` and a matrix product (`gpu_program`) in each of two slots that share the first GPU, the product's time
inside and outside of a slot by turns, and a slot that is released while it multiplies. A specification is written for
this run, by nvidia-ctk where it is installed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from atropos.slots import LeaseLimits, Slot, SlotPool, SlotPoolConfig

PROGRAM = Path(__file__).with_name("gpu_program.py").read_text()
TURNS = 3
ONE = LeaseLimits(gpus=1)


def specification() -> dict[str, object]:
    """What a slot needs of this machine's driver: its nodes, libraries and nvidia-smi. One device for each GPU."""
    nodes = sorted(str(path) for path in Path("/dev").glob("nvidia*") if path.is_char_device())
    gpus = [path for path in nodes if re.fullmatch(r"/dev/nvidia\d+", path)]
    libraries = subprocess.run(["ldconfig", "-p"], check=True, capture_output=True, text=True).stdout
    found = {str(Path(path).resolve()) for path in re.findall(r"=> (\S*/lib(?:cuda|nvidia-)\S*\.so\S*)", libraries)}
    files = sorted({*found, *filter(None, [shutil.which("nvidia-smi")])})
    folders = sorted({str(Path(path).parent) for path in found})
    cache = {
        "hookName": "createContainer",
        "path": "/usr/bin/nvidia-cdi-hook",
        "args": ["nvidia-cdi-hook", "update-ldcache", *(part for folder in folders for part in ("--folder", folder))],
    }
    return {
        "cdiVersion": "0.5.0",
        "kind": "nvidia.com/gpu",
        "devices": [
            {"name": path.removeprefix("/dev/nvidia"), "containerEdits": {"deviceNodes": [{"path": path}]}}
            for path in gpus
        ],
        "containerEdits": {
            "deviceNodes": [{"path": path} for path in nodes if path not in gpus],
            "mounts": [{"hostPath": path, "containerPath": path, "options": ["ro", "rbind"]} for path in files],
            "hooks": [cache],
        },
    }


def write(folder: Path) -> None:
    """Write this machine's specification."""
    if shutil.which("nvidia-ctk"):
        output = f"--output={folder}/nvidia.yaml"
        subprocess.run(["nvidia-ctk", "cdi", "generate", output], check=True, capture_output=True)
    else:
        (folder / "nvidia.json").write_text(json.dumps(specification()))
    for path in (folder, *folder.iterdir()):
        path.chmod(0o755)


async def inside(slot: Slot) -> dict[str, object]:
    """The program's answer in a slot."""
    done = await slot.exec(["python3", "-c", PROGRAM], timeout_s=120)
    if done.exit_code:
        sys.exit(f"in a slot: {done.output}")
    return json.loads(done.output.splitlines()[-1])


def outside() -> dict[str, object]:
    """The program's answer on the host."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


async def released_while_it_multiplies(pool: SlotPool) -> float:
    """Seconds of the reset, after which the next lease has a GPU that works."""
    slot = await pool.acquire("busy", limits=ONE)
    process = await slot.start(["python3", "-c", PROGRAM, "forever"])
    async with asyncio.timeout(120):
        while b"multiplying" not in await process.read(wait_s=60):
            pass
    began = time.perf_counter()
    await slot.release()
    return time.perf_counter() - began


async def main() -> None:
    """Run all of it, and print a line each as JSON."""
    with tempfile.TemporaryDirectory(prefix="atropos-cdi-") as folder:
        write(Path(folder))
        config = SlotPoolConfig(gpus=1, slots_per_gpu=2, slots_per_container=2, cdi_folders=(folder,))
        async with SlotPool(config) as pool:
            began = time.perf_counter()
            async with pool.lease("one", limits=ONE) as one, pool.lease("two", limits=ONE) as two:
                print(json.dumps({"leases_s": round(time.perf_counter() - began, 3)}))
                for slot in (one, two):
                    print(json.dumps({"nvidia-smi": (await slot.exec("nvidia-smi -L")).output.strip()}))
                for _ in range(TURNS):
                    print(json.dumps({"outside": await asyncio.to_thread(outside), "inside": await inside(one)}))
                both = await asyncio.gather(inside(one), inside(two))
                print(json.dumps({"side by side": both}))
            print(json.dumps({"reset_s": round(await released_while_it_multiplies(pool), 3)}))
            async with pool.lease("after", limits=ONE) as slot:
                print(json.dumps({"after": await inside(slot)}))
            print(json.dumps({"retired": pool.stats().retired}))


if __name__ == "__main__":
    asyncio.run(main())
