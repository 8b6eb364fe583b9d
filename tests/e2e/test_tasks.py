"""Every example task on real slots: its solution scores 1.0, an untouched workspace 0.0; and verifiers that misbehave."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from atropos import wire
from atropos.config import ImageStoreSettings
from atropos.errors import ConfigError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks import workspace
from atropos.tasks.errors import TaskBroken, VerifierFailed
from atropos.tasks.folder import load_task, read_tasks
from atropos.tasks.guide import guide
from atropos.tasks.prepare import TaskImages
from atropos.tasks.verifier import services
from tests.files import write_files
from tests.processes import descendants
from tests.waiting import until

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
TASKS = read_tasks(EXAMPLES).tasks


@pytest.fixture(scope="module")
async def pool(tmp_path_factory):
    store = ImageStoreSettings(folder=str(tmp_path_factory.mktemp("store")))
    config = SlotPoolConfig(
        backend="local", slots_per_container=8, min_containers=1, max_containers=1, image_store=store
    )
    async with SlotPool(config) as running:
        yield running
        stats = running.stats()
        assert stats.leased == 0, "a slot was not given back"


@pytest.fixture(autouse=True)
def no_server_is_awaited(monkeypatch):
    """Every test below that starts one waits for it, and leaves other processes behind."""
    monkeypatch.setattr(services, "YOUNG_S", 0.1)


class Attempt:
    """One slot at a time, as a trajectory has it."""

    def __init__(self, pool, task):
        self.pool, self.task, self.slot = pool, task, None
        self.images = TaskImages(pool)

    async def __aenter__(self):
        await self.fresh()
        return self

    async def __aexit__(self, *_):
        await self.slot.release()

    async def fresh(self):
        if self.slot is not None:
            await self.slot.release()
        prepared = await self.images.prepare(self.task)
        self.task = prepared.task
        return await self.lease(prepared)

    async def lease(self, prepared):
        self.slot = await self.pool.acquire(self.task.name, image=prepared.image)
        await workspace.enter(self.slot, prepared.task)
        return self.slot

    async def judge(self):
        """The slot of a separate verifier."""
        if self.task.verifier is None:
            return await self.fresh()
        await self.slot.release()
        return await self.lease(await self.images.prepare(self.task.verifier))

    async def verify(self, mode="task"):
        return await workspace.verify(self.slot, self.task, mode=mode, fresh=self.judge)


async def attempt(pool, task, room, *, solved):
    async with room, Attempt(pool, task) as run:
        if solved:
            result = await workspace.solve(run.slot, task)
            assert result.exit_code == 0, f"{task.name}: {result.output}"
        return await run.verify()


@pytest.mark.timeout(900)  # half a minute of CPU time
@pytest.mark.asyncio(loop_scope="module")
async def test_solutions_1_nothing_0(pool):
    room = asyncio.Semaphore(2 * (os.cpu_count() or 1))
    cases = [(task, solved) for task in TASKS for solved in (True, False)]
    verdicts = await asyncio.gather(*(attempt(pool, task, room, solved=solved) for task, solved in cases))
    wrong = {
        f"{task.name}, {'solved' if solved else 'untouched'}": (verdict.reward, verdict.log)
        for (task, solved), verdict in zip(cases, verdicts, strict=True)
        if verdict.reward != float(solved)
    }
    assert wrong == {}


# ------------------------------------------------------------------------------------------- tasks made for one purpose


def make_task(root, *, test="echo 1 > /logs/verifier/reward.txt", toml="", files=None, setup=None, dockerfile=None):
    write_files(
        root / "made",
        {
            "task.toml": f'version = "1.0"\n{toml}',
            "instruction.md": "Do it.",
            "environment/given.txt": "given\n",
            "tests/test.sh": test,
            **(files or {}),
            **({"environment/setup.sh": setup} if setup else {}),
            **({"environment/Dockerfile": dockerfile} if dockerfile else {}),
        },
    )
    return load_task(root / "made")


@contextlib.asynccontextmanager
async def working_on(pool, task):
    async with Attempt(pool, task) as run:
        yield run


@pytest.mark.asyncio(loop_scope="module")
async def test_set_up_follows_dockerfile(pool, tmp_path):
    task = make_task(
        tmp_path,
        dockerfile="FROM debian:trixie\nWORKDIR /app\nCOPY given.txt data/\nCOPY sub /opt/sub\nRUN umask && pwd > where\n",
        files={"environment/sub/deep/x.txt": "x"},
    )
    async with working_on(pool, task) as run:
        result = await run.slot.exec("pwd; cat /app/where data/given.txt; ls -A; find /opt/sub -type f")
        lines = result.output.split()
        assert lines[:2] == ["/app", "/app"]
        assert lines[2] == "given"
        assert "/opt/sub/deep/x.txt" in lines
        assert (await run.slot.exec("[ ! -L /app ] && [ ! -e Dockerfile ]")).exit_code == 0


RECIPES = {
    "a file onto a folder": ("FROM debian\nWORKDIR /app\nCOPY given.txt /app\n", "cat /app/given.txt", "given"),
    "a file under another name": ("FROM debian\nCOPY given.txt /srv/x\n", "cat /srv/x; pwd", "given\n/"),
    "a folder that exists": (
        "FROM debian\nWORKDIR /root\n",
        "pwd; python3 -c 'import os; print(os.getcwd())'",
        "/root\n/root",
    ),
    "folders in between": (
        "FROM debian\nWORKDIR /build\nRUN pwd > a\nWORKDIR /app\n",
        "cat /build/a; pwd",
        "/build\n/app",
    ),
    "variables": (
        "FROM debian\nARG WHO=me\nENV GREETING=hello DEBIAN_FRONTEND=noninteractive\nWORKDIR /app\nRUN echo $GREETING $WHO > said\n",
        "cat said; echo $GREETING ${WHO:-nobody} $DEBIAN_FRONTEND",
        "hello me\nhello nobody noninteractive",
    ),
    "a user": (
        (
            "FROM debian\nRUN useradd -m dev && groupadd crew\nUSER dev:crew\nWORKDIR /home/dev/app\nRUN id -un > who\n"
            "COPY --chown=dev given.txt mine\nCOPY given.txt roots\n"
        ),
        "id -un; id -gn; cat who; echo $HOME $USER; stat -c %U:%G . mine roots; touch here",
        "dev\ncrew\ndev\n/home/dev dev\ndev:crew\ndev:dev\nroot:root",
    ),
    "a user by number": (
        "FROM debian\nWORKDIR /app\nRUN chmod 777 .\nUSER 4321\n",
        "id -u; touch x; stat -c %u x",
        "4321\n4321",
    ),
    "another shell": ('FROM debian\nSHELL ["/bin/bash", "-c"]\nWORKDIR /app\nRUN echo {1..3} > x\n', "cat x", "1 2 3"),
    "here-documents": (
        (
            "FROM debian\nWORKDIR /app\nRUN <<EOF\necho one > x\necho two >> x\nEOF\nRUN cat <<END >> x\nthree\nEND\n"
            "COPY --chmod=755 <<run /app/run\n#!/bin/sh\necho four\nrun\n"
        ),
        "cat x; ./run",
        "one\ntwo\nthree\nfour",
    ),
    "stages": (
        (
            "FROM debian AS build\nENV OUT=/out\nWORKDIR /src\nCOPY given.txt .\n"
            "RUN mkdir -p $OUT/deep && cp given.txt $OUT/one && ln -s one $OUT/link && touch $OUT/deep/x\n"
            "FROM debian AS other\nCOPY --from=build /out/one /copied\nFROM debian\nRUN useradd dev\nWORKDIR /app\n"
            "COPY --from=build --chown=dev:dev /out/ ./out/\nCOPY --from=other /copied /app/named\nCOPY --from=build /out/o* /app\n"
        ),
        "cat named one; ls out; stat -c %U out/one; readlink out/link; ls -d /src /out 2>&1 | wc -l",
        "given\ngiven\ndeep\nlink\none\ndev\none\n2",
    ),
    "mounts": (
        "FROM debian\nWORKDIR /app\nRUN --mount=type=bind,source=given.txt,target=in --mount=type=cache,target=/c cat in > out; touch /c/x\n",
        "cat out; ls -d /app/* /c 2>/dev/null",
        "given\n/app/out",
    ),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("name", RECIPES)
async def test_workspaces_are_as_dockers(pool, tmp_path, name):
    dockerfile, look, seen = RECIPES[name]
    async with working_on(pool, make_task(tmp_path, dockerfile=dockerfile)) as run:
        assert (await run.slot.exec(look)).output.strip() == seen


@pytest.mark.asyncio(loop_scope="module")
async def test_sessions_start_in_workdir(pool, tmp_path):
    task = make_task(tmp_path, dockerfile="FROM debian\nENV A=b\nWORKDIR /app\nCOPY given.txt .\n")
    async with working_on(pool, task) as run:
        assert await run.slot.read_file("given.txt") == b"given\n"
        await run.slot.write_file("sub/new.txt", "x")
        assert (await run.slot.exec("cat /app/sub/new.txt")).output == "x"
        started = await run.slot.run(wire.ProcStart(command="pwd; echo $A"))
        seen = await run.slot.run(wire.ProcRead(id=started.id, wait_s=10))
        assert seen.output == b"/app\nb\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_verifiers_env_and_user(pool, tmp_path):
    task = make_task(
        tmp_path,
        dockerfile="FROM debian\nRUN useradd -m dev\nENV FROM_IMAGE=1\nWORKDIR /app\nRUN chown dev .\nUSER dev\n",
        toml='[environment.env]\nFROM_TASK = "2"\n[verifier.env]\nFROM_TESTS = "3"\n',
        test="#!/usr/bin/env python3\nimport os, pathlib, getpass\n"
        'e = os.environ\nok = pathlib.Path.home().joinpath("made").exists() and getpass.getuser() == "dev"\n'
        'ok = ok and os.getuid() != 0 and (e["FROM_IMAGE"], e["FROM_TASK"], e["FROM_TESTS"]) == ("1", "2", "3")\n'
        'pathlib.Path("/logs/verifier/reward.txt").write_text(str(float(ok and os.getcwd() == "/app")))\n',
        files={"solution/solve.sh": "touch ~/made; [ $FROM_TASK = 2 ] && [ -z $FROM_TESTS ]"},
    )
    async with working_on(pool, task) as run:
        assert (await workspace.solve(run.slot, task)).exit_code == 0
        assert (await run.verify()).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_endless_accounts_unread(pool, tmp_path):
    task = make_task(tmp_path, dockerfile="FROM debian\nRUN useradd -m dev\nUSER dev\n")
    async with working_on(pool, task) as run:
        await run.slot.exec("yes : | head -c 2000000 >> /etc/passwd", user="0")
        with pytest.raises(VerifierFailed, match=r"more than max_bytes .*/etc/passwd"):
            await run.verify("shared")


SERVICE = """nohup python3 -m http.server 8123 >/dev/null 2>&1 &
(exec -a a-mere-loop sleep 1000) & (exec -a a-mere-loop sleep 1000) &
for i in $(seq 100); do python3 -c 'import socket; socket.create_connection(("127.0.0.1", 8123))' 2>/dev/null && break; sleep 0.05; done
"""


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("keep", "server", "loops"), [(None, 1, 0), ("true", 1, 2), ("false", 0, 0)])
async def test_only_services_stay(pool, tmp_path, caplog, keep, server, loops):
    test = """
    up=$(python3 -c 'import urllib.request as u; u.urlopen("http://127.0.0.1:8123/"); print(1)' 2>/dev/null || echo 0)
    echo "{\\"server\\": $up, \\"loops\\": $(pgrep -fc '^a-mere-loop')}" > /logs/verifier/reward.json
    """
    task = make_task(tmp_path, test=test, toml="" if keep is None else f"[verifier]\nkeep_processes = {keep}\n")
    caplog.set_level("INFO", logger="atropos.tasks")
    async with working_on(pool, task) as run:
        await run.slot.exec(SERVICE)
        assert (await run.verify("shared")).metrics == {"server": server, "loops": loops}
        assert ("ended before verification" in caplog.text) == (keep != "true")


FILES = """
import os, time
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(400)]
for _ in range(100):
    if os.fork() == 0:
        time.sleep(1000)
"""
"""Processes with so many files that looking at them takes a while."""


@pytest.mark.asyncio(loop_scope="module")
async def test_ended_process_costs_none(pool, tmp_path):
    name = f"ends-meanwhile-{os.getpid()}"
    async with working_on(pool, make_task(tmp_path)) as run:
        await run.slot.exec(SERVICE)
        await run.slot.exec(["python3", "-c", FILES])
        await run.slot.exec(f"(exec -a {name} sleep 1000 &)")
        (pid,) = (pid for pid, line in descendants().items() if line.startswith(name))
        stat = Path(f"/proc/{pid}/stat")
        ending = asyncio.create_task(services.end_processes(run.slot, run.task, "services"))
        await until(lambda: ") T " in stat.read_text(), "that it is stopped")
        os.kill(pid, signal.SIGKILL)  # as the kernel does where memory is short; the others' files are being looked at
        await ending
        assert (await run.slot.exec("pgrep -fc ^python3.-m.http; pgrep -fc ^a-mere-loop")).output == "1\n0\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_terminals_server_needs_its_shell(pool, tmp_path):
    test = 'echo "{\\"server\\": $(pgrep -fc ^python3.-m.http), \\"loops\\": $(pgrep -fc ^sleep)}" > /logs/verifier/reward.json'
    task = make_task(tmp_path, test=test)
    async with working_on(pool, task) as run:
        shell = await run.slot.start("exec bash --norc", pty=(24, 80))
        await shell.write("sleep 1000 &\npython3 -m http.server 8123\n")
        up = "until : < /dev/tcp/127.0.0.1/8123; do sleep 0.05; done"
        assert (await run.slot.exec(up, timeout_s=30)).exit_code == 0
        assert (await run.verify("shared")).metrics == {"server": 1, "loops": 0}


@pytest.mark.asyncio(loop_scope="module")
async def test_a_health_check_is_awaited(pool, tmp_path):
    toml = '[environment.healthcheck]\ncommand = "date >> tries; [ $(wc -l < tries) -ge {} ]"\ninterval_sec = 0.01\nretries = 3\n'
    async with working_on(pool, task := make_task(tmp_path, toml=toml.format(3))) as run:
        await workspace.wait_until_healthy(run.slot, task)
    async with working_on(pool, task := make_task(tmp_path, toml=toml.format(4))) as run:
        with pytest.raises(TaskBroken, match="healthcheck failed 3 times"):
            await workspace.wait_until_healthy(run.slot, task)
    rare = '[environment.healthcheck]\ncommand = "false"\ninterval_sec = 600\nretries = 1\n'
    async with working_on(pool, task := make_task(tmp_path, toml=rare)) as run, asyncio.timeout(60):
        with pytest.raises(TaskBroken, match="healthcheck failed 1 times"):
            await workspace.wait_until_healthy(run.slot, task)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_steps_health_check(pool, tmp_path):
    toml = (
        '[environment.healthcheck]\ncommand = "echo task >> checks"\n[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    )
    toml += '[steps.healthcheck]\ncommand = "echo two >> checks; false"\ninterval_sec = 0\nretries = 2\n'
    task = make_task(tmp_path, toml=toml, files={f"steps/{name}/instruction.md": "Go." for name in ("one", "two")})
    async with working_on(pool, task) as run:
        await workspace.wait_until_healthy(run.slot, task)
        await workspace.prepare_step(run.slot, task.steps[0])
        with pytest.raises(TaskBroken, match=r"steps\.healthcheck failed 2 times"):
            await workspace.prepare_step(run.slot, task.steps[1])
        assert (await run.slot.exec("cat checks")).output == "task\ntwo\ntwo\n"


@pytest.mark.asyncio(loop_scope="module")
async def test_collected_are_carried(pool, tmp_path):
    task = make_task(
        tmp_path,
        test="if [ -e /logs/artifacts/state ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt",
        toml='[verifier]\nenvironment_mode = "separate"\n[[verifier.collect]]\n'
        'command = "cp /etc/made /logs/artifacts/state"\n',
    )
    async with working_on(pool, task) as run:
        await run.slot.exec("echo x > /etc/made")
        assert (await run.verify()).reward == 1.0
    async with working_on(pool, task) as run:
        assert (await run.verify()).reward == 0.0, (
            "a hook that fails, since the agent made nothing, is no fault of the task"
        )


@pytest.mark.asyncio(loop_scope="module")
async def test_log_folders_are_shared(pool, tmp_path):
    task = make_task(
        tmp_path,
        test="[ -e /logs/artifacts/file ] && echo 1 > /logs/verifier/reward.txt",
        toml="[agent]\nuser = 'nobody'\n",
    )
    async with working_on(pool, task) as run:
        wrote = await run.slot.exec("cd /logs && touch agent/file artifacts/file verifier/file && id -un")
        assert wrote.output == "nobody\n"
        assert (await run.verify("view")).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_closed_scripts_run(pool, tmp_path):
    made = make_task(
        tmp_path, toml="[agent]\nuser = 'nobody'\n", files={"solution/solve.sh": "cat /solution/part"}
    ).path
    (made / "solution/part").write_text("done")
    for script in ("solution/solve.sh", "tests/test.sh"):
        (made / script).rename(made / f"{script}.real")
        (made / script).symlink_to(f"{Path(script).name}.real")
    for file in ("solution/part", "solution/solve.sh.real", "tests/test.sh.real"):
        (made / file).chmod(0o600)
    task = load_task(made)
    async with working_on(pool, task) as run:
        assert (await workspace.solve(run.slot, task)).output == "done"
        assert (await run.verify()).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_separate_verifier_image(pool, tmp_path):
    task = make_task(
        tmp_path,
        test="exit 9",
        toml="artifacts = ['/app/out']\n[agent]\nuser = 'dev'\n[verifier]\nenvironment_mode = 'separate'\n"
        "[verifier.environment.env]\nMORE = 'm'\n[verifier.env]\nLAST = 'l'\n",
        dockerfile="FROM debian\nRUN useradd dev && mkdir -m 777 /app\nWORKDIR /app\nENV MORE=agents\n",
        files={
            "tests/Dockerfile": "FROM debian\nWORKDIR /judge\nCOPY . /tests/\nRUN echo 'cat expected' > /tests/expected.sh; echo yes > expected\n"
            "ENV FIRST=f\n",
            "tests/check.sh": '[ "$(pwd) $FIRST$MORE$LAST" = "/judge fml" ] && [ ! -e /app/rest ] && cmp /app/out expected',
        },
    )
    (task.path / "tests/test.sh").write_text(
        "#!/bin/sh\nsh /tests/expected.sh; sh /tests/check.sh; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    )
    for wrote, reward in (("yes", 1.0), ("no", 0.0)):
        async with working_on(pool, task) as run:
            seen = await run.slot.exec(f"id -un; ls /tests /judge; echo {wrote} > out; echo x > rest")
            assert seen.output.splitlines()[0] == "dev"
            assert "expected" not in seen.output
            verdict = await run.verify()
            assert (verdict.reward, "yes" in verdict.log) == (reward, True)


@pytest.mark.asyncio(loop_scope="module")
async def test_separate_without_image(pool, tmp_path):
    task = make_task(
        tmp_path,
        test='[ "$(cat built out)$WHO" = "b\no2" ] && [ ! -e /etc/planted ] && echo 1 > /logs/verifier/reward.txt',
        toml="[environment.env]\nWHO = '1'\n[verifier.environment]\ncpus = 1\n[verifier.environment.env]\nWHO = '2'\n",
        setup="echo b > built",
    )
    async with working_on(pool, task) as run:
        await run.slot.exec("echo o > out; echo x > /etc/planted")
        assert (await run.verify()).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_skills_and_mcp_are_told(pool, tmp_path):
    task = make_task(
        tmp_path,
        toml="[environment]\nskills_dir = 'skills'\n[[environment.mcp_servers]]\nname = 'notes'\nurl = 'http://localhost:8/mcp'\n"
        "[[environment.mcp_servers]]\nname = 'files'\ntransport = 'stdio'\ncommand = 'serve'\nargs = ['--all', 'x']\n",
        dockerfile="FROM debian\nWORKDIR /app\nCOPY skills /app/skills\n",
        files={
            "environment/skills/pdf/SKILL.md": "---\nname: pdf\ndescription: Reads\n  PDF & more.\n---\nRun pdftotext.",
            "environment/skills/none/SKILL.md": "no front matter",
            "environment/skills/odd/SKILL.md": "---\n- {\n---\n",
            "environment/skills/vast/SKILL.md": f"---\na: &a {[*range(99)]}\nb: &b {['*a'] * 99}\nname: {['*b'] * 99}\n"
            "description: x\n---\n".replace("'", ""),
            "environment/skills/long/SKILL.md": f"---\nname: long\ndescription: x\nlist: {[*range(9000)]}\n---\n",
            "environment/skills/README.md": "about",
        },
    )
    async with working_on(pool, task) as run:
        assert (await guide(run.slot, task)).strip().splitlines() == [
            "MCP servers of this task:",
            "- notes: sse, http://localhost:8/mcp",
            "- files: stdio, serve --all x",
            "",
            "<available_skills>",
            (
                "<skill><name>pdf</name><description>Reads PDF &amp; more.</description>"
                "<location>/app/skills/pdf/SKILL.md</location></skill>"
            ),
            "</available_skills>",
        ]
    plain = make_task(tmp_path / "plain")
    async with working_on(pool, plain) as run:
        assert await guide(run.slot, plain) == ""


@pytest.mark.asyncio(loop_scope="module")
async def test_steps_share_a_workspace(pool, tmp_path):
    count = "wc -l < log > /logs/verifier/reward.txt"
    task = make_task(
        tmp_path,
        toml="[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n",
        files={
            "steps/one/instruction.md": "One.",
            "steps/one/solution/solve.sh": "echo x >> log",
            "tests/test.sh": count,
            "tests/shared.txt": "",
            "steps/two/instruction.md": "Two.",
            "steps/two/workdir/setup.sh": "echo set >> log",
            "steps/two/workdir/data.txt": "d",
            "steps/two/solution/solve.sh": "cat data.txt >> log; echo >> log",
            "steps/two/tests/test.sh": f"[ -e /tests/shared.txt ] && {count}",
        },
    )
    async with working_on(pool, task) as run:
        for step, reward in zip(task.steps, (1.0, 3.0), strict=True):
            await workspace.prepare_step(run.slot, step)
            assert (
                await run.slot.exec("ls -A /tests /logs/verifier /solution 2>/dev/null | grep -v :$")
            ).output.strip() == ""
            assert (await workspace.solve(run.slot, step)).exit_code == 0
            assert (await workspace.verify(run.slot, step)).reward == reward
            await workspace.clear(run.slot, step)


def make_old_task(root, *, test, parser="pytest"):
    write_files(
        root / "old",
        {
            "task.yaml": f"instruction: |-\n  Do it.\ndifficulty: easy\nparser_name: {parser}\nmax_test_timeout_sec: 20\n",
            "Dockerfile": "FROM ghcr.io/laude-institute/t-bench/ubuntu-24-04:20250624\nWORKDIR /app\n",
            "docker-compose.yaml": "services:\n  client:\n    build: {dockerfile: Dockerfile}\n    image: ${T_BENCH_TASK_DOCKER_CLIENT_IMAGE_NAME}\n"
            "    container_name: ${T_BENCH_TASK_DOCKER_CLIENT_CONTAINER_NAME}\n    command: [sh, -c, sleep infinity]\n"
            "    environment:\n      - TEST_DIR=${T_BENCH_TEST_DIR}\n    volumes:\n      - ${T_BENCH_TASK_LOGS_PATH}:${T_BENCH_CONTAINER_LOGS_PATH}\n",
            "solution.sh": "#!/bin/bash\necho hi > hello.txt\n",
            "run-tests.sh": "#!/bin/bash\npython3 $TEST_DIR/test_outputs.py\n",
            "tests/test_outputs.py": test,
        },
    )
    return load_task(root / "old")


@pytest.mark.asyncio(loop_scope="module")
async def test_pytest_scores_t_bench_1(pool, tmp_path):
    test = """import os
word = "PASSED" if os.path.exists("/app/hello.txt") else "FAILED"
print("=========== short test summary info ============")
print(f"\\x1b[32mPASSED\\x1b[0m test_outputs.py::test_one\\nSKIPPED [1] x.py\\n{word} test_outputs.py::test_two - assert")
"""
    task = make_old_task(tmp_path, test=test)
    assert (task.config.verifier.timeout_sec, task.config.metadata["difficulty"]) == (20, "easy")
    async with working_on(pool, task) as run:
        assert (await run.verify()).reward == 0.0
    async with working_on(pool, task) as run:
        await workspace.solve(run.slot, task)
        assert (await run.verify()).metrics == {"reward": 1.0, "tests": 3.0, "passed": 3.0}
    async with working_on(pool, make_old_task(tmp_path, test="print('no summary')")) as run:
        with pytest.raises(VerifierFailed, match="no pytest summary"):
            await run.verify()
    with pytest.raises(ConfigError, match="parser_name: 'mlebench'"):
        make_old_task(tmp_path, test="", parser="mlebench")


@pytest.mark.asyncio(loop_scope="module")
async def test_failed_set_up_is_tasks(pool, tmp_path):
    for setup, toml, named in (
        ("echo no such luck; exit 3", "", "no such luck"),
        ("sleep 60", "[environment]\nbuild_timeout_sec = 0.5", "took longer than environment.build_timeout_sec"),
    ):
        task = make_task(tmp_path, setup=setup, toml=toml)
        with pytest.raises(TaskBroken, match=named):
            await TaskImages(pool).prepare(task)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("test", "toml", "named"),
    [
        ("true", "", "wrote no"),
        ("echo much > /logs/verifier/reward.txt", "", "holds no reward"),
        ("echo nan > /logs/verifier/reward.txt", "", "not finite"),
        ("echo 1 2 > /logs/verifier/reward.txt", "", "holds no reward"),
        (": > /logs/verifier/reward.txt", "", "holds no reward"),
        ("mkdir /logs/verifier/reward.txt", "", "wrote no"),
        ("echo '{}' > /logs/verifier/reward.json", "", "object of numbers"),
        ('printf \'{"reward": 1, "x%070000d": 1}\' 0 > /logs/verifier/reward.json', "", "bytes, more than 65536"),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "", "'1' is not a number"),
        (
            "echo '{\"reward\": 1}' > /logs/verifier/reward.json; echo 0 > /logs/verifier/reward.txt",
            "",
            "says 1 and .* 0",
        ),
        ("echo '{\"reward\": null}' > /logs/verifier/reward.json", "", "not a number"),
        ("printf '{\"reward\": 1%0400d}' 0 > /logs/verifier/reward.json", "", "too large"),
        ("printf '[%.0s' $(seq 20000) > /logs/verifier/reward.json", "", "recursion"),
        ("sleep 60; echo 1 > /logs/verifier/reward.txt", "[verifier]\ntimeout_sec = 0.5", "took longer"),
    ],
)
async def test_no_reward_is_no_score(pool, tmp_path, test, toml, named):
    task = make_task(tmp_path, test=test, toml=toml)
    async with working_on(pool, task) as run:
        with pytest.raises(VerifierFailed, match=named):
            await run.verify()


@pytest.mark.asyncio(loop_scope="module")
async def test_rewards_as_written(pool, tmp_path):
    for test, reward in (
        ("echo 0.25 > /logs/verifier/reward.txt; exit 7", 0.25),
        ("printf ' 1e-1 \\n' > /logs/verifier/reward.txt", 0.1),
        (
            'echo \'{"reward": 0.5, "style": 1}\' > /logs/verifier/reward.json; echo 0.497 > /logs/verifier/reward.txt',
            0.5,
        ),
        ("echo '{\"accuracy\": 0.75}' > /logs/verifier/reward.json", 0.75),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json", 1.0),
        ('printf \'{"reward": 0.5, "x%09000d": 1}\' 0 > /logs/verifier/reward.json', 0.5),
    ):
        async with working_on(pool, make_task(tmp_path, test=test)) as run:
            assert (await run.verify()).reward == reward


@pytest.mark.asyncio(loop_scope="module")
async def test_the_verifier_runs_clean(pool, tmp_path):
    test = """
    out=0
    [ "$PWD" = /workspace ] || out=wrong-folder
    [ -z "$LEFT_BY_AGENT" ] || out=agent-environment
    [ "$FROM_TOML" = yes ] || out=no-toml-environment
    [ "$(cat /workspace/given.txt)" = given ] || out=agent-changed
    python3 -c 'import json' || out=python
    pgrep -f agent-daemon >/dev/null 2>&1 && out=agent-process
    [ -e /tests/planted ] && out=planted
    [ "$out" = 0 ] && echo 1 > /logs/verifier/reward.txt || echo "why: $out"
    """
    task = make_task(tmp_path, test=test, toml='[verifier.env]\nFROM_TOML = "yes"\n')
    spoil = """
    mkdir -p /tests /logs/verifier ~/.local/lib
    echo 0 > /tests/planted; echo 1 > /logs/verifier/reward.txt; export LEFT_BY_AGENT=1
    echo 'export LEFT_BY_AGENT=1' >> ~/.bashrc; echo 'export LEFT_BY_AGENT=1' >> ~/.bash_profile
    for v in $(ls -d /usr/lib/python3.* | sed 's,.*/,,'); do
      mkdir -p ~/.local/lib/$v/site-packages
      echo 'import os; os._exit(0)' > ~/.local/lib/$v/site-packages/usercustomize.py
    done
    (exec -a agent-daemon setsid sleep 1000) >/dev/null 2>&1 &
    (while :; do echo 0 > /logs/verifier/reward.txt; sleep 0.01; done) >/dev/null 2>&1 &
    """
    for mode in ("shared", "separate"):
        async with working_on(pool, task) as run:
            assert (await run.slot.exec(spoil)).exit_code == 0
            assert (await run.verify(mode)).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_separate_verifier_sees_artifacts(pool, tmp_path):
    test = """
    cat /workspace/kept.txt /data/one.txt > /logs/verifier/seen 2>&1
    [ -e /workspace/given.txt ] && echo given-still-there >> /logs/verifier/seen
    [ -e /data/other.txt ] && echo other >> /logs/verifier/seen
    [ -x /workspace/run ] && [ "$(readlink /workspace/link)" = kept.txt ] || echo modes >> /logs/verifier/seen
    [ -e /root/outside ] && echo outside >> /logs/verifier/seen
    [ "$(bash --version | head -c 3)" = GNU ] || echo shell >> /logs/verifier/seen
    if [ "$(tr '\\n' ' ' < /logs/verifier/seen)" = "kept one " ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
    cat /logs/verifier/seen
    """
    toml = 'artifacts = ["/workspace", "/data/one.txt", "/missing"]\n[verifier]\nenvironment_mode = "separate"\n'
    task = make_task(tmp_path, test=test, toml=toml)
    work = """
    set -e
    rm given.txt; echo kept > kept.txt; ln -s kept.txt link; printf '#!/bin/sh\\n' > run; chmod 755 run
    mkdir -p /data; echo one > /data/one.txt; echo other > /data/other.txt; touch /root/outside
    mkfifo pipe; mkdir deep; ln -s / deep/root
    rm /bin; mkdir /bin; printf '#!/usr/bin/env python3\\nprint("evil")\\n' > /bin/bash; /usr/bin/chmod 755 /bin/bash
    """
    async with working_on(pool, task) as run:
        await run.slot.exec(work)
        verdict = await run.verify()
        assert (verdict.reward, verdict.log) == (1.0, "kept\none\n")


@pytest.mark.asyncio(loop_scope="module")
async def test_large_artifact_in_pieces(pool, tmp_path):
    test = "cmp <(head -c 40000000 /dev/zero) big && [ -s small ] && echo 1 > /logs/verifier/reward.txt"
    task = make_task(tmp_path, test=test)
    async with working_on(pool, task) as run:
        await run.slot.exec("head -c 40000000 /dev/zero > big; echo x > small")
        assert (await run.verify("separate")).reward == 1.0


@pytest.mark.asyncio(loop_scope="module")
async def test_full_disk_costs_no_reward(pool, tmp_path):
    task = make_task(tmp_path, test="[ -s /workspace/given.txt ] && echo 1 > /logs/verifier/reward.txt")
    fill = "head -c 2000000000 /dev/zero > /var/tmp/fill 2>/dev/null || head -c 2000000000 /dev/zero > /tmp/fill; echo"
    async with working_on(pool, task) as run:
        await run.slot.exec(fill)
        with pytest.raises(VerifierFailed):
            await run.verify("shared")
        assert (await run.verify("separate")).reward == 1.0


async def test_prepared_anew_after_a_kill():
    async with SlotPool(SlotPoolConfig(backend="local", slots_per_container=1, max_containers=1)) as pool:
        (link,) = pool.links.values()
        os.kill(int(link.container.id.partition("-")[0]), signal.SIGKILL)
        async with asyncio.timeout(20):
            while link.seat.open:  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(0.01)
        prepared = await TaskImages(pool).prepare(load_task(EXAMPLES / "fix-ledger"))
        async with pool.lease("t", image=prepared.image) as slot:
            await workspace.enter(slot, prepared.task)
            assert (await slot.exec("ls -A | grep .")).exit_code == 0
