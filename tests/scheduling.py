"""How `pytest -n N --dist loadscope` shares the tests out: modules side by side, then what needs the machine alone.

A test module is one unit of work, as its fixtures are made once for all of its tests. Tests that measure wait until
every other test has ended; then one worker, the last that is left, runs them one after the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController


class AloneLast(LoadScopeScheduling):
    """Runs the unit `last` when it is all that is left and one worker is.

    Args:
        config: pytest's.
        log: xdist's.
        unit_of: the unit that a test, by its node id, belongs to.
        last: the unit of the tests that run alone.
    """

    def __init__(self, config, log, unit_of: Callable[[str], str], last: str) -> None:
        super().__init__(config, log)
        self._split_scope = unit_of
        self._last = last

    def _assign_work_unit(self, node: WorkerController) -> None:
        # what a worker had done before it crashed is in the queue again, and would be waited for
        for unit in [unit for unit, tests in self.workqueue.items() if all(tests.values())]:
            del self.workqueue[unit]
        if self._last in self.workqueue:
            self.workqueue.move_to_end(self._last)
        if not self.workqueue:
            node.shutdown()
        elif not self._only_last_is_left or len(self.nodes) == 1:
            # a worker that has just crashed reads no more; its end is reported next, and its units go back into the
            # queue
            with contextlib.suppress(OSError):
                super()._assign_work_unit(node)

    def _reschedule(self, node: WorkerController) -> None:
        if not self._only_last_is_left or len(self.nodes) == 1:
            super()._reschedule(node)
            return
        # A worker keeps its last test back until it gets more or ends, so each but one is ended.
        running = [one for one in self.nodes if not one.shutting_down]
        if node in running and len(running) > 1 and self._pending_of(self.assigned_work[node]) <= 2:
            node.shutdown()

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = super().remove_node(node)
        for left in self.nodes:
            self._reschedule(left)
        return crashed

    @property
    def _only_last_is_left(self) -> bool:
        return list(self.workqueue) == [self._last]
