"""Hosts as containers: a sandbox server is started on each over ssh, its port forwarded to this machine's loopback."""

from __future__ import annotations

from atropos.errors import ConfigError
from atropos.slots.backends.ssh.server import SshServer, place
from atropos.slots.backends.ssh.settings import SshSettings
from atropos.slots.backends.supervised import SupervisedBackend, SupervisedServer


class SshBackend(SupervisedBackend):
    """Supervised sandbox servers on other hosts, one each."""

    name = "ssh"
    stop_more_s = 2.0

    async def start(self) -> None:
        """Check the settings; the connection to a host is made when its container is started."""
        hosts = self.config.of(SshSettings).ssh_hosts
        for host in hosts:
            place(host)
        if len(hosts) < self.config.max_containers:
            raise ConfigError(
                f"ssh_hosts: {len(hosts)} for max_containers {self.config.max_containers}, and each holds one "
                "container: name more hosts (one may be named twice), or lower max_containers"
            )

    async def launch(self, index: int, token: str) -> SupervisedServer:
        """A server on the host of this index."""
        own = self.config.of(SshSettings)
        return SshServer(own.ssh_hosts[index], own.ssh_python, own.ssh_config, self.remote_config(token))
