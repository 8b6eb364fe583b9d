"""A Nomad agent as production has it: mutual TLS, ACLs, a region and a namespace of its own. Measured: ready in 5 s."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Self

from tests.engines import ROOT
from tests.waiting import until

REGION, NAMESPACE, PORT = "moon", "training", 6846
CONFIG = """
region = "{region}"
ports {{
  http = {port}
  rpc = {rpc}
  serf = {serf}
}}
acl {{
  enabled = true
}}
tls {{
  http = true
  rpc = true
  ca_file = "nomad-agent-ca.pem"
  cert_file = "{region}-server-nomad.pem"
  key_file = "{region}-server-nomad-key.pem"
  verify_server_hostname = true
  verify_https_client = true
}}
client {{
  min_dynamic_port = 19000
  max_dynamic_port = 19999
}}
"""


class Secured:
    """`async with Secured() as agent:` then `agent.environment`, the NOMAD_* variables of an env's token."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="atropos-secured."))
        self.environment: dict[str, str] = {}
        self.management = ""
        self._agent: subprocess.Popen[bytes] | None = None

    async def __aenter__(self) -> Self:
        done = await asyncio.to_thread(
            subprocess.run, ["bash", str(ROOT / "scripts/nomad.sh")], capture_output=True, text=True, check=True
        )
        self.binary = done.stdout.split()[-1]
        try:
            await asyncio.to_thread(self._start)
            await until(lambda: self._agent.poll() is not None or self._ready(), "the agent's node", 60)
            assert self._agent.poll() is None, (self.folder / "log").read_text()[-3000:]
            await asyncio.to_thread(self._grant)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._agent is not None and self._agent.poll() is None:
            self._agent.send_signal(signal.SIGINT)
            await asyncio.to_thread(self._agent.wait)
        for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            if (where := line.split()[1]).startswith(f"{self.folder}/"):
                await asyncio.to_thread(subprocess.run, ["umount", "-l", where], check=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *arguments: str, stdin: str = "", check: bool = True) -> str:
        """`nomad ...` with the management token, in the folder of the certificates."""
        env = {**os.environ, **self.environment, "NOMAD_TOKEN": self.management}
        done = subprocess.run(
            [self.binary, *arguments],
            check=False,
            cwd=self.folder,
            env=env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert not check or done.returncode == 0, f"nomad {' '.join(arguments)}: {done.stdout}{done.stderr}"
        return done.stdout

    def ask(self, *arguments: str) -> Any:
        """The same, its output parsed as JSON; None where it fails."""
        try:
            return json.loads(self.run(*arguments, check=False))
        except ValueError:
            return None

    def _start(self) -> None:
        self.run("tls", "ca", "create")
        for kind in ("-server", "-cli"):
            self.run("tls", "cert", "create", kind, "-region", REGION)
        config = CONFIG.format(region=REGION, port=PORT, rpc=PORT + 1, serf=PORT + 2)
        (self.folder / "agent.hcl").write_text(config)
        (self.folder / "data").mkdir()
        command = [self.binary, "agent", "-dev", "-config", str(ROOT / "nomad/dev-agent.hcl"), "-config", "agent.hcl"]
        command += ["-data-dir", str(self.folder / "data")]
        self._agent = subprocess.Popen(
            command,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=(self.folder / "log").open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.environment = {
            "NOMAD_ADDR": f"https://127.0.0.1:{PORT}",
            "NOMAD_REGION": REGION,
            "NOMAD_NAMESPACE": NAMESPACE,
            "NOMAD_CACERT": str(self.folder / "nomad-agent-ca.pem"),
            "NOMAD_CLIENT_CERT": str(self.folder / f"{REGION}-cli-nomad.pem"),
            "NOMAD_CLIENT_KEY": str(self.folder / f"{REGION}-cli-nomad-key.pem"),
        }

    def _ready(self) -> bool:
        if not self.management:
            self.management = (self.ask("acl", "bootstrap", "-json") or {}).get("SecretID", "")
        nodes = self.ask("node", "status", "-json") if self.management else None
        return any(node["Status"] == "ready" and node["Drivers"]["docker"]["Healthy"] for node in nodes or [])

    def _grant(self) -> None:
        """The namespace, and a token with nomad/policy.hcl, by the commands of docs/cluster.md."""
        self.run("namespace", "apply", NAMESPACE)
        policy = (ROOT / "nomad/policy.hcl").read_text()
        policy = policy.replace('namespace "default"', f'namespace "{NAMESPACE}"')
        self.run("acl", "policy", "apply", "atropos-pool", "-", stdin=policy)
        token = self.ask("acl", "token", "create", "-name", "trainer", "-policy", "atropos-pool", "-json")
        self.environment["NOMAD_TOKEN"] = token["SecretID"]
