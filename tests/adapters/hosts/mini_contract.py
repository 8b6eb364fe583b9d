"""What mini-swe-agent's environments do, on slots; run by tests/adapters/test_mini_swe_agent.py in the peers'
environment."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading

import entrypoint_images
import pytest
import side_by_side
import yaml
from accident import kill_container
from minisweagent.config import builtin_config_dir
from minisweagent.environments import get_environment, get_environment_class
from minisweagent.exceptions import Submitted
from minisweagent.run.utilities import mini_extra

import atropos.adapters.mini_swe_agent as adapter
from atropos import event_loop
from atropos.adapters.mini_swe_agent import AtroposEnvironment, AtroposEnvironmentConfig
from atropos.adapters.sharing import SandboxGoneError
from atropos.errors import ConfigError

POOL = {"backend": "local", "slots_per_container": 3, "max_containers": 1}


@pytest.fixture(scope="module")
def kept():
    """One that keeps the pool running."""
    environment = AtroposEnvironment(pool=POOL)
    yield environment
    environment.cleanup()


@pytest.fixture
def make(kept):
    made = []

    def one(**settings):
        made.append(AtroposEnvironment(pool=POOL, **settings))
        return made[-1]

    yield one
    for environment in made:
        environment.cleanup()


def test_output_and_errors_are_one(make):
    result = make().execute({"command": "echo out; echo err >&2; exit 42"})
    assert result == {"output": "out\nerr\n", "returncode": 42, "exception_info": ""}


def test_killed_has_dockers_code(make):
    assert make().execute({"command": "kill -9 $$"})["returncode"] == 137


def test_an_environment_is_collected_any_time(make):
    environments = [make(), make()]

    def collect(frame, event, _argument):
        """At any line of it, as a collection of garbage may."""
        if event == "line" and frame.f_code is event_loop.event_loop.__code__ and environments:
            environments.pop().cleanup()
        return collect

    def ask():
        sys.settrace(collect)
        event_loop.event_loop()

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(30)
    assert not asking.is_alive()
    assert not environments


def test_a_forked_process_is_its_own(make):
    """As the workers of `multiprocessing` do, also where they have no environment."""
    environment = make()

    def work(said):
        if said is not None:
            own = AtroposEnvironment(pool=POOL)
            said.put(own.execute({"command": "echo own"})["output"])
            own.cleanup()

    fork = multiprocessing.get_context("fork")
    for said in (None, fork.Queue()):
        child = fork.Process(target=work, args=[said], daemon=True)
        child.start()
        assert said is None or said.get(timeout=50) == "own\n"
        child.join(50)
        assert child.exitcode == 0
    assert environment.execute({"command": "echo still"})["output"] == "still\n"


def test_variables_come_from_settings(make, monkeypatch):
    monkeypatch.setenv("GIVEN", "one")
    monkeypatch.setenv("HIDDEN", "secret")
    environment = make(env={"A": "1", "BOTH": "settings"}, forward_env=["GIVEN", "ABSENT"])
    assert (
        environment.execute({"command": "echo $A $BOTH $GIVEN [$ABSENT] [$HIDDEN]"})["output"]
        == "1 settings one [] []\n"
    )
    assert "secret" not in str(environment.get_template_vars())


def test_commands_start_where_they_should(make):
    environment = make(cwd="/tmp")
    assert environment.execute({"command": "cd /; pwd"})["output"] == "/\n"
    assert environment.execute({"command": "pwd"})["output"] == "/tmp\n"
    assert environment.execute({"command": "pwd"}, "/etc")["output"] == "/etc\n"


def test_a_folder_is_made_for_the_user(make):
    environment = make(cwd="/srv/work", user="nobody")
    assert environment.execute({"command": "echo x >file; pwd; cat file"})["output"] == "/srv/work\nx\n"
    with pytest.raises(ConfigError, match="cwd: /etc/passwd/no can't be made"):
        make(cwd="/etc/passwd/no")


def test_a_folder_is_made_without_etc_passwd(make, tmp_path):
    environment = make(image=entrypoint_images.image(tmp_path), cwd="/made/here", user="1000", interpreter=["sh", "-c"])
    assert environment.execute({"command": "echo x >file; pwd; cat file"})["output"] == "/made/here\nx\n"


def test_a_time_out_is_a_value(make):
    environment = make(timeout=1)
    result = environment.execute({"command": "echo before; sleep 61"})
    if not result["output"]:  # the login shell of a busy machine took longer to start
        result = environment.execute({"command": "echo before; sleep 61"}, timeout=20)
    assert (result["output"], result["returncode"]) == ("before\n", -1)
    assert "timed out" in result["exception_info"]
    assert result["extra"]["exception_type"] == "TimeoutExpired"
    assert "sleep" not in environment.execute({"command": "ps -eo comm"}, timeout=20)["output"]


def test_what_never_starts_is_a_value(make):
    result = make().execute({"command": "true"}, "/not/there")
    assert result["returncode"] == -1
    assert "/not/there" in result["exception_info"]


def test_a_submission_ends_the_run(make):
    with pytest.raises(Submitted) as submitted:
        make().execute({"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo patch"})
    assert submitted.value.messages[0]["extra"]["submission"] == "patch\n"


def test_templates_know_the_slots_system(make):
    environment = make(user="nobody")
    known = environment.get_template_vars(task="t")
    assert (known["system"], known["task"]) == ("Linux", "t")
    assert known["node"] == environment.execute({"command": "uname -n"})["output"].strip()
    assert environment.execute({"command": "whoami; echo x >file"}) == {
        "output": "nobody\n",
        "returncode": 0,
        "exception_info": "",
    }


def test_its_docker_settings_are_known(make, monkeypatch):
    monkeypatch.setattr(mini_extra, "main", lambda: None)
    adapter.main()
    settings = yaml.safe_load((builtin_config_dir / "benchmarks/swebench.yaml").read_text())["environment"]
    assert get_environment_class(settings["environment_class"]) is AtroposEnvironment
    config = AtroposEnvironmentConfig(**{name: settings[name] for name in settings if name != "environment_class"})
    assert (config.cwd, config.interpreter) == ("/testbed", ["bash", "-c"])
    environment = get_environment({**settings, "cwd": "/", "pool": POOL})
    assert environment.execute({"command": "echo $PAGER"})["output"] == "cat\n"
    environment.cleanup()


def test_a_killed_container_is_no_outcome():
    environment = AtroposEnvironment(pool={**POOL, "slots_per_container": 1})
    kill_container()
    with pytest.raises(SandboxGoneError):
        environment.execute({"command": "sleep 5"})
    environment.cleanup()
    with pytest.raises(SandboxGoneError, match="cleaned up"):
        environment.execute({"command": "true"})


def test_a_missing_image_is_no_outcome(kept):
    with pytest.raises(SandboxGoneError):
        AtroposEnvironment(pool=POOL, image="127.0.0.1:1/none:1")


def test_an_entrypoint_runs_beside_commands(make, tmp_path):
    environment = make(image=entrypoint_images.image(tmp_path / "image"), interpreter=["sh", "-c"])
    assert environment.execute({"command": "cat /said"})["output"] == "sleep infinity /srv\n"
    with pytest.raises(SandboxGoneError, match=r"ENTRYPOINT: .*nothing"):
        make(image=entrypoint_images.image(tmp_path / "missing", starts="/nothing"))


def test_commands_run_beside_a_waiting_one(make):
    environment = make()

    async def run(line):
        return (await asyncio.to_thread(environment.execute, {"command": line}))["output"]

    assert asyncio.run(side_by_side.answer(run)) == "42\n"
