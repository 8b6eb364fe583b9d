"""The /sys of slots: a few folders and files of ours, with the kernel's about CPUs and memory nodes mounted in them.

A slot's own cgroups are mounted at /sys/fs/cgroup, so that programs size themselves by its limits: the JVM and Node
choose their heaps by them. On cgroup v1, where each controller has a folder there, the names of cgroup v2 lead to the
same numbers.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from atropos.sandbox.linux import netlink
from atropos.sandbox.programs import gateway

SYSTEM = "/sys/devices/system"
"""What slots see of the kernel's own, through an overlay each: of a lock or a watch no other slot knows."""
CGROUP = "/sys/fs/cgroup"
CPU_MAX = "cpu.max"
_FOLDERS = (
    "block",
    "bus",
    "class/block",
    "class/net",
    "dev/block",
    "dev/char",
    "devices/system",
    "fs/cgroup",
    "module",
)
_EVERY_DEVICE = {"addr_len": "6", "carrier": "1", "dev_id": "0x0", "tx_queue_len": "1000"}
_LOOPBACK = {
    "address": "00:00:00:00:00:00",
    "broadcast": "00:00:00:00:00:00",
    "flags": "0x9",
    "mtu": "65536",
    "operstate": "unknown",
    "type": "772",
}
"""What the kernel says of a loopback, the one interface of a slot without a network."""
_GATEWAYS_DEVICE = {
    "address": gateway.OWN_MAC.hex(":"),
    "broadcast": "ff:ff:ff:ff:ff:ff",
    "duplex": "full",
    "flags": "0x1003",
    "mtu": f"{netlink.MTU}",
    "operstate": "up",
    "speed": "10000",
    "type": "1",
}
_AS_V2 = {
    "memory": {
        "memory.max": "memory.limit_in_bytes",
        "memory.current": "memory.usage_in_bytes",
        "memory.peak": "memory.max_usage_in_bytes",
        "memory.stat": "memory.stat",
    },
    "pids": {"pids.max": "pids.max", "pids.current": "pids.current", "cgroup.procs": "cgroup.procs"},
    "cpu": {"cpu.stat": "cpu.stat"},
}
"""Files of cgroup v2 by the controllers of v1: which of its files has the same number."""


def build(folder: str, controllers: Collection[str]) -> None:
    """Make it in a new folder.

    Args:
        folder: where.
        controllers: of cgroup v1, by which slots are limited.

    Raises:
        OSError: it could not be made.
    """
    for name in _FOLDERS:
        os.makedirs(f"{folder}/{name}", 0o755)
    _add_device(folder, "lo", 1, _LOOPBACK)
    cgroup = Path(folder, "fs/cgroup")
    for controller in controllers:
        (cgroup / controller).mkdir()
        for name, same in _AS_V2.get(controller, {}).items():
            (cgroup / name).symlink_to(f"{controller}/{same}")
    if controllers:
        known = " ".join(name for name in _AS_V2 if name in controllers)
        (cgroup / "cgroup.controllers").write_text(f"{known}\n", encoding="ascii")
    if "cpu" in controllers:
        # A place for the file that each slot has mounted there: v1 has two files for what cgroup v2 says in one.
        (cgroup / CPU_MAX).touch()


def build_network(folder: str) -> None:
    """Make what lies above it in slots with a gateway, in a new folder.

    Raises:
        OSError: it could not be made.
    """
    os.makedirs(f"{folder}/class/net", 0o755)
    _add_device(folder, gateway.DEVICE, 2, _GATEWAYS_DEVICE)


def _add_device(folder: str, name: str, index: int, values: dict[str, str]) -> None:
    device = Path(folder, "devices/virtual/net", name)
    # As plain files: the kernel's own sysfs shows the network namespace of whoever mounted it.
    device.mkdir(parents=True)
    own = {"ifindex": f"{index}", "iflink": f"{index}", "uevent": f"INTERFACE={name}\nIFINDEX={index}"}
    for each, text in (_EVERY_DEVICE | own | values).items():
        (device / each).write_text(f"{text}\n", encoding="ascii")
    os.symlink(f"../../devices/virtual/net/{name}", f"{folder}/class/net/{name}")
