"""A Nomad cluster on one machine: a server agent and client agents, each a process that can be stopped and killed.

All clients share one Docker engine, so none may clean up what it thinks is dangling. The clients start once the server
has its keys: one that registers before is refused, and tries again only 15 to 30 s later. Measured: ready in 4 s.

ATROPOS_CLUSTER_LOGS names a folder that gets the agents' logs at the end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from tests.engines import ROOT, containers, remove_container

COMMON = """
disable_update_check = true
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
MARK = "ATROPOS_TEST_CLUSTER"
"""In the environment of every process of a cluster, with its folder."""
SERVER = """
server {
  enabled = true
  bootstrap_expect = 1
  min_heartbeat_ttl = "1s"
  heartbeat_grace = "9s"
  failover_heartbeat_ttl = "15s"
}
"""
"""A heartbeat comes every 1 to 2 s and is valid for 10 to 11 s. It must be valid for 10 s at least: a client that was
started anew sends its first one up to 10 s after it has registered (initialHeartbeatStagger), and would be lost again.
"""
VALID_S = 11
"""The longest that a heartbeat is valid, in seconds."""
CLIENT = """
client {{
  enabled = true
  servers = ["127.0.0.1:{rpc}"]
  min_dynamic_port = {low}
  max_dynamic_port = {high}
  options = {{
    "fingerprint.denylist" = "env_aws,env_gce,env_azure,env_digitalocean,consul,vault,cni,bridge"
    "driver.allowlist"     = "docker"
  }}
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
    """`with Cluster(clients=3) as cluster:` then `cluster.url`. Blocking; its methods are quick but for the start."""

    def __init__(self, *, clients: int = 3) -> None:
        self.clients = [f"client{n}" for n in range(1, clients + 1)]
        self._place = next(place for place in range(8) if _free(5646 + 1000 * place))
        self._base = 5646 + 1000 * self._place
        self.url = f"http://127.0.0.1:{self._base}"
        self._folder = Path(tempfile.mkdtemp(prefix="atropos-cluster."))
        self._agents: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        found = subprocess.run(
            ["bash", str(ROOT / "scripts/nomad.sh")], capture_output=True, text=True, check=True, timeout=600
        )
        self._binary = found.stdout.split()[-1]
        try:
            self.start("server")
            _wait(self._keys, "the server's keys", 60)
            for name in self.clients:
                self.start(name)
            _wait(lambda: self.ready() == len(self.clients), "all clients ready", 90)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # jobs that a failed test left; no engine may answer any more
        with contextlib.suppress(OSError, ValueError, TypeError, subprocess.SubprocessError):
            for job in self.ask("GET", "/v1/jobs"):
                self.ask("DELETE", f"/v1/job/{job['ID']}?purge=true")
                for one in containers(job["ID"]):
                    remove_container(one)
        for name in [*self.clients, "server"]:
            if (agent := self._agents.get(name)) is not None and agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
                agent.kill()
                agent.wait()
        for entry in Path("/proc").iterdir():  # an agent's plugins outlive it, to be found again when it is back
            with contextlib.suppress(OSError, ValueError):
                if f"{MARK}={self._folder}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (where := line.split()[1]).startswith(f"{self._folder}/"):
                subprocess.run(["umount", "-l", where], check=False)
        if logs := os.environ.get("ATROPOS_CLUSTER_LOGS"):
            kept = Path(logs) / self._folder.name
            kept.mkdir(parents=True)
            for log in self._folder.glob("*.log"):
                shutil.copy(log, kept)
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self, name: str) -> None:
        """Start an agent, anew after a kill with what it had on disk."""
        number = 0 if name == "server" else self.clients.index(name) + 1
        data = self._folder / name
        data.mkdir(exist_ok=True)
        port = self._base + 100 * number
        text = COMMON.format(data=data, name=name, port=port, rpc=port + 1, serf=port + 2)
        low = 11_000 + 200 * (4 * self._place + number)  # below 20,000, where those of other agents begin
        text += SERVER if number == 0 else CLIENT.format(rpc=self._base + 1, low=low, high=low + 199)
        config = self._folder / f"{name}.hcl"
        config.write_text(text)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._agents[name] = subprocess.Popen(
                [self._binary, "agent", "-config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {MARK: str(self._folder)},
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to an agent: SIGSTOP partitions it, SIGKILL crashes it."""
        os.kill(self._agents[name].pid, number)
        if number == signal.SIGKILL:
            self._agents[name].wait()

    def heal(self) -> None:
        """Start what was killed, let go on what was stopped, end all drains."""
        for name, agent in self._agents.items():
            if agent.poll() is None:
                agent.send_signal(signal.SIGCONT)
            else:
                self.start(name)
        _wait(lambda: len(self.nodes()) >= len(self.clients), "the server's nodes", 60)
        for node in self.nodes():
            if node["SchedulingEligibility"] != "eligible":
                self.ask("POST", f"/v1/node/{node['ID']}/drain", {"DrainSpec": None, "MarkEligible": True})
        self.in_touch(0)
        _wait(lambda: self.ready() == len(self.clients), "all clients ready again", 60)

    def in_touch(self, steady_s: float) -> None:
        """Wait until every client is heard of by the server, and has been for so long without a break.

        Heard of is `ready`, or `initializing`: Nomad 1.11.3 leaves a node there for good if its heartbeat was missed
        and came before the scheduler could do anything about it. Its allocations have no news then, and the server
        waits for some before it places more there. They run on; `ready` comes with the next change of one of them.
        """
        for name in self.clients:
            _wait(lambda name=name: self._in_touch(name), f"{name}'s first word with the server", 60)
        since: float | None = None
        deadline = time.monotonic() + 90
        while since is None or time.monotonic() < since + steady_s:
            assert time.monotonic() < deadline, f"not all clients are heard of again: {self.histories()}"
            if sum(node["Status"] in {"ready", "initializing"} for node in self.nodes()) < len(self.clients):
                since = None
            elif since is None:
                since = time.monotonic()
            time.sleep(0.05)

    def _in_touch(self, name: str) -> bool:
        """Whether a client has spoken to its server: one just started anew may be ready in the server's eyes alone."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            port = self._base + 100 * (self.clients.index(name) + 1)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/agent/self", timeout=5) as answer:
                return json.loads(answer.read())["stats"]["client"]["heartbeat_ttl"] != "0s"  # the server gives it one
        return False

    def histories(self) -> dict[str, list[str]]:
        """What happened to each node, as the server tells it: for the message of a test that waited in vain."""
        told: dict[str, list[str]] = {}
        for node in self.nodes():
            events = (self.ask("GET", f"/v1/node/{node['ID']}") or {}).get("Events") or []
            told[f"{node['Name']} ({node['Status']})"] = [f"{e['Timestamp']} {e['Message']}" for e in events][-8:]
        return told

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Ask the server agent; None for 404."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}{path}", data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise

    def _keys(self) -> bool:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return bool(self.ask("GET", "/.well-known/jwks.json")["keys"])
        return False

    def nodes(self) -> list[dict[str, Any]]:
        """What the server knows of its nodes; empty while it doesn't answer."""
        with contextlib.suppress(OSError, ValueError):
            return self.ask("GET", "/v1/nodes") or []
        return []

    def ready(self) -> int:
        """How many nodes can take containers."""
        return sum(
            node["Status"] == "ready"
            and node["SchedulingEligibility"] == "eligible"
            and node["Drivers"].get("docker", {}).get("Healthy", False)
            for node in self.nodes()
        )

    def drain(self, name: str) -> None:
        """Drain a node as `nomad node drain -enable` does."""
        node = next(node for node in self.nodes() if node["Name"] == name)
        spec = {"Deadline": 60_000_000_000, "IgnoreSystemJobs": False}
        self.ask("POST", f"/v1/node/{node['ID']}/drain", {"DrainSpec": spec})

    def allocations(self, job_id: str) -> list[dict[str, Any]]:
        """What the server lists of a job's allocations."""
        return self.ask("GET", "/v1/allocations?" + urllib.parse.urlencode({"filter": f'JobID == "{job_id}"'})) or []

    def leftovers(self, job_id: str) -> list[str]:
        """What is still there of a pool that was purged: containers, jobs, variables."""
        left = [f"container {one[:12]}" for one in containers(job_id)]
        for what, path in {"job": f"/v1/job/{job_id}", "variable": f"/v1/var/nomad/jobs/{job_id}"}.items():
            if self.ask("GET", path) is not None:
                left.append(f"{what} {job_id}")
        return left


def _free(port: int) -> bool:
    """Whether nobody listens there: another run of the tests may have a cluster of its own."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def _wait(condition: Callable[[], object], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {seconds} s"
        time.sleep(0.05)
