"""Whether a limit was reached that is lower than what the task asks for."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Sequence

from atropos.errors import LeaseExpired, NotSupported
from atropos.slots import Slot
from atropos.tasks.format.task import Task
from atropos.wire import ProcList

FULL = os.strerror(errno.ENOSPC)


async def check_room(task: Task, machines: Sequence[Slot], said: str = "") -> None:
    """Refuse to blame an agent, or the task, for what slots of the sizes that the task asks for would have done.

    Args:
        task: whose machine each is.
        machines: each with the services beside it.
        said: what programs printed there: installers that find no room remove what they had written, and leave some.

    Raises:
        NotSupported: a limit was reached that is lower than that.
        SandboxError: what was reached can't be known.
    """
    sized = (task, *task.beside)
    for machine in machines:
        if not isinstance(machine.lost, LeaseExpired):  # given back before
            await note_limits(machine)
    for machine, of in (pair for each in machines for pair in zip(each.group, sized, strict=False)):
        for limit, lowered in of.lowered.items():
            if limit in machine.limits_reached or (limit == "disk" and FULL in said):
                raise NotSupported(f"{of.name}: the {limit} limit was reached, and is lower than the task's: {lowered}")


async def note_limits(machine: Slot) -> None:
    """Have the slots of a machine and its services say which limits ended programs that no call waited for."""
    await asyncio.gather(*(each.run(ProcList()) for each in machine.group))
