"""A dockerd of one's own, to be restarted and killed: nobody else's containers are in it.

Its containerd is a service beside it, as distributions install the two, and outlives it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

BRIDGE = "atropos-own"
NETWORK = "172.29.64.1/20"
IMAGE = "atropos-sandbox:local"


class OwnDockerd:
    """`with OwnDockerd(live_restore=True) as own:` then `own.host`; it has the sandbox image. Blocking; needs root."""

    def __init__(self, *, live_restore: bool = False) -> None:
        self.live_restore = live_restore
        info = ["docker", "info", "--format", "{{.DockerRootDir}}"]
        self._others = Path(subprocess.run(info, capture_output=True, text=True, check=True).stdout.strip())
        # beside the other engine's data: hard links don't cross file systems
        self._folder = Path(tempfile.mkdtemp(prefix="atropos-own-dockerd.", dir=self._others.parent))
        self.host = f"unix://{self._folder}/docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        self._containerd: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            subprocess.run(["ip", "link", "add", "name", BRIDGE, "type", "bridge"], check=True, capture_output=True)
            subprocess.run(["ip", "addr", "add", NETWORK, "dev", BRIDGE], check=True)
            subprocess.run(["ip", "link", "set", BRIDGE, "up"], check=True)
            self._copy_image()
            self._containerd = self._spawn("containerd", "--config", str(self._containerd_config()))
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _copy_image(self) -> None:
        """Give the engine the image's layers as hard links: loading 640 MB would take longer than all the tests."""
        inspect = ["docker", "image", "inspect", IMAGE, "--format", "{{.Id}} {{json .RootFS.Layers}}"]
        image, _, layers = subprocess.run(inspect, capture_output=True, text=True, check=True).stdout.partition(" ")
        there, here = self._others, self._folder / "data"
        store = Path("image/overlay2")
        parts = [store / "imagedb/content/sha256" / image.removeprefix("sha256:")]
        chain = ""
        for layer in json.loads(layers):
            chain = f"sha256:{hashlib.sha256(f'{chain} {layer}'.encode()).hexdigest()}" if chain else layer
            folder = store / "layerdb" / chain.replace(":", "/")
            folder_id = (there / folder / "cache-id").read_text()
            link = (there / "overlay2" / folder_id / "link").read_text()
            parts += [folder, Path("overlay2") / folder_id, Path("overlay2/l") / link]
        # dockerd mounts its folder onto itself, and links don't cross mounts: a view of the parent has none
        view = here.parent / "view"
        view.mkdir()
        subprocess.run(["mount", "--bind", str(there.parent), str(view)], check=True)
        try:
            old, new = view / there.name, view / here.parent.name / here.name
            for part in parts:
                (new / part).parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-al", str(old / part), str(new / part)], check=True)
        finally:
            subprocess.run(["umount", "-l", str(view)], check=True)
        names = {"atropos-sandbox": {IMAGE: image}}
        (here / store / "repositories.json").write_text(json.dumps({"Repositories": names}))

    def _containerd_config(self) -> Path:
        path = self._folder / "containerd.toml"
        path.write_text(
            f'version = 2\nroot = "{self._folder}/containerd"\nstate = "{self._folder}/containerd-state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n[grpc]\naddress = "{self._folder}/containerd.sock"\n'
        )
        return path

    def _spawn(self, *command: str) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def start(self) -> None:
        """Start it, anew after `end` with the containers that it had."""
        self._process = self._spawn(
            "dockerd", "-H", self.host, "--data-root", f"{self._folder}/data", "--exec-root", f"{self._folder}/exec",
            "--pidfile", f"{self._folder}/pid", "--containerd", f"{self._folder}/containerd.sock", "--bridge", BRIDGE,
            "--iptables=false", "--ip6tables=false", "--shutdown-timeout", "5",
            f"--live-restore={str(self.live_restore).lower()}",
        )  # fmt: skip
        deadline = time.monotonic() + 60
        while not self.answers():
            assert time.monotonic() < deadline, (self._folder / "log").read_text()[-2000:]
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            time.sleep(0.05)

    def answers(self) -> bool:
        command = ["docker", "-H", self.host, "version", "--format", "{{.Server.Version}}"]
        with contextlib.suppress(subprocess.TimeoutExpired):
            return subprocess.run(command, capture_output=True, timeout=3, check=False).returncode == 0
        return False

    def end(self, number: signal.Signals) -> None:
        """SIGTERM ends it and, without live-restore, its containers; SIGKILL is a crash."""
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(60)

    def containers(self, pool: str = "") -> list[str]:
        """Ids of its containers, of a pool or of all."""
        filters = ["--filter", f"label=atropos.pool={pool}"] if pool else []
        command = ["docker", "-H", self.host, "ps", "--all", "--quiet", "--no-trunc", *filters]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            if self._process.poll() is None and self.answers() and (left := self.containers()):
                subprocess.run(["docker", "-H", self.host, "rm", "-f", *left], capture_output=True, check=False)
            if self._process.poll() is None:
                self.end(signal.SIGTERM)
        if self._containerd is not None:
            self._containerd.terminate()
            self._containerd.wait(30)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (where := line.split()[1]).startswith(f"{self._folder}/"):
                subprocess.run(["umount", "-l", where], check=False)
        subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)
        shutil.rmtree(self._folder, ignore_errors=True)
