"""What an agent changed in its working folder: the folder before its first call compared with the folder at the end."""

from __future__ import annotations

import asyncio
import logging
import zlib
from dataclasses import asdict

from atropos import wire
from atropos.agent import ExecuteTool
from atropos.dashboard.changes import Changes, compare
from atropos.errors import SandboxError
from atropos.slots import Slot
from atropos.tools import ToolCall, ToolExecutor, ToolResult

MAX_FOLDER_BYTES = 1 << 20
"""Longest archive of the folder; a larger folder is not compared."""
LOOK_S = 5.0
"""Timeout of reading the folder once."""

_log = logging.getLogger(__name__)


class WorkspaceChanges:
    """Compares an agent's working folder with what it was before the agent's first call in it.

    A failure of the comparison is noted in its result and fails nothing else. Where it isn't `wanted`, nothing is
    recorded.
    """

    def __init__(self, executor: ToolExecutor, trajectory_id: str, *, wanted: bool) -> None:
        self._executor, self._trajectory, self._wanted = executor, trajectory_id, wanted
        self._slot: Slot | None = None
        self._before, self._note = b"", ""
        # The calls of one turn run at once; all of them wait until the folder has been read.
        self._once = asyncio.Lock()

    def watched(self, run: ExecuteTool) -> ExecuteTool:
        """`run`, which first archives the folder before the first call to the slot."""
        if not self._wanted:
            return run

        async def watched(call: ToolCall) -> ToolResult:
            async with self._once:
                tool = self._executor.tools.get(call.name)
                # Not at the start: a trajectory without a call to its slot takes none.
                if self._slot is None and tool is not None and tool.sandboxed:
                    slot = await self._executor.slot(self._trajectory)
                    archive, self._note = await self._look(slot)
                    # It stays in memory as long as the trajectory, of which hundreds may run.
                    self._slot, self._before = slot, await asyncio.to_thread(zlib.compress, archive, 1)
            return await run(call)

        return watched

    async def since_start(self) -> dict[str, object]:
        """`Changes` as the JSONL gets them; empty: no call went to the slot."""
        return {} if self._slot is None else asdict(await self._changes(self._slot))

    async def _changes(self, slot: Slot) -> Changes:
        folder, note, after = slot.profile.workdir, self._note, b""
        if not note:
            after, note = await self._look(slot)
        if not note:
            try:
                return await asyncio.to_thread(compare, folder, zlib.decompress(self._before), after)
            except ValueError as error:
                note = f"its archive can't be read: {error}"
        return Changes(folder, note=note)

    async def _look(self, slot: Slot) -> tuple[bytes, str]:
        """An archive of the folder, or why there is none."""
        try:
            async with asyncio.timeout(LOOK_S):
                answer = await slot.run(wire.Tar(path=".", max_bytes=MAX_FOLDER_BYTES))
        except TimeoutError:
            return b"", f"reading it took more than {LOOK_S:g} s"
        except SandboxError as error:
            _log.debug("%s: the files that it changed are unknown: %s", self._trajectory, error)
            return b"", "the slot no longer answers"
        if isinstance(answer, wire.FileResult):
            return answer.data, ""
        too_large = isinstance(answer, wire.OpError) and answer.error == "too_large"
        return b"", f"it holds more than {MAX_FOLDER_BYTES >> 20} MiB" if too_large else "it can't be read"
