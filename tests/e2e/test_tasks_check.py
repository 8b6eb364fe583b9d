"""`atropos tasks check` on real slots: sound tasks are told from unsound, broken and refused ones."""

import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from atropos.errors import ConfigError, SandboxError
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.tasks import workspace
from atropos.tasks.check import CheckConfig, check
from atropos.tasks.errors import TaskBroken
from atropos.tasks.folder import TaskSet, read_tasks
from atropos.tasks.format.datasets import dataset_folders, task_digest
from atropos.tasks.prepare import TaskImages
from tests import privileges
from tests.engines import params
from tests.files import write_files
from tests.unit.command import ended

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "tasks"
PASSES_WITH_DONE = "if [ -e done ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


def make(root, name, *, toml="", test=PASSES_WITH_DONE, solution="touch done", dockerfile=None, files=None):
    write_files(
        root / name,
        {
            "task.toml": f'version = "1.0"\n{toml}',
            "instruction.md": "Make done.",
            "environment/given.txt": "x",
            "tests/test.sh": test,
            "solution/solve.sh": solution,
            **({"environment/Dockerfile": dockerfile} if dockerfile else {}),
            **(files or {}),
        },
    )
    return root / name


def run(*arguments):
    done = subprocess.run(
        [sys.executable, "-m", "atropos.cli", "tasks", "check", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def refusal(monkeypatch, capfd):
    """What the command says, in this process, where it can't be used so."""

    def said(*arguments):
        done = ended(monkeypatch, capfd, "tasks", "check", *map(str, arguments))
        assert done.code == 2, done
        return done.err

    return said


def test_escapes_act_on_nothing(tmp_path):
    make(tmp_path / "tasks", "loud", test=r"printf '\033]52;c;bGVha2Vk\007\033[2Jred\n'")
    code, out, _ = run(tmp_path / "tasks", "--html", tmp_path / "page.html")
    assert code == 1
    assert "␛]52;c;bGVha2Vk␇␛[2Jred" in out
    page = (tmp_path / "page.html").read_text()
    assert "\x1b" not in out + page
    assert '<meta name="viewport"' in page
    assert '<td class="one bad">unsound' in page


def test_findings_have_reasons(tmp_path):
    tasks = tmp_path / "tasks"
    make(tasks, "sound", dockerfile="FROM ubuntu:24.04\nWORKDIR /app\n")
    make(tasks, "wrong-solution", solution="echo no idea; exit 3")
    make(tasks, "free-reward", test="echo 1 > /logs/verifier/reward.txt")
    make(tasks, "no-build", dockerfile="FROM debian\nRUN echo no such luck; exit 3\n")
    make(tasks, "too-big", toml="[environment]\nmemory_mb = 900000000\n")
    make(tasks, "lowered", toml='[environment]\nmemory = "2G"\nstorage = "10G"\n')
    make(tasks, "unreadable", toml="[environment]\ngpus = 1\n")
    make(tasks, "unknown-base", dockerfile="FROM 127.0.0.1:1/alpine:3\n")
    start = 'FROM debian\nRUN mkfifo /said\nENTRYPOINT ["{}", "-c", "echo ready > /said"]\n'
    make(tasks, "started", dockerfile=start.format("sh"), solution="timeout 60 cat /said && touch done")
    make(tasks, "no-start", dockerfile=start.format("/nothing"))
    make(
        tasks,
        "in-steps",
        toml="[[steps]]\nname = 'one'\nmin_reward = 1\n[[steps]]\nname = 'two'\n",
        files={
            **{f"steps/{step}/instruction.md": "Go on." for step in ("one", "two")},
            **{f"steps/{step}/solution/solve.sh": "touch done" for step in ("one", "two")},
        },
    )
    make(
        tasks,
        "own-verifier",
        toml="artifacts = ['/app']\n[environment]\nskills_dir = '/skills'\nmcp_servers = [{name = 'notes', url = 'http://x/'}]\n"
        "[verifier]\nenvironment_mode = 'separate'\n",
        dockerfile="FROM ubuntu:24.04\nWORKDIR /app\n",
        test="[ -e /app/done ] && cp /judge /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
        files={"tests/Dockerfile": "FROM python:3.13-slim\nCOPY . /tests/\nRUN echo 1 > /judge\n"},
    )
    page = tmp_path / "page.html"
    code, out, _ = run(tasks, "--json", "--html", page, "--slots", "3")
    found = {one["name"]: one for one in json.loads(out)}
    assert code == 1
    assert {name: one["status"] for name, one in found.items()} == {
        "sound": "sound",
        "lowered": "sound",
        "in-steps": "sound",
        "own-verifier": "sound",
        "started": "sound",
        "wrong-solution": "unsound",
        "free-reward": "unsound",
        "no-build": "broken",
        "no-start": "broken",
        "too-big": "refused",
        "unreadable": "refused",
        "unknown-base": "broken",
    }
    sound = found["sound"]["attempts"]
    assert (sound["oracle"]["reward"], sound["nop"]["reward"]) == (1.0, 0.0)
    assert found["sound"]["notes"][0] == "FROM: the slots' base stands in for ubuntu:24.04"
    for name, reason in (
        ("wrong-solution", "its solution scores 0 (it ended with 3: no idea)"),
        ("free-reward", "doing nothing scores 1"),
        ("no-build", "no such luck"),
        ("no-start", "ENTRYPOINT /nothing"),
        ("too-big", "environment.memory_mb"),
        ("unreadable", "environment.gpus"),
        ("unknown-base", "127.0.0.1:1/alpine:3: pulling: 127.0.0.1:1: connection refused"),
        ("unknown-base", "; pass --mirror 127.0.0.1:1=HOST[/PATH] where another registry has it"),
    ):
        assert reason in " ".join(found[name]["problems"]), name
    notes = [note for note in found["own-verifier"]["notes"][1:] if not note.startswith("not enforced: ")]
    assert notes == [
        "verifier.FROM: the slots' base stands in for python:3.13-slim",
        "environment.mcp_servers: the prompt names notes; nothing starts or connects to them",
        *(f"{phase}.network_mode: slots have no network" for phase in ("agent", "verifier")),
    ]
    (lowered,) = found["lowered"]["clamped"]
    assert lowered.startswith("environment.storage_mb: 10240 wanted, slots have ")
    assert all(name in page.read_text() for name in found)
    assert all(cure in page.read_text() for cure in ("(--pull pulls it)", "(--network gives them filtered egress)"))


async def test_unreadable_solution_named(tmp_path):
    for name in ("one", "two"):
        make(tmp_path, name)
    first, second = read_tasks(tmp_path).tasks
    unreadable = replace(first, solution=Path("/proc/self/mem"))
    one, two = await check(TaskSet((unreadable, second), {}), CheckConfig(slots=2))
    assert (one.status, one.problems, two.status) == ("broken", ("[Errno 5] Input/output error",), "sound")
    with pytest.raises(SandboxError, match=r"one: .* Input/output error"):
        async with SlotPool(SlotPoolConfig(backend="local")) as pool, pool.lease("verify") as slot:
            await workspace.verify(slot, unreadable)


async def test_own_fault_costs_one_task(tmp_path, monkeypatch, caplog):
    for name in ("one", "two"):
        make(tmp_path, name)
    solve = workspace.solve

    async def broken(slot, task):
        if task.name == "two":
            raise RuntimeError("not meant")
        return await solve(slot, task)

    monkeypatch.setattr(workspace, "solve", broken)
    one, two = await check(read_tasks(tmp_path), CheckConfig(slots=2))
    assert (one.status, two.status) == ("sound", "unsound")
    assert two.problems == ("a fault of atropos's own, please report it: RuntimeError: not meant",)
    assert "Traceback" in caplog.text


async def test_what_one_prepared_the_other_can(tmp_path, monkeypatch):
    make(tmp_path, "one")
    prepare, tries = TaskImages.prepare, []

    async def slow(images, task, *arguments, **more):
        tries.append(task.name)
        if len(tries) == 1:
            raise TaskBroken("took longer than environment.build_timeout_sec")
        return await prepare(images, task, *arguments, **more)

    monkeypatch.setattr(TaskImages, "prepare", slow)
    (one,) = await check(read_tasks(tmp_path), CheckConfig(slots=2))
    assert (one.status, one.problems, len(tries)) == ("sound", (), 3)


def test_an_own_agent_is_run(tmp_path, refusal):
    make(tmp_path / "tasks", "sound")
    script = tmp_path / "agent.sh"
    script.write_text("touch done")
    code, out, _ = run(tmp_path / "tasks", "--agent", "script", "--script", script)
    assert code == 0
    assert "1 task: 1 sound" in out
    assert "--script FILE" in refusal(tmp_path / "tasks", "--agent", "script")
    for option, at in (("--script", "absent.sh"), ("--html", "absent/page.html"), ("--html", "tasks")):
        assert option in refusal(tmp_path / "tasks", option, tmp_path / at), "and nothing was run for it"


def test_tests_find_their_layer(tmp_path, refusal):
    test = "[ -e done ] && cp /opt/judge/reward /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    make(tmp_path / "tasks", "layered", test=test, solution="[ ! -e /opt/judge ] && touch done")
    (tmp_path / "layer/opt/judge").mkdir(parents=True)
    (tmp_path / "layer/opt/judge/reward").write_text("1")
    code, out, told = run(tmp_path / "tasks", "--json", "--verifier-layer", f"dir:{tmp_path}/layer")
    assert code == 0, out + told
    told = refusal(tmp_path / "tasks", "--verifier-layer", f"dir:{tmp_path}/absent")
    assert f"--verifier-layer: image: dir:{tmp_path}/absent" in told


def test_the_table_fits_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"{number}-a-task-with-a-name-that-is-longer-than-its-column" for number in range(3)]
    for name in names:
        make(tmp_path / "tasks", name, toml='[environment]\ngpus = 1\ndocker_image = "example.org/some/where/else:1"\n')
    code, out, _ = run(tmp_path / "tasks")
    head, *lines = out.splitlines()
    rows = [line for line in lines if line[0].isdigit() and " refused " in line]
    assert code == 1
    assert max(map(len, out.splitlines())) <= 80
    assert head.split() == ["task", "status", "oracle", "nop", "image", "prepared", "size", "verifier"]
    assert [(row.split()[0][:8], row.split()[1]) for row in rows] == [(name[:8], "refused") for name in names]
    assert all(f"{name}: " in out for name in names), "its reason stands below"


def test_in_a_pipe_names_are_whole(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "a-task-with-a-name-that-is-longer-than-a-terminal-of-eighty-columns-and-then-some-more"
    make(tmp_path / "tasks", name, toml='[environment]\ngpus = 1\ndocker_image = "example.org/some/where/else:1"\n')
    _, out, _ = run(tmp_path / "tasks")
    assert out.splitlines()[1].split()[:2] == [name, "refused"]
    assert f"{name}: environment.gpus: 1 wanted" in out.splitlines()[2]


def test_ctrl_c_keeps_results(tmp_path):
    make(tmp_path / "tasks", "quick")
    make(tmp_path / "tasks", "slow", solution="sleep 1000", test="sleep 1000")
    page = tmp_path / "page.html"
    command = [
        sys.executable,
        "-m",
        "atropos.cli",
        "tasks",
        "check",
        tmp_path / "tasks",
        "--html",
        page,
        "--slots",
        "3",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        head, row = process.stdout.readline(), process.stdout.readline()
        assert head.split()[:2] == ["task", "status"]
        assert row.split()[:4] == ["quick", "sound", "1", "0"]
        assert "quick" in page.read_text()
        process.send_signal(signal.SIGINT)
        out, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "1 task: 1 sound" in out
    assert "stopped: 1 of 2 tasks were checked" in told


async def test_shared_solution_is_tried(tmp_path):
    make(
        tmp_path,
        "first",
        solution="where=/op; touch ${where}t/made",  # which no text shows
        test="where=/op; [ -e ${where}t/made ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt",
        dockerfile="FROM debian\nWORKDIR /app\n",
    )
    make(tmp_path, "second")
    order = []
    found = await check(
        read_tasks(tmp_path), CheckConfig(agents=("oracle",), slots=1), done=lambda one: order.append(one.name)
    )
    assert order == ["first", "second"]
    assert 'set environment_mode = "shared"' in found[0].problems[-1]


@privileges.volumes_on_disk
async def test_storage_beyond_memory_is_on_disk(tmp_path):
    make(tmp_path, "large", toml="schema_version = '1.4'\n[environment]\nmemory_mb = 512\nstorage_mb = 500000000\n")
    (one,) = await check(read_tasks(tmp_path), CheckConfig())
    assert one.status == "sound", one
    unbounded = "not enforced: disk_mib, inodes: nothing bounds files on disk here"
    assert any(note.text.startswith(unbounded) for note in one.notes)
    (one,) = await check(read_tasks(tmp_path), CheckConfig(volume="memory"))
    assert one.status == "refused"


async def test_a_task_has_its_own_time(tmp_path):
    make(tmp_path, "long", toml="[agent]\ntimeout_sec = 60\n", solution="sleep 1; touch done")
    (one,) = await check(read_tasks(tmp_path), CheckConfig(agents=("oracle",), attempt_s=0.5))
    assert one.problems == ()


@privileges.volumes_on_disk
async def test_what_was_too_little_is_given_whole(tmp_path):
    """10 GiB are what old schemas wrote out, and a slot has the 600 MiB of its memory."""
    toml, large = '[environment]\nstorage = "10G"\n', "head -c 650M /dev/zero > large && rm large"
    make(tmp_path, "built", toml=toml, dockerfile=f"FROM debian\nWORKDIR /app\nRUN {large} && : {tmp_path}\n")
    make(tmp_path, "small", toml=toml)
    make(tmp_path, "solved", toml=toml, solution=f"{large} && touch done")
    config = CheckConfig(agents=("oracle",), memory_mib=600, slots=2)
    found = await check(read_tasks(tmp_path), config)
    assert [(one.status, one.problems) for one in found] == [("sound", ())] * 3
    assert ["tried again with all of it" in one.clamped[0] for one in found] == [True, False, True]
    (one,) = await check(read_tasks(tmp_path, ["solved"]), replace(config, volume="memory"))
    assert "the disk limit was reached, and is lower than the task's" in one.problems[0]
    assert "again" not in one.clamped[0], "memory has no room for that"


@pytest.mark.parametrize("backend", params())
def test_examples_are_sound(backend):
    tasks = {"local": ("top-words", "notes-server")}.get(backend, ("fix-ledger", "route-table"))
    code, out, told = run(*(EXAMPLES / name for name in tasks), "--json", "--backend", backend)
    assert code == 0, out + told
    assert [one["status"] for one in json.loads(out)] == ["sound", "sound"]


@pytest.mark.parametrize("backend", params("docker", "nomad"))
def test_engines_check_alike(tmp_path, backend):
    """The local backend has tests of each."""
    tasks, separate = tmp_path / "tasks", "artifacts = ['/app']\n[verifier]\nenvironment_mode = 'separate'\n"
    both = "[ -e /app/done ] && cp /judge /opt/judge/reward /logs/verifier/ && cp /judge /logs/verifier/reward.txt"
    own = {
        "tests/Dockerfile": "FROM debian AS made\nRUN echo 1 > /judge\nFROM debian\nCOPY --from=made /judge /\nCOPY . /tests/\n"
    }
    machine = "FROM debian\nRUN useradd -m dev && install -d -o dev /app\nUSER dev\nWORKDIR /app\n"
    make(
        tasks, "own", toml=separate, test=f"{both} || echo 0 > /logs/verifier/reward.txt", files=own, dockerfile=machine
    )
    steps = {f"steps/{name}/instruction.md": "Go on." for name in ("one", "two")}
    steps |= {f"steps/{name}/solution/solve.sh": f"[ ! -e /tests ] && touch {name}" for name in ("one", "two")}
    steps |= {f"steps/{name}/tests/name": name for name in ("one", "two")}
    sees = "cd /app; ls -d one $(cat /tests/name) && cp /opt/judge/reward /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    toml = "[[steps]]\nname = 'one'\nmin_reward = 1\n[[steps]]\nname = 'two'\n"
    for name, mode in (("steps", ""), ("steps-apart", separate)):
        make(tasks, name, toml=mode + toml, test=sees, files=steps, dockerfile="FROM debian\nWORKDIR /app\n")
    (tmp_path / "layer/opt/judge").mkdir(parents=True)
    (tmp_path / "layer/opt/judge/reward").write_text("1")
    code, out, told = run(
        tasks, "--json", "--backend", backend, "--verifier-layer", f"dir:{tmp_path}/layer", "--slots", "2"
    )
    assert code == 0, out + told
    rewards = [[one["attempts"][agent]["reward"] for agent in ("oracle", "nop")] for one in json.loads(out)]
    assert rewards == [[1.0, 0.0]] * 3


def test_checking_needs_no_training_library():
    script = "import sys, atropos.tasks.check, atropos.cli.tasks; sys.exit('atroposlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# ----------------------------------------------------------------------------------------------------------- data sets


def test_a_registry_has_versions(tmp_path):
    make(tmp_path / "tasks", "one")
    make(tmp_path / "tasks", "two")
    rows = [
        {
            "name": "set",
            "version": "1",
            "description": "",
            "tasks": [{"name": "one", "git_url": "x", "path": "tasks/one"}],
        },
        {"name": "set", "version": "2", "tasks": [{"path": "tasks/one"}, {"path": "tasks/two"}], "metrics": []},
        {"name": "bad", "version": "1", "tasks": [{"path": "../elsewhere"}]},
    ]
    (tmp_path / "registry.json").write_text(json.dumps(rows))
    assert [one.name for one in dataset_folders(tmp_path, "set@1")] == ["one"]
    assert [one.name for one in dataset_folders(tmp_path, "set@2", ["t*"])] == ["two"]
    for wanted, named in (("set", "versions 1, 2"), ("set@3", "there is set@1"), ("bad@1", "leads out of the clone")):
        with pytest.raises(ConfigError, match=named):
            dataset_folders(tmp_path, wanted)


def test_digests_are_checked(tmp_path):
    task = make(tmp_path / "tasks", "one", files={"README.md": "r", "notes.txt": "not published", "tests/x.pyc": "c"})
    files = ("README.md", "environment/given.txt", "instruction.md", "solution/solve.sh", "task.toml", "tests/test.sh")
    lines = "".join(f"{name}\0{hashlib.sha256((task / name).read_bytes()).hexdigest()}\n" for name in files)
    digest = f"sha256:{hashlib.sha256(lines.encode()).hexdigest()}"
    assert task_digest(task) == digest
    (tmp_path / "dataset.toml").write_text(
        f'schema_version = "1.0"\n[dataset]\nname = "org/set"\nversion = "2"\n[[tasks]]\nname = "org/one"\ndigest = "{digest}"\n'
    )
    assert dataset_folders(tmp_path, "org/set@2") == [task]
    (task / "tests/test.sh").write_text("echo 1")
    with pytest.raises(ConfigError, match="is not what the digest says"):
        dataset_folders(tmp_path, "org/set")
    with pytest.raises(ConfigError, match="it is org/set@2"):
        dataset_folders(tmp_path, "org/other")


@pytest.mark.parametrize("name", ["dataset.toml", "registry.json"])
@pytest.mark.parametrize("content", [b"\xff", b"x = " + b"[" * 3000])
def test_unreadable_set_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name) as refused:
        dataset_folders(tmp_path, "org/set")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["a\0b", "a" * 300, "a/" * 3000, "loop/a", "missing"])
def test_absent_task_is_named(tmp_path, path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "registry.json").write_text(json.dumps([{"name": "set", "tasks": [{"path": path}]}]))
    with pytest.raises(ConfigError, match="is not in this clone"):
        dataset_folders(tmp_path, "set")
    quoted = json.dumps(f"org/{path.replace('/', '-')}")
    (tmp_path / "dataset.toml").write_text(f'[dataset]\nname = "set"\n[[tasks]]\nname = {quoted}\n')
    with pytest.raises(ConfigError, match="is not in this clone"):
        dataset_folders(tmp_path, "set")
