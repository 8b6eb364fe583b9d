"""What happens to a slot for a task: it is built, later verified, and in between the agent (or the solution) works in it.

Verification comes after the agent has finished: its processes are ended, tests are uploaded only then, and run with a
clean environment. `shared` (Harbor's default) verifies where the agent worked; root in a slot owns that slot's shell,
so a task that must hold against a hostile agent says `environment_mode = "separate"`: a fresh slot is built, only the
artifacts are carried over, and nothing else the agent did counts.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import math
import secrets
import shlex
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from atropos import wire
from atropos.envs.dockerfile import DEFAULT_WORKDIR, Copy, Run
from atropos.envs.task_folder import Task, packed_folder, unpack_steps
from atropos.slots import Slot
from atropos.slots.results import ExecResult, file_error

REWARD_TEXT, REWARD_JSON = "/logs/verifier/reward.txt", "/logs/verifier/reward.json"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_REWARD_BYTES = 4096
MAX_ARTIFACT_BYTES = 256 * 1024 * 1024
"""Most that is carried from the agent's slot to a separate verifier's."""
LOG_CHARS = 4000
"""Tail of the verifier's output that is kept with the trajectory."""


class TaskBroken(Exception):
    """The task's own set-up failed in a fresh slot: nobody's score."""


class VerifierFailed(Exception):
    """The verifier gave no reward that can be read: it timed out, was killed, or wrote nothing or nonsense."""


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
                await _untar(slot, where, archive)
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
        await _untar(slot, "/solution", archive)
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
        carried = [(path, await _carry_out(slot, path)) for path in task.artifacts]
        slot = await fresh()
        for path, artifact in carried:
            await _carry_in(slot, path, artifact)
    return await _judge(slot, task)


async def _judge(slot: Slot, task: Task) -> Verdict:
    home = f"/tmp/.verifier-{secrets.token_hex(8)}"
    clean = await slot.exec(
        f"rm -rf /tests /logs/verifier && mkdir -p /logs/verifier /tests && chmod 700 /tests && mkdir {home}",
        workdir="/",
        env={"PATH": PATH},
        clean_env=True,
        timeout_s=60,
    )
    if clean.exit_code != 0:
        raise VerifierFailed(f"{task.name}: the place for the tests can't be made: {clean.output[-300:].strip()}")
    try:
        for archive in packed_folder(task.path / "tests"):
            await _untar(slot, "/tests", archive)
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


# ---------------------------------------------------------------------------------------------------------- transport


async def _untar(slot: Slot, where: str, archive: bytes) -> None:
    result = await slot.run(wire.Untar(path=where, data=archive))
    if isinstance(result, wire.OpError):
        raise file_error(result, where)


@dataclass(frozen=True)
class _Carried:
    """An artifact on its way: a file's content and mode, or a folder's archive (mode None)."""

    data: bytes
    mode: int | None


async def _carry_out(slot: Slot, path: str) -> _Carried | None:
    """A file or folder; None when it isn't there."""
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    if isinstance(seen, wire.FileResult):
        if seen.size > MAX_ARTIFACT_BYTES:
            raise VerifierFailed(f"the artifact {path} can't be carried over: {seen.size} bytes")
        return _Carried(await slot.read_file(path), seen.mode & 0o777)
    if isinstance(seen, wire.OpError) and seen.error == "not_found":
        return None
    return _Carried(await _pack_folder(slot, path), None)


async def _pack_folder(slot: Slot, path: str) -> bytes:
    try:
        return await asyncio.to_thread(safe_archive, await slot.download(path), path)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise VerifierFailed(f"the artifact {path} can't be carried over: {error}") from None
    # Too large for one message: the slot's own tar makes a file, which is read in pieces.
    name = f"/tmp/.artifact-{secrets.token_hex(8)}"
    command = f"tar -cf {name} -C {shlex.quote(path)} . && stat -c %s {name}"
    made = await slot.exec(command, workdir="/", timeout_s=300)
    size = made.output.strip()
    if made.exit_code != 0 or not size.isdigit() or int(size) > MAX_ARTIFACT_BYTES:
        limit = f"more than {MAX_ARTIFACT_BYTES} bytes, or it can't be packed"
        raise VerifierFailed(f"the artifact {path} can't be carried over: {limit}: {made.output[-200:].strip()}")
    return await asyncio.to_thread(safe_archive, await slot.read_file(name), path)


def safe_archive(archive: bytes, path: str) -> bytes:
    """The same archive without what leads out of the folder it is unpacked in: absolute names, `..`, ways through links.

    The archive comes from a slot that the agent owned: it may hold anything.

    Raises:
        VerifierFailed: it is no tar archive.
    """
    out = io.BytesIO()
    links: set[str] = set()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as source, tarfile.open(fileobj=out, mode="w") as target:
            for member in source:
                name = _inside(member.name, links)
                if name is None or not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
                    continue
                if member.islnk():
                    link = _inside(member.linkname, links)
                    if link is None:
                        continue
                    member.linkname = link
                if member.issym():
                    links.add(name)
                member.name = name
                member.uid = member.gid = 0
                member.uname = member.gname = ""
                target.addfile(member, source.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        raise VerifierFailed(f"the artifact {path} came as no tar archive: {error}") from None
    return out.getvalue()


def _inside(name: str, links: set[str]) -> str | None:
    """A member's plain name; None for the folder itself and for what leads out of it."""
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if not parts or ".." in parts or name.startswith("/"):
        return None
    if any("/".join(parts[:count]) in links for count in range(1, len(parts) + 1)):
        return None
    return "/".join(parts)


async def _carry_in(slot: Slot, path: str, carried: _Carried | None) -> None:
    """Put an artifact in the place of what is there."""
    quoted = shlex.quote(path)
    # A folder is emptied rather than removed: it may be the one that commands start in.
    if carried is not None and carried.mode is None:
        script = f"mkdir -p -- {quoted} && find {quoted} -mindepth 1 -delete"
    else:
        script = f"[ ! -d {quoted} ] && rm -f -- {quoted} || find {quoted} -mindepth 1 -delete"
    cleared = await slot.exec(script, workdir="/", clean_env=True, env={"PATH": PATH}, timeout_s=60)
    if cleared.exit_code != 0:
        raise TaskBroken(f"the verifier's slot can't take {path}: {cleared.output[-300:].strip()}")
    if carried is None:
        return
    try:
        if carried.mode is not None:
            await slot.write_file(path, carried.data, carried.mode)
            return
        if len(carried.data) <= wire.MAX_FILE_BYTES:
            await _untar(slot, path, carried.data)
            return
    except OSError as error:
        raise VerifierFailed(f"the artifact {path} can't be put into the verifier's slot: {error}") from None
    name = f"/tmp/.artifact-{secrets.token_hex(8)}"
    await slot.write_file(name, carried.data)
    unpacked = await slot.exec(f"tar -xpf {name} -C {quoted} && rm {name}", workdir="/", timeout_s=300)
    if unpacked.exit_code != 0:
        raise VerifierFailed(f"the artifact {path} can't be unpacked: {unpacked.output[-300:].strip()}")
