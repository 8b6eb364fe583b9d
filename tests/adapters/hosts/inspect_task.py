"""Twenty samples on slots with a scripted model; and once more, while the container that sample 10 runs in is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageTool, GenerateConfig, ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import match
from inspect_ai.solver import Solver, generate, solver, use_tools
from inspect_ai.tool import bash
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from atropos.adapters.inspect_ai import AtroposSandboxConfig
from tests.processes import first_processes, parent_of

POOL = {"backend": "local", "slots_per_container": 4, "max_containers": 1}


@modelapi(name="scripted")
class Scripted(ModelAPI):
    async def generate(
        self, input: list[Any], tools: list[Any], tool_choice: Any, config: GenerateConfig
    ) -> ModelOutput:
        last = input[-1]
        if isinstance(last, ChatMessageTool):
            return ModelOutput.from_content(self.model_name, f"the answer is {last.text.strip() or last.error}")
        return ModelOutput.for_tool_call(self.model_name, "bash", {"command": last.text})


@solver
def accident():
    async def solve(state, generate):
        if state.sample_id == 10:
            said = await sandbox().exec(["readlink", "/proc/self/ns/pid"])
            (first,) = first_processes(namespace=said.stdout.strip())
            os.kill(parent_of(parent_of(first)), signal.SIGKILL)  # above it is the spawner of its container
        return state

    return solve


def squares(*before: Solver) -> Task:
    samples = [Sample(id=n, input=f"echo $(({n} * {n}))", target=str(n * n)) for n in range(1, 21)]
    return Task(
        dataset=samples,
        model="scripted/any",
        solver=[use_tools(bash()), *before, generate()],
        scorer=match(),
        sandbox=SandboxEnvironmentSpec("atropos", AtroposSandboxConfig(pool=POOL)),
    )


@task
def twenty() -> Task:
    return squares()


@task
def twenty_and_an_accident() -> Task:
    return squares(accident())
