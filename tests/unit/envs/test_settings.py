"""What the settings of the agent and of the run change, seen by the inference server and in what is written."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from aiohttp import web

from atropos.agent.transcript import CONTEXT_LOGPROB, MASKED, WeightSpan
from atropos.envs import AgentEnvConfig, HermesAgentBaseEnv, HermesAgentEnvConfig
from atropos.envs.hermes.data import load_rows
from atropos.envs.humaneval_problems import load_problems
from atropos.envs.running.backend import ToolBackend
from atropos.envs.running.rollout import GroupsDropped
from atropos.errors import ConfigError, SlotLost
from atropos.slots import SlotPoolConfig
from atropos.slots.config import PoolSettings
from atropos.tools import ToolRegistry
from atropos.tools.tool_server.messages import ToolInfo
from atropos.tools.tool_server.offered import adopt_offered
from atropos.tools.toolsets import DISTRIBUTIONS, Distribution, get_distribution
from atropos.wire import SlotLimits
from examples.policy.play import TASKS, Policy
from examples.policy.server import PolicyServer, Settings
from tests.e2e.hermes_support import make as make_hermes
from tests.settings import shows
from tests.unit.envs.support import ScriptEnv, StandInExecutor, call, items, make
from tests.web_app import serving

pytestmark = pytest.mark.waits

TWO_CALLS = [{"calls": [call("a")]}, {"calls": [call("b")]}, "done"]


class Recording:
    """The policy server in this loop, and the bodies of the requests that it got, the probe's left out."""

    url: str

    def __init__(self) -> None:
        self.posted: list[dict] = []
        self.delay_s = 0.0

    @property
    def bodies(self) -> list[dict]:
        return [body for body in self.posted if body.get("sampling_params", body).get("max_tokens") != 1]

    @web.middleware
    async def keep(self, request, handler):
        if request.method == "POST":
            self.posted.append(await request.json())
            await asyncio.sleep(self.delay_s if self.bodies else 0)
        return await handler(request)


@pytest.fixture
async def policy():
    recording = Recording()
    app = PolicyServer(Policy(TASKS), Settings()).application()
    app.middlewares.append(recording.keep)
    async with serving(app) as url:
        recording.url = f"{url}/v1"
        yield recording


async def run(env, *script):
    """The env's only item played; its group as written, and the messages of its first member."""
    env.items = items(1, *script)
    await env.process_manager()
    [line] = Path(env.config.data_path_to_save_groups).read_text().splitlines()
    group = json.loads(line)
    return group, group["messages"][0]


# ------------------------------------------------------------------------------------------------------------- AgentEnv


@shows("agent_max_steps")
async def test_agent_max_steps_bounds(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", agent_max_steps=2)
    group, _ = await run(env, *TWO_CALLS)
    assert {one["steps"] for one in group["atropos"]["trajectories"]} == {2}
    assert {one["stop_reason"] for one in group["atropos"]["trajectories"]} == {"max_steps"}


class OneIsCut(ScriptEnv):
    """The first trajectory of a group has one turn, the others have two; scores are 10 and the members' number."""

    async def run_trajectory(self, item, trajectory_id, member):
        self.number = member.index
        rollout = await super().run_trajectory(item, trajectory_id, member)
        rollout.transcript.weights = [WeightSpan(5, 9, "step-7")] * member.index
        return rollout

    def build_agent_config(self, item):
        return replace(super().build_agent_config(item), max_steps=1 if self.number == 0 else 9)

    async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
        return float(trajectory_id[-1]) or 10.0, {}


@shows("cut_trajectories")
async def test_cut_ones_follow_setting(policy, tmp_path):
    script = [{"calls": [call("ls")]}, "done"]
    groups = {}
    for choice in ("keep", "mask"):
        env = make(OneIsCut, policy.url, tmp_path / f"{choice}.jsonl", cut_trajectories=choice)
        groups[choice], _ = await run(env, *script)
        assert [each["stop_reason"] for each in groups[choice]["overrides"]] == ["max_steps", "final", "final"]
    kept, masked = groups["keep"], groups["mask"]
    assert (kept["scores"], masked["scores"]) == ([10.0, 1.0, 2.0], [1.5, 1.0, 2.0]), "the mean of the others"
    assert [one["score"] for one in masked["atropos"]["trajectories"]] == [10.0, 1.0, 2.0]
    assert [each.get("set_advantage_to_zero") for each in masked["overrides"]] == [True, None, None]
    assert not any("set_advantage_to_zero" in each for each in kept["overrides"])
    versions = [each.get("weight_versions") for each in kept["overrides"]]
    assert versions == [None, [[5, 9, "step-7"]], [[5, 9, "step-7"]] * 2]
    assert {*masked["masks"][0]} == {MASKED}
    assert {*masked["inference_logprobs"][0]} == {CONTEXT_LOGPROB}
    assert {*kept["masks"][0]} != {MASKED} != {*masked["masks"][1]}
    env = make(OneIsCut, policy.url, tmp_path / "drop.jsonl", cut_trajectories="drop")
    with pytest.raises(GroupsDropped, match="1 x cut"):
        await run(env, *script)


async def test_mean_of_equal_scores_is_equal(policy, tmp_path):
    """Else the group would pass for one of different scores."""

    class Equal(OneIsCut):
        async def verify_and_score_trajectory(self, item, final_response, *, trajectory_id, exec_tool, agent_result):
            return 0.1, {}

    settings = {"cut_trajectories": "mask", "group_size": 4}
    group, _ = await run(make(Equal, policy.url, tmp_path / "g.jsonl", **settings), {"calls": [call("ls")]}, "done")
    assert group["scores"] == [0.1] * 4


async def test_masked_teach_nothing(policy, tmp_path):
    settings = {"cut_trajectories": "mask", "agent_max_steps": 1}
    with pytest.raises(GroupsDropped, match="1 x cut"):
        await run(make(ScriptEnv, policy.url, tmp_path / "g.jsonl", **settings), *TWO_CALLS)


@shows("agent_temperature", "agent_max_tokens", "seed")
async def test_sampling_reaches_server(policy, tmp_path):
    settings = {"agent_temperature": 0.25, "agent_max_tokens": 77, "seed": 9}
    await run(make(ScriptEnv, policy.url, tmp_path / "g.jsonl", **settings), *TWO_CALLS)
    assert {body["temperature"] for body in policy.bodies} == {0.25}
    assert {body["max_tokens"] for body in policy.bodies} == {77}
    first = {body["seed"] for body in policy.bodies}
    assert len(first) >= 3, "each member of the group has its own"
    policy.posted.clear()
    await run(make(ScriptEnv, policy.url, tmp_path / "h.jsonl"), *TWO_CALLS)
    assert not any("seed" in body for body in policy.bodies)
    assert min(body["max_tokens"] for body in policy.bodies) > 10_000, "what is left of the context"


@shows("agent_tool_delay_s")
async def test_a_pause_follows_each_call(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", agent_tool_delay_s=0.4, group_size=1)
    group, _ = await run(env, *TWO_CALLS)
    assert group["atropos"]["trajectories"][0]["phases"]["agent"] >= 0.8


@shows("agent_system_prompt")
async def test_system_prompt_comes_first(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", agent_system_prompt="Speak like a pirate.")
    _, messages = await run(env, *TWO_CALLS)
    assert messages[0]["role"] == "system"
    assert messages[0]["content"].startswith("Speak like a pirate.")
    assert '"name": "terminal"' in messages[0]["content"]


@shows("agent_tool_parser")
async def test_calls_in_the_parsers_form(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", agent_tool_parser="kimi_k2")
    group, _ = await run(env, *TWO_CALLS)  # the policy writes hermes' format
    assert {one["calls"] for one in group["atropos"]["trajectories"]} == {0}
    with pytest.raises(ConfigError, match="nosuch"):
        await make(ScriptEnv, policy.url, None, agent_tool_parser="nosuch").process_manager()


@shows("agent_max_result_chars")
async def test_long_results_shortened(policy, tmp_path):
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", agent_max_result_chars=120)
    _, messages = await run(env, {"calls": [call("x" * 5_000)]}, "done")
    [answer] = [message["content"] for message in messages[2:] if message["role"] == "user"]
    assert len(answer) < 600


@shows("enabled_toolsets", "disabled_toolsets")
def test_toolsets_come_and_go():
    def names(**settings):
        env = make(ScriptEnv, "http://127.0.0.1:9/v1", None, **settings)
        return {tool.name for tool in env.build_tools()}

    assert names() == {"terminal", "process", "read_file", "write_file", "patch", "search_files"}
    assert "terminal" in names(enabled_toolsets=["terminal"])
    assert "read_file" not in names(enabled_toolsets=["terminal"])
    assert "terminal" not in names(disabled_toolsets=["terminal"])


@shows("trajectory_retries")
@pytest.mark.parametrize("retries", [0, 2])
async def test_retries_are_counted(policy, tmp_path, retries):
    tried: list[str] = []

    class Env(ScriptEnv):
        @staticmethod
        def fault(trajectory, _call):
            tried.append(trajectory)
            raise SlotLost("gone")

    env = make(Env, policy.url, tmp_path / "g.jsonl", trajectory_retries=retries, group_size=1)
    env.items = items(1)
    with pytest.raises(GroupsDropped):
        await env.process_manager()
    assert len(set(tried)) == 1 + retries


@shows("model_timeout_s", "model_retries")
async def test_model_call_has_deadline(policy, tmp_path):
    settings = {"model_timeout_s": 2.5, "model_retries": 0, "trajectory_retries": 0, "group_size": 1}
    env = make(ScriptEnv, policy.url, tmp_path / "g.jsonl", **settings)
    policy.delay_s = 30
    began = time.monotonic()
    with pytest.raises(GroupsDropped, match="inference"):
        await run(env, "done")
    assert time.monotonic() - began < 20
    assert len(policy.bodies) == 1


@shows("process_concurrency")
@pytest.mark.parametrize("groups", [1, 3])
async def test_groups_in_flight_as_told(policy, tmp_path, groups):
    inside = most = 0
    full = asyncio.Event()

    class Env(ScriptEnv):
        async def setup_trajectory_workspace(self, item, *, trajectory_id, exec_tool):
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            if inside == groups:
                full.set()
            await full.wait()
            await asyncio.sleep(0.05)  # for one too many
            inside -= 1
            return {}

    env = make(Env, policy.url, None, process_concurrency=groups, group_size=1)
    env.items = items(6)
    await env.process_manager()
    assert most == groups


@shows("allow_placeholder_tokens")
async def test_serve_needs_real_values(policy):
    def env(**settings):
        return make(
            ScriptEnv, policy.url, None, server_type="openai", rollout_server_url="http://127.0.0.1:9", **settings
        )

    with pytest.raises(ConfigError, match=r"openai\.server_type: openai doesn't report"):
        await env().env_manager()
    with pytest.raises(ConfigError, match=r"env\.rollout_server_url"):  # the next thing that is wrong
        await env(allow_placeholder_tokens=True).env_manager()


@shows("group_size")
async def test_groups_have_their_size(policy, tmp_path):
    group, _ = await run(make(ScriptEnv, policy.url, tmp_path / "g.jsonl", group_size=5), "done")
    assert len(group["scores"]) == len(group["tokens"]) == 5


# -------------------------------------------------------------------------------------------------------------- Hermes


class Hermes(HermesAgentBaseEnv):
    """Rows carry the policy's script; every rollout scores 1."""

    fault = None
    most_rewards = rewards = 0
    together = 1
    """As many rewards wait for each other."""

    async def setup(self):
        self.rows, self.full = self.load_rows(), asyncio.Event()

    async def get_next_item(self):
        return next(self.rows, None)

    async def start_tool_backend(self, tools=None):
        self.backend.executor = StandInExecutor(tools or self.build_tools())

    async def compute_reward(self, item, result, ctx):
        self.rewards += 1
        self.most_rewards = max(self.most_rewards, self.rewards)
        if self.rewards == self.together:
            self.full.set()
        await self.full.wait()
        await asyncio.sleep(0.05)  # for one too many
        self.rewards -= 1
        return 1.0


async def hermes(policy, tmp_path, *rows, **settings):
    """Rows (a script, or a whole row) played; the env, and the messages of the first group's first member."""
    whole = [row if isinstance(row, dict) else {"prompt": f"```policy\n{json.dumps(row)}\n```"} for row in rows]
    env = make_hermes(Hermes, (policy.url, None), tmp_path, whole, **settings)
    await env.process_manager()
    first = json.loads((tmp_path / "groups.jsonl").read_text().splitlines()[0])
    return env, first["messages"][0]


@shows("system_prompt")
async def test_hermes_prompt_is_first(policy, tmp_path):
    _, messages = await hermes(policy, tmp_path, ["done"], system_prompt="Be terse.", server_type="openai")
    assert messages[0] == {"role": "system", "content": "Be terse."}


@shows("extra_body")
async def test_extra_fields_reach_openai(policy, tmp_path):
    extra = {"top_k": 7, "chat_template_kwargs": {"thinking": True}}
    await hermes(policy, tmp_path, ["done"], extra_body=extra, server_type="openai")
    assert {(body["top_k"], body["chat_template_kwargs"]["thinking"]) for body in policy.bodies} == {(7, True)}


@shows("max_agent_turns")
async def test_max_agent_turns_bounds(policy, tmp_path):
    env, messages = await hermes(policy, tmp_path, TWO_CALLS, max_agent_turns=2)
    assert sum(message["role"] == "assistant" for message in messages) == 2
    assert env.metrics.stop_reasons == {"max_turns": 2}


@shows("tool_call_parser")
async def test_hermes_calls_by_parser(policy, tmp_path):
    env, _ = await hermes(policy, tmp_path, TWO_CALLS, tool_call_parser="kimi_k2")
    assert env.metrics.calls == 0


@shows("tool_pool_size")
@pytest.mark.parametrize("size", [1, 3])
async def test_tool_pool_size_bounds(policy, tmp_path, monkeypatch, size):
    monkeypatch.setattr(Hermes, "together", size)
    env, _ = await hermes(policy, tmp_path, ["done"], tool_pool_size=size, group_size=4)
    assert env.most_rewards == size


@shows("dataset_name", "prompt_field")
async def test_prompt_is_the_rows_field(policy, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "why?", "prompt": "unused"}) + "\n")
    settings = {"dataset_name": str(tmp_path / "rows.jsonl"), "prompt_field": "question"}
    _, messages = await hermes(policy, tmp_path, total_steps=1, **settings)
    assert {"role": "user", "content": "why?"} in messages
    with pytest.raises(ConfigError, match="prompt_field: the item has no 'nosuch'"):
        await hermes(policy, tmp_path / "b", {"prompt": "x"}, prompt_field="nosuch")


@pytest.mark.parametrize("name", [json.dumps({"prompt": "long " * 100}), "~nobody-of-that-name/rows"])
def test_no_path_is_no_dataset(monkeypatch, name):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"^dataset_name: '.* can't be loaded: .*; give a .jsonl or .parquet file"):
        load_rows(name)


@shows("dataset_split")
def test_hub_split_is_asked_for(monkeypatch):
    asked = []
    hub = SimpleNamespace(load_dataset=lambda *a, **k: asked.append((a, k)) or [{"prompt": "x"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert load_rows("someone/something", "validation") == [{"prompt": "x"}]
    assert "validation" in repr(asked)


def test_folder_is_its_files(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "rows"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.csv").write_text(f"prompt\nof {split}\n")
    assert load_rows(str(folder)) == load_rows("rows") == [{"prompt": "of train"}]
    assert load_rows("./rows/", "test") == [{"prompt": "of test"}]
    with pytest.raises(ConfigError, match=r"^dataset_name: 'rows' \(split 'nosuch'\) can't be loaded: .*train.*test"):
        load_rows("rows", "nosuch")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"^dataset_name: 'empty' .*doesn't contain any data files; give a "):
        load_rows("empty")


@pytest.mark.parametrize("load", [lambda path: load_rows(str(path)), load_problems])
def test_separators_split_no_row(tmp_path, load):
    names = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
    rows = [dict.fromkeys(names, text) for text in ("a\u2028b\u2029c\x85d", "second")]
    path = tmp_path / "rows.jsonl"
    path.write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8", newline="")
    found = [row["prompt"] if isinstance(row, dict) else row.prompt for row in load(path)]
    assert found == [row["prompt"] for row in rows]


@shows("distribution")
def test_distribution_is_alone(tmp_path):
    def names(name, *groups):
        config = {"distribution": name, "enabled_toolsets": None, "seed": 1}
        env = make_hermes(Hermes, ("http://127.0.0.1:9/v1", None), tmp_path, [], **config)
        env.backend.executor = StandInExecutor(env.build_tools())
        return [tuple(sorted(env.tools_of(group).names)) for group in groups]

    drawn = names("interactive", *map(str, range(30)))
    assert len(set(drawn)) > 1
    assert drawn == names("interactive", *map(str, range(30))), "the same seed draws the same"


TERMINAL, FILE = ("process", "terminal"), ("patch", "read_file", "search_files", "write_file")


@pytest.mark.parametrize("gone", [{"disabled_toolsets": ["session"]}, {}])
def test_missing_toolsets_are_not_replaced(tmp_path, monkeypatch, gone):
    shares = {"session" if gone else "web": 1.0, "terminal": 0.02, "file": 0.01}
    monkeypatch.setitem(DISTRIBUTIONS, "rarely", Distribution("rarely", shares))
    config = {"distribution": "rarely", "enabled_toolsets": None, "seed": 1, **gone}
    env = make_hermes(Hermes, ("http://127.0.0.1:9/v1", None), tmp_path, [], **config)
    env.backend.executor = StandInExecutor(env.build_tools())
    drawn = {tuple(sorted(env.tools_of(str(group)).names)) for group in range(20)}
    assert TERMINAL in drawn, "the most probable of those that are there"
    assert drawn <= {TERMINAL, FILE}


def test_no_empty_distribution(tmp_path):
    config = {"distribution": "default", "enabled_toolsets": None, "disabled_toolsets": ["terminal", "file"]}
    env = make_hermes(Hermes, ("http://127.0.0.1:9/v1", None), tmp_path, [], **config)
    with pytest.raises(ConfigError, match="disabled_toolsets: terminal, file leaves no tool of terminal, file"):
        env.build_tools()
    with pytest.raises(ConfigError, match="distribution 'default': no tool is left of terminal, file"):
        get_distribution("default").among({"web"})


@pytest.mark.parametrize("wide", ["mcp", "all"])
def test_toolsets_contain_others(tmp_path, monkeypatch, wide):
    monkeypatch.setitem(DISTRIBUTIONS, "wide", Distribution("wide", {"terminal": 1.0, wide: 1.0}))
    others = ["file", "session", "web", "browser"]
    config = {"distribution": "wide", "enabled_toolsets": None, "disabled_toolsets": others}
    env = make_hermes(
        Hermes, ("http://127.0.0.1:9/v1", None), tmp_path, [], tool_server_url="inprocess", seed=1, **config
    )
    tools = env.build_tools()
    read = {"function": {"name": "fs_read", "description": "read a file"}}
    adopt_offered(tools, [ToolInfo(name="fs_read", toolset="mcp-fs", schema=read, timeout_s=1)])
    env.backend.executor = StandInExecutor(tools)
    assert {*env.tools_of("a group").names} == {*TERMINAL, "fs_read"}


@shows("terminal_backend")
@pytest.mark.parametrize(
    "settings", [AgentEnvConfig(tool_pool_mode="docker"), HermesAgentEnvConfig(terminal_backend="docker")]
)
async def test_certificates_need_tls(settings):
    backend = ToolBackend(settings.model_copy(update={"tls_certificate": "c.pem", "tls_key": "k.pem"}))
    with pytest.raises(ConfigError, match=r"^env\.tls_certificate: a setting of 'nomad', which backend 'docker' lacks"):
        await backend.start(ToolRegistry())


@shows("terminal_timeout")
def test_default_timeout_is_set():
    limits = HermesAgentEnvConfig(terminal_timeout=900).executor_config().limits
    assert (limits.command_timeout_s, limits.max_timeout_s) == (900, 900)
    assert HermesAgentEnvConfig(terminal_timeout=5).executor_config().limits.command_timeout_s == 5


@shows("terminal_backend", "tool_pool_mode")
def test_the_backend_is_the_pools():
    assert HermesAgentEnvConfig(terminal_backend="docker").pool_config().backend == "docker"
    assert AgentEnvConfig(tool_pool_mode="nomad").pool_config().backend == "nomad"
    assert AgentEnvConfig(tool_pool_mode="local").pool_config().backend == "local"


@shows("privileged")
def test_privileged_is_explained():
    with pytest.raises(ConfigError, match=r"env\.?.*privileged.*never privileged"):
        AgentEnvConfig(privileged=True)


@pytest.mark.parametrize("name", [*PoolSettings.model_fields])
def test_pool_settings_once(name):
    own, pools = AgentEnvConfig.model_fields[name], SlotPoolConfig.model_fields[name]
    assert (own.description, own.metadata, own.annotation) == (pools.description, pools.metadata, pools.annotation)
    value = {"max_containers": 7, "min_containers": 2, "volume": "disk", "egress_allow": "a.example, b.example"}.get(
        name
    )
    if value is None:
        default = own.get_default(call_default_factory=True)
        value = {bool: not default, int: 100, float: 7.5, dict: {"a": "/b"}}.get(type(default), pools.default)
    if name == "privileged":
        return
    env = AgentEnvConfig(**{name: value})
    assert getattr(env.pool_config(), name) == getattr(SlotPoolConfig(**{name: value}), name) == getattr(env, name)


def test_every_limit_is_a_setting():
    limits = SlotLimits(memory_mib=99, open_files=777, wall_s=5)
    env = AgentEnvConfig(slot_memory_mib=99, slot_open_files=777, slot_wall_s=5)
    assert env.pool_config().limits == limits
