"""What one container is made of, the same for every engine: image, server settings, and the sizes that follow."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable

if TYPE_CHECKING:
    from atropos.slots.config import SlotPoolConfig

SERVER_MEMORY_MIB = 256
"""Memory of a container beside its slots': the server and its warm sandboxes' processes, in MiB."""
SERVER_PIDS = 512
"""Processes and threads of a container beside its slots': the server, bubblewrap and the runners."""
CONTAINER_PORT = 8787
"""Where the server listens inside a container that has a network of its own."""
HOSTNAME = "atropos"
"""Of a container, and so of its slots: the seccomp profile lets nobody inside set one."""
CAP_ADD = ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "CHOWN", "DAC_OVERRIDE")
"""For the container's root phase alone; the server gives them up before it listens."""
STOP_MARGIN_S = 5
"""How much longer than the server's own drain an engine waits before it kills, in seconds."""
BAD_CONFIG, NO_ISOLATION = 2, 3
"""Exit codes of the server that trying again can't change."""
HOPELESS = 3
"""Failed starts in a row, with no server ever ready, after which the fault is taken to be in the set-up."""
IMAGE_FOLDER = "/var/cache/atropos/images"
"""Where a server in a container keeps images; a shared folder or volume of the host is mounted there."""
_PLACED_BY_ENGINE = {"host", "port", "token", "tls", "die_with_parent", "state_dir", "base"}


@dataclass(frozen=True)
class ContainerSpec:
    """A container to make: `image`, and the `server` inside (whose host, port and token the engine chooses).

    Attributes:
        memory_mib: memory of the whole container; None: the server's and every slot's limit. Less is over-commit.
        snapshots_mib: room for retained snapshots, which outlive the slots they came from.
    """

    image: str
    server: ServerConfig
    memory_mib: int | None = None
    snapshots_mib: int = 0

    @classmethod
    def from_pool(cls, config: SlotPoolConfig) -> ContainerSpec:
        """What a pool's configuration asks for."""
        return cls(config.image, config.server_config(token="-"), memory_mib=config.container_memory_mib)

    def config(self) -> dict[str, object]:
        """The server's settings as ATROPOS_CONFIG carries them: only those that differ from the defaults."""
        config = self.server.model_dump(mode="json", exclude_defaults=True, exclude=_PLACED_BY_ENGINE)
        config.get("image_store", {}).pop("folder", None)  # mounted at the server's own default
        if self.server.base is not None:
            config["base"] = self.server.base
        return {**config, "slots": self.server.slots}

    @property
    def container_memory_mib(self) -> int:
        """Memory that the engine reserves: enough that a full slot is killed and never its container."""
        if self.memory_mib is not None:
            return self.memory_mib
        return SERVER_MEMORY_MIB + self.server.slots * self.server.limits.memory_mib + self.snapshots_mib

    @property
    def container_pids(self) -> int:
        """Processes and threads that the engine allows."""
        return SERVER_PIDS + self.server.slots * self.server.limits.pids

    @property
    def stop_s(self) -> float:
        """How long a container may take to end once it is stopped, in seconds."""
        return self.server.drain_s + STOP_MARGIN_S

    def fingerprint(self, image_id: str = "") -> str:
        """The same for containers that are interchangeable: same image, same settings, same sizes."""
        text = json.dumps(
            [image_id or self.image, self.config(), self.container_memory_mib, self.container_pids], sort_keys=True
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def hopeless(code: int | None, words: str, failures: int) -> Exception | None:
    """Why no container will ever come, judged by how the first ones ended; None: trying again makes sense."""
    if code == BAD_CONFIG:
        return ConfigError(words)
    if code == NO_ISOLATION:
        return IsolationUnavailable(words)
    return BackendUnavailable(words) if failures >= HOPELESS else None


def owner() -> str:
    """Who asks, for labels that people read: host, pid and start time of this process."""
    with open("/proc/self/stat", encoding="ascii") as file:
        started = file.read().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()}:{os.getpid()}:{started}"
