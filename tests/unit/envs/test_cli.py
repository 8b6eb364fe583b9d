"""The command line: every field a flag, and whatever is wrong one line that says what would be right."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import click
import pytest
from pydantic import BaseModel, SecretStr

from atropos.envs import AgentEnvConfig, APIServerConfig
from atropos.envs.command_line import app, flags
from atropos.envs.config import SandboxEnvConfig, own_field_names
from atropos.errors import ConfigError
from examples.policy.tokenizer import FOLDER
from tests.unit.envs.support import ScriptEnv

pytestmark = pytest.mark.waits

GOOD = {
    "--env.tool_pool_mode": "local",
    "--env.tokenizer_name": str(FOLDER),
    "--openai.base_url": "http://127.0.0.1:9/v1",
    "--openai.server_type": "vllm",
}


def config_of(*words: str, command: str = "process") -> AgentEnvConfig:
    defaults = flags.command_defaults(ScriptEnv, command, AgentEnvConfig())
    return flags.build_config(defaults, given(*words, command=command))


def given(*words: str, command: str = "process") -> flags.CommandLine:
    """What these words say, before it is checked."""
    came: list[flags.CommandLine] = []
    settings_command = flags.SettingsCommand(
        command, "", AgentEnvConfig(), APIServerConfig(), lambda settings: came.append(settings) or 0
    )
    settings_command.main(list(words), standalone_mode=False)
    return came[0]


def run(capsys, *argv: str) -> tuple[int, str]:
    """The exit code and the one line, with everything not under test right."""
    words = list(argv)
    if words and words[0] in app.COMMANDS:
        given = {word.split("=")[0] for word in words}
        words[1:1] = [part for flag, value in GOOD.items() if flag not in given for part in (flag, value)]
    gc.collect()  # clients that other tests left open complain as they are collected
    capsys.readouterr()
    root, own = logging.getLogger(), logging.getLogger("atropos")
    handlers, levels = root.handlers[:], (root.level, own.level)
    try:
        code = app.run(ScriptEnv, words)
    finally:  # its handler writes to a stream that this test alone has
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        own.setLevel(levels[1])
    return code, capsys.readouterr().err.strip()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "a command is needed: serve, process, evaluate"),
        (["proces"], "Did you mean 'process'?"),
        (
            ["process", "--env.grop_size", "3"],
            "No such option '--env.grop_size'. (Did you mean one of: '--env.batch_size', '--env.gpus', '--env.group_size'",
        ),
        (["process", "--env.group_size"], "'--env.group_size' requires an argument"),
        (
            ["process", "--env.enabled_toolsets", "a", "b"],
            "unexpected 'b'; a flag has one value: write lists with commas",
        ),
        (["process", "--env.group_size", "-1"], "group_size: must be at least 1"),
        (["process", "--env.group_size=-1"], "group_size: must be at least 1"),
        (["process", "--env.group_size", "x"], "env.group_size: input should be a valid integer"),
        (["process", "--env.enabled_toolsets", "terminalx"], "unknown toolset 'terminalx'"),
        (["process", "--env.agent_tool_parser", "nope"], "env.agent_tool_parser: parser of tool calls: unknown 'nope'"),
        (["process", "--env.slots_per_container", "0"], "env.slots_per_container: input should be greater"),
        (["process", "--env.min_containers", "5", "--env.max_containers", "2"], "max_containers (2) is less than"),
        (["process", "--env.privileged", "true"], "env.privileged: sandbox containers are never privileged"),
        (["process", "--env.allow_network", "maybe"], "'maybe' is not a valid boolean"),
        (["process", "--env.sandbox_base", "rootfs"], "env.sandbox_base: write the whole path"),
        (["process", "--env.tool_pool_mode", "moon"], "'local', 'docker', 'ssh', 'modal', 'singularity' or 'nomad'"),
        (["process", "--config", "/no/such.yaml"], "--config /no/such.yaml: No such file"),
        (["process", "--openai.base_url", "foo"], "openai.base_url: 'foo' is no URL"),
        (["process", "--openai.base_url", "http://127.0.0.1:9/v1"], "start the server, or correct --openai.base_url"),
        (["process", "--openai.server_type", "foo"], "openai.server_type"),
        (["process", "--env.tokenizer_name", "/no/such"], "env.tokenizer_name: there is no folder /no/such"),
        (["process", "--env.tokenizer_name", "no-such-org/no-such"], "env.tokenizer_name"),
        (["process", "--env.tokenizer_name", "/" + "x" * 300], "env.tokenizer_name: there is no folder /x"),
        (["serve", "--openai.server_type", "openai"], "--env.allow_placeholder_tokens true"),
        (["serve", "--env.rollout_server_url", "http://127.0.0.1:9"], "no trajectory API at http://127.0.0.1:9"),
        (["serve", "stray"], "a flag has one value"),
        (["serve", "--env.rollout_server_url", "127.0.0.1:9"], "env.rollout_server_url: '127.0.0.1:9' is no URL"),
        (["serve", "--env.max_num_workers", "0"], "env.max_num_workers: must be at least 1, or -1"),
        (["serve", "--env.max_num_workers_per_node", "0"], "env.max_num_workers_per_node: must be at least 1"),
        (["serve", "--env.max_batches_offpolicy", "-1"], "env.max_batches_offpolicy: must be at least 1"),
        (["process", "--openai.num_max_requests_at_once", "0"], "openai.num_max_requests_at_once: must be at least 1"),
        (["evaluate", "--openai.num_requests_for_eval", "-1"], "openai.num_requests_for_eval: must be at least 1"),
        (["process", "--env.reasoning_effort", "much"], "env.reasoning_effort: must be one of high, low, medium"),
        (["process", "--env.data_path_to_save_groups", "/tmp"], "is a folder; give a file, as /tmp/groups.jsonl"),
        (["process", "--slurm", "true"], "--slurm: SLURM_JOB_NODELIST is not set"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_not_zero(capsys, monkeypatch, argv, says):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code, line = run(capsys, *argv)
    assert code in {1, 2}
    assert says in line
    assert line.startswith("error: ")
    assert line.count("\n") == 0


def test_bad_tokenizer_is_one_line(capsys, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    code, line = run(capsys, "process", "--env.tokenizer_name", str(tmp_path))
    assert (code, line.count("\n")) == (2, 0)
    assert f"env.tokenizer_name: '{tmp_path}' can't be loaded" in line


def test_unwritable_place_is_one_line(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    code, line = run(capsys, "process", "--env.data_path_to_save_groups", str(tmp_path / "file" / "g.jsonl"))
    assert (code, line.count("\n")) == (2, 0)
    assert "env.data_path_to_save_groups" in line


def test_rerun_says_where_groups_are(capsys, tmp_path):
    (tmp_path / "out.jsonl").write_text("{}\n")
    _, said = run(capsys, "process", "--env.data_path_to_save_groups", str(tmp_path / "out.jsonl"))
    assert f"{tmp_path}/out.jsonl is there already: the groups go to {tmp_path}/out_1.jsonl" in said


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("env:\n  grop_size: 3\n", "unknown key env.grop_size; did you mean group_size?"),
        ("enw:\n  group_size: 3\n", "unknown key 'enw'; did you mean env?"),
        ("openai:\n  base_urll: x\n", "unknown key openai.base_urll"),
        ("- 1\n", "expected keys env, openai"),
        ("a: [\n", "no YAML"),
        ("\x7fELF\x02", "no YAML"),
        ("env: 3\n", "env must be keys and values"),
        ("env:\n  group_size: 3\n  group_size: 4\n", "'group_size' stands there twice"),
        ("slurm: 'false'\n", "slurm is true or false, not str"),
        ("env:\n  slots_per_container: none\n", "env.slots_per_container"),
    ],
)
def test_bad_yaml_is_one_line(capsys, tmp_path, text, says):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    code, line = run(capsys, "process", "--config", str(path))
    assert (code, line.count("\n")) == (2, 0)
    assert says in line


def test_only_keys_are_hidden(capsys, tmp_path):
    path = tmp_path / "c.yaml"
    texts = (
        "openai:\n  api_key: [sk-1, [sk-2\nb: x\n",
        "openai:\n  api_key: {key: sk-3}\n",
        "env:\n  metrics_token: [sk-4]\n",
    )
    for text in texts:
        path.write_text(text)
        code, line = run(capsys, "process", "--config", str(path))
        assert (code, "sk-" in line) == (2, False)
    path.write_bytes(b"\x7fELF\x02\xff\xfe")
    assert "no YAML" in run(capsys, "process", "--config", str(path))[1]
    assert "(got 'abc')" in run(capsys, "process", "--env.max_token_length", "abc")[1]


def test_yaml_is_utf_8_everywhere(tmp_path):
    (tmp_path / "c.yaml").write_text("env: {says: 'Réponds'}\n", encoding="utf-8")
    program = (
        "import pydantic; from atropos.envs.command_line import flags\n"
        "class Settings(pydantic.BaseModel):\n says: str = ''\n"
        "def run(settings): print(ascii(settings.env)); return 0\n"
        "flags.SettingsCommand('process', '', Settings(), Settings(), run).main(['--config', 'c.yaml'])"
    )
    ascii_alone = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=ascii_alone, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "{'says': 'R\\xe9ponds'}\n", ran.stderr


def test_the_help_shows_no_key(capsys):
    class Env(ScriptEnv):
        @classmethod
        def config_init(cls):
            return AgentEnvConfig(), [APIServerConfig(base_url="http://127.0.0.1:9/v1", api_key="secret42")]

    assert app.run(Env, ["process", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--openai.api_key" in shown
    assert "secret42" not in shown


SERVER = APIServerConfig(base_url="http://127.0.0.1:9/v1", model_name="authors-own")


@pytest.mark.parametrize("given", [SERVER, [SERVER], (SERVER,)], ids=["alone", "list", "tuple"])
def test_config_init_counts(capsys, given):
    class Env(ScriptEnv):
        @classmethod
        def config_init(cls):
            return AgentEnvConfig(), given

    assert app.run(Env, ["process", "--help"]) == 0
    assert "[default: authors-own]" in capsys.readouterr().out


@pytest.mark.parametrize("given", [None, AgentEnvConfig(), (AgentEnvConfig(),), ([], AgentEnvConfig())])
def test_lone_config_init_is_named(capsys, given):
    class Env(ScriptEnv):
        @classmethod
        def config_init(cls):
            return given

    assert app.run(Env, ["process"]) == 2
    assert "config_init must return (config, [APIServerConfig(...)])" in capsys.readouterr().err


def test_flags_yaml_then_defaults(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("env:\n  group_size: 7\n  enabled_toolsets: [terminal, file]\n  agent_max_steps: 3\n")
    config = config_of("--config", str(path), "--env.agent_max_steps", "9")
    assert (config.group_size, config.enabled_toolsets, config.agent_max_steps) == (7, ["terminal", "file"], 9)
    assert config.agent_temperature == 0.7


def test_keys_without_a_value_change_nothing(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("env:\nopenai:\nslurm:\ntesting:\n")
    settings = given("--config", str(path))
    assert (settings.env, settings.openai, settings.slurm, settings.testing) == ({}, {}, False, False)


def test_values_of_every_kind():
    config = config_of(
        "--env.enabled_toolsets=terminal, file",
        "--env.disabled_toolsets",
        '["process"]',
        "--env.agent_max_tokens",
        "None",
        "--env.require_sandbox",
        "true",
        "--env.tool_server_token",
        "sesame",
        "--env.eval_handling",
        "NONE",
        "--env.worker_timeout=-1",
        "--env.slot_cpu_quota",
        "0.5",
    )
    assert config.enabled_toolsets == ["terminal", "file"]
    assert config.disabled_toolsets == ["process"]
    assert config.agent_max_tokens is None
    assert config.require_sandbox is True
    assert config.worker_timeout == -1
    assert config.slot_cpu_quota == 0.5
    assert isinstance(config.tool_server_token, SecretStr)
    assert "sesame" not in repr(config)
    assert "sesame" not in config.model_dump_json()


def test_dicts_are_json():
    kind = flags.FieldType(dict[str, int] | None)
    with pytest.raises(click.BadParameter, match=r"write it as '\{\"key\": 1\}'"):
        kind.convert("{a", None, None)
    assert kind.convert('{"a": 1}', None, None) == {"a": 1}
    assert kind.convert("None", None, None) is None


@pytest.mark.parametrize("name", list(AgentEnvConfig.model_fields))
def test_every_field_is_a_flag(name):
    value = getattr(AgentEnvConfig(), name)
    text = value.model_dump_json() if isinstance(value, BaseModel) else getattr(value, "value", value)
    shown = ",".join(text) if isinstance(text, list | tuple) else str(text)
    config = config_of(f"--env.{name}={shown}")
    assert getattr(config, name) == value


def test_wandb_only_when_asked():
    assert config_of().use_wandb is False
    assert config_of(command="evaluate").use_wandb is False
    assert config_of(command="serve").use_wandb is True
    assert config_of("--env.use_wandb", "true").use_wandb is True
    assert config_of().wandb_name == "script"
    assert config_of().data_path_to_save_groups == "data/script.jsonl"


def test_servers_are_a_list(tmp_path):
    default = [APIServerConfig(base_url="http://a/v1")]
    settings = given("--openai.model_name", "m")
    [server] = flags.build_servers(settings, default)
    assert (server.base_url, server.model_name) == ("http://a/v1", "m")
    path = tmp_path / "c.yaml"
    path.write_text("openai:\n- {base_url: 'http://b/v1'}\n- {base_url: 'http://c/v1'}\n")
    settings = given("--config", str(path))
    assert [one.base_url for one in flags.build_servers(settings, default)] == ["http://b/v1", "http://c/v1"]
    with pytest.raises(ConfigError, match="names 2 servers"):
        given("--config", str(path), "--openai.model_name", "m")


@pytest.mark.parametrize("command", app.COMMANDS)
def test_help_names_defaults(capsys, command):
    assert app.run(ScriptEnv, [command, "--help"]) == 0
    text = capsys.readouterr().out
    for name in AgentEnvConfig.model_fields:
        assert f"--env.{name}" in text
    assert "--openai.base_url" in text
    assert "[default: 50]" in " ".join(text.split())
    assert max(len(line) for line in text.splitlines()) <= 120
    words = " ".join(text.split())
    assert "--env.egress_allow LIST hosts that programs may reach: public, " in words
    assert "addresses or networks [default: public]" in words
    assert "--env.verifier_mode view|shared " in words
    assert "--env.eval_handling STOP_TRAIN|LIMIT_TRAIN|NONE " in words


def test_help_lists_commands(capsys):
    assert app.run(ScriptEnv, ["--help"]) == 0
    assert "evaluate" in capsys.readouterr().out


def test_settings_reach_pool_and_executor():
    config = config_of(
        "--env.slots_per_container=3",
        "--env.max_containers=4",
        "--env.slot_memory_mib=333",
        "--env.slot_disk_mib=99",
        "--env.slot_pids=77",
        "--env.slot_inodes=5000",
        "--env.slot_output_bytes=4000",
        "--env.acquire_timeout_s=7",
        "--env.allow_network=false",
        "--env.require_sandbox=true",
        "--env.require_stateful_sandbox=true",
        "--env.sandbox_job_id=job-x",
        "--env.sandbox_image=img:y",
        "--env.tool_batch_window_ms=5",
        "--env.tool_max_batch_size=17",
        "--env.lease_ttl_s=30",
        "--env.tool_server_url=http://127.0.0.1:9",
        '--env.image_store={"mirrors": {"docker.io": "mirror:5000"}}',
        "--env.prepare_timeout_s=9",
    )
    pool, executor = config.pool_config(), config.executor_config()
    assert (pool.backend, pool.slots_per_container, pool.max_containers) == ("nomad", 3, 4)
    assert (pool.limits.memory_mib, pool.limits.disk_mib, pool.limits.pids) == (333, 99, 77)
    assert (pool.limits.inodes, pool.limits.output_bytes) == (5000, 4000)
    assert (pool.acquire_timeout_s, pool.allow_network, pool.lease_ttl_s) == (7, False, 30)
    assert (pool.job_id, pool.image, pool.max_batch_size) == ("job-x", "img:y", 17)
    assert (pool.require_sandbox, pool.require_stateful_sandbox) == (True, True)
    assert (executor.tool_server_url, executor.allow_network, executor.batch_window_ms) == (
        "http://127.0.0.1:9",
        False,
        5,
    )
    assert (pool.image_store.mirrors, pool.prepare_timeout_s) == ({"docker.io": "mirror:5000"}, 9)
    assert config.capacity == 12


def test_registry_by_url_is_named():
    with pytest.raises(ConfigError, match=r"env\.image_store\.mirrors\.docker\.io: write the host alone, without http"):
        config_of('--env.image_store={"mirrors": {"docker.io": "http://mirror:5000"}}')


def test_unknown_refused_in_code():
    with pytest.raises(ValueError, match="slots_per_contaner"):
        SandboxEnvConfig(slots_per_contaner=3)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("enabled_toolsets: unknown toolset 'x'", r"^env\.enabled_toolsets: unknown toolset 'x'$"),
        ("limits.pids: too few", r"^env\.slot_pids: too few$"),
        ("job_id: taken", r"^env\.sandbox_job_id: taken$"),
        ("elsewhere: taken", "^elsewhere: taken$"),
    ],
)
def test_mistakes_have_flags_names(said, shown):
    with pytest.raises(ConfigError, match=shown), own_field_names(AgentEnvConfig()):
        raise ConfigError(said)


def test_prints_are_inert(capsys, monkeypatch):
    printed = "\x1b]52;c;bGVha2Vk\x07\x1b[2Jred\n2026-01-01 00:00:00 INFO atropos: all is well"

    class Env(ScriptEnv):
        def __init__(self, **_):
            logging.getLogger("atropos").warning("task scores 0: %s", printed)
            raise ConfigError(printed)

    monkeypatch.setitem(globals(), "ScriptEnv", Env)
    code, said = run(capsys, "process")
    assert code == 2
    assert "\x1b" not in said
    assert "\x07" not in said
    first, second, *_ = said.splitlines()
    assert first.endswith("WARNING atropos: task scores 0: ␛]52;c;bGVha2Vk␇␛[2Jred")
    assert second.startswith("    2026-01-01")


def test_unknown_level_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("ATROPOS_LOG_LEVEL", "verbose")
    said = "error: ATROPOS_LOG_LEVEL: 'verbose' is none of INFO, WARNING, ERROR"
    assert run(capsys, "process") == (2, said)


def test_early_ctrl_c_is_one_line(tmp_path):
    (tmp_path / "atroposlib.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    attentive = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a script's background job is not
    )
    command = [sys.executable, "-c", f"{attentive}; from atropos.envs import AgentEnv"]
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=variables, **pipes) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert (process.returncode, said) == (130, "interrupted while the environments were loaded\n")


@pytest.mark.parametrize(("page_age_s", "named"), [(None, False), (60, False), (-60, True)])
def test_last_lines_name_the_page(capsys, tmp_path, page_age_s, named):
    """A full disk leaves none, or one of an earlier run."""
    groups, page = tmp_path / "g.jsonl", tmp_path / "g.html"
    groups.write_text("{}\n")
    if page_age_s is not None:
        page.write_text("<html>")
        os.utime(page, (groups.stat().st_mtime - page_age_s,) * 2)
    metrics = SimpleNamespace(mean_score=0.5, groups=1, trajectories=2, calls=3)
    app._report(SimpleNamespace(metrics=metrics, config=SimpleNamespace(data_path_to_save_groups=str(groups))))
    said = capsys.readouterr().out
    assert f"groups: {groups}" in said
    assert (f"page:   {page}" in said) == named
