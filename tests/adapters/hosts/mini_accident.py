"""An environment of mini-swe-agent whose container is killed by the tenth command that works on a task."""

from __future__ import annotations

from accident import kill_container

from atropos.adapters.mini_swe_agent import AtroposEnvironment


class AccidentEnvironment(AtroposEnvironment):
    begun = 0

    def execute(self, action, cwd="", *, timeout=None):
        if "square" in action["command"]:
            AccidentEnvironment.begun += 1
            if AccidentEnvironment.begun == 10:
                kill_container()
        return super().execute(action, cwd, timeout=timeout)
