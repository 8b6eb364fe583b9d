"""What SWE-ReX's own tests leave out; tests/adapters/test_swerex.py runs it beside them."""

from __future__ import annotations

import asyncio
import os
import time

import entrypoint_images
import pytest
import side_by_side
from accident import kill_container
from swerex.exceptions import (
    BashIncorrectSyntaxError,
    CommandTimeoutError,
    DeploymentNotStartedError,
    DeploymentStartupError,
    SessionExistsError,
    SessionNotInitializedError,
)
from swerex.runtime.abstract import (
    BashAction,
    BashInterruptAction,
    Command,
    CreateBashSessionRequest,
    ReadFileRequest,
    WriteFileRequest,
)

from atropos.adapters import swerex_session
from atropos.adapters.swerex import AtroposDeployment, AtroposDeploymentConfig, DeploymentGoneError
from atropos.errors import SandboxError

from .conftest import POOL


async def say(runtime, command, **options):
    return (await runtime.run_in_session(BashAction(command=command, **{"timeout": 60, **options}))).output


async def test_a_command_may_be_long(runtime_with_default_session):
    text = "x" * 100_000
    assert await say(runtime_with_default_session, f"echo {text}") == f"{text}\n"


async def test_a_stop_of_this_process_loses_nothing(runtime_with_default_session):
    stop = f"sleep 0.5; kill -STOP {os.getpid()}; sleep 5; kill -CONT {os.getpid()}"
    stopping = await asyncio.create_subprocess_exec("sh", "-c", stop)
    assert await say(runtime_with_default_session, "echo one; sleep 2; echo two", timeout=4) == "one\ntwo\n"
    await stopping.wait()


async def test_output_of_megabytes_comes_whole(runtime_with_default_session):
    assert (
        await say(runtime_with_default_session, "yes 0123456789 | head -c 3000000")
        == ("0123456789\n" * 280_000)[:3_000_000]
    )


async def test_too_much_output_keeps_its_end(runtime_with_default_session, monkeypatch):
    monkeypatch.setattr(swerex_session, "MAX_OUTPUT_CHARS", 100_000)
    printed = "".join(f"{number}\r\n" for number in range(1, 100_001))
    said = await say(runtime_with_default_session, "seq 1 100000")
    assert said == (
        f"[{len(printed) - 100_000} characters of output were dropped here]\n{swerex_session.clean(printed[-100_000:])}"
    )


async def test_little_after_much_is_cheap(runtime_with_default_session):
    async def seconds(before):
        started = time.process_time()
        await say(
            runtime_with_default_session, f"{before}; for i in $(seq 1 300); do echo $i; sleep 0.01; done", timeout=240
        )
        return time.process_time() - started

    alone = await seconds("true")
    assert await seconds("head -c 9500000 /dev/zero | tr '\\0' x") < 5 * alone


async def test_a_late_prompt_ends_no_other(runtime_with_default_session):
    with pytest.raises(CommandTimeoutError):
        await say(runtime_with_default_session, "sleep 0.6; false", timeout=0.1)
    await asyncio.sleep(1)
    assert await say(runtime_with_default_session, "sleep 0.3; echo mine") == "mine\n"


async def test_a_program_may_change_the_prompt(runtime_with_default_session):
    assert await say(runtime_with_default_session, "PS1='(venv) '; PS2=more; true") == ""
    assert await say(runtime_with_default_session, "echo 'a\nb'") == "a\nb\n"


async def test_a_shell_that_ends_says_so(remote_runtime):
    await remote_runtime.create_session(CreateBashSessionRequest(session="brief"))
    with pytest.raises(SessionNotInitializedError, match="bye"):
        await say(remote_runtime, "echo bye; exit 3", session="brief")


async def test_start_up_files_are_sourced(remote_runtime):
    await remote_runtime.write_file(WriteFileRequest(path="/tmp/start", content="export FRUIT=fig\necho started\n"))
    request = CreateBashSessionRequest(session="sourced", startup_source=["/tmp/start"], startup_timeout=20)
    assert "started" in (await remote_runtime.create_session(request)).output
    assert await say(remote_runtime, "echo $FRUIT", session="sourced") == "fig\n"


async def test_programs_may_set_prompt_command(remote_runtime):
    await remote_runtime.write_file(
        WriteFileRequest(path="/tmp/history", content="PROMPT_COMMAND='history -a'; PS1='$ '\n")
    )
    request = CreateBashSessionRequest(session="history", startup_source=["/tmp/history"], startup_timeout=20)
    await remote_runtime.create_session(request)
    assert await say(remote_runtime, "source /tmp/history; echo sourced", session="history") == "sourced\n"
    action = BashAction(command="source /tmp/history; (exit 3)", session="history", check="silent", timeout=20)
    assert (await remote_runtime.run_in_session(action)).exit_code == 3
    assert await say(remote_runtime, "echo then", session="history") == "then\n"


async def test_a_trace_shows_the_sourced_file(runtime_with_default_session):
    await say(runtime_with_default_session, "set -x")
    sourced, *lines = (await say(runtime_with_default_session, "echo a")).splitlines()
    assert sourced.startswith("+ . /tmp/")
    assert lines == ["++ echo a", "a"]


async def test_a_self_interrupted_command_has_ended(runtime_with_default_session):
    action = BashAction(command="sh -c 'kill -INT $$'; echo not reached", check="silent", timeout=20)
    assert (await runtime_with_default_session.run_in_session(action)).exit_code == 130


async def test_programs_print_no_escapes(runtime_with_default_session):
    """Nothing in SWE-ReX's containers sets TERM, so that its bash makes it `dumb`."""
    assert await say(runtime_with_default_session, "[ -t 1 ] && echo $TERM") == "dumb\n"


async def test_a_changed_terminal_costs_no_answer(runtime_with_default_session):
    killed = "sh -c 'stty raw echo; kill -9 $$'"
    for command in ("stty echo", "stty raw echo", "stty -icanon -opost echo", "stty sane", killed):
        await say(runtime_with_default_session, command, check="ignore")
        assert await say(runtime_with_default_session, "echo one; echo two") == "one\ntwo\n", command


async def test_a_syntax_error_names_no_file_of_ours(runtime_with_default_session):
    with pytest.raises(BashIncorrectSyntaxError) as error:
        await say(runtime_with_default_session, "echo 'a")
    assert error.value.extra_info["bash_stderr"].startswith("bash: line 1: unexpected EOF")


async def test_what_ignores_an_interrupt_is_killed(runtime_with_default_session):
    ignoring = "sleep 600 & (trap '' INT; echo ignoring; while true; do sleep 0.1; done)"
    await say(runtime_with_default_session, ignoring, expect=["ignoring"], check="ignore")
    await runtime_with_default_session.run_in_session(BashInterruptAction())
    assert "600" in await say(runtime_with_default_session, "jobs -r")


async def test_programs_run_as_subprocess_runs_them(remote_runtime):
    with pytest.raises(FileNotFoundError):
        await remote_runtime.execute(Command(command=["no-such-program"]))
    with pytest.raises(PermissionError):
        await remote_runtime.execute(Command(command=["/etc/passwd"]))
    alone = await remote_runtime.execute(Command(command=["/usr/bin/env"], env={"FRUIT": "fig"}))
    assert "FRUIT=fig\n" in alone.stdout
    assert (await remote_runtime.execute(Command(command="kill -9 $$", shell=True))).exit_code == -9


async def test_a_slots_limit_is_named():
    deployment = AtroposDeployment(pool={**POOL, "limits": {"wall_s": 3}})
    await deployment.start()
    try:
        for timeout in (None, 50):
            with pytest.raises(CommandTimeoutError, match=r"limits\.wall_s"):
                await deployment.runtime.execute(Command(command=["sleep", "60"], timeout=timeout))
    finally:
        await deployment.stop()


async def test_deployments_take_turns_in_slots():
    async def square(number):
        deployment = AtroposDeploymentConfig(pool=POOL, user="nobody").get_deployment()
        with pytest.raises(DeploymentNotStartedError):
            await deployment.is_alive()
        await deployment.start()
        try:
            await deployment.runtime.create_session(CreateBashSessionRequest())
            await deployment.runtime.write_file(WriteFileRequest(path="n", content=str(number)))
            assert await say(deployment.runtime, "whoami; echo $(($(cat n) * $(cat n))) >m") == "nobody\n"
            return int((await deployment.runtime.read_file(ReadFileRequest(path="m"))).content)
        finally:
            await deployment.stop()

    assert await asyncio.gather(*map(square, range(20))) == [number**2 for number in range(20)]


async def test_calls_may_have_loops_of_their_own():
    """The slot of a deployment that is dropped is given back as well."""

    def one(word):
        deployment = AtroposDeployment(pool={**POOL, "slots_per_container": 1, "acquire_timeout_s": 60})
        asyncio.run(deployment.start())
        asyncio.run(deployment.runtime.create_session(CreateBashSessionRequest()))
        asyncio.run(say(deployment.runtime, f"cd /tmp; word={word}"))
        return deployment, asyncio.run(say(deployment.runtime, "pwd; echo $word"))

    def dropped(word):
        return one(word)[1]

    assert await asyncio.to_thread(dropped, "first") == "/tmp\nfirst\n"
    deployment, said = await asyncio.to_thread(one, "second")
    assert said == "/tmp\nsecond\n"
    await deployment.stop()


async def test_a_killed_container_is_no_outcome():
    deployment = AtroposDeployment(pool={**POOL, "slots_per_container": 1})
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    running = asyncio.create_task(say(deployment.runtime, "sleep 60", check="silent", timeout=60))
    await asyncio.sleep(0.5)
    kill_container()
    with pytest.raises(DeploymentGoneError) as gone:
        await running
    assert isinstance(gone.value.__cause__, SandboxError)
    assert not isinstance(gone.value, (CommandTimeoutError, TimeoutError))
    with pytest.raises(DeploymentGoneError):
        await deployment.runtime.execute(Command(command=["true"]))
    alive = await deployment.is_alive()
    assert not alive
    assert alive.message
    await deployment.stop()


async def test_an_entrypoint_runs_beside_commands(tmp_path):
    deployment = AtroposDeployment(pool=POOL, image=entrypoint_images.image(tmp_path / "image"))
    await deployment.start()
    try:
        said = await deployment.runtime.execute(Command(command=["cat", "/said"], timeout=20))
        assert said.stdout == "sleep infinity /srv\n"
    finally:
        await deployment.stop()
    with pytest.raises(DeploymentStartupError, match=r"ENTRYPOINT: .*nothing"):
        await AtroposDeployment(
            pool=POOL, image=entrypoint_images.image(tmp_path / "missing", starts="/nothing")
        ).start()


async def test_a_session_name_is_taken_once(remote_runtime):
    requests = [CreateBashSessionRequest(session="twin") for _ in range(2)]
    made, refused = await asyncio.gather(*map(remote_runtime.create_session, requests), return_exceptions=True)
    assert isinstance(refused, SessionExistsError)
    assert not isinstance(made, Exception)
    assert await say(remote_runtime, "echo one", session="twin") == "one\n"


async def test_a_missing_image_fails_the_start():
    deployment = AtroposDeployment(pool=POOL, image="127.0.0.1:1/none:1")
    with pytest.raises(DeploymentStartupError):
        await deployment.start()


async def test_commands_run_beside_a_waiting_one(remote_runtime):
    async def run(line):
        return (await remote_runtime.execute(Command(command=line, shell=True))).stdout

    assert await side_by_side.answer(run) == "42\n"
