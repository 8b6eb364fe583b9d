"""Hooks verify in a view: what the agent left rewrites neither hidden tests nor the machine, and its servers answer."""

from __future__ import annotations

import pytest

from atropos.envs import AgentEnv, AgentEnvConfig
from atropos.tools import ToolCall
from tests.e2e.hermes_support import call, groups, make, script
from tests.e2e.test_hermes import Env as HermesEnv
from tests.settings import shows

REWRITES = (
    "cat > d.sh <<'END'\nwhile :; do for f in hidden.sh /tmp/hidden.sh; do [ -e $f ] && echo 'echo 42' > $f; done; done\nEND\n"
    "for i in 1 2; do (setsid bash d.sh >/dev/null 2>&1 &); done"
)
SERVES = """echo 42 > answer; setsid -w python3 -c '
import http.server, os
server = http.server.ThreadingHTTPServer(("127.0.0.1", 8125), http.server.SimpleHTTPRequestHandler)
if not os.fork():
    server.serve_forever()
' >/dev/null 2>&1"""
"""Ends when the server listens."""
FETCHES = "python3 -I -c \"import urllib.request as u; print(u.urlopen('http://127.0.0.1:8125/answer').read().decode(), end='')\""
MACHINE = "printf '#!/usr/bin/python3\\nprint(42)\\n' > /b; chmod +x /b; cp /b /usr/bin/cat; cp /b /usr/local/bin/cat; echo 41 > answer"
COMPARES = "echo 42 > /tmp/expected; (cd / && python3 -c 'import json') && (python3 -c 'import re') && cmp /tmp/expected answer && cat answer"
LEADS = [
    "ln -sf /tmp/expected answer",
    "ln -s /tmp t; ln -sf t/expected answer",
    "ln -s /tmp/expected /expected; ln -sf /expected answer",
    "d=json; mkdir /$d; echo 'import os; print(42); os.kill(os.getppid(), 9)' > /$d/__init__.py",
    "m=re; echo 'import os; print(42); os.kill(os.getppid(), 9)' > $m.py",
]
"""Tricks with what only the hook's commands write, and with a folder at the top that the prompt doesn't name."""
HIDDEN = "sleep 0.3; cat answer 2>/dev/null || echo none"


class Agent(AgentEnv):
    """Items are what the agent runs, and where the hidden test is written after it has ended; it is to print 42."""

    name = "hidden"
    test = HIDDEN

    async def setup_agent_env(self):
        self.items = enumerate(self.work)

    async def get_next_item(self):
        number, (work, path) = next(self.items, (0, (None, "")))
        return None if work is None else {"name": str(number), "work": work, "path": path}

    def build_task(self, item):
        return script({"calls": [call("terminal", command=item["work"])]}, "done")

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await exec_tool(ToolCall(name="terminal", arguments={"command": "echo ready > /etc/prepared"}))
        return {}

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        await exec_tool(ToolCall(name="write_file", arguments={"path": item["path"], "content": self.test}))
        done = await exec_tool(
            ToolCall(name="terminal", arguments={"command": f"sleep 0.2; cat /etc/prepared && bash {item['path']}"})
        )
        return float(done.output == "ready\n42\n"), {"said": done.output}


async def scores(policy, tmp_path, work, test=HIDDEN, base=Agent, **settings):
    """Those of each work: what the agent runs, or that and where the hidden test is."""
    pairs = [(each, "hidden.sh") if isinstance(each, str) else each for each in work]
    cls = type("Agent", (base,), {"work": pairs, "test": test})
    env = make(cls, policy, tmp_path, [], config_cls=AgentEnvConfig, tool_pool_mode="local", **settings)
    env.n_groups_to_process = -1
    await env.process_manager()
    found = {group["atropos"]["item"]: group["scores"] for group in groups(tmp_path)}
    return [found[str(number)] for number in range(len(pairs))]


async def test_no_daemon_raises_a_score(policy, tmp_path):
    rewrites = [REWRITES, (REWRITES, "/tmp/hidden.sh")] * 3
    honest = [f"{REWRITES}; echo 42 > answer", "echo 42 > answer; rm -rf /usr/bin/cat /etc"]
    found = await scores(policy, tmp_path, [*rewrites, MACHINE, *honest])
    assert found == [[0, 0]] * 7 + [[1, 1]] * 2


async def test_server_of_agent_answers(policy, tmp_path):
    assert await scores(policy, tmp_path, [SERVES], test=FETCHES) == [[1, 1]]


async def test_hook_may_choose_slot(policy, tmp_path):
    work = ["echo 42 > /tmp/there; (sleep 1000 &)"]
    test = "cat /tmp/there; ! pgrep -x sleep"
    assert await scores(policy, tmp_path, work, test=test, verifier_mode="shared") == [[1, 1]]


@shows("verifier_folders")
@pytest.mark.parametrize(("folders", "score"), [(["/workspace"], 0), (["/workspace", "/root"], 1)])
async def test_view_shows_listed_folders(policy, tmp_path, folders, score):
    found = await scores(
        policy, tmp_path, ["echo 42 > /root/answer"], test="cat /root/answer 2>&1", verifier_folders=folders
    )
    assert found == [[score, score]]


async def test_home_that_is_shown_runs_nothing(policy, tmp_path):
    plant = "mkdir -p $(python3 -m site --user-site); echo 'import os; print(42, flush=True); os._exit(0)' > $(python3 -m site --user-site)/x.pth"
    found = await scores(
        policy,
        tmp_path,
        [f"echo 41 > /root/answer; {plant}", f"echo 42 > /root/answer; {plant}"],
        test='python3 -c \'print(open("/root/answer").read(), end="")\'',
        verifier_folders=["/workspace", "/root"],
    )
    assert found == [[0, 0], [1, 1]]


@shows("verifier_quiesce")
async def test_quiesced_have_ended(policy, tmp_path):
    assert await scores(policy, tmp_path, [SERVES], test=FETCHES, verifier_quiesce=True) == [[0, 0]]


class ServingAgent(Agent):
    """Its set-up leaves a server running in the slot."""

    async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
        await super().setup_trajectory_workspace(item, trajectory_id=trajectory_id, exec_tool=exec_tool)
        await exec_tool(ToolCall(name="terminal", arguments={"command": SERVES}))
        return {}


@pytest.mark.parametrize(("quiesce", "score"), [(False, 1), (True, 0)])
async def test_set_up_servers_answer(policy, tmp_path, quiesce, score):
    found = await scores(policy, tmp_path, ["true"], test=FETCHES, base=ServingAgent, verifier_quiesce=quiesce)
    assert found == [[score, score]]


async def test_beside_set_up_s_programs(policy, tmp_path):
    works = ["rm answer; " + REWRITES, MACHINE]
    assert await scores(policy, tmp_path, works, base=ServingAgent) == [[0, 0]] * 2


async def test_reward_function_sees_view(policy, tmp_path):
    class Env(HermesEnv):
        async def judge(self, item, result, ctx):
            ctx.write_file("hidden.sh", HIDDEN)
            return float(ctx.terminal("sleep 0.2; bash hidden.sh")["output"] == "42\n")

    rows = [
        {"prompt": script({"calls": [call("terminal", command=work)]}, "done")}
        for work in [REWRITES] * 3 + [MACHINE, "echo 42 > answer"]
    ]
    env = make(Env, policy, tmp_path, rows)
    env.n_groups_to_process = -1
    await env.process_manager()
    assert sorted(sum(group["scores"]) for group in groups(tmp_path)) == [0, 0, 0, 0, 2]


async def test_no_link_to_hooks_scores(policy, tmp_path):
    found = await scores(policy, tmp_path, [*LEADS, "echo 42 > answer"], test=COMPARES)
    assert found == [[0, 0]] * len(LEADS) + [[1, 1]]


async def test_no_link_to_a_reward_s_files_scores(policy, tmp_path):
    class Env(HermesEnv):
        async def judge(self, item, result, ctx):
            return float(ctx.terminal(COMPARES)["output"] == "42\n")

    works = [*LEADS, "echo 42 > answer"]
    rows = [{"prompt": script({"calls": [call("terminal", command=work)]}, "done")} for work in works]
    env = make(Env, policy, tmp_path, rows)
    env.n_groups_to_process = -1
    await env.process_manager()
    assert sorted(sum(group["scores"]) for group in groups(tmp_path)) == [0] * len(LEADS) + [2]
