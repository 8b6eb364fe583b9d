"""Which backends there are: the built-in ones, and those that installed packages register as entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

GROUP = "atropos.backends"
"""An entry point here is a backend's name, and what makes one of a `SlotPoolConfig`."""
_HERE = "atropos.slots.backends"
BUILT_IN = {
    each.name: each
    for each in (
        EntryPoint("local", f"{_HERE}.local.backend:LocalBackend", GROUP),
        EntryPoint("docker", f"{_HERE}.docker.backend:DockerBackend", GROUP),
        EntryPoint("ssh", f"{_HERE}.ssh.backend:SshBackend", GROUP),
        EntryPoint("modal", f"{_HERE}.modal.backend:ModalBackend", GROUP),
        EntryPoint("singularity", f"{_HERE}.singularity.backend:SingularityBackend", GROUP),
        EntryPoint("nomad", f"{_HERE}.nomad.backend:NomadBackend", GROUP),
    )
}
"""Listed here and not in the package's metadata, so that a source tree that is not installed has them too."""


def find(name: str) -> EntryPoint:
    """The backend of a name; nothing of it is imported yet.

    Raises:
        ValueError: there is none; says which there are.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    others = {each.name: each for each in entry_points(group=GROUP)}
    if name in others:
        return others[name]
    *most, last = [repr(each) for each in (*sorted(others), *BUILT_IN)]
    raise ValueError(f"input should be {', '.join(most)} or {last}")


def known(name: str) -> str:
    """The name, where there is a backend of it. Raises as `find`."""
    return find(name).name
