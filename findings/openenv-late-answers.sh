#!/usr/bin/env bash
# openenv-core 0.3.0: after one step that took longer than the client waits (`message_timeout_s`), every later call gets the answer of the
# call before it, since what comes next on the socket is taken for the answer, whoever asked. A training loop that goes on after the
# TimeoutError gives each action the reward of the action before, and even `reset()` brings the old episode's last step.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q uv==0.13.9 # takes from its cache what is there
venv/bin/uv pip install -q -p venv/bin/python fastapi==0.121.2 uvicorn==0.38.0 websockets==15.0.1 requests==2.34.2 fastmcp==3.0.0
venv/bin/uv pip install -q -p venv/bin/python --no-deps openenv-core==0.3.0
cat >late.py <<'PYTHON'
import asyncio
import threading
import time
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.generic_client import GenericEnvClient

class Number(Action):
    number: int

class Answer(Observation):
    number: int

class Env(Environment):
    state = State()

    def reset(self, seed=None, episode_id=None, **rest):
        return Answer(number=0)

    def step(self, action, timeout_s=None, **rest):
        if action.number == 2:
            time.sleep(5)
        return Answer(number=action.number, reward=float(action.number))

async def main():
    server = uvicorn.Server(uvicorn.Config(create_fastapi_app(Env, Number, Answer), port=0, log_level="error"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        await asyncio.sleep(0.1)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with GenericEnvClient(f"http://127.0.0.1:{port}", message_timeout_s=3) as client:
        await client.reset()
        for number in range(1, 6):
            try:
                answer = await client.step({"number": number})
                print(f"step {number}: number {answer.observation['number']}, reward {answer.reward}")
            except TimeoutError:
                print(f"step {number}: TimeoutError")
                await asyncio.sleep(4)
        print(f"reset: number {(await client.reset()).observation['number']}")

asyncio.run(main())
PYTHON
found=$(venv/bin/python late.py 2>/dev/null)
wanted="step 1: number 1, reward 1.0
step 2: TimeoutError
step 3: number 2, reward 2.0
step 4: number 3, reward 3.0
step 5: number 4, reward 4.0
reset: number 5"
echo "openenv-core 0.3.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
