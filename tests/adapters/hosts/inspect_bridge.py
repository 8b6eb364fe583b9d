"""An agent that runs in the slot by `sandbox().exec`, and calls its model by inspect_ai's bridge, which polls by `exec`
too."""

from __future__ import annotations

from inspect_ai import Task, task
from inspect_ai.agent import AgentState, agent, sandbox_agent_bridge
from inspect_ai.dataset import Sample
from inspect_ai.model import ModelAPI, ModelOutput, modelapi
from inspect_ai.scorer import match
from inspect_ai.util import SandboxEnvironmentSpec, sandbox

from atropos.adapters.inspect_ai import AtroposSandboxConfig

POOL = {"backend": "local", "slots_per_container": 2, "max_containers": 1}
AGENT = """
import json, os, socket, time, urllib.request
port = int(os.environ["PORT"])
for _ in range(600):
    try:
        socket.create_connection(("localhost", port)).close()
        break
    except OSError:
        time.sleep(0.1)
body = json.dumps({"model": "inspect", "messages": [{"role": "user", "content": "q"}]}).encode()
headers = {"content-type": "application/json", "authorization": "Bearer x"}
request = urllib.request.Request(f"http://localhost:{port}/v1/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["message"]["content"])
"""


@modelapi(name="answers")
class Answers(ModelAPI):
    async def generate(self, input, tools, tool_choice, config) -> ModelOutput:
        return ModelOutput.from_content(self.model_name, "42")


@agent
def in_the_slot():
    async def execute(state: AgentState) -> AgentState:
        async with sandbox_agent_bridge(state) as bridge:
            result = await sandbox().exec(["python3", "-c", AGENT], env={"PORT": str(bridge.port)}, timeout=100)
            assert result.success, result.stderr
        return bridge.state

    return execute


@task
def bridge() -> Task:
    return Task(
        dataset=[Sample(input="q", target="42")],
        model="answers/any",
        solver=in_the_slot(),
        scorer=match(),
        sandbox=SandboxEnvironmentSpec("atropos", AtroposSandboxConfig(pool=POOL)),
    )
