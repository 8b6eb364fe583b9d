"""Nomad's answers as our types: allocations as containers, failed placements as messages. Plain data, no requests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
"""An object of Nomad's JSON."""
GROUP, TASK, PORT = "sandbox", "server", "http"
"""Names in nomad/sandbox.nomad.hcl."""
UNRECOVERABLE = "Error was unrecoverable"
"""Nomad's reason for not restarting a task whose driver refused it for good."""
OVER = {"complete", "failed"}
DRIVER = "Driver Failure"
BAD_EVENTS = {DRIVER, "Setup Failure", "Failed Validation", "Failed Artifact Download", "Template"}
"""Task events with a reason why a task doesn't run."""


@dataclass(frozen=True, slots=True)
class JobSecret:
    """The secret of a job's servers; empty while there is no job.

    Attributes:
        token: the bearer token.
        certificate: their certificate in PEM; None: plain HTTP.
    """

    token: str = ""
    certificate: str | None = None


@dataclass(frozen=True)
class Allocation:
    """One allocation of the job.

    Attributes:
        state: `over` when it has ended; `unknown` when its client lost contact; `lost` when Nomad has also replaced it,
            though it may still run where Nomad can't stop it.
        run: the name of this run of its server; a restart in place is a new run.
        detail: Nomad's last error about it, of interest while its server doesn't answer.
        exit_code: of its task's last end, where it has ended.
        unrecoverable: its driver says that a retry can't help.
        doing: what its task was at last, before its server was started: an image may be pulled for minutes.
    """

    id: str
    run: str
    index: int
    state: Literal["starting", "running", "ending", "unknown", "lost", "over"]
    url: str | None
    detail: str = ""
    failed: bool = False
    exit_code: int | None = None
    unrecoverable: bool = False
    doing: str = ""
    node: str = ""
    modified: int = 0

    @classmethod
    def read(cls, row: Json, *, tls: bool = False) -> Allocation:
        """Read an entry of /v1/allocations?resources=true&task_states=true; `tls`: its server uses TLS."""
        task = (row.get("TaskStates") or {}).get(TASK) or {}
        # Names have the form `job.group[index]`.
        index = re.search(r"\[(\d+)\]$", row["Name"])
        events: Sequence[Json] = task.get("Events") or []
        detail, exit_code = _task_trouble(events)
        state = _state(row, task)
        return cls(
            id=row["ID"],
            # Nomad restarts a task within its allocation: the leases of the former server are gone, though the id is
            # the same.
            run=f"{row['ID']}.{task.get('Restarts', 0)}",
            index=int(index[1]) if index else 0,
            state=state,
            url=_url(row, "https" if tls else "http"),
            detail=detail,
            failed=row.get("ClientStatus") == "failed",
            exit_code=exit_code,
            unrecoverable=any(event.get("RestartReason") == UNRECOVERABLE for event in events),
            doing=str(events[-1].get("DisplayMessage") or "") if events and state == "starting" else "",
            node=row.get("NodeName") or "",
            modified=int(row.get("ModifyIndex") or 0),
        )


def _state(row: Json, task: Json) -> Literal["starting", "running", "ending", "unknown", "lost", "over"]:
    client, desired = row.get("ClientStatus"), row.get("DesiredStatus")
    if client in OVER or (desired != "run" and task.get("State") == "dead"):
        return "over"
    if client == "lost" or (client == "unknown" and desired != "run"):
        return "lost"
    if desired != "run":
        # To be stopped and never started: nothing has to end.
        return "ending" if client == "running" else "over"
    if client == "unknown":
        return "unknown"
    return "running" if client == "running" and task.get("State") == "running" else "starting"


def _url(row: Json, scheme: str) -> str | None:
    shared = ((row.get("AllocatedResources") or {}).get("Shared")) or {}
    for port in shared.get("Ports") or []:
        if port.get("Label") == PORT and port.get("HostIP"):
            # An IPv6 address in a URL (RFC 3986, section 3.2.2).
            host = f"[{port['HostIP']}]" if ":" in port["HostIP"] else port["HostIP"]
            return f"{scheme}://{host}:{port['Value']}"
    return None


def _task_trouble(events: Sequence[Json]) -> tuple[str, int | None]:
    """A task's last error and exit code; it may have started since."""
    words, code = "", None
    for event in events:
        kind = event.get("Type", "")
        if kind == "Terminated":
            details = event.get("Details") or {}
            code = int(details.get("exit_code") or event.get("ExitCode") or 0)
            killed = ", killed for memory" if details.get("oom_killed") == "true" else ""
            words = f"its server ended with exit code {code}{killed}"
        elif kind in BAD_EVENTS:
            words = f"{kind}: {event.get('DisplayMessage') or event.get('Message') or ''}"
    return words, code


CURES = {
    "does not allow the following capabilities": (
        "its client's Docker plugin lacks allow_caps: merge nomad/client-plugin.hcl into the client's configuration"
    ),
    "seccomp profile": (
        "seccomp_profile names a file on the client: copy docker/sandbox/seccomp.json there, "
        "or set it in nomad_variables"
    ),
    "Failed to pull": "push sandbox_image to a registry that the clients reach, or `docker load` it on each of them",
    "No such image": "push sandbox_image to a registry that the clients reach, or `docker load` it on each of them",
    "pids_limit cannot be greater": (
        "its client's Docker plugin bounds pids_limit: set it to 0 there, or `pids` in nomad_variables"
    ),
}
"""Messages of a Docker driver that only a change of the set-up cures, and that change."""
TEMPORARY = ("i/o timeout", "deadline exceeded", "toomanyrequests", "connection reset", "503")
"""In the message of a failed pull that may succeed on a retry."""


def set_up_fault(detail: str) -> str:
    """The cure for a driver's error where the client or the job is set up wrongly; empty when it may be temporary."""
    if not detail.startswith(DRIVER) or any(word in detail for word in TEMPORARY):
        return ""
    return next((cure for words, cure in CURES.items() if words in detail), "")


def newest(allocations: Iterable[Allocation]) -> list[Allocation]:
    """A job's allocations that are neither over nor lost, by index."""
    return sorted((a for a in allocations if a.state not in {"over", "lost"}), key=lambda a: (a.index, a.modified))


def placement_failures(evaluations: Iterable[Json]) -> str:
    """Why the scheduler could not place containers, from the newest evaluation with a reason; empty: none has."""
    ordered = sorted(evaluations, key=lambda e: (e.get("ModifyIndex", 0), e.get("CreateIndex", 0)), reverse=True)
    for evaluation in ordered:
        failed = (evaluation.get("FailedTGAllocs") or {}).get(GROUP)
        if failed:
            return f"Nomad can't place {1 + failed.get('CoalescedFailures', 0)} of its containers: {explain(failed)}"
        if evaluation.get("Status") == "complete" and evaluation.get("TriggeredBy") != "queued-allocs":
            return ""
    return ""


ROOM = {
    "memory": "lower slots_per_container or slot_memory_mib, or set container_memory_mib",
    "cpu": "lower cpu_mhz in nomad_variables",
    "network": "set static_port in nomad_variables to 0",
    "disk": "free some on the clients",
}
"""Cures for an exhausted resource, by the first word of Nomad's dimension."""


def cure(metric: Json) -> str:
    """What to change where the scheduler can't place containers; empty where only the cluster can help."""
    cures: list[str] = []
    if not metric.get("NodesInPool", 1):
        cures.append(
            "`nomad node status` shows nodes that drain or are ineligible; else set node_pool or datacenters in "
            "nomad_variables to where there are clients"
        )
    for key in metric.get("ConstraintFiltered") or {}:
        if key == "missing drivers":
            cures.append("install Docker on the clients and merge nomad/client-plugin.hcl (docs/cluster.md)")
        else:
            cures.append("see constraints in nomad_variables")
    cures.extend(ROOM.get(name.split()[0].split(":")[0], "") for name in metric.get("DimensionExhausted") or {})
    return "; ".join(dict.fromkeys(filter(None, cures)))


def explain(metric: Json) -> str:
    """An AllocMetric as `nomad job status` shows it, and the cure."""
    parts: list[str] = []
    if not metric.get("NodesInPool", 1):
        parts.append(f"no ready node of node pool {metric.get('NodePool', 'default')!r} is in the job's datacenters")
    evaluated = metric.get("NodesEvaluated", 0)
    if not evaluated and metric.get("NodesInPool"):
        parts.append("no node was eligible")
    for datacenter, count in (metric.get("NodesAvailable") or {}).items():
        if not count:
            parts.append(f"no node is available in datacenter {datacenter!r}")
    for name, what in (("ClassFiltered", "node class"), ("ConstraintFiltered", "constraint")):
        for key, count in (metric.get(name) or {}).items():
            parts.append(f"{what} {key!r} filtered {count} of {evaluated} nodes")
    for name, count in (metric.get("DimensionExhausted") or {}).items():
        parts.append(f"{name} exhausted on {count} of {evaluated} nodes")
    parts.extend(f"quota limit hit: {name}" for name in metric.get("QuotaExhausted") or [])
    if metric.get("NodesFiltered") and not metric.get("ConstraintFiltered") and not metric.get("ClassFiltered"):
        parts.append(f"{metric['NodesFiltered']} of {evaluated} nodes were filtered")
    reasons = "; ".join(parts) or "no reason given"
    return f"{reasons} ({help_})" if (help_ := cure(metric)) else reasons
