"""The spec of one container, the same for every engine: image, server settings, and the sizes that follow."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

from atropos.config import ServerConfig
from atropos.errors import BackendUnavailable, ConfigError, IsolationUnavailable
from atropos.resources import Resources
from atropos.slots.config import SlotPoolConfig

SERVER_ROOM = Resources(memory_mib=256, pids=512)
"""What a container has beside its slots': for the server, bubblewrap, the runners and warm sandboxes."""
SERVER_COMMAND = ("python3", "-P", "-m", "atropos.sandbox", "--config", "-")
"""Starts the server in an image, its settings on stdin."""
CONTAINER_PORT = 8787
"""Port of the server inside a container that has a network of its own."""
HOSTNAME = "atropos"
"""Of a container and its slots, which the seccomp profile keeps from setting one."""
CAP_ADD = ("SYS_ADMIN", "SETUID", "SETGID", "SETPCAP", "CHOWN", "DAC_OVERRIDE")
"""Capabilities for the container's root phase; the server drops them before it listens."""
STOP_MARGIN_S = 5
"""How much longer than the server's own drain an engine waits before it kills, in seconds."""
BAD_CONFIG, NO_ISOLATION = 2, 3
"""Exit codes of the server after which a retry can't help."""
HOPELESS_CRASHES = 3
"""Containers that ended, one after the other, with no server ever ready, after which no more are tried."""
IMAGE_FOLDER = "/var/cache/atropos/images"
"""The image store of a server in a container, where a shared folder or volume of the host is mounted."""
_PLACED_BY_ENGINE = {"host", "port", "token", "tls", "die_with_parent", "state_dir"}


@dataclass(frozen=True)
class ContainerSpec:
    """A container: its `image`, and the `server` inside (whose host, port and token the engine chooses).

    Attributes:
        memory_mib: memory of the whole container; None: the server's and every slot's limit. Less is over-commit.
        architecture: of the machine that it needs, as images name it; None: any.
    """

    image: str
    server: ServerConfig
    memory_mib: int | None = None
    architecture: str | None = None

    @classmethod
    def from_pool(cls, config: SlotPoolConfig) -> ContainerSpec:
        """The spec of a pool's containers."""
        return cls(config.image, config.server_config(token="-"), config.container_memory_mib, config.architecture)

    def config(self) -> dict[str, object]:
        """The server's settings for ATROPOS_CONFIG: those that differ from the defaults."""
        # Defaults are left out, so that a new setting doesn't change the fingerprint of containers that run.
        config = self.server.model_dump(mode="json", exclude_defaults=True, exclude=_PLACED_BY_ENGINE)
        config.get("image_store", {}).pop("folder", None)  # mounted at the server's own default
        return {**config, "slots": self.server.slots}

    @property
    def room(self) -> Resources:
        """Limits of the container: enough that a full slot reaches its own limit first, unless `memory_mib` is less."""
        whole = SERVER_ROOM + self.server.slot_room * self.server.slots
        return whole if self.memory_mib is None else replace(whole, memory_mib=self.memory_mib)

    @property
    def gpu_names(self) -> list[str]:
        """The container's GPUs by the names that an engine knows; those of a kind are numbered, as nvidia-ctk does."""
        server = self.server
        names = [
            name if "=" in name else f"{name}={number}" for name in server.gpu_devices for number in range(server.gpus)
        ]
        return list(dict.fromkeys(names))[: server.gpus]

    @property
    def stop_s(self) -> float:
        """How long a container may take to end after it is asked to, in seconds."""
        return self.server.drain_s + STOP_MARGIN_S

    def fingerprint(self, image_id: str = "") -> str:
        """A hash of image, settings and sizes: containers with the same are interchangeable."""
        sizes = [self.room.memory_mib, self.room.pids]
        # The token is no part of it: each container has its own.
        text = json.dumps([image_id or self.image, self.config(), *sizes], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def refused(code: int | None, reason: str) -> ConfigError | IsolationUnavailable | None:
    """What a server's exit code says of its start, which no retry would change; None for another code."""
    if code == BAD_CONFIG:
        return ConfigError(reason)
    return IsolationUnavailable(reason) if code == NO_ISOLATION else None


def hopeless(code: int | None, reason: str, failures: int) -> Exception | None:
    """Why no container will ever start, by how the first ones ended; None: a retry may help."""
    if code == 0:  # a server ends so only when it is told to
        reason = f"{reason}; is sandbox_image one of `make image`, or derived from it with its entry point?"
    return refused(code, reason) or (BackendUnavailable(reason) if failures >= HOPELESS_CRASHES else None)
