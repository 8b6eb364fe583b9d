"""What happens to a slot for a task: it is built, later verified, and in between the agent (or the solution) works in it.

Verification comes after the agent has finished: its processes are ended, tests are uploaded only then, and run with a
clean environment. `shared` (Harbor's default) verifies where the agent worked; root in a slot owns that slot's shell,
so a task that must hold against a hostile agent says `environment_mode = "separate"`: a fresh slot is built, only the
artifacts are carried over, and nothing else the agent did counts.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from atropos import wire
from atropos.slots import Slot
from atropos.slots.results import ExecResult
from atropos.tasks.archive import packed_folder, unpack_steps
from atropos.tasks.carry import PATH, TaskBroken, VerifierFailed, carry_in, carry_out, untar
from atropos.tasks.dockerfile import DEFAULT_WORKDIR, Copy, Run
from atropos.tasks.folder import Task

REWARD_TEXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
MAX_REWARD_BYTES = 4096
LOG_CHARS = 4000
"""Tail of the verifier's output that is kept with the trajectory."""


@dataclass(frozen=True)
class Verdict:
    """A reward and what the verifier had to say.

    Attributes:
        reward: as written; by convention from 0 to 1.
        metrics: all numbers of a reward.json.
        seconds: of the verifier's own run.
    """

    reward: float
    exit_code: int | None
    log: str
    seconds: float
    metrics: dict[str, float] = field(default_factory=dict[str, float])


async def build(slot: Slot, task: Task) -> None:
    """Make the task's workspace in a fresh slot.

    Raises:
        TaskBroken: a step failed or took longer than `environment.build_timeout_sec`.
        ConfigError: a file of the task can't be packed.
        SandboxError: the infrastructure failed.
    """
    end = time.monotonic() + task.config.environment.build_timeout_sec
    await _make_workdir(slot, task)
    for step in task.recipe.steps:
        if isinstance(step, Copy):
            for where, archive in await asyncio.to_thread(_packed_step, task, step):
                await untar(slot, where, archive)
        else:
            await _run_step(slot, task, step, end - time.monotonic())


def _packed_step(task: Task, step: Copy) -> list[tuple[str, bytes]]:
    return list(unpack_steps(task.path / "environment", step))


async def _make_workdir(slot: Slot, task: Task) -> None:
    """Commands start in /workspace, so another WORKDIR is made a name for it."""
    workdir = task.recipe.workdir
    if workdir in {DEFAULT_WORKDIR, "/"}:
        return
    quoted = shlex.quote(workdir)
    script = f"mkdir -p {DEFAULT_WORKDIR} && {{ [ {quoted} -ef {DEFAULT_WORKDIR} ] || {{ [ ! -e {quoted} ] && "
    if workdir.startswith(DEFAULT_WORKDIR + "/"):
        script = f"mkdir -p {quoted} && {{ {{ true"
    else:
        script += f'mkdir -p "$(dirname {quoted})" && ln -s {DEFAULT_WORKDIR} {quoted}'
    result = await slot.exec(script + "; }; }", workdir="/", timeout_s=30)
    if result.exit_code != 0:
        raise TaskBroken(
            f"{task.name}: the working folder {workdir} can't be had in a slot (it exists in the base, or its parent is "
            f"read-only); use {DEFAULT_WORKDIR}. {result.output[-300:].strip()}"
        )


async def _run_step(slot: Slot, task: Task, step: Run, seconds: float) -> None:
    if seconds <= 0:
        raise TaskBroken(f"{task.name}: set-up took too long: more than environment.build_timeout_sec")
    result = await slot.exec(step.command, workdir=step.workdir, timeout_s=seconds)
    if result.exit_code != 0:
        why = "took too long" if result.timed_out else f"ended with {result.exit_code}"
        limit = f" (limit: {result.limit})" if result.limit else ""
        raise TaskBroken(f"{task.name}: set-up `{step.command:.100}` {why}{limit}: {result.output[-500:].strip()}")


async def solve(slot: Slot, task: Task, *, timeout_s: float | None = None) -> ExecResult:
    """Run the task's own solution where an agent would work.

    Raises:
        TaskBroken: it has none.
    """
    if task.solution is None:
        raise TaskBroken(f"{task.name}: solution/solve.sh is missing")
    for archive in packed_folder(task.path / "solution"):
        await untar(slot, "/solution", archive)
    limit = timeout_s or task.config.agent.timeout_sec
    return await slot.exec("bash /solution/solve.sh", workdir=_cwd(task), env=task.config.solution.env, timeout_s=limit)


async def verify(
    slot: Slot,
    task: Task,
    *,
    mode: Literal["task", "shared", "separate"] = "task",
    fresh: Callable[[], Awaitable[Slot]] | None = None,
) -> Verdict:
    """Score what is in the slot.

    Args:
        slot: where the agent worked.
        task: whose tests run.
        mode: `task`: as task.toml says.
        fresh: gives the slot of a separate verifier, with the task built in it; the agent's may be gone by then.

    Raises:
        VerifierFailed: no reward could be read.
        SandboxError: the infrastructure failed.
    """
    chosen = task.config.verifier.environment_mode if mode == "task" else mode
    await slot.quiesce()
    if chosen == "separate":
        if fresh is None:
            raise ValueError("a separate verifier needs `fresh`")
        carried = [(path, await carry_out(slot, path)) for path in task.artifacts]
        slot = await fresh()
        for path, artifact in carried:
            await carry_in(slot, path, artifact)
    return await _judge(slot, task)


async def _judge(slot: Slot, task: Task) -> Verdict:
    home = f"/tmp/.verifier-{secrets.token_hex(8)}"
    # links and files where folders belong would send the tests, or the reward, to a place of the agent's choice
    plain = "for d in /logs /tmp; do if [ -L $d ] || [ ! -d $d ]; then rm -f $d && mkdir -m 1777 $d; fi; done"
    clean = await slot.exec(
        f"{plain} && rm -rf /tests /logs/verifier && mkdir -p /logs/verifier /tests && chmod 700 /tests && mkdir {home}",
        workdir="/",
        env={"PATH": PATH},
        clean_env=True,
        timeout_s=60,
    )
    if clean.exit_code != 0:
        raise VerifierFailed(f"{task.name}: the place for the tests can't be made: {clean.output[-300:].strip()}")
    try:
        for archive in packed_folder(task.path / "tests"):
            await untar(slot, "/tests", archive)
    except OSError as error:  # a full disk, above all
        raise VerifierFailed(f"{task.name}: the tests can't be uploaded: {error}") from None
    # What the agent left in its home folder or in user-wide Python and git settings must not run here.
    environment = {
        "PATH": PATH,
        "HOME": home,
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "GIT_CONFIG_NOSYSTEM": "1",
        **task.config.verifier.env,
    }
    result = await slot.exec(
        "bash /tests/test.sh",
        workdir=_cwd(task),
        env=environment,
        clean_env=True,
        timeout_s=task.config.verifier.timeout_sec,
    )
    await slot.quiesce()
    if result.timed_out:
        raise VerifierFailed(f"{task.name}: tests/test.sh took longer than {task.config.verifier.timeout_sec:g} s")
    reward, metrics = await _reward(slot, task, result)
    return Verdict(reward, result.exit_code, result.output[-LOG_CHARS:], result.duration_s, metrics)


async def _reward(slot: Slot, task: Task, result: ExecResult) -> tuple[float, dict[str, float]]:
    """The reward as Harbor has it: reward.txt holds one number, or reward.json numbers by name."""
    for path in (REWARD_TEXT, REWARD_JSON):
        answer = await slot.run(wire.ReadFile(path=path, max_bytes=MAX_REWARD_BYTES))
        if isinstance(answer, wire.OpError):
            continue
        assert isinstance(answer, wire.FileResult)
        text = answer.data.decode("utf-8", errors="replace").strip()
        try:
            if answer.size > MAX_REWARD_BYTES:
                raise ValueError(f"{answer.size} bytes")
            metrics = _numbers(json.loads(text)) if path == REWARD_JSON else {"reward": _number(text)}
        except ValueError as error:
            raise VerifierFailed(f"{task.name}: {path} holds no reward: {error}") from None
        return metrics.get("reward", next(iter(metrics.values()))), metrics
    killed = f", limit {result.limit}" if result.limit else ""
    raise VerifierFailed(
        f"{task.name}: tests/test.sh wrote no {REWARD_TEXT} (exit code {result.exit_code}{killed}): "
        f"{result.output[-500:].strip()}"
    )


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r:.100} is not a number")  # noqa: TRY004 (what was read is wrong, not a type here)
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r:.100} is not finite")
    return number


def _numbers(value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not value:
        raise ValueError("it is not an object of numbers")
    named: dict[Any, Any] = value
    return {str(key): _number(number) for key, number in named.items()}


def _cwd(task: Task) -> str:
    return task.recipe.workdir
