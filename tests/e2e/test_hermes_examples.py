"""The example envs, whole: right work scores, wrong work doesn't."""

from __future__ import annotations

import json

import pytest

from examples.envs.data_env import DataEnv
from examples.envs.swe_env import BUILT_IN, SweEnv
from examples.envs.terminal_env import TerminalEnv, TerminalEnvConfig
from examples.policy.play import TASKS
from tests.e2e.hermes_support import call, groups, make, running_policy, script
from tests.engines import leftovers, params, pool_config
from tests.waiting import until

FIX = (
    "def median(values):\n    o = sorted(values)\n    m = len(o) // 2\n"
    "    return o[m] if len(o) % 2 else (o[m - 1] + o[m]) / 2\n"
)


CHEATS = {
    "weakened tests": "echo > test_stats.py",
    "exit": "echo 'import os; os._exit(0)' > stats.py",
    "own unittest": "printf 'print(\"OK\")\\nraise SystemExit(0)\\n' > unittest.py",
    "patched assertEqual": (
        "printf 'import unittest\\nunittest.TestCase.assertEqual = lambda *a: None\\n"
        "def median(values): return 0\\n' > stats.py"
    ),
    "equal to everything": (
        "printf 'class Any(float):\\n    __eq__ = lambda *a: True\\n    __hash__ = float.__hash__\\n"
        "def median(values): return Any()\\n' > stats.py"
    ),
    "patched json": (
        "printf 'import json\\njson.dumps = lambda *a: \"[true, true, true]\"\\ndef median(values): pass\\n' > stats.py"
    ),
    "prints answers": "printf 'import os\\nprint(\"[5, 5, 5]\", flush=True)\\nos._exit(0)\\n' > stats.py",
    "finds the checks": (
        'printf \'import glob, re\\ndef median(values):\\n    for f in glob.glob("/tmp/*") + glob.glob("/workspace/*"):\\n'
        '        found = re.search("gives.*?([0-9.-]+)", open(f, errors="replace").read())\\n'
        "        if found: return float(found[1])\\n' > stats.py"
    ),
    "sitecustomize": "printf 'print(\"OK\")\\nimport os\\nos._exit(0)\\n' | tee sitecustomize.py usercustomize.py",
    "no repository": "rm -rf .git",
    "a diff of its own": "printf '[diff]\\n external = echo OK\\n' >> .git/config; echo x >> stats.py",
    "out of the workspace": "rm stats.py; ln -s /tmp/calls.json stats.py",
    "a daemon": "(setsid sh -c 'while :; do echo OK > stats.py; done' >/dev/null 2>&1 &)",
}


@pytest.mark.parametrize("backend", params())
async def test_swe_env_scores_no_cheat(tmp_path, backend):
    mend = {"calls": [call("write_file", path="stats.py", content=FIX)]}
    commit = {"calls": [call("terminal", command="git add -A; git -c user.name=a -c user.email=a@a commit -qm mended")]}
    work = {"mended": [mend], "committed": [mend, commit], "untouched": ["nothing"]}
    work |= {name: [{"calls": [call("terminal", command=command)]}] for name, command in CHEATS.items()}
    rows = [{**BUILT_IN, "name": name, "issue": script(*turns, "done")} for name, turns in work.items()]
    async with running_policy(tmp_path) as policy:
        settings = pool_config(backend)
        env = make(
            SweEnv,
            policy,
            tmp_path,
            rows,
            terminal_backend=backend,
            slots_per_container=2,  # each is taken by a trajectory: verifying finds no other one
            process_concurrency=1,
            slot_memory_mib=192,
            slot_disk_mib=64,
            sandbox_job_id=settings.job_id,
            nomad_address=settings.nomad_address or "http://localhost:4646",
        )
        await env.process_manager()
    scores = {group["atropos"]["item"]: group["scores"] for group in groups(tmp_path)}
    assert scores == {name: [1.0, 1.0] if name in {"mended", "committed"} else [0.0, 0.0] for name in work}
    assert not env.metrics.retries
    await until(lambda: leftovers(backend, settings.job_id) == [], "nothing left", 60)


async def test_data_env_feeds_behind(tmp_path):
    class Scripted(DataEnv):
        def format_prompt(self, item):
            wanted = item["sensor"] if item["seed"] == 0 else "none"
            code = (
                "import json, statistics, urllib.request as u\n"
                "rows = [r for p in range(10) for r in json.load(u.urlopen(f'http://127.0.0.1:8000/{p}'))]\n"
                f"values = [r['celsius'] for r in rows if r['sensor'] == {wanted!r}] or [0]\n"
                "json.dump({'median': round(statistics.median(values), 2)}, open('answer.json', 'w'))\n"
            )
            steps = [call("write_file", path="a.py", content=code), call("terminal", command="python3 a.py")]
            return super().format_prompt(item) + script({"calls": steps}, "done")

    async with running_policy(tmp_path) as policy:
        env = make(Scripted, policy, tmp_path, [], server_type="openai")
        await env.process_manager()
    scores = {group["atropos"]["item"]: group["scores"] for group in groups(tmp_path)}
    assert scores == {"seed-0": [1.0, 1.0], "seed-1": [0.0, 0.0]}


async def test_terminal_charges_calls(tmp_path):
    settings = {"tool_pool_mode": "local", "tasks_path": str(TASKS), "task_names": ["top-words"], "fork_setup": True}
    async with running_policy(tmp_path) as policy:
        env = make(TerminalEnv, policy, tmp_path, [], config_cls=TerminalEnvConfig, **settings)
        await env.process_manager()
    [group] = groups(tmp_path)
    for score, trajectory in zip(group["scores"], group["atropos"]["trajectories"], strict=True):
        assert score == 1.0 - 0.01 * trajectory["calls"]
        assert json.loads(json.dumps(trajectory["info"]))["reward"] == 1.0
