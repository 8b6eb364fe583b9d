"""Twenty-four tasks for verifiers, and a harness whose program does in the slot what the model says.

With KILL_AT in the environment, the container of that task's slot is killed by SIGKILL while the harness runs.
"""

import os

import verifiers.v1 as vf
from accident import kill_container

from atropos.adapters.verifiers import AtroposEnv, AtroposRuntime

TASKS = 24
PROGRAM = """
import json, subprocess, sys, urllib.request
url, key, prompt = sys.argv[1:]
asked = {"model": "scripted", "messages": [{"role": "user", "content": prompt}]}
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + key}
request = urllib.request.Request(url + "/chat/completions", json.dumps(asked).encode(), headers)
with urllib.request.urlopen(request) as response:
    message = json.load(response)["choices"][0]["message"]
command = json.loads(message["tool_calls"][0]["function"]["arguments"])["command"]
subprocess.run(["bash", "-c", command], check=True)
"""


class Square(vf.Task):
    async def setup(self, trace, runtime):
        await runtime.write("number", str(self.data.idx).encode())
        assert (await runtime.run(["cat", "number"], {})).stdout == str(self.data.idx)
        assert isinstance(runtime, AtroposRuntime) and trace.agent.runtime.id

    @vf.reward
    async def right(self, runtime):
        return float((await runtime.read("answer")).strip() == str(self.data.idx**2).encode())


class Squares(vf.Taskset[Square]):
    def load(self):
        for number in range(TASKS):
            prompt = f"RUN<n=$(cat number); sleep 0.2; echo $((n * n)) >answer>RUN {number}"
            yield Square(vf.TaskData(prompt=prompt))


class Program(vf.Harness[vf.HarnessConfig]):
    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
        if str(data.idx) == os.environ.get("KILL_AT"):
            kill_container()
        return await runtime.run_program(["python3", "-c", PROGRAM, endpoint, secret, data.prompt], {})


__all__ = ["AtroposEnv", "Program", "Squares"]
