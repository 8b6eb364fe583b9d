"""The task env as a whole, over a real policy and real slots: what the flags say happens."""

from __future__ import annotations

import json

import pytest

from atropos.envs import TaskEnv, TaskEnvConfig
from atropos.envs.running.rollout import GroupsDropped
from atropos.errors import ConfigError
from tests.e2e.hermes_support import call, groups, make, running_policy, script
from tests.settings import shows


@pytest.fixture
async def policy(tmp_path):
    async with running_policy(tmp_path) as running:
        yield running


def task(
    root, name, *, prompt="Do nothing.", test="echo 1 > /logs/verifier/reward.txt", toml="", setup="echo set > up"
):
    for part, text in {
        "task.toml": f'version = "1.0"\n{toml}',
        "instruction.md": prompt,
        "environment/setup.sh": setup,
        "tests/test.sh": test,
    }.items():
        path = root / "tasks" / name / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


async def run(policy, tmp_path, **settings):
    settings = {"tool_pool_mode": "local", "tasks_path": str(tmp_path / "tasks"), "allow_network": False, **settings}
    env = make(TaskEnv, policy, tmp_path, [], config_cls=TaskEnvConfig, **settings)
    env.n_groups_to_process = -1
    try:
        await env.process_manager()
    finally:
        assert env.pool is None, "the pool was left behind"
    return {group["atropos"]["item"]: group for group in groups(tmp_path)}, env


SEES = 'ls /tests 2>&1; echo "tests: $(cat /tests/test.sh 2>&1)"; ls /workspace; cat up'


@pytest.mark.parametrize("fork_setup", [False, True])
async def test_a_task_from_setup_to_reward(policy, tmp_path, fork_setup):
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
async def test_the_verifier_runs_where_it_is_told_to(policy, tmp_path, mode, score):
    plant = script({"calls": [call("terminal", command="echo x > /etc/planted")]}, "done")
    task(tmp_path, "t", prompt=plant, test="test -e /etc/planted; echo $((1 - $?)) > /logs/verifier/reward.txt")
    found, _ = await run(policy, tmp_path, verifier_mode=mode)
    assert found["t"]["scores"] == [score, score]


async def test_verifiers_without_a_reward_drop_the_group_or_score_zero(policy, tmp_path):
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


@pytest.mark.parametrize(
    "trick",
    [
        "mkfifo out",
        "dd if=/dev/zero of=fill bs=1M",
        "i=0; while : > f$i; do i=$((i+1)); done",
        "rm -rf /bin /usr/bin",
    ],
)
async def test_an_agent_that_leaves_its_verifier_without_a_reward_scores_0(policy, tmp_path, trick):
    task(
        tmp_path,
        "t",
        prompt=script({"calls": [call("terminal", command=trick, timeout=60)]}, "done"),
        test="set -e; [ ! -e out ] || cat out > answer; cat /proc/uptime > x; echo 0.5 > /logs/verifier/reward.txt",
        toml='[verifier]\ntimeout_sec = 5.0\nenvironment_mode = "shared"\n',  # in a view most of them hinder nothing
    )
    found, env = await run(policy, tmp_path, slot_inodes=2000, slot_disk_mib=16)
    assert found["t"]["scores"] == [0.0, 0.0]
    assert env.metrics.verifier_zeros == 2
    assert not env.metrics.dropped


async def test_a_set_up_that_fails_drops_its_group_alone(policy, tmp_path):
    task(tmp_path, "broken", setup="exit 3")
    task(tmp_path, "fine")
    with pytest.raises(GroupsDropped, match="task_fault"):
        await run(policy, tmp_path)
    assert [group["atropos"]["item"] for group in groups(tmp_path)] == ["fine"]


async def test_the_agents_time_is_bounded_and_its_work_still_scored(policy, tmp_path):
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
async def test_an_image_that_can_not_be_had_is_named_before_anything_runs(policy, tmp_path):
    task(tmp_path, "t")
    nowhere = "127.0.0.1:1/nowhere:3"
    (tmp_path / "tasks/t/environment/Dockerfile").write_text(f"FROM {nowhere}\nWORKDIR /workspace\n")
    with pytest.raises(ConfigError, match=nowhere):
        await run(policy, tmp_path)
    with pytest.raises(ConfigError, match="the image of no task can be had"):
        await run(policy, tmp_path, skip_bad_tasks=True)
    found, _ = await run(policy, tmp_path, task_images=f"debian*,{nowhere}")
    assert found["t"]["scores"] == [1.0, 1.0]


def test_what_slots_do_not_give_is_refused_by_name(tmp_path):
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
def test_bad_tasks_are_named_together_or_left_out_with_a_warning(tmp_path, caplog):
    task(tmp_path, "fine")
    task(tmp_path, "gpu", toml="[environment]\ngpus = 1\n")
    task(tmp_path, "big", toml="[environment]\nmemory_mb = 99999\n")
    with pytest.raises(ConfigError, match=r"2 of 3 tasks can't be used:\n  gpu: .*gpus.*\n  big: .*memory_mb"):
        TaskEnv(config(tmp_path), [])
    with pytest.raises(ConfigError, match="tokenizer"):  # the next thing that is wrong
        TaskEnv(config(tmp_path, skip_bad_tasks=True), [])
    assert [name in caplog.text for name in ("gpu is left out", "big is left out")] == [True, True]
    with pytest.raises(ConfigError, match="none of 1 tasks can be used"):
        TaskEnv(config(tmp_path, skip_bad_tasks=True, task_names="gpu"), [])


@shows("task_limits")
def test_limits_are_lowered_as_the_setting_says(tmp_path, caplog):
    task(tmp_path, "big", toml="[environment]\nmemory_mb = 99999\n")
    with pytest.raises(ConfigError, match="tokenizer"):
        TaskEnv(config(tmp_path, task_limits="clamp"), [])
    assert "task limit lowered: big: environment.memory_mb: 99999 wanted, slots have at most 10240" in caplog.text
    with pytest.raises(ConfigError, match=r"environment\.memory_mb"):
        TaskEnv(config(tmp_path, task_limits="refuse"), [])


@shows("task_variables")
def test_only_listed_variables_of_this_process_reach_a_task(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE", "j")
    task(tmp_path, "t", toml="[verifier.env]\nJUDGE = '${JUDGE}'\n")
    with pytest.raises(ConfigError, match="list it in task_variables"):
        TaskEnv(config(tmp_path), [])
    with pytest.raises(ConfigError, match="tokenizer"):
        TaskEnv(config(tmp_path, task_variables="JUDGE"), [])


@shows("dataset", "dataset_path")
def test_a_data_set_of_a_clone_replaces_the_folder(tmp_path):
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


def test_tasks_of_several_steps_are_refused_by_name(tmp_path):
    task(tmp_path, "t", toml="[[steps]]\nname = 'one'\n")
    step = tmp_path / "tasks/t/steps/one"
    step.mkdir(parents=True)
    (step / "instruction.md").write_text("Go.")
    with pytest.raises(ConfigError, match="steps: an agent of this env gets one instruction"):
        TaskEnv(config(tmp_path), [])


async def test_items_come_in_order_and_passes(tmp_path, policy):
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
    serving._serving = True
    assert "." not in await names(serving, 20)
