"""A Nomad cluster on one machine: a server agent and client agents, each a process that can be stopped and killed.

All clients share one Docker engine, so none may clean up what it thinks is dangling. Measured: ready in 15 s.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, Self

from tests.engines import ROOT
from tests.waiting import until

COMMON = """
data_dir = "{data}"
bind_addr = "127.0.0.1"
name = "{name}"
ports {{
  http = {port}
  rpc = {rpc}
  serf = {serf}
}}
advertise {{
  http = "127.0.0.1"
  rpc = "127.0.0.1"
  serf = "127.0.0.1"
}}
"""
SERVER = """
server {
  enabled = true
  bootstrap_expect = 1
  heartbeat_grace = "2s"
  min_heartbeat_ttl = "5s"
}
"""
CLIENT = """
client {{
  enabled = true
  servers = ["127.0.0.1:{rpc}"]
  min_dynamic_port = {low}
  max_dynamic_port = {high}
  options = {{ "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean" }}
}}
plugin "docker" {{
  config {{
    allow_caps = ["sys_admin", "setuid", "setgid", "setpcap", "chown", "dac_override"]
    extra_labels = ["job_id", "namespace"]
    gc {{
      image = false
      dangling_containers {{
        enabled = false
      }}
    }}
  }}
}}
"""


class Cluster:
    """`async with Cluster(clients=3) as cluster:` then `cluster.url`."""

    def __init__(self, *, clients: int = 3, base_port: int = 5646) -> None:
        self.clients = [f"client{n}" for n in range(1, clients + 1)]
        self.url = f"http://127.0.0.1:{base_port}"
        self._base = base_port
        self._folder = Path(tempfile.mkdtemp(prefix="atropos-cluster."))
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    async def __aenter__(self) -> Self:
        binary = await asyncio.to_thread(
            subprocess.run, ["bash", str(ROOT / "scripts/nomad.sh")], capture_output=True, text=True, check=True
        )
        self._binary = binary.stdout.split()[-1]
        try:
            self.start("server")
            for name in self.clients:
                self.start(name)
            await until(lambda: self.ready() == len(self.clients), "all clients ready", 90)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in [*self.clients, "server"]:
            if (agent := self._agents.get(name)) is not None and agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
                await asyncio.to_thread(agent.wait)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (where := line.split()[1]).startswith(f"{self._folder}/"):
                await asyncio.to_thread(subprocess.run, ["umount", "-l", where], check=False)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, name: str) -> None:
        """Start an agent, anew after `kill` with what it had on disk."""
        number = 0 if name == "server" else self.clients.index(name) + 1
        data = self._folder / name
        data.mkdir(exist_ok=True)
        port = self._base + 100 * number
        text = COMMON.format(data=data, name=name, port=port, rpc=port + 1, serf=port + 2)
        low = 21_000 + 1000 * number
        text += SERVER if number == 0 else CLIENT.format(rpc=self._base + 1, low=low, high=low + 999)
        config = self._folder / f"{name}.hcl"
        config.write_text(text)
        log = (self._folder / f"{name}.log").open("ab")
        self._agents[name] = subprocess.Popen(
            [self._binary, "agent", "-config", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an agent: SIGSTOP partitions it, SIGKILL crashes it."""
        os.kill(self._agents[name].pid, number)
        if number == signal.SIGKILL:
            self._agents[name].wait()

    def nodes(self) -> list[dict[str, Any]]:
        """What the server knows of its nodes; empty while it doesn't answer."""
        with (
            contextlib.suppress(OSError, ValueError),
            urllib.request.urlopen(f"{self.url}/v1/nodes", timeout=2) as answer,
        ):
            return json.loads(answer.read())
        return []

    def ready(self) -> int:
        """How many nodes can take containers."""
        return sum(node["Status"] == "ready" and node["SchedulingEligibility"] == "eligible" for node in self.nodes())

    def drain(self, name: str) -> None:
        """Drain a node as `nomad node drain -enable` does."""
        node = next(node for node in self.nodes() if node["Name"] == name)
        body = json.dumps({"DrainSpec": {"Deadline": 60_000_000_000, "IgnoreSystemJobs": False}}).encode()
        request = urllib.request.Request(f"{self.url}/v1/node/{node['ID']}/drain", data=body, method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()
