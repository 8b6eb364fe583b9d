"""A machine with two GPUs, by a CDI specification in the form that nvidia-ctk writes: harmless device nodes, a library,
links."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KIND = "atropos.test/gpu"
LIBRARY = "libgpu-test.so.1"
ENGINE = os.environ.get("ATROPOS_ENGINE_CDI")
"""Where an engine of `scripts/engine_matrix.py` looks for specifications; what they name is made beside it."""
NUMBERS = (os.makedev(1, 5), os.makedev(1, 7))
"""As /dev/zero and /dev/full: the one reads as zeros, and so does the other, which takes nothing."""


@dataclass(frozen=True)
class GpuMachine:
    """The files of such a machine, in a folder that every user may enter.

    Attributes:
        folder: where they are.
        specs: where the specification is.
    """

    folder: Path
    specs: Path

    @property
    def ran(self) -> Path:
        """The names of the hooks that an engine has run."""
        return self.folder / "hooks"

    def settings(self, **more: object) -> dict[str, object]:
        """Those of a pool with both GPUs."""
        return {
            "gpus": 2,
            "gpu_devices": (KIND,),
            "gpu_type": "T1000",
            "cdi_folders": (str(self.specs),),
            "max_containers": 1,
            **more,
        }

    def make(self, *, inside: str = "/opt/gpu-test", mode: int = 0o666, library: bool = True) -> GpuMachine:
        """Make the files. `inside`: where a container has the library; without it the specification names nodes
        alone.
        """
        for path in (self.folder, self.folder / "dev", self.folder / "lib", self.specs):
            path.mkdir(exist_ok=True)
            path.chmod(0o755)
        for name, number in (("gpu0", NUMBERS[0]), ("gpu1", NUMBERS[1]), ("gpuctl", os.makedev(1, 3))):
            os.mknod(self.folder / "dev" / name, stat.S_IFCHR | mode, number)
            os.chmod(self.folder / "dev" / name, mode)
        source = self.folder / "lib" / "gpu.c"
        source.write_text("int gpus(void) { return 42; }\n")
        hook = self.folder / "nvidia-cdi-hook"
        hook.write_text(f"#!/bin/sh\necho $1 >>{self.ran}\n")
        hook.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.bind(str(self.folder / "socket"))
        target = self.folder / "lib" / f"{LIBRARY}.2.3"
        subprocess.run(["cc", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", "-o", target, source], check=True)
        spec = self.spec(inside)
        if not library:
            spec["containerEdits"] = {"deviceNodes": spec["containerEdits"]["deviceNodes"]}
        self.write(spec)
        return self

    def write(self, spec: dict[str, Any]) -> None:
        """Write the specification."""
        (self.specs / "gpu-test.json").write_text(json.dumps(spec))

    def spec(self, inside: str = "/opt/gpu-test") -> dict[str, Any]:
        """The specification, in the shape of one of nvidia-ctk's."""

        def node(name: str) -> dict[str, str]:
            return {"path": f"/dev/test-{name}", "hostPath": f"{self.folder}/dev/{name}"}

        def hook(*arguments: str) -> dict[str, object]:
            return {
                "hookName": "createContainer",
                "path": f"{self.folder}/nvidia-cdi-hook",
                "args": ["nvidia-cdi-hook", *arguments],
                "env": ["NVIDIA_CTK_DEBUG=false"],
            }

        def device(number: int) -> dict[str, object]:
            link = hook("create-symlinks", "--link", f"../test-gpu{number}::/dev/by-path/gpu{number}")
            edits = {"deviceNodes": [node(f"gpu{number}")], "env": [f"GPU={number}"], "hooks": [link]}
            return {"name": str(number), "containerEdits": edits}

        return {
            "cdiVersion": "0.5.0",
            "kind": KIND,
            "devices": [
                device(0),
                device(1),
                {"name": "all", "containerEdits": {"deviceNodes": [node("gpu0"), node("gpu1")]}},
            ],
            "containerEdits": {
                "env": ["GPU_LIBRARY=yes"],
                "deviceNodes": [node("gpuctl")],
                "mounts": [
                    {
                        "hostPath": f"{self.folder}/lib/{LIBRARY}.2.3",
                        "containerPath": f"{inside}/lib/{LIBRARY}.2.3",
                        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate"],
                    },
                    {
                        "hostPath": str(self.folder),
                        "containerPath": "/run/gpu-shared",
                        "options": ["nosuid", "nodev", "rbind", "rprivate", "noexec"],
                    },
                    {
                        "hostPath": f"{self.folder}/socket",
                        "containerPath": "/run/gpu-daemon/socket",
                        "options": ["ro", "nosuid", "nodev", "rbind", "rprivate", "noexec"],
                    },
                ],
                "hooks": [
                    hook("create-symlinks", "--link", f"{LIBRARY}::{inside}/lib/libgpu-test.so"),
                    hook("enable-cuda-compat", "--host-driver-version=999.88.77"),
                    hook("update-ldcache", "--folder", f"{inside}/lib"),
                    hook("disable-device-node-modification"),
                ],
            },
        }


@contextmanager
def gpu_machine(*, library: bool = True) -> Generator[GpuMachine]:
    """Context with the files, in a folder that every user may enter, as pytest's own can't be."""
    within = "/tmp" if ENGINE is None else os.path.dirname(ENGINE)
    with tempfile.TemporaryDirectory(prefix="atropos-gpus-", dir=within) as folder:
        machine = GpuMachine(Path(folder), Path(ENGINE or f"{folder}/cdi"))
        try:
            yield machine.make(library=library)
        finally:
            for spec in machine.specs.iterdir():
                spec.unlink()
