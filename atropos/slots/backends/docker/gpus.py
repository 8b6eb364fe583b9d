"""The options of a container with its pool's GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from docker.types import DeviceRequest

from atropos.errors import ConfigError
from atropos.slots.backends.docker.facts import EngineFacts
from atropos.slots.backends.spec import ContainerSpec

CAPABILITIES = [["gpu", "compute", "utility", "video", "graphics", "display"], ["gpu"]]
"""Of a driver that `--gpus` is to find: NVIDIA's, with all that its specification names; else any vendor's."""


@dataclass
class ContainerGpus:
    """In the words of the Docker SDK. `volumes` are all read-only."""

    volumes: dict[str, dict[str, str]] = field(default_factory=dict[str, "dict[str, str]"])
    devices: list[str] = field(default_factory=list[str])
    requests: list[DeviceRequest] = field(default_factory=list[DeviceRequest])

    def mount(self, source: str, target: str) -> None:
        """Add a folder or file."""
        self.volumes[source] = {"bind": target, "mode": "ro"}


def container_gpus(spec: ContainerSpec, engine: EngineFacts, *, same_files: bool) -> ContainerGpus:
    """A container's GPUs, and their specifications, by which its server gives each slot its own.

    An engine that reads these itself is asked for them by name. Another one is given what they name; where it has other
    files, it is asked as by `--gpus`.

    Args:
        spec: of the container.
        engine: what it says of itself.
        same_files: whether it has this machine's files.

    Raises:
        ConfigError: they can't be had.
    """
    server, gpus = spec.server, ContainerGpus()
    if not server.gpus:
        return gpus
    reads = engine.cdi_folders.issuperset(server.cdi_folders)
    for folder in server.cdi_folders:
        if not same_files or os.path.isdir(folder):
            gpus.mount(folder, folder)
    if same_files:
        _name_devices(spec, gpus, reads=reads)
    elif reads:
        gpus.requests = [DeviceRequest(driver="cdi", device_ids=spec.gpu_names)]
    elif engine.name == "Podman":
        raise ConfigError(
            f"gpus: {engine} takes no names of CDI devices in {', '.join(server.cdi_folders)}, and has other files "
            "than this machine; it needs Podman 5.4"
        )
    else:
        ids = [name.partition("=")[2] for name in spec.gpu_names]
        gpus.requests = [DeviceRequest(device_ids=ids, capabilities=CAPABILITIES)]
    return gpus


def _name_devices(spec: ContainerSpec, gpus: ContainerGpus, *, reads: bool) -> None:
    """Add what this machine's specifications name: the devices, or their nodes and files."""
    from atropos.sandbox.host.cdi import find  # Linux alone has what it builds on

    server = spec.server
    devices = find(server.cdi_folders, server.gpu_devices, server.gpus)
    if reads:
        gpus.requests = [DeviceRequest(driver="cdi", device_ids=[device.name for device in devices])]
        return
    # its server has to find all that the specifications name
    for bind in dict.fromkeys(bind for device in devices for bind in (*device.binds, *device.sockets)):
        if bind.device:
            gpus.devices.append(f"{bind.source}:{bind.target}:rw")
        else:
            gpus.mount(bind.source, bind.target)
