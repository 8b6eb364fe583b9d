"""A pool's job: its configuration as variables of nomad/sandbox.nomad.hcl."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import cast

from atropos.errors import ConfigError
from atropos.slots.backends.assets import asset
from atropos.slots.backends.nomad.access import NomadAccess
from atropos.slots.backends.nomad.settings import hcl
from atropos.slots.backends.nomad.view import GROUP, TASK, Json
from atropos.slots.backends.spec import ContainerSpec

DEFINITION = "nomad/sandbox.nomad.hcl"
PROFILE = "docker/sandbox/seccomp.json"
OWN = {
    "job_id": "sandbox_job_id",
    "count": "min_containers",
    "namespace": "NOMAD_NAMESPACE",
    "region": "NOMAD_REGION",
    "image": "sandbox_image",
    "slots": "slots_per_container",
    "slot_memory_mib": "limits (slot_memory_mib)",
    "slot_pids": "limits (slot_pids)",
    "memory_mib": "container_memory_mib",
    "gpus": "gpus",
    "architecture": "architecture",
}
"""Variables that a setting of the pool sets, and its name: they can't be set twice."""


def definition() -> str:
    """The job's HCL."""
    return asset(DEFINITION).read_text()


def variables(
    spec: ContainerSpec, access: NomadAccess, job_id: str, count: int, extra: Mapping[str, str]
) -> dict[str, str]:
    """Variables by name, each as an HCL expression; `extra` are the user's, in the form of `nomad job run -var`.

    The seccomp profile is this checkout's where the agent is on this machine, else the definition's default.

    Raises:
        ConfigError: `extra` has a variable that the definition doesn't declare (Nomad's parser ignores those), or one
            that a setting of the pool sets.
    """
    # Of the definition itself, so that it needs no second list here.
    declared = set(re.findall(r'^variable "(\w+)"', definition(), re.MULTILINE))
    if unknown := extra.keys() - declared:
        raise ConfigError(
            f"nomad_variables: {DEFINITION} has no variable {', '.join(sorted(unknown))}; "
            f"it has {', '.join(sorted(declared))}"
        )
    if twice := sorted(extra.keys() & OWN.keys()):
        raise ConfigError(f"nomad_variables: {twice[0]} is set by {OWN[twice[0]]}: change that instead")
    config = {key: value for key, value in spec.config().items() if key not in {"slots", "limits"}}
    added = _server_settings(extra.get("config", "{}"))
    if twice := sorted(added.keys() & {*config, "slots", "limits"}):
        raise ConfigError(f"nomad_variables: config.{twice[0]} is set by the pool's own settings: change those instead")
    config |= added
    limits = spec.server.limits.model_dump(mode="json", exclude_defaults=True)
    if limits:
        config["limits"] = limits
    chosen = {
        "job_id": hcl(job_id),
        "count": str(count),
        "namespace": hcl(access.namespace),
        "image": hcl(spec.image),
        "slots": str(spec.server.slots),
        "slot_memory_mib": str(spec.server.limits.memory_mib),
        "slot_pids": str(spec.server.limits.pids),
        "memory_mib": str(spec.room.memory_mib),
        "pids": str(spec.room.pids),
        "config": hcl(json.dumps(config)),
        "gpus": str(spec.server.gpus),
        "architecture": hcl(spec.architecture or ""),
    }
    if access.region:
        chosen["region"] = hcl(access.region)
    if access.local:
        # Docker's driver reads the file on the client, which is this machine only here.
        chosen["seccomp_profile"] = hcl(str(asset(PROFILE)))
    return chosen | {name: expression(value) for name, value in extra.items() if name != "config"}


def group_of(job: Json) -> Json:
    """The group of a job's containers.

    Raises:
        ConfigError: the job has another purpose and the same name.
    """
    for group in job.get("TaskGroups") or []:
        if group["Name"] == GROUP and any(task["Name"] == TASK for task in group.get("Tasks") or []):
            return group
    raise ConfigError(
        f"sandbox_job_id: job {job.get('ID')!r} in Nomad is no sandbox job (it has no task {GROUP}/{TASK}), and is not "
        "changed; choose another sandbox_job_id"
    )


def count(job: Json) -> int:
    """A job's number of containers."""
    return int(group_of(job)["Count"])


def differences(job: Json, spec: ContainerSpec) -> str:
    """How a registered job differs from the pool's settings; empty: in nothing important."""
    task = next(task for task in group_of(job)["Tasks"] if task["Name"] == TASK)
    try:
        server = json.loads((task.get("Env") or {}).get("ATROPOS_CONFIG", "{}"))
    except ValueError:
        server = {}
    limits = spec.server.limits
    pairs = {
        "sandbox_image": ((task.get("Config") or {}).get("image"), spec.image),
        "slots_per_container": (server.get("slots"), spec.server.slots),
        "slot_memory_mib": ((server.get("limits") or {}).get("memory_mib"), limits.memory_mib),
        "container_memory_mib": ((task.get("Resources") or {}).get("MemoryMB"), spec.room.memory_mib),
        "gpus": (server.get("gpus", 0), spec.server.gpus),
        "architecture": (_architecture(job), spec.architecture or _architecture(job)),
    }
    # A value that the job doesn't have is no difference: an older definition may lack it.
    differing = [
        f"its {name} is {has}, not {own}" for name, (has, own) in pairs.items() if has is not None and has != own
    ]
    return "; ".join(differing)


def _architecture(job: Json) -> str:
    """What a job's clients must be; empty: any."""
    needed = {each.get("LTarget"): str(each.get("RTarget")) for each in job.get("Constraints") or []}
    return needed.get("${attr.cpu.arch}", "")


def _server_settings(text: str) -> dict[str, object]:
    """More settings of the server, from a JSON object or an HCL literal of one."""
    try:
        settings = json.loads(text)
        settings = json.loads(settings) if isinstance(settings, str) else settings
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ConfigError('nomad_variables: config must be an object in JSON, such as {"drain_s": 10}')
    return cast("dict[str, object]", settings)


def expression(text: str) -> str:
    """A value of `-var name=` as HCL: numbers, booleans, lists and quoted text as they are, other text quoted."""
    stripped = text.strip()
    if stripped in {"true", "false", "null"} or stripped[:1] in {"[", "{", '"'}:
        return stripped
    try:
        float(stripped)
    except ValueError:
        return hcl(text)
    return stripped
