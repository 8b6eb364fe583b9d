"""What happens in a built workspace: commands start in it, the solution or an agent works, it is verified.

Verification comes after the agent has finished: tests are uploaded only then, and run with a clean environment. In a
`view` they run on the task's own machine as it was built, with the agent's folders and servers (`Slot.view`). `shared`
verifies where the agent worked, its processes ended but for services; root in a slot owns that slot's shell. `separate`
takes a fresh slot, to which only the artifacts are carried over.
"""

from __future__ import annotations

import asyncio
import re
import shlex
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Literal

from atropos.errors import SandboxError
from atropos.slots import Slot
from atropos.slots.slot.processes import Process
from atropos.slots.slot.profile import PLAIN
from atropos.slots.slot.results import ExecResult, SlotFileError
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.builder.transfer import exec_plain, upload
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.format.service import ServiceVolume
from atropos.tasks.format.task import Task
from atropos.tasks.shortage import check_room, note_limits
from atropos.tasks.verifier.judging import judge
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Mode, choose, leaves_programs
from atropos.tasks.verifier.place import place
from atropos.tasks.verifier.reward import Verdict
from atropos.tasks.verifier.services import Keep

LOGS = "/logs/agent /logs/verifier /logs/artifacts"
"""Folders that anyone may write to while the agent works, as Harbor makes them."""
_OF_STEPS = ("/tests", "/solution", "/logs/verifier", "/logs/agent")
"""Folders that are each step's own."""
WAITS = ("sh", "-c", "sleep infinity")
"""What Harbor has a container run, so that it stays."""


async def enter(slot: Slot, task: Task) -> None:
    """Set up a prepared workspace for the agent: its network, log folders, and commands' folder, variables and user.

    Raises:
        TaskBroken: there is no such user, or no such folder.
    """
    await exec_plain(slot, f"mkdir -p {LOGS} && chmod 777 {LOGS}", user="0")
    slot.profile = await profile_of(slot, task, task.agent_settings)
    if slot.network:
        await slot.set_network(task.agent_hosts)
    # The profile is checked nowhere else: without this, the agent's first call would fail.
    if (await slot.exec("true", timeout_s=60)).exit_code != 0:
        raise TaskBroken(
            f"{task.name}: commands can't start in {task.recipe.workdir} as {task.agent_settings.user or 'root'}"
        )


async def start_main_process(slot: Slot, task: Task, env: Mapping[str, str] | None = None) -> Process | None:
    """Start what a container of the machine would start, as Harbor does, where that does more than keep it running.

    That is its ENTRYPOINT, with the command of its compose file, or one that waits, in the place of its CMD.

    Args:
        slot: with the machine.
        task: whose machine it is; the process has the variables, folder and user of its image.
        env: variables beside these.

    Returns:
        The process; None: it would only wait.

    Raises:
        TaskBroken: there is no such program, or no such user.
    """
    settings = task.recipe.settings
    words = (*settings.entrypoint, *(settings.command or WAITS))
    if words == WAITS:
        return None
    # The container's own user starts it, who may be another one than the agent's.
    profile, slot.profile = slot.profile, await profile_of(slot, task, task.container_settings)
    try:
        return await slot.start(words, env=env)
    except SlotFileError as error:
        kind = "ENTRYPOINT" if settings.entrypoint else "command"
        raise TaskBroken(f"{task.name}: {kind} {words[0]}: {error}") from error
    finally:
        slot.profile = profile


async def wait_until_healthy(slot: Slot, task: Task) -> None:
    """Wait until the task's health check succeeds, where it has one; of a step: the step's own.

    Raises:
        TaskBroken: it failed as often as it may.
    """
    check = task.config.environment.healthcheck if task.step is None else task.step.healthcheck
    if check is None:
        return
    started, failures = time.monotonic(), 0
    while True:
        starting = time.monotonic() - started < check.start_period_sec
        result = await slot.exec(check.command, timeout_s=check.timeout_sec)
        if result.exit_code == 0:
            return
        # As Docker has it: failures within the start period don't count.
        failures += not starting
        if failures == check.retries:
            table = "environment" if task.step is None else "steps"
            output = result.output[-300:].strip()
            raise TaskBroken(f"{task.name}: {table}.healthcheck failed {failures} times: {output}")
        await asyncio.sleep(check.start_interval_sec if starting else check.interval_sec)


async def prepare_step(slot: Slot, task: Task) -> None:
    """Copy a step's files into the workspace, run its setup.sh there, and wait for its health check.

    Raises:
        TaskBroken: the script or the health check failed.
        SlotFileError, SandboxError: the files can't be copied.
    """
    # Files are copied as root, whoever the last step's agent was.
    slot.profile = PLAIN
    workdir = task.recipe.workdir
    if task.files is not None:
        await upload(slot, task.files, workdir)
    await enter(slot, task)
    if task.files is not None and (task.files / "setup.sh").is_file():
        result = await slot.exec("bash ./setup.sh", timeout_s=task.config.environment.build_timeout_sec)
        if result.exit_code != 0:
            raise TaskBroken(
                f"{task.name}: workdir/setup.sh ended with {result.exit_code}: {result.output[-500:].strip()}"
            )
    await wait_until_healthy(slot, task)


async def solve(slot: Slot, task: Task) -> ExecResult:
    """Run the task's own solution where an agent would work.

    Raises:
        TaskBroken: it has none.
    """
    if task.solution is None:
        raise TaskBroken(f"{task.name}: solution/{task.solution_script} is missing")
    await upload(slot, task.solution, "/solution", program=task.solution_script, mode="a+rX")
    env = {"DEBIAN_FRONTEND": "noninteractive", **task.filled(task.config.solution.env)}
    return await slot.exec(f"/solution/{task.solution_script}", env=env, timeout_s=task.config.agent.timeout_sec)


async def verify(
    slot: Slot,
    task: Task,
    *,
    mode: Literal["task"] | Mode = "task",
    fresh: Callable[[], Awaitable[Slot]] | None = None,
    layers: VerifierLayers | None = None,
    keep: Literal["task"] | Keep = "task",
) -> Verdict:
    """Score what is in the slot.

    Args:
        slot: where the agent worked.
        task: whose tests run.
        mode: `task`: as `choose` says.
        fresh: gives the slot of a separate verifier, with its machine (`Task.verifier`, else the task) built in it; the
            agent's may be gone by then.
        layers: what is laid over the machine before the tests come.
        keep: which of the agent's processes are left; `task`: as its `keep_processes` says.

    Raises:
        VerifierFailed: no reward could be read.
        NotSupported: something failed by a limit of the slot that is lower than the task asks for.
        SandboxError: the infrastructure failed.
    """
    machines = [slot]
    try:
        await note_limits(slot)  # it may be frozen, or gone, by the verdict
        chosen = choose(task, mode).mode
        judged = task.verifier if chosen == "separate" and task.verifier is not None else task
        machine, surroundings = await place(slot, task, judged, chosen, fresh, _kept(task) if keep == "task" else keep)
        machines.append(machine)
        if layers is not None:
            await layers.put(machine)
        verdict = await judge(machine, judged, surroundings)
    except (SlotFileError, TaskBroken, VerifierFailed) as error:  # no such user, no room, a folder in a file's place
        await check_room(task, machines, str(error))
        raise error if isinstance(error, VerifierFailed) else VerifierFailed(f"{task.name}: {error}") from error
    except OSError as error:  # of this machine, as of the disk with the tests
        raise SandboxError(f"{task.name}: {error}") from error
    # A full reward was reached whatever the limits did.
    if verdict.reward < 1:
        await check_room(task, machines, verdict.log)
    return verdict


def _kept(task: Task) -> Keep:
    keep = task.config.verifier.keep_processes
    if isinstance(keep, str):
        # Those that wait at a pipe, or for an hour of the day, listen on no socket.
        return "all" if leaves_programs(task) else keep
    return "all" if keep else "none"


async def clear(slot: Slot, task: Task) -> None:
    """Remove what a step's tests and solution left, so that nothing of them is visible in the next one.

    Volumes there stay mounted, and are emptied: other services have them, too.

    Raises:
        VerifierFailed: it can't be removed.
    """
    slot.profile = PLAIN
    volumes = () if task.service is None else task.service.volumes
    result = await exec_plain(slot, " && ".join(_removal(folder, volumes) for folder in _OF_STEPS))
    if result.exit_code != 0:
        raise VerifierFailed(f"{task.name}: its tests can't be removed: {result.output[-300:].strip()}")


def _removal(folder: str, volumes: Sequence[ServiceVolume]) -> str:
    """A line that removes a folder, but for its volumes' own folders, and what can't be written there."""
    mount_points: set[str] = set()
    for volume in volumes:
        if f"{volume.target}/".startswith(f"{folder}/"):
            path = re.sub(r"[*?\[\\]", r"\\\g<0>", volume.target)
            mount_points.update(
                map(str, (path, *PurePosixPath(path).parents[:-1])), [f"{path}/*"] if volume.read_only else ()
            )
    if not mount_points:
        return f"rm -rf {folder}"
    others = " ".join(f"! -path {shlex.quote(path)}" for path in sorted(mount_points))
    emptied = f"find {folder} -depth {others} -delete"  # twice: a service may write beside it
    return f"if [ -L {folder} ] || [ ! -d {folder} ]; then rm -f {folder}; else {emptied} || {emptied}; fi"
