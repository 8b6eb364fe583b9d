"""Slots as environments of mini-swe-agent: `--environment-class atropos.adapters.mini_swe_agent.AtroposEnvironment`.

`python -m atropos.adapters.mini_swe_agent` is its `mini-extra` with slots in the place of Docker, images included.
"""

from __future__ import annotations

import os
from typing import Any

from atropos.adapters.extras import extra

with extra("mini-swe-agent"):
    import minisweagent.environments

from minisweagent.environments.local import LocalEnvironment
from minisweagent.run.utilities import mini_extra
from minisweagent.utils.serialize import recursive_merge
from pydantic import Field

from atropos.adapters.process_slots import lease_until_exit
from atropos.adapters.sharing import (
    HeldSlot,
    SandboxGoneError,
    SlotRequest,
    infrastructure,
    shell_code,
    time_limit,
)
from atropos.errors import ConfigError
from atropos.event_loop import event_loop, release
from atropos.slots import ExecResult

NOT_ENDED = -1
"""Return code of a command that didn't run to its end, as mini-swe-agent's own environments have it."""
SYSTEM = ("system", "node", "release", "version", "machine")
"""What templates call the fields of `uname`."""


class AtroposEnvironmentConfig(SlotRequest):
    """What an environment's slot is, the pool that it comes from, and how commands run; the latter as for Docker.

    Attributes:
        cwd: where commands run, made if it isn't there; empty: the image's folder, else /workspace.
        env: variables of commands.
        forward_env: names of variables of this process that commands get; `env` wins over them.
        timeout: seconds that a command may take.
        interpreter: what a command is an argument of.
    """

    cwd: str = ""
    env: dict[str, str] = Field(default_factory=dict)
    forward_env: list[str] = Field(default_factory=list)
    timeout: int = 30
    interpreter: list[str] = Field(default=["bash", "-lc"], min_length=1)


class AtroposEnvironment(LocalEnvironment):
    """One slot from construction to `cleanup`; environments of a process with the same settings share a pool."""

    def __init__(self, **kwargs: Any) -> None:
        """Lease a slot; args are those of `AtroposEnvironmentConfig`.

        Raises:
            SandboxGoneError: there is none.
            ConfigError: a setting is wrong.
        """
        self._held: HeldSlot | None = None
        self.config = AtroposEnvironmentConfig(**kwargs)
        with infrastructure():
            self._held = event_loop().run(lease_until_exit(self.config, "mini-swe-agent"))
            refused = event_loop().run(self._held.make_folder(self.config.cwd)) if self.config.cwd else None
        if refused is not None:
            raise ConfigError(f"cwd: {self.config.cwd} can't be made: {refused}")
        lines = [self._run(["uname", f"-{flag}"], 10, self._held.folder).output.strip() for flag in "snrvm"]
        self._system = dict(zip(SYSTEM, lines, strict=True))

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        """Run an action's command; its end, time-outs included, is a value.

        Raises:
            SandboxGoneError: the infrastructure failed.
            Submitted: the command said that the task is complete.
        """
        limit = timeout or self.config.timeout
        result = self._run([*self.config.interpreter, action.get("command", "")], limit, cwd or self.config.cwd or ".")
        output: dict[str, Any] = {"output": result.output, "exception_info": ""}
        if result.timed_out:
            output |= not_ended("TimeoutExpired", f"the command timed out after {time_limit(result, limit)}")
        elif result.exit_code is None:
            output |= {"output": "", **not_ended("OSError", result.error or "the command could not be started")}
        else:
            output["returncode"] = shell_code(result.exit_code)
        self._check_finished(output)
        return output

    def _run(self, argv: list[str], timeout_s: float, cwd: str) -> ExecResult:
        held = self._held
        if held is None:
            raise SandboxGoneError("the environment was cleaned up")
        forwarded = {name: os.environ[name] for name in self.config.forward_env if name in os.environ}
        work = held.slot.exec(
            argv,
            timeout_s=timeout_s,
            workdir=held.path(cwd),
            env=forwarded | self.config.env,
            user=held.user,
            concurrent=True,
        )
        with infrastructure():
            return event_loop().run(work)

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """The settings and what `uname` says in the slot; nothing of this process."""
        return recursive_merge(self.config.model_dump(exclude={"pool"}), self._system, kwargs)

    def serialize(self) -> dict[str, Any]:
        """For the trajectory's file: without the pool's settings, which may hold secrets."""
        kind = f"{type(self).__module__}.{type(self).__name__}"
        settings = self.config.model_dump(mode="json", exclude={"pool"})
        return {"info": {"config": {"environment": settings, "environment_type": kind}}}

    def cleanup(self) -> None:
        """Give the slot back, in the background. Idempotent."""
        held, self._held = self._held, None
        if held is not None:
            release(held)

    def __del__(self) -> None:
        if hasattr(self, "_held"):
            self.cleanup()


def not_ended(kind: str, reason: str) -> dict[str, object]:
    """What mini-swe-agent's environments say of a command that didn't run to its end."""
    return {
        "returncode": NOT_ENDED,
        "exception_info": f"An error occurred while executing the command: {reason}",
        "extra": {"exception_type": kind, "exception": reason},
    }


def main() -> None:
    """`mini-extra` with slots in place of Docker: it passes images only to environment classes that it knows."""
    known = minisweagent.environments._ENVIRONMENT_MAPPING  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    known["docker"] = "atropos.adapters.mini_swe_agent.AtroposEnvironment"
    mini_extra.main()


if __name__ == "__main__":
    main()
