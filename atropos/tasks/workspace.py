"""What happens in a built workspace: commands start in it, the solution or an agent works, it is verified.

Verification comes after the agent has finished: tests are uploaded only then, and run with a clean environment. In a
`view` they run on the task's own machine as it was built, with the agent's folders and servers (`Slot.view`). `shared`
verifies where the agent worked, its processes ended but for services; root in a slot owns that slot's shell. `separate`
takes a fresh slot, to which only the artifacts are carried over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from atropos import wire
from atropos.errors import NotSupported, SandboxError
from atropos.slots import Slot
from atropos.slots.slot.profile import PLAIN
from atropos.slots.slot.results import ExecResult, SlotFileError
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.builder.archive import pack
from atropos.tasks.builder.transfer import exec_plain, is_missing, unpack_pieces
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.format.context import walk
from atropos.tasks.format.task import Hosts, Task
from atropos.tasks.verifier.carry import CarriedArtifact, carry_in, carry_out
from atropos.tasks.verifier.home import home_of, move_in, put_aside, put_back
from atropos.tasks.verifier.layers import VerifierLayers
from atropos.tasks.verifier.mode import Mode, choose
from atropos.tasks.verifier.reward import Verdict, read_verdict
from atropos.tasks.verifier.services import Keep, end_processes, end_tests
from atropos.tasks.verifier.surroundings import Surroundings, Wishes, environment, program_folders, with_links
from atropos.tasks.verifier.texts import named_folders, read_texts, renames_across
from atropos.wire import VIEW_HOME

_log = logging.getLogger(__name__)
LOGS = "/logs/agent /logs/verifier /logs/artifacts"
"""Folders that anyone may write to while the agent works, as Harbor makes them."""
USED = 0.5
"""Part of a verifier's time limit that tests must have computed for, where taking longer is their own doing."""
_STATE = 'read -r up _ </proc/uptime && read -r one </proc/1/stat && echo && echo "$up $one"'
"""Prints, as its last line, the seconds since the machine's start and what the kernel says of PID 1."""
WAITS = ("sh", "-c", "sleep infinity")
"""What Harbor has a container run, so that it stays."""


async def enter(slot: Slot, task: Task) -> None:
    """Set up a prepared workspace for the agent: the network, folders for logs, and the folder, variables and user of its commands.

    Raises:
        TaskBroken: there is no such user, or no such folder.
    """
    await exec_plain(slot, f"mkdir -p {LOGS} && chmod 777 {LOGS}", user="0")
    slot.profile = await profile_of(slot, task, task.agent_settings)
    await _reach(slot, task.agent_hosts)
    if (await slot.exec("true", timeout_s=60)).exit_code != 0:
        raise TaskBroken(
            f"{task.name}: commands can't start in {task.recipe.workdir} as {task.agent_settings.user or 'root'}"
        )


async def _reach(slot: Slot, hosts: Hosts) -> None:
    """Change what a slot's programs reach, where it has a network at all."""
    if slot.network:
        await slot.set_network(hosts)


async def start_main_process(slot: Slot, task: Task, env: Mapping[str, str] | None = None) -> None:
    """Start what a container of the machine would start, as Harbor does, where that does more than keep it running.

    That is its ENTRYPOINT, with the command of its compose file, or one that waits, in the place of its CMD.

    Args:
        slot: with the machine.
        task: whose machine it is; the process has the variables, folder and user of its image.
        env: variables beside these.

    Raises:
        TaskBroken: there is no such program, or no such user.
    """
    settings = task.recipe.settings
    words = (*settings.entrypoint, *(settings.command or WAITS))
    if words == WAITS:
        return
    profile, slot.profile = slot.profile, await profile_of(slot, task, task.container_settings)
    try:
        await slot.start(words, env=env)
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
    slot.profile = PLAIN
    workdir = task.recipe.workdir
    if task.files is not None:
        await _upload(slot, task.files, workdir)
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
    profile, slot.profile = slot.profile, PLAIN
    try:
        await _upload(slot, task.solution, "/solution")
        script = f"/solution/{task.solution_script}"
        await slot.exec(f"chmod -R a+rX /solution; chmod +x {script}")
    finally:
        slot.profile = profile
    env = {"DEBIAN_FRONTEND": "noninteractive", **task.filled(task.config.solution.env)}
    return await slot.exec(script, env=env, timeout_s=task.config.agent.timeout_sec)


async def _upload(slot: Slot, source: Path, where: str) -> None:
    """Copy a folder's content, or a file, into a folder of the slot.

    Raises:
        SlotFileError: the slot can't take it.
        SandboxError: it can't be read here.
    """
    try:
        if source.is_dir():
            await unpack_pieces(slot, where, pack(walk(source)))
        else:
            await slot.write_file(f"{where}/{source.name}", await asyncio.to_thread(source.read_bytes), 0o755)
    except SlotFileError:
        raise
    except OSError as error:
        raise SandboxError(str(error)) from error


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
        chosen = choose(task, mode).mode
        judged = task.verifier if chosen == "separate" and task.verifier is not None else task
        machine, found = await _machine(slot, task, judged, chosen, fresh, _kept(task) if keep == "task" else keep)
        machines.append(machine)
        if layers is not None:
            await layers.put(machine)
        verdict = await _judge(machine, judged, found)
    except (SlotFileError, TaskBroken, VerifierFailed) as error:  # no such user, no room, a folder in a file's place
        _check_room(task, machines)
        raise error if isinstance(error, VerifierFailed) else VerifierFailed(f"{task.name}: {error}") from error
    except OSError as error:  # of this machine, as of the disk with the tests
        raise SandboxError(f"{task.name}: {error}") from error
    if verdict.reward < 1:
        _check_room(task, machines)
    return verdict


def _kept(task: Task) -> Keep:
    said = task.config.verifier.keep_processes
    return said if isinstance(said, str) else "all" if said else "none"


def _check_room(task: Task, machines: Sequence[Slot]) -> None:
    """Refuse to blame an agent for what a slot of the size that its task asks for would have done.

    Raises:
        NotSupported: a limit was reached that is lower than that.
    """
    for limit, lowered in task.lowered.items():
        if any(limit in machine.limits_reached for machine in machines):
            raise NotSupported(f"{task.name}: the {limit} limit was reached, and is lower than the task's: {lowered}")


async def _machine(
    slot: Slot, task: Task, judged: Task, chosen: Mode, fresh: Callable[[], Awaitable[Slot]] | None, keep: Keep
) -> tuple[Slot, Surroundings]:
    """Where the tests run, with what the agent left in its place."""
    await _collect(slot, task)
    slot.profile = PLAIN
    if chosen == "view":
        return slot, await _open_view(slot, task, keep)
    if chosen == "shared":
        await end_processes(slot, task, keep)
        return slot, Surroundings()
    if fresh is None:
        raise ValueError("a separate verifier needs `fresh`")
    await slot.quiesce()
    carried = [(one.source, await carry_out(slot, one.source, one.exclude)) for one in task.artifacts]
    slot = await fresh()
    slot.profile = PLAIN
    return slot, await _carry_all(slot, judged, carried)


async def _carry_all(slot: Slot, judged: Task, carried: Sequence[tuple[str, CarriedArtifact | None]]) -> Surroundings:
    """Put the artifacts into a fresh slot; its home and programs stay as they are."""
    wishes = await asyncio.to_thread(lambda: Wishes.of(read_texts(judged)))
    found = Surroundings(tuple(path for path, _ in carried), wishes=wishes)
    home = home_of(await profile_of(slot, judged, judged.verifier_settings))
    wanted = [path for path in program_folders(judged) if found.holds(path)]
    inside = found.holds(home)
    programs = await put_aside(slot, home if inside else None, wanted) if inside or wanted else ()
    for path, artifact in carried:
        await carry_in(slot, path, artifact)
    await put_back(slot, wanted, programs)
    return replace(found, programs=programs, home=VIEW_HOME if inside else None)


async def _open_view(slot: Slot, task: Task, keep: Keep) -> Surroundings:
    """Run the tests beside the agent's programs, where these reach nothing but the folders that they wrote in."""
    if keep == "none":
        await slot.quiesce()
    workdir = task.recipe.workdir
    others = [one.source for one in task.artifacts if not f"{one.source}/".startswith(f"{workdir.rstrip('/')}/")]
    carried = [(path, await carry_out(slot, path)) for path in others]
    named, as_layer, wishes = await asyncio.to_thread(_read, task, (workdir, *others))
    home = await _home_within(slot, task, (workdir, *others))
    try:
        shown = await slot.view([workdir], optional=named, programs=program_folders(task), home=home, as_layer=as_layer)
    except NotSupported as error:
        _log.warning("%s: verified in the agent's slot: %s", task.name, error)
        await end_processes(slot, task, keep)
        return Surroundings()
    for path, artifact in carried:
        if artifact is not None:
            await carry_in(slot, path, artifact)
    return Surroundings((*shown.folders, *others), shown.programs, None if home is None else VIEW_HOME, wishes)


def _read(task: Task, folders: Sequence[str]) -> tuple[list[str], bool, Wishes]:
    """Of a task's texts: the folders that they name, whether its tests rename across these folders, and what is wanted."""
    texts = read_texts(task)
    return named_folders(texts.whole), renames_across(texts.tests, folders), Wishes.of(texts)


async def _home_within(slot: Slot, task: Task, folders: Sequence[str]) -> str | None:
    """The home of a view's programs, if it is in folders that the view shows: by the agent's word, who gains nothing by a lie."""
    try:
        home = home_of(await profile_of(slot, task, task.verifier_settings))
    except TaskBroken:
        return None
    return home if Surroundings(tuple(folders)).holds(home) else None


async def clear(slot: Slot, task: Task) -> None:
    """Remove what a step's tests and solution left, so that nothing of them is visible in the next one.

    Raises:
        VerifierFailed: it can't be removed.
    """
    slot.profile = PLAIN
    result = await exec_plain(slot, "rm -rf /tests /solution /logs/verifier /logs/agent")
    if result.exit_code != 0:
        raise VerifierFailed(f"{task.name}: its tests can't be removed: {result.output[-300:].strip()}")


async def _collect(slot: Slot, task: Task) -> None:
    for hook in task.config.verifier.collect:
        slot.profile = PLAIN
        if hook.user is not None:
            slot.profile = await profile_of(slot, task, replace(task.agent_settings, user=str(hook.user)))
        result = await slot.exec(hook.command, workdir=task.recipe.workdir, timeout_s=hook.timeout_sec)
        if result.exit_code != 0:  # as in Harbor: the tests say what is missing
            _log.warning(
                "%s: verifier.collect: `%.100s` ended with %s: %s",
                *(task.name, hook.command, result.exit_code, result.output[-300:].strip()),
            )


async def _judge(slot: Slot, task: Task, found: Surroundings) -> Verdict:
    """Run the tests, and once more where they took too long without having computed for it.

    A host that stalls, or is busy with others, keeps tests from the CPU; so may what they wait for in vain.
    """
    limit_s = task.config.verifier.timeout_sec
    result, used_s = await _run_tests(slot, task, found)
    if result.timed_out and used_s < USED * limit_s:
        _log.warning("%s: its tests took %g s and computed for %.1f: they run again", task.name, limit_s, used_s)
        result, used_s = await _run_tests(slot, task, found)
    if result.timed_out:
        raise VerifierFailed(
            f"{task.name}: /tests/{task.test_script} took longer than {limit_s:g} s, and computed for {used_s:.1f}"
        )
    return await read_verdict(slot, task, result)


async def _run_tests(slot: Slot, task: Task, found: Surroundings) -> tuple[ExecResult, float]:
    """How the tests ended, and where they took too long for how many seconds they computed."""
    profile = await profile_of(slot, task, task.verifier_settings)
    found = await with_links(slot, task, found)
    if found.holds(home_of(profile)) and "HOME" not in task.config.verifier.env:
        if found.home is None:
            raise VerifierFailed(f"{task.name}: the agent's slot names another home than its image")
        profile = await move_in(slot, profile)
    await _reach(slot, task.verifier_hosts)
    # links and files where folders belong would send the tests, or the reward, to a place of the agent's choice
    plain = "for d in /logs /tmp; do if [ -L $d ] || [ ! -d $d ]; then rm -f $d && mkdir -m 1777 $d; fi; done"
    script = f"/tests/{task.test_script}"
    held = task.bundled and not await is_missing(slot, script)
    tests = "true" if held else "rm -rf /tests && mkdir /tests && chmod 700 /tests"
    logs = "chmod a+rx /logs && rm -rf /logs/verifier && mkdir /logs/verifier"
    clean = await exec_plain(slot, f"{plain} && {logs} && {tests} && {_STATE}")
    if clean.exit_code != 0:
        raise VerifierFailed(f"{task.name}: the tests' folder can't be created: {clean.output[-300:].strip()}")
    for source in () if held else task.tests:
        await _upload(slot, source, "/tests")
    user = profile.user
    chown = "" if user is None else f"chown -R {user.uid}:{user.gid} /tests /logs/verifier && "
    await exec_plain(slot, f"{chown}chmod +x {script}")
    env = environment(task, profile, found)
    operation = profile.applied(
        wire.Exec(command=script, env=env, clean_env=True, timeout_s=task.config.verifier.timeout_sec)
    )
    began, used = _state(clean)
    result = ExecResult.of(await slot.run(operation))
    # With a step's processes the agent goes on, and tests that run again talk to them.
    await end_tests(slot, task, began if task.step is not None or result.timed_out else None)
    return result, _state(await exec_plain(slot, _STATE))[1] - used if result.timed_out else 0.0


def _state(printed: ExecResult) -> tuple[int, float]:
    """Of `_STATE`: hundredths of a second since the machine's start, and seconds that all which has ended computed for."""
    words = printed.output.rstrip().rpartition("\n")[2].split()
    try:
        return int(float(words[0]) * 100), sum(map(int, words[-37:-35])) / 100  # cutime and cstime, 16 and 17 of 52
    except (ValueError, IndexError):  # a shell of the agent's
        raise VerifierFailed(f"the machine doesn't say what it did: {printed.output[-300:].strip()}") from None
