"""Making a task's workspace in a slot: the steps of its recipe, stage after stage."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from atropos import wire
from atropos.slots import Slot
from atropos.slots.profile import Account, Profile
from atropos.slots.results import ExecResult
from atropos.tasks.archive import Context, unpack_steps
from atropos.tasks.carry import TaskBroken, untar
from atropos.tasks.recipe import Copy, Folder, Run, Settings, Step

if TYPE_CHECKING:
    from atropos.tasks.folder import Task

_STAGED = "/tmp/.atropos-stage"
_TAKE = """set -e; shopt -s nullglob dotglob; IFS=; n=0; kind=file; rm -rf $S; mkdir $S
for p in PATTERNS; do
  if [ -e "/$p" ]; then set -- "/$p"; else set -- /$p; fi
  [ $# -gt 0 ] || { echo "/$p: is not in the stage"; exit 1; }
  for f; do n=$((n + 1)); if [ -d "$f" ]; then kind=folder; cp -axH "$f/." $S/; else cp -aH "$f" $S/; fi; done
done
[ $n = 1 ] || kind=folder; cd $S; chown -hR 0:0 .; tar -cf $S.tar .; rm -rf $S; echo $kind
"""
_GIVE = """set -e; shopt -s nullglob dotglob; mkdir $S; tar -xpf $S.tar -C $S; ADJUST
if [ $KIND = file ] && [ ! -d "$T" ] && [ $NAMED = yes ]; then
  mkdir -p "$(dirname "$T")"; cp -a --remove-destination $S/* "$T"
else
  mkdir -p "$T"; set -- $S/*; [ $# = 0 ] || cp -a --remove-destination -- "$@" "$T"
fi; rm -rf $S $S.tar
"""


@dataclass(frozen=True)
class _Taken:
    """Files of a stage on their way to a later one."""

    archive: bytes
    kind: str


async def build(slot: Slot, task: Task, *, fresh: Callable[[], Awaitable[Slot]] | None = None) -> Slot:
    """Make the task's workspace in a fresh slot, and let commands start there as the task says.

    Args:
        slot: unused so far.
        task: whose recipe is followed.
        fresh: replaces the slot by another one; each stage that files are copied from is built in a slot of its own.

    Returns:
        The slot that the workspace is in: the given one, unless there were several stages.

    Raises:
        TaskBroken: a step failed or took longer than `environment.build_timeout_sec`.
        ConfigError: a file of the task can't be packed.
        SandboxError: the infrastructure failed.
    """
    builder = _Builder(task)
    for stage in task.recipe.stages:
        if fresh is None:
            raise TaskBroken(f"{task.name}: a Dockerfile with several stages needs a slot for each of them")
        await builder.steps(slot, stage.steps)
        await builder.take(slot, stage.index)
        slot = await fresh()
    await builder.steps(slot, task.recipe.steps)
    await enter(slot, task)
    return slot


async def enter(slot: Slot, task: Task) -> None:
    """Let the agent's commands start in the built workspace: its folder, its variables, its user.

    Raises:
        TaskBroken: there is no such user, or no such folder.
    """
    slot.profile = await profile_of(slot, task, task.agent_settings)
    if (await slot.exec("true", timeout_s=60)).exit_code != 0:
        raise TaskBroken(
            f"{task.name}: commands can't start in {task.recipe.workdir} as {task.agent_settings.user or 'root'}"
        )


async def profile_of(slot: Slot, task: Task, settings: Settings) -> Profile:
    """Settings with the user looked up in the slot.

    Raises:
        TaskBroken: there is no such user.
    """
    user = None if settings.user is None else await _account(slot, task, settings.user)
    return Profile(settings.workdir, settings.env, user)


class _Builder:
    """The steps of one build: its deadline, and what was taken from earlier stages."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.context = Context.of(task.context)
        self.end = time.monotonic() + task.config.environment.build_timeout_sec
        self.taken: dict[tuple[int, tuple[str, ...]], _Taken] = {}

    async def steps(self, slot: Slot, steps: tuple[Step, ...]) -> None:
        for step in steps:
            if isinstance(step, Folder):
                await self.folder(slot, step.path, step.owner)
            elif isinstance(step, Run):
                await self.run(slot, step)
            elif step.stage is None:
                await self.copy(slot, step)
            else:
                await self.give(slot, step, self.taken[step.stage, step.sources])

    async def shell(self, slot: Slot, script: str, *, stdin: str | None = None) -> str:
        """A script of the build itself, as root."""
        done = await slot.run(
            wire.Exec(command=script, workdir="/", timeout_s=self.left(), stdin=stdin.encode() if stdin else None)
        )
        result = ExecResult.of(done)
        if result.exit_code != 0:
            raise self.broken("a step", result)
        return result.output

    def left(self) -> float:
        left = self.end - time.monotonic()
        if left <= 0:
            raise TaskBroken(f"{self.task.name}: set-up took too long: more than environment.build_timeout_sec")
        return left

    def broken(self, what: str, result: ExecResult) -> TaskBroken:
        why = "took too long" if result.timed_out else f"ended with {result.exit_code}"
        limit = f" (limit: {result.limit})" if result.limit else ""
        return TaskBroken(f"{self.task.name}: set-up: {what} {why}{limit}: {result.output[-500:].strip()}")

    # ------------------------------------------------------------------------------------------------------ steps

    async def folder(self, slot: Slot, path: str, owner: str | None) -> None:
        quoted = shlex.quote(path)
        chown = "" if owner is None else f" && chown {_owner(owner)} {quoted}"
        await self.shell(slot, f"[ -d {quoted} ] || {{ mkdir -p {quoted}{chown}; }}")

    async def run(self, slot: Slot, step: Run) -> None:
        if step.emptied:
            await self.shell(slot, "".join(f"[ -e {f} ] || mkdir -p {f};" for f in map(shlex.quote, step.emptied)))
        profile = await profile_of(slot, self.task, step.settings)
        operation = profile.applied(wire.Exec(command=step.command, timeout_s=self.left()))
        result = ExecResult.of(await slot.run(operation))
        if result.exit_code != 0:
            raise self.broken(f"`{step.command:.200}`", result)
        for folder in map(shlex.quote, step.emptied):
            await self.shell(
                slot, f"if [ -d {folder} ]; then find {folder} -mindepth 1 -delete; else rm -f {folder}; fi"
            )

    async def copy(self, slot: Slot, step: Copy) -> None:
        into = not step.target.endswith("/") and await _is_folder(slot, step.target)
        for where, names, archive in await asyncio.to_thread(self._packed, step, into):
            if step.owner is not None:
                await self.folder(slot, where, step.owner)
            await untar(slot, where, archive)
            if step.owner is not None:
                script = f"cd {shlex.quote(where)} && xargs -0 chown -h {_owner(step.owner)} --"
                await self.shell(slot, script, stdin="\0".join(names))

    def _packed(self, step: Copy, into: bool) -> list[tuple[str, list[str], bytes]]:
        return list(unpack_steps(self.context, step, into_folder=into))

    # --------------------------------------------------------------------------------------------- between stages

    async def take(self, slot: Slot, stage: int) -> None:
        """Keep what later stages copy from the one that has just been built."""
        recipe = self.task.recipe
        later = [step for steps in (*(one.steps for one in recipe.stages), recipe.steps) for step in steps]
        for step in later:
            if isinstance(step, Copy) and step.stage == stage and (stage, step.sources) not in self.taken:
                patterns = " ".join(shlex.quote(source) for source in step.sources)
                kind = await self.shell(slot, f"S={_STAGED}\n" + _TAKE.replace("PATTERNS", patterns))
                self.taken[stage, step.sources] = _Taken(await slot.read_file(f"{_STAGED}.tar"), kind.split()[-1])

    async def give(self, slot: Slot, step: Copy, taken: _Taken) -> None:
        await slot.write_file(f"{_STAGED}.tar", taken.archive)
        adjust = "" if step.owner is None else f"chown -hR {_owner(step.owner)} $S; "
        if step.mode is not None:
            adjust += f"find $S -type f -exec chmod {step.mode:o} {{}} +"
        named = "no" if step.target.endswith("/") else "yes"
        names = f"S={_STAGED} KIND={taken.kind} NAMED={named} T={shlex.quote(step.target)}\n"
        await self.shell(slot, names + _GIVE.replace("ADJUST", adjust))


# -------------------------------------------------------------------------------------------------------------- users


def _owner(owner: str) -> str:
    """For chown: a name alone means its login group too, a number alone that number."""
    if ":" not in owner:
        owner = f"{owner}:{owner if owner.isdecimal() else ''}"
    return shlex.quote(owner)


def owner_of(account: Account) -> str:
    """An account as chown takes it."""
    return f"{account.uid}:{account.gid}"


async def _account(slot: Slot, task: Task, user: str) -> Account | None:
    """Who `name`, `uid`, `name:group` or `uid:gid` is in the slot; None for root."""
    name, _, group = user.partition(":")
    people, groups = [await _entries(slot, path) for path in ("/etc/passwd", "/etc/group")]
    found = next((entry for entry in people if len(entry) > 5 and name in {entry[0], entry[2]}), None)
    if found is None and not name.isdecimal():
        raise TaskBroken(f"{task.name}: there is no user {name!r} in the slot; add it with RUN useradd")
    account = (
        Account("", int(name), 0, "/") if found is None else Account(found[0], int(found[2]), int(found[3]), found[5])
    )
    if group:
        number = next((entry[2] for entry in groups if len(entry) > 2 and group in {entry[0], entry[2]}), group)
        if not number.isdecimal():
            raise TaskBroken(f"{task.name}: there is no group {group!r} in the slot; add it with RUN groupadd")
        account = replace(account, gid=int(number))
    return None if account.uid == 0 else account


async def _entries(slot: Slot, path: str) -> list[list[str]]:
    try:
        text = (await slot.read_file(path)).decode(errors="replace")
    except FileNotFoundError:
        return []
    return [line.split(":") for line in text.splitlines()]


async def _is_folder(slot: Slot, path: str) -> bool:
    seen = await slot.run(wire.ReadFile(path=path, max_bytes=1))
    return isinstance(seen, wire.OpError) and seen.error == "is_directory"
