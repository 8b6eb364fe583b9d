"""Whether a slot's container has the isolation that an executor requires; checked once a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atropos.errors import IsolationUnavailable

if TYPE_CHECKING:
    from atropos.slots import Slot


class IsolationCheck:
    """Checks containers and remembers those that passed.

    Args:
        sandbox: every isolation feature must be there.
        stateful: sessions must live between calls.
    """

    def __init__(self, *, sandbox: bool, stateful: bool) -> None:
        self.required = sandbox or stateful
        self._sandbox = sandbox
        self._stateful = stateful
        self._passed: set[str] = set()

    async def check(self, slot: Slot) -> None:
        """Refuse a slot whose container lacks what is required.

        Raises:
            IsolationUnavailable: names the feature and the cure.
        """
        if slot.container in self._passed:
            return
        has = await slot.capabilities()
        if self._sandbox and not has.isolated:
            lacking = ", ".join(f"{one.name} ({one.fix or one.detail})" for one in has.features if not one.ok)
            raise IsolationUnavailable(f"require_sandbox: container {slot.container} lacks {lacking}")
        if self._stateful and not has.stateful:
            raise IsolationUnavailable(
                f"require_stateful_sandbox: container {slot.container} can't keep sessions between calls"
            )
        self._passed.add(slot.container)
