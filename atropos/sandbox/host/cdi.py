"""What slots get of devices that the Container Device Interface describes: nodes, files, variables, links, libraries.

No hook is run: those of NVIDIA's tool are read, and what they would do is done inside the slot. What can't be had is
refused by name.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atropos.errors import ConfigError
from atropos.sandbox.host.cdi_spec import Listed, Spec, SpecDevice, SpecEdits, SpecHook, SpecMount, SpecNode, read_all
from atropos.sandbox.host.files.root_changer import Bind

ALL = "all"
"""The device that vendors' tools add for all others together; of WSL's GPUs it is the only one."""
NEEDLESS_HOOKS = frozenset(
    ("chmod", "disable-device-node-modification", "enable-cuda-compat", "update-application-profile")
)
"""Hooks of NVIDIA's tool that a slot does without: its nodes can't be changed; the others are for graphics, and for
images whose CUDA is newer than the driver."""


@dataclass(frozen=True)
class Device:
    """What a slot gets with one device.

    Attributes:
        name: KIND=NAME.
        binds: files and nodes.
        sockets: sockets, pipes and folders with one, which no slot gets, but a container of slots.
        env: variables of its programs.
        links: symbolic links, as (target, path).
        libraries: folders for the cache of libraries.
    """

    name: str
    binds: tuple[Bind, ...] = ()
    sockets: tuple[Bind, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    libraries: tuple[str, ...] = ()


def find(folders: Sequence[str], wanted: Sequence[str], count: int) -> list[Device]:
    """The first `count` devices among the wanted ones that this machine has.

    Args:
        folders: where specifications are; one in a later folder comes before one of the same device in an earlier.
        wanted: KIND=NAME, or KIND for all of that kind: each once, whatever names it has.
        count: how many there must be.

    Raises:
        ConfigError: there are fewer, two are the same, or one of them wants what no slot can have.
    """
    kinds, problems = read_all(folders)
    devices: list[Listed] = []
    for name in wanted:
        kind, _, device = name.partition("=")
        of_kind = kinds.get(kind, {})
        # A whole kind names what is here; a device named by itself has to be here, and is refused below if it isn't.
        if not device:
            devices += _alone([each for each in of_kind.values() if _present(each[1])])
        elif device in of_kind:
            devices.append(of_kind[device])
    if len(devices) < count:
        has = ", ".join(map(_name, devices)) or "none"
        why = "".join(f"; {problem}" for problem in problems)
        raise ConfigError(
            f"gpus: {count} wanted; of gpu_devices ({', '.join(wanted)}) this machine has {has}, by the files in "
            f"{' and '.join(folders)}{why} (docs/gpu.md)"
        )
    for number, one in enumerate(devices[:count]):
        for other in devices[:number]:
            # Two leases would be given the same hardware, each as if it had it alone.
            if _is_part(one[1], other[1]) or _is_part(other[1], one[1]):
                raise ConfigError(
                    f"gpu_devices: {_name(other)} and {_name(one)} are the same device, or one is a part of the other; "
                    "name one of them"
                )
    return [_device(*each) for each in devices[:count]]


def _name(found: Listed) -> str:
    spec, device = found
    return f"{spec.kind}={device.name}"


def _alone(found: Sequence[Listed]) -> list[Listed]:
    """Devices that are no part of another: second names of the same one go, and cards that are also there in parts."""
    # `all` contains every other device; beside single ones it would take the place of each of them.
    single = [each for each in found if each[1].name != ALL] or found
    return [
        (spec, device)
        for number, (spec, device) in enumerate(single)
        if not any(
            _is_part(device, other) and (before < number or not _is_part(other, device))
            for before, (_, other) in enumerate(single)
            if before != number
        )
    ]


def _is_part(one: SpecDevice, other: SpecDevice) -> bool:
    """Whether a device's own nodes are all another's too: a card's are those of each of its MIG devices."""
    return bool(one.own) and one.own <= other.own


def _present(device: SpecDevice) -> bool:
    """Whether its nodes are here: a container has only some of its machine's."""
    return all(_source_of(node) for node in device.container_edits.device_nodes)


def _source_of(node: SpecNode) -> str | None:
    """Where this server finds a node."""
    return _source(node.host_path, node.path) or _named_by_kernel(node)


def _source(host: str | None, inside: str) -> str | None:
    """Where this server finds it: on the host, or where an engine has put it into the server's own container."""
    return next((path for path in (host, inside) if path is not None and os.path.exists(path)), None)


def _named_by_kernel(node: SpecNode) -> str | None:
    """The node of this number, which an engine would make where the specification wants it."""
    if not node.type or not node.major:
        return None
    # sysfs lists devices by number and names their nodes (`DEVNAME` of uevent), also where /dev has other names.
    folder = Path("/sys/dev", "block" if node.type == "b" else "char", f"{node.major}:{node.minor}")
    try:
        named = re.search(r"^DEVNAME=(.+)$", (folder / "uevent").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    path = f"/dev/{named[1]}" if named else ""
    return path if os.path.exists(path) else None


def _device(spec: Spec, device: SpecDevice) -> Device:
    name = f"{spec.kind}={device.name}"
    edits = (spec.container_edits, device.container_edits)
    links: list[tuple[str, str]] = []
    libraries: list[str] = []
    for each in edits:
        if each.net_devices or each.intel_rdt is not None:
            raise ConfigError(f"gpus: {name} wants a network interface or Intel RDT, which no slot has")
        for hook in each.hooks:
            _read_hook(name, hook, links, libraries)
    # A device's own edits come after those of its kind, as the specification orders them, and so replace them.
    by_target = {bind.target: bind for each in edits for bind in _binds(name, each)}
    # Sorted, so that a folder is mounted before what lies in it.
    binds = [by_target[target] for target in sorted(by_target)]
    # A read-only mount doesn't keep a program from connecting to a socket: it would talk to a daemon of the host.
    sockets = tuple(bind for bind in binds if not bind.device and _has_socket(bind.source))
    return Device(
        name,
        tuple(bind for bind in binds if bind not in sockets),
        sockets,
        tuple((key, value) for each in edits for key, _, value in (text.partition("=") for text in each.env)),
        tuple(dict.fromkeys(links)),
        tuple(dict.fromkeys(libraries)),
    )


def _binds(name: str, edits: SpecEdits) -> Iterator[Bind]:
    for node in edits.device_nodes:
        source = _source_of(node)
        yield _node(name, source, node.host_path or node.path, node.path)
        rights = node.permissions or "rw"
        # An engine enforces permissions by device cgroups; a slot has only the node's mode (decision 24).
        if source is not None and ("r" not in rights or ("w" not in rights and os.stat(source).st_mode & 0o222)):
            raise ConfigError(
                f"gpus: {name}: {node.path} has permissions {rights!r}, and its mode allows a slot more; leave "
                "them out of the file if it may do that"
            )
    for mount in edits.mounts:
        yield from _mounted(name, mount)


def _node(name: str, source: str | None, wanted: str, target: str) -> Bind:
    """A node that a slot's users may open as its owner may: MIG's are readable alone."""
    # The type is asked of the file itself: what the specification says of it is what an engine would make.
    mode = 0 if source is None else os.stat(source).st_mode
    if source is None or not _is_device(mode):
        raise ConfigError(f"gpus: {name}: {wanted} is no device node of this machine")
    if not os.access(source, os.R_OK | (os.W_OK if mode & stat.S_IWUSR else 0)):
        raise ConfigError(
            f"gpus: {name}: {source} has mode {stat.S_IMODE(mode):o}: a slot's users, who are none of the host's, "
            'can\'t open it; give it MODE="0666" in a udev rule, or take it out of the file'
        )
    return Bind(source, target, device=True)


def _is_device(mode: int) -> bool:
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _mounted(name: str, mount: SpecMount) -> Iterator[Bind]:
    """A mount: of a node, as Intel's links to them are; of a file or folder, if it is read-only.

    What can be written is left out, since all slots and the host would share it.
    """
    source = _source(mount.host_path, mount.container_path)
    # Before the options are looked at: nodes are shared with the host anyhow, read-only or not.
    if source is not None and _is_device(os.stat(source).st_mode):
        yield _node(name, source, mount.host_path, mount.container_path)
    elif not {"ro", "rro"}.isdisjoint(mount.options):
        if mount.type not in {"", "none", "bind"}:
            raise ConfigError(f"gpus: {name}: no slot has a mount of type {mount.type}, as at {mount.container_path}")
        if source is None:
            raise ConfigError(f"gpus: {name}: there is no {mount.host_path} to mount at {mount.container_path}")
        yield Bind(source, mount.container_path, no_exec="noexec" in mount.options, below=_mounts_below(source))


def _has_socket(path: str) -> bool:
    """Whether a file is a socket or pipe, or a folder has one: nvidia-ctk up to 1.18 says that they are read-only."""
    inside = (os.path.join(top, name) for top, _, names in os.walk(path) for name in names)
    modes = (os.lstat(each).st_mode for each in (os.path.realpath(path), *inside) if os.path.lexists(each))
    return any(stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) for mode in modes)


def _mounts_below(path: str) -> tuple[str, ...]:
    """Where something is mounted below a folder of this server's, from there."""
    # mountinfo has paths with all links followed.
    top = f"{os.path.realpath(path).rstrip('/')}/"
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    mounts = [
        # spaces, tabs, newlines and backslashes are octal numbers there (proc_pid_mountinfo(5))
        (line.split()[0], re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4]))
        for line in lines
    ]
    return tuple(sorted({at.removeprefix(top) for number, at in mounts if at.startswith(top) and _is_seen(number, at)}))


def _is_seen(mount: str, point: str) -> bool:
    """Whether a mount of this number is what its point leads to: no later one hides it."""
    try:
        # O_PATH: looking must neither trigger an automount nor open a device.
        fd = os.open(point, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return f"mnt_id:\t{mount}\n" in Path(f"/proc/self/fdinfo/{fd}").read_text(encoding="ascii")
    finally:
        os.close(fd)


def _read_hook(name: str, hook: SpecHook, links: list[tuple[str, str]], libraries: list[str]) -> None:
    """What a hook would do: add its links and its folders of libraries."""
    # The first argument is the program's own name, as in execve(2).
    arguments = list(hook.args[1:])
    values = [value for flag in ("link", "folder") for value in _values(arguments, flag)]
    # Names of nvidia-ctk's subcommands; older and newer releases put them at different places of the command line.
    if "create-symlinks" in arguments:
        pairs = [re.fullmatch(r"(.+)::(/.+)", value) for value in values]
        links += [(pair[1], pair[2]) for pair in pairs if pair is not None]
    elif "update-ldcache" in arguments:
        libraries += values
    elif NEEDLESS_HOOKS.isdisjoint(arguments):
        raise ConfigError(
            f"gpus: {name}: the hook {' '.join([hook.path, *arguments])} is not run for a slot; take it out of the "
            "file if the device works without"
        )


def _values(arguments: Sequence[str], flag: str) -> Iterator[str]:
    """The values of a flag, as `--flag VALUE` or `--flag=VALUE`."""
    for number, text in enumerate(arguments):
        if text == f"--{flag}" and number + 1 < len(arguments):
            yield arguments[number + 1]
        elif text.startswith(f"--{flag}="):
            yield text.partition("=")[2]
