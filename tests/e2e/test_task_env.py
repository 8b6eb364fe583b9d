"""The task env as a whole, over a real policy and real slots: what the flags say happens."""

from __future__ import annotations

import json

import pytest

from atropos.envs import TaskEnv, TaskEnvConfig
from atropos.envs.running.rollout import GroupsDropped
from atropos.errors import ConfigError
from atropos.tasks import workspace
from atropos.tasks.errors import VerifierFailed
from atropos.tasks.prepare import TaskImages
from atropos.tasks.workspace import WAITS
from examples.policy.truth import Truth
from tests import privileges
from tests.e2e.hermes_support import call, groups, make, sampled, script
from tests.files import write_files
from tests.processes import out_of_descriptors
from tests.settings import shows


def task(
    root, name, *, prompt="Do nothing.", test="echo 1 > /logs/verifier/reward.txt", toml="", setup="echo set > up"
):
    write_files(
        root / "tasks" / name,
        {
            "task.toml": f'version = "1.0"\n{toml}',
            "instruction.md": prompt,
            "environment/setup.sh": setup,
            "tests/test.sh": test,
        },
    )


async def run(policy, tmp_path, *, cls=TaskEnv, **settings):
    settings = {"tool_pool_mode": "local", "tasks_path": str(tmp_path / "tasks"), "allow_network": False, **settings}
    env = make(cls, policy, tmp_path, [], config_cls=TaskEnvConfig, **settings)
    env.n_groups_to_process = -1
    try:
        await env.process_manager()
    finally:
        assert env.pool is None, "the pool was left behind"
    return {group["atropos"]["item"]: group for group in groups(tmp_path)}, env


SEES = 'ls /tests 2>&1; echo "tests: $(cat /tests/test.sh 2>&1)"; ls /workspace; cat up'


@shows("fork_setup")
@pytest.mark.parametrize("fork_setup", [False, True])
async def test_task_from_setup_to_reward(policy, tmp_path, fork_setup):
    look = script(
        {"calls": [call("terminal", command=SEES)]}, {"calls": [call("terminal", command="echo x > out")]}, "done"
    )
    check = '[ "$(cat up out)" = "set\nx" ] && echo 0.75 > /logs/verifier/reward.txt'
    task(tmp_path, "looks", prompt=look, test=check, toml='[verifier]\nenvironment_mode = "separate"\n')
    found, env = await run(policy, tmp_path, fork_setup=fork_setup)
    group = found["looks"]
    assert group["scores"] == [0.75, 0.75]
    for messages in group["messages"]:
        told = json.dumps(messages)
        assert "reward.txt" not in told, "the agent saw the tests"
        assert "set" in told
    assert {t["info"]["task"] for t in group["atropos"]["trajectories"]} == {"looks"}
    assert env.metrics.trajectories == 2


@shows("verifier_mode")
@pytest.mark.parametrize(("mode", "score"), [("shared", 1.0), ("view", 0.0), ("separate", 0.0)])
async def test_verifier_runs_where_told(policy, tmp_path, mode, score):
    plant = script({"calls": [call("terminal", command="echo x > /etc/planted")]}, "done")
    task(tmp_path, "t", prompt=plant, test="test -e /etc/planted; echo $((1 - $?)) > /logs/verifier/reward.txt")
    found, _ = await run(policy, tmp_path, verifier_mode=mode)
    assert found["t"]["scores"] == [score, score]


@shows("keep_processes")
@pytest.mark.parametrize(("keep", "score"), [("task", 1.0), ("none", 0.0)])
async def test_operator_sets_variables(policy, tmp_path, keep, score):
    leave = script({"calls": [call("terminal", command="(exec -a left-over sleep 1000 >/dev/null 2>&1 &)")]}, "done")
    toml = "[verifier]\nkeep_processes = true\nenvironment_mode = 'shared'\n"
    task(tmp_path, "t", prompt=leave, test="pgrep -fc ^left-over > /logs/verifier/reward.txt", toml=toml)
    found, _ = await run(policy, tmp_path, keep_processes=keep)
    assert found["t"]["scores"] == [score, score]


async def test_verifier_failure_drops_or_zeroes(policy, tmp_path):
    task(tmp_path, "fine")
    task(tmp_path, "silent", test="true")
    with pytest.raises(GroupsDropped, match="1 of 2 groups"):
        await run(policy, tmp_path)
    assert [group["atropos"]["item"] for group in groups(tmp_path)] == ["fine"]
    found, _ = await run(
        policy, tmp_path, verifier_failure="zero", data_path_to_save_groups=str(tmp_path / "groups2.jsonl")
    )
    del found
    second = [json.loads(line) for line in (tmp_path / "groups2.jsonl").read_text().splitlines()]
    assert {group["atropos"]["item"]: group["scores"] for group in second} == {"fine": [1.0, 1.0], "silent": [0.0, 0.0]}


TRICKS = {
    "pipe": "mkfifo out",
    "full": "dd if=/dev/zero of=fill bs=1M",
    "many": "i=0; while : > f$i; do i=$((i+1)); done",
    "bare": "rm -rf /bin /usr/bin",
}


async def test_hindered_verifier_is_0(policy, tmp_path):
    for name, trick in TRICKS.items():
        task(
            tmp_path,
            name,
            prompt=script({"calls": [call("terminal", command=trick, timeout=60)]}, "done"),
            test="set -e; [ ! -e out ] || cat out > answer; cat /proc/uptime > x; echo 0.5 > /logs/verifier/reward.txt",
            toml='[verifier]\ntimeout_sec = 5.0\nenvironment_mode = "shared"\n',  # in a view most of them hinder nothing
        )
    found, env = await run(policy, tmp_path, slot_inodes=2000, slot_disk_mib=16)
    assert {name: group["scores"] for name, group in found.items()} == {name: [0.0, 0.0] for name in TRICKS}
    assert env.metrics.verifier_zeros == 2 * len(TRICKS)
    assert not env.metrics.dropped


async def test_each_missing_reward_is_looked_into(policy, tmp_path, monkeypatch):
    looked, verify = [], workspace.verify

    async def untouched(slot, *rest, **options):
        verdict = await verify(slot, *rest, **options)  # where the agent was, it raises
        looked.append(slot)
        if len(looked) > 1:
            raise VerifierFailed("what the tests download is away")
        return verdict

    monkeypatch.setattr(workspace, "verify", untouched)
    spoil = script({"calls": [call("terminal", command="touch out")]}, "done")
    task(tmp_path, "t", prompt=spoil, test="[ -e out ] || echo 1 > /logs/verifier/reward.txt")
    with pytest.raises(GroupsDropped, match="verifier_failed"):
        await run(policy, tmp_path)
    assert len(looked) == 2


async def test_unreadable_tests_no_fault(policy, tmp_path):
    task(tmp_path, "t")
    here = tmp_path / "tasks/t/tests"
    away = here.with_name("away")

    class Env(TaskEnv):
        async def verify_and_score_trajectory(self, *arguments, **named):
            if away.exists():
                away.rename(here)
            else:
                here.rename(away)  # as on a share whose server doesn't answer
            return await super().verify_and_score_trajectory(*arguments, **named)

    found, env = await run(policy, tmp_path, cls=Env, group_size=1)
    assert found["t"]["scores"] == [1.0]
    assert env.metrics.retries == {"sandbox_error": 1}


async def test_no_descriptors_is_no_tasks_fault(policy, tmp_path, monkeypatch):
    folder = steps_task(
        tmp_path,
        "t",
        [("cat given >> out", 'cmp out <(printf "xx"); echo $((1-$?)) > /logs/verifier/reward.txt', "")] * 2,
    )
    for step in ("s0", "s1"):
        (folder / step / "workdir").mkdir()
        (folder / step / "workdir/given").write_text("x")
    short: list[str] = []

    def once(owner, name):
        work = getattr(owner, name)

        async def first_short(*arguments, **named):
            if name in short:
                return await work(*arguments, **named)
            short.append(name)
            with out_of_descriptors():
                return await work(*arguments, **named)

        monkeypatch.setattr(owner, name, first_short)

    once(TaskImages, "prepare")
    once(workspace, "prepare_step")
    found, env = await run(policy, tmp_path, group_size=1)
    assert found["t"]["scores"] == [0.5]
    assert short == ["prepare", "prepare_step"]
    assert env.metrics.retries == {"sandbox_error": 2}


async def test_failed_set_up_drops_group(policy, tmp_path):
    task(tmp_path, "broken", setup="exit 3")
    task(tmp_path, "fine")
    with pytest.raises(GroupsDropped, match="task_fault"):
        await run(policy, tmp_path)
    assert [group["atropos"]["item"] for group in groups(tmp_path)] == ["fine"]


async def test_late_work_is_scored(policy, tmp_path):
    steps = [{"calls": [call("terminal", command="echo x >> out; sleep 0.4")]}] * 40
    task(
        tmp_path,
        "slow",
        prompt=script(*steps),
        test="touch out; wc -l < out > /logs/verifier/reward.txt",
        toml="[agent]\ntimeout_sec = 3.0\n",
    )
    found, _ = await run(policy, tmp_path)
    group = found["slow"]
    assert all(score < len(steps) for score in group["scores"])
    assert {t["stop_reason"] for t in group["atropos"]["trajectories"]} == {"max_time"}


def config(tmp_path, **settings):
    return TaskEnvConfig(tasks_path=str(tmp_path / "tasks"), tokenizer_name="x", **settings)


@shows("task_images")
async def test_missing_image_named_early(policy, tmp_path):
    task(tmp_path, "t")
    nowhere = "127.0.0.1:1/nowhere:3"
    (tmp_path / "tasks/t/environment/Dockerfile").write_text(f"FROM {nowhere}\nWORKDIR /workspace\n")
    with pytest.raises(ConfigError, match=nowhere):
        await run(policy, tmp_path)
    with pytest.raises(ConfigError, match="no task's image is available"):
        await run(policy, tmp_path, skip_bad_tasks=True)
    found, _ = await run(policy, tmp_path, task_images=f"debian*,{nowhere}")
    assert found["t"]["scores"] == [1.0, 1.0]


def test_lacking_is_refused(tmp_path):
    task(tmp_path, "big", toml="[environment]\nmemory_mb = 99999\n")
    with pytest.raises(ConfigError, match=r"big/task\.toml: environment\.memory_mb: 99999 wanted.*slot_memory_mib"):
        TaskEnv(config(tmp_path), [])
    task(tmp_path, "big", toml="[environment]\nallow_internet = false\nmemory_mb = 4096\n")
    task(tmp_path, "open")
    with pytest.raises(ConfigError, match="tokenizer"):  # the next thing that is wrong
        TaskEnv(config(tmp_path, allow_network=True, fork_setup=True), [])
    with pytest.raises(ConfigError, match="matches 'nosuch'"):
        TaskEnv(config(tmp_path, task_names="nosuch"), [])


@shows("skip_bad_tasks")
def test_bad_named_or_left_out(tmp_path, caplog):
    task(tmp_path, "fine")
    task(tmp_path, "gpu", toml="[environment]\ngpus = 1\n")
    task(tmp_path, "big", toml="[environment]\nmemory_mb = 99999\n")
    with pytest.raises(ConfigError, match=r"2 of 3 tasks can't be used:\n  big: .*memory_mb.*\n  gpu: .*gpus"):
        TaskEnv(config(tmp_path), [])
    with pytest.raises(ConfigError, match="tokenizer"):  # the next thing that is wrong
        TaskEnv(config(tmp_path, skip_bad_tasks=True), [])
    assert [name in caplog.text for name in ("gpu is left out", "big is left out")] == [True, True]
    with pytest.raises(ConfigError, match="none of 1 tasks can be used"):
        TaskEnv(config(tmp_path, skip_bad_tasks=True, task_names="gpu"), [])


@shows("architecture")
def test_dockerfiles_shape_slots(tmp_path):
    task(tmp_path, "arm")
    (tmp_path / "tasks/arm/environment/Dockerfile").write_text("FROM --platform=linux/arm64 debian\n")
    with pytest.raises(ConfigError, match=r"arm: .*--platform=linux/arm64: slots are linux/amd64; .* architecture"):
        TaskEnv(config(tmp_path, architecture="amd64"), [])
    with pytest.raises(ConfigError, match="tokenizer"):  # the next thing that is wrong
        TaskEnv(config(tmp_path, architecture="arm64"), [])


@shows("task_limits")
def test_limits_are_lowered_as_set(tmp_path, caplog):
    task(tmp_path, "big", toml="[environment]\nmemory_mb = 99999\n")
    with pytest.raises(ConfigError, match="tokenizer"):
        TaskEnv(config(tmp_path, task_limits="clamp"), [])
    assert "task limit lowered: big: environment.memory_mb: 99999 wanted, slots have at most 10240" in caplog.text
    with pytest.raises(ConfigError, match=r"environment\.memory_mb"):
        TaskEnv(config(tmp_path, task_limits="refuse"), [])


@shows("task_variables")
def test_only_listed_variables_reach_a_task(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", "j")
    task(tmp_path, "t", toml="[verifier.env]\nJUDGE = '${JUDGE}'\n")
    with pytest.raises(ConfigError, match="list it in task_variables"):
        TaskEnv(config(tmp_path), [])
    with pytest.raises(ConfigError, match="tokenizer"):
        TaskEnv(config(tmp_path, task_variables="JUDGE"), [])


@shows("dataset", "dataset_path")
def test_a_clones_data_set_is_used(tmp_path):
    task(tmp_path, "one")
    task(tmp_path, "gpu", toml="[environment]\ngpus = 1\n")
    rows = [
        {"name": "set", "version": version, "tasks": [{"path": f"tasks/{name}"}]}
        for version, name in (("1", "one"), ("2", "gpu"))
    ]
    (tmp_path / "registry.json").write_text(json.dumps(rows))
    with pytest.raises(ConfigError, match="tokenizer"):
        TaskEnv(config(tmp_path, dataset="set@1", dataset_path=str(tmp_path)), [])
    with pytest.raises(ConfigError, match=r"1 of 1 tasks .*\n  gpu"):
        TaskEnv(config(tmp_path, dataset="set@2", dataset_path=str(tmp_path)), [])


def steps_task(root, name, steps, toml="", **more):
    """A task whose steps are (what the agent runs, tests/test.sh, what stands in its table)."""
    toml += "".join(f"[[steps]]\nname = 's{number}'\n{table}\n" for number, (_, _, table) in enumerate(steps))
    task(root, name, toml=toml, **more)
    turns = [turn for command, _, _ in steps for turn in ({"calls": [call("terminal", command=command)]}, "done")]
    for number, (_, test, _) in enumerate(steps):
        folder = root / "tasks" / name / "steps" / f"s{number}"
        (folder / "tests").mkdir(parents=True)
        (folder / "instruction.md").write_text(f"Step {number}." if number else script(*turns))
        (folder / "tests/test.sh").write_text(test)
    return root / "tasks" / name / "steps"


SCORE = "echo %s > /logs/verifier/reward.txt"


async def test_steps_share_conversation(policy, tmp_path):
    look = "cat log; ls /tests /logs/verifier 2>&1"
    folder = steps_task(
        tmp_path,
        "both",
        [
            ("echo one >> log", '[ "$(cat log)" = one ] && ' + SCORE % "0.5", "min_reward = 0.5"),
            (f"{look}; echo two >> log", '[ "$(cat log)" = "one\nset\ntwo" ] && ' + SCORE % 1, ""),
        ],
    )
    (folder / "s1/workdir").mkdir()
    (folder / "s1/workdir/setup.sh").write_text("echo set >> log")
    steps_task(
        tmp_path,
        "last",
        [("true", SCORE % 0, ""), ("true", SCORE % 1, "")],
        toml="multi_step_reward_strategy = 'final'\n",
    )
    steps_task(tmp_path, "stops", [("true", SCORE % 0.25, "min_reward = 0.5"), ("touch never", SCORE % 1, "")])
    found, env = await run(policy, tmp_path)
    assert {name: group["scores"] for name, group in found.items()} == {
        "both": [0.75] * 2,
        "last": [1.0] * 2,
        "stops": [0.25] * 2,
    }
    for messages in found["both"]["messages"]:
        assert [message["role"] for message in messages] == ["system", *["user", "assistant"] * 4]
        told = messages[7]["content"]
        assert "one" in told
        assert "reward.txt" not in told
        assert "test.sh" not in told
    truth = Truth(policy[1])
    assert all(turn in truth for group in found.values() for index in range(2) for turn in sampled(group, index))
    assert all("Step 1." not in json.dumps(messages) for messages in found["stops"]["messages"])
    steps = found["both"]["atropos"]["trajectories"][0]["info"]["steps"]
    assert {name: one["metrics"] for name, one in steps.items()} == {
        "both/s0": {"reward": 0.5},
        "both/s1": {"reward": 1.0},
    }
    assert env.metrics.trajectories == 6


async def test_step_follows_a_verifier(policy, tmp_path):
    test = "cat /app/log; wc -l < /app/log > /logs/verifier/reward.txt"
    toml = "artifacts = ['/app']\n[verifier]\nenvironment_mode = 'separate'\n"
    steps_task(
        tmp_path,
        "t",
        [
            ("echo x >> /app/log; echo own > /etc/own", test, ""),
            ("cat /etc/own /etc/judge >> /app/log", test, ""),
        ],
        toml=toml,
        setup="mkdir /app",
    )
    (tmp_path / "tasks/t/tests/Dockerfile").write_text("FROM debian\nRUN echo j > /etc/judge\nCOPY . /tests/\n")
    for number in range(2):
        (tmp_path / f"tasks/t/steps/s{number}/tests/Dockerfile").write_text("FROM debian\nCOPY . /tests/\n")
    found, _ = await run(policy, tmp_path)
    assert found["t"]["scores"] == [1.5, 1.5], (
        "one line, then two: the second step saw its own files and not the verifier's"
    )


async def test_hindered_step_ends_with_0(policy, tmp_path):
    hindered = "[ ! -e stop ] && " + SCORE % 1
    steps_task(
        tmp_path,
        "t",
        [("true", SCORE % 1, ""), ("touch stop", hindered, ""), ("touch never", SCORE % 1, "")],
    )
    steps_task(tmp_path, "silent", [("true", "true", "")])
    with pytest.raises(GroupsDropped, match="1 x verifier_failed"):
        await run(policy, tmp_path)
    [group] = groups(tmp_path)
    assert (group["atropos"]["item"], group["scores"]) == ("t", [0.5, 0.5])
    assert "Step 2." not in json.dumps(group["messages"])


async def test_separate_verifier_skills(policy, tmp_path):
    toml = "artifacts = ['/app']\n[environment]\nskills_dir = '/skills'\n[verifier]\nenvironment_mode = 'separate'\n"
    setup = "mkdir -p /app /skills/it; printf -- '---\\nname: it\\ndescription: helps\\n---\\n' > /skills/it/SKILL.md"
    task(
        tmp_path,
        "t",
        prompt=script({"calls": [call("terminal", command="echo x > /app/out")]}, "done"),
        test="cp /judge /logs/verifier/reward.txt; cat /app/out",
        toml=toml,
        setup=setup,
    )
    (tmp_path / "tasks/t/tests/Dockerfile").write_text("FROM debian\nRUN echo 0.5 > /judge\nCOPY test.sh /tests/\n")
    found, _ = await run(policy, tmp_path)
    group = found["t"]
    assert group["scores"] == [0.5, 0.5]
    assert "<location>/skills/it/SKILL.md</location>" in group["messages"][0][1]["content"]
    assert group["atropos"]["trajectories"][0]["info"]["verifier_log"].strip() == "x"


SERVER = """
import socket, sys
with socket.create_server(("127.0.0.1", 8000)) as server:
    open("/starts", "a").write(" ".join(sys.argv[1:]) + "\\n")
    while True:
        server.accept()[0].sendall(b"served\\n")
"""
HEALTHY = "[environment.healthcheck]\ncommand = 'cat < /dev/tcp/127.0.0.1/8000'\ninterval_sec = 0.1\nretries = 600\n"
ALIVE = "until read said < /dev/tcp/127.0.0.1/8000 || ! pidof -q python3; do sleep 0.1; done; pidof -q python3"
SERVED = "until read said < /dev/tcp/127.0.0.1/8000; do sleep 0.1; done; cat /starts"


@pytest.mark.parametrize("fork_setup", [False, True])
async def test_each_slot_has_main(policy, tmp_path, fork_setup):
    start = "one two sh -c sleep infinity\n"
    look = script({"calls": [call("terminal", command=f"{SERVED} > seen")]}, "done")
    test = f'{SERVED}; [ "$said" = served ] && [ "$(cat seen)" = "{start.strip()}" ] && ' + SCORE % 1
    modes = {mode: f"[verifier]\nenvironment_mode = '{mode}'\n" for mode in ("view", "shared", "separate")}
    for mode, toml in modes.items():
        task(tmp_path, mode, prompt=look, test=test, toml=HEALTHY + toml)
    counted = f"{SERVED}; wc -l < /starts > /logs/verifier/reward.txt"
    steps_task(tmp_path, "steps", [(SERVED, counted, "")] * 2, toml=HEALTHY + modes["separate"])
    for name in (*modes, "steps"):
        folder = tmp_path / "tasks" / name / "environment"
        (folder / "serve.py").write_text(SERVER)
        started = ["python3", "-S", "/serve.py", "one", "two"]
        entrypoint = "[]" if name == "view" else json.dumps(started)
        if name == "view":
            command = json.dumps([*started, *WAITS])
            (folder / "docker-compose.yaml").write_text(f"services: {{main: {{build: ., command: {command}}}}}\n")
        (folder / "Dockerfile").write_text(
            f"FROM debian\nCOPY serve.py /\nWORKDIR /app\nENTRYPOINT {entrypoint}\nCMD no\n"
        )
    found, _ = await run(policy, tmp_path, fork_setup=fork_setup)
    assert {name: group["scores"] for name, group in found.items()} == {name: [1.0, 1.0] for name in (*modes, "steps")}
    for messages in found["steps"]["messages"]:
        told = [message["content"] for message in messages]
        assert [told[3].count(start.strip()), told[7].count(start.strip())] == [1, 2], (
            "it is started again where the agent goes on"
        )


@pytest.mark.parametrize("mode", ["shared", "view"])
async def test_servers_stay_for_steps(policy, tmp_path, mode):
    mine = f"setsid python3 -S /serve.py agent >/dev/null 2>&1 & {SERVED}"
    test = "(exec -a left-by-tests sleep 1000) & " + SCORE % 1
    look = f"timeout 20 bash -c '{SERVED}'; pgrep -fc '^left-by-tests'"
    for name, first, start in (
        ("its-own", mine, ""),
        ("the-machines", SERVED, 'ENTRYPOINT ["python3", "-S", "/serve.py"]'),
    ):
        steps_task(
            tmp_path,
            name,
            [(first, test, ""), (look, test, ""), (look, SCORE % 1, "")],
            toml=f"[verifier]\nenvironment_mode = '{mode}'\n",
        )
        folder = tmp_path / "tasks" / name / "environment"
        (folder / "serve.py").write_text(SERVER)
        (folder / "Dockerfile").write_text(f"FROM debian\nCOPY serve.py /\nWORKDIR /app\n{start}\n")
    found, _ = await run(policy, tmp_path)
    for name, started in (("its-own", "agent"), ("the-machines", "sh -c sleep infinity")):
        for messages in found[name]["messages"]:
            told = [message["content"] for message in messages[3::4]]
            assert [started in told[0], *(f"{started}\\n0\\n" in one for one in told[1:])] == [True] * 3, told


async def test_bad_entrypoint_is_tasks(policy, tmp_path):
    task(tmp_path, "t")
    (tmp_path / "tasks/t/environment/Dockerfile").write_text('FROM debian\nENTRYPOINT ["/nothing"]\n')
    with pytest.raises(GroupsDropped, match="task_fault"):
        await run(policy, tmp_path)


RUINS = {
    "its-program": "rm /start",
    "its-server": "pkill python3",
    "its-file": "rm /needed",
    "its-place": "mkdir -p /app/setup.sh/x",
}


@shows("verifier_failure")
@pytest.mark.parametrize(("decided", "score"), [("blame", 0.25), ("drop", None)])
async def test_a_blocked_step_scores_0(policy, tmp_path, decided, score):
    for name, ruin in RUINS.items():
        steps_task(
            tmp_path,
            name,
            [
                (ruin, SCORE % 0.5, ""),
                ("echo not reached", SCORE % 1, f"healthcheck = {{command = '{ALIVE}', retries = 1}}"),
            ],
            toml="[verifier]\nenvironment_mode = 'separate'\n" if name == "its-program" else "",
        )
        folder = tmp_path / "tasks" / name
        (folder / "steps/s1/workdir").mkdir()
        (folder / "steps/s1/workdir/setup.sh").write_text("cat /needed")
        (folder / "environment/serve.py").write_text(SERVER)
        (folder / "environment/start").write_text("#!/bin/sh\nexec python3 -S /serve.py\n")
        (folder / "environment/Dockerfile").write_text(
            'FROM debian\nCOPY serve.py /\nCOPY --chmod=755 start /\nRUN touch /needed\nWORKDIR /app\nENTRYPOINT ["/start"]\n'
        )
    if score is None:
        with pytest.raises(GroupsDropped, match=f"{len(RUINS)} x verifier_failed"):
            await run(policy, tmp_path, verifier_failure=decided)
        return
    found, env = await run(policy, tmp_path, verifier_failure=decided)
    assert {name: group["scores"] for name, group in found.items()} == {name: [score, score] for name in RUINS}
    assert env.metrics.verifier_zeros == 2 * len(RUINS)
    assert "not reached" not in json.dumps([group["messages"][0][2:] for group in found.values()])


async def test_broken_step_is_not_agents(policy, tmp_path):
    folder = steps_task(tmp_path, "t", [("true", SCORE % 0.5, ""), ("true", SCORE % 1, "")])
    (folder / "s1/workdir").mkdir()
    (folder / "s1/workdir/setup.sh").write_text("exit 3")
    with pytest.raises(GroupsDropped, match="1 x verifier_failed"):
        await run(policy, tmp_path)


@privileges.owners
@shows("verifier_layers")
@pytest.mark.parametrize("mode", ["view", "shared"])
async def test_layers_are_for_tests_alone(policy, tmp_path, mode):
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "judge").write_text("#!/bin/sh\ncat /opt/data/answer\n")
    (tools / "judge").chmod(0o755)
    (tools / "Dockerfile").write_text(
        "FROM debian AS made\nRUN mkdir -p /opt/data && echo 0.5 > /opt/data/answer\n"
        "FROM scratch\nCOPY judge /opt/tools/\nCOPY --from=made /opt/data /opt/data\n"
    )
    (tmp_path / "tree/opt/more").mkdir(parents=True)
    (tmp_path / "tree/opt/more/file").write_text("more")
    look = "ls /opt/tools /opt/more; mkdir -m 700 /opt/mine; stat -c %a /workspace"
    task(
        tmp_path,
        "t",
        prompt=script({"calls": [call("terminal", command=look)]}, "done"),
        test="stat -c %a /workspace; cat /opt/more/file; /opt/tools/judge > /logs/verifier/reward.txt",
        setup="chmod 710 /workspace",
    )
    layers = [str(tools / "Dockerfile"), f"dir:{tmp_path}/tree"]
    found, _ = await run(policy, tmp_path, verifier_mode=mode, verifier_layers=layers)
    assert found["t"]["scores"] == [0.5, 0.5]
    assert found["t"]["messages"][0][3]["content"].count("No such file") == 2
    log = found["t"]["atropos"]["trajectories"][0]["info"]["verifier_log"]
    assert log.startswith("710\nmore"), "a folder of which a layer has nothing stays as it is"


@shows("epochs", "shuffle")
async def test_items_in_order_by_passes(tmp_path, policy):
    for name in "abcdef":
        task(tmp_path, name)

    def fresh(**settings):
        settings = {"tasks_path": str(tmp_path / "tasks"), **settings}
        return make(TaskEnv, policy, tmp_path, [], config_cls=TaskEnvConfig, **settings)

    async def names(env, count):
        found = [await env.get_next_item() for _ in range(count)]
        return "".join(item.name if item else "." for item in found)

    assert await names(fresh(), 8) == "abcdef.."
    assert await names(fresh(epochs=2), 14) == "abcdefabcdef.."
    one, two = fresh(shuffle=True, seed=1, epochs=2), fresh(shuffle=True, seed=1, epochs=2)
    order = await names(one, 12)
    assert order == await names(two, 12)
    assert sorted(order[:6]) == list("abcdef")
    assert order[:6] != order[6:]
    serving = fresh()
    with pytest.raises(ConfigError):
        await serving.env_manager()
    assert "." not in await names(serving, 20)
