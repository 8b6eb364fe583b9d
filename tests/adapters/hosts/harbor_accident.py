"""A Harbor environment whose container is killed while the fifth trial's agent works."""

from __future__ import annotations

from accident import kill_container

from atropos.adapters.harbor import AtroposEnvironment


class AccidentEnvironment(AtroposEnvironment):
    started = 0

    async def exec(self, command, *args, **kwargs):
        if "solve.sh" in command and "chmod" not in command:
            AccidentEnvironment.started += 1
            if AccidentEnvironment.started == 5:
                kill_container()
        return await super().exec(command, *args, **kwargs)
