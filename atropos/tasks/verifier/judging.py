"""Runs a task's tests where they belong, and reads what they say."""

from __future__ import annotations

import logging

from atropos import wire
from atropos.slots import Slot
from atropos.slots.slot.results import ExecResult
from atropos.tasks.builder.accounts import profile_of
from atropos.tasks.builder.transfer import exec_plain, is_missing, upload
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.format.task import Task
from atropos.tasks.verifier.home import home_of, move_in
from atropos.tasks.verifier.reward import REWARD_TEXT, Verdict, read_verdict
from atropos.tasks.verifier.services import end_tests
from atropos.tasks.verifier.surroundings import Surroundings, environment, image_variables, with_links

_log = logging.getLogger(__name__)
USED = 0.9
"""Part of a verifier's time limit that tests must have computed for, where taking longer is their own doing."""
WATCHED_S = 1.5
"""How long programs of the agent's are watched that are alive where tests run."""
_STATE = 'read -r up _ </proc/uptime && read -r one </proc/1/stat && echo && echo "$up $one"'
"""Prints, as its last line, the seconds since the machine's start and what the kernel says of PID 1."""


async def judge(slot: Slot, task: Task, surroundings: Surroundings) -> Verdict:
    """Run the tests, and once more where they took too long without having computed for it.

    A host that stalls, or is busy with others, keeps tests from the CPU; so may what they wait for in vain.
    """
    limit_s = task.config.verifier.timeout_sec
    if surroundings.company and task.scoring != "pytest":
        await _watch_company(slot, task)
    result, used_s = await _run_tests(slot, task, surroundings)
    # Once more, and no third time: tests that wait for something in vain are the task's own.
    if result.timed_out and used_s < USED * limit_s:
        _log.warning("%s: its tests took %g s and computed for %.1f: they run again", task.name, limit_s, used_s)
        result, used_s = await _run_tests(slot, task, surroundings)
    if result.timed_out:
        raise VerifierFailed(
            f"{task.name}: /tests/{task.test_script} took longer than {limit_s:g} s, and computed for {used_s:.1f}"
        )
    return await read_verdict(slot, task, result)


async def _run_tests(slot: Slot, task: Task, surroundings: Surroundings) -> tuple[ExecResult, float]:
    """How the tests ended, and where they took too long for how many seconds they computed."""
    profile = await profile_of(slot, task, task.verifier_settings)
    # Each run: the tests themselves may have changed where links lead.
    surroundings = await with_links(slot, image_variables(task), surroundings)
    if surroundings.holds(home_of(profile)) and "HOME" not in task.config.verifier.env:
        if surroundings.home is None:
            raise VerifierFailed(f"{task.name}: the agent's slot names another home than its image")
        profile = await move_in(slot, profile)
    # The tests' own hosts: those that the agent had end with its work.
    if slot.network:
        await slot.set_network(task.verifier_hosts)
    # After the network and before anything of the tests' is there: the machine's time then tells theirs from the
    # agent's.
    began, used, held = await _make_room(slot, task)
    for source in () if held else task.tests:
        await upload(slot, source, "/tests", program=task.test_script)
    user, script = profile.user, f"/tests/{task.test_script}"
    chown = "" if user is None else f"chown -R {user.uid}:{user.gid} /tests /logs/verifier && "
    if held or user is not None:
        # An upload has made it executable where root runs it; an image's own tests, or another user's, need it said.
        await exec_plain(slot, f"{chown}chmod +x {script}")
    env = environment(task, profile, surroundings)
    operation = profile.applied(
        wire.Exec(command=script, env=env, clean_env=True, timeout_s=task.config.verifier.timeout_sec)
    )
    # `clean_env`: none of the slot's variables that the agent could have had a part in.
    result = ExecResult.of(await slot.run(operation))
    # With a step's processes the agent goes on, and tests that run again talk to them.
    await end_tests(slot, task, began if task.step is not None or result.timed_out else None)
    return result, _state(await exec_plain(slot, _STATE))[1] - used if result.timed_out else 0.0


async def _make_room(slot: Slot, task: Task) -> tuple[int, float, bool]:
    """Recreate the tests' folder and the reward's. Returns `_state`, and whether the image already has the tests."""
    # links and files where folders belong would send the tests, or the reward, to a place of the agent's choice
    plain = "for d in /logs /tmp; do if [ -L $d ] || [ ! -d $d ]; then rm -f $d && mkdir -m 1777 $d; fi; done"
    held = task.bundled and not await is_missing(slot, f"/tests/{task.test_script}")
    folders, tests = ("/logs/verifier", "true") if held else ("/logs/verifier /tests", "mkdir -m 700 /tests")
    # once more where a server of the agent's wrote into a folder that was being removed
    logs = f"chmod a+rx /logs && {{ rm -rf {folders} || rm -rf {folders}; }} && mkdir /logs/verifier"
    clean = await exec_plain(slot, f"{plain} && {logs} && {tests} && {_STATE}")
    if clean.exit_code != 0:
        raise VerifierFailed(f"{task.name}: the tests' folder can't be created: {clean.output[-300:].strip()}")
    return *_state(clean), held


async def _watch_company(slot: Slot, task: Task) -> None:
    """Have the agent's programs that are alive see a test that writes 0: none of them may write a reward of its own.

    Raises:
        VerifierFailed: one did.
    """
    await _make_room(slot, task)
    script = f"/tests/{task.test_script}"
    await slot.write_file(script, f"#!/bin/sh\necho 0 > {REWARD_TEXT}\n", 0o755)
    done = await exec_plain(slot, f"{script}; sleep {WATCHED_S}; cat /logs/verifier/*")
    if done.output.split() != ["0"]:
        raise VerifierFailed(
            f"{task.name}: a process that its tests did not start writes to /logs/verifier: "
            f"{done.output[-300:].strip()}"
        )


def _state(printed: ExecResult) -> tuple[int, float]:
    """Of `_STATE`: hundredths of a second since the machine's start, and CPU seconds of all ended processes."""
    words = printed.output.rstrip().rpartition("\n")[2].split()
    try:
        return int(float(words[0]) * 100), sum(map(int, words[-37:-35])) / 100  # cutime and cstime, 16 and 17 of 52
    except (ValueError, IndexError):  # a shell of the agent's
        raise VerifierFailed(f"the machine doesn't say what it did: {printed.output[-300:].strip()}") from None
