"""A task folder is either understood in full or refused in one line that names the place and the cure."""

import io
import tarfile
from pathlib import Path

import pytest

from atropos.errors import ConfigError
from atropos.tasks.archive import pack, unpack_steps
from atropos.tasks.dockerfile import Copy, Run
from atropos.tasks.folder import load_task, load_tasks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tasks"


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "demo"
    for name, text in {
        "task.toml": 'version = "1.0"\n',
        "instruction.md": "Do it.\n",
        "environment/a.txt": "a",
        "environment/sub/b.sh": "b",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "environment/sub/b.sh").chmod(0o775)
    return root


def unpacked(folder, step):
    found = {}
    for where, data in unpack_steps(folder / "environment", step):
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                content = archive.extractfile(member).read().decode() if member.isfile() else member.linkname
                found[where.rstrip("/") + "/" + member.name] = (member.mode, member.uid, content)
    return found


def test_every_example_task_is_complete():
    tasks = load_tasks(EXAMPLES)
    assert len(tasks) >= 15
    helpers = {(task.path / "tests/verify.py").read_text() for task in tasks}
    assert len(helpers) == 1, "the copies of tests/verify.py differ"
    categories = {task.config.metadata["category"] for task in tasks}
    assert len(categories) >= 10
    for task in tasks:
        assert task.solution is not None, task.name
        assert task.unmet(memory_mib=1024, disk_mib=512, cpus=None, images=()) == []
    assert len({task.instruction for task in tasks}) == len(tasks)


def test_files_land_in_the_workspace_with_their_modes(folder):
    (folder / "environment/link").symlink_to("a.txt")
    task = load_task(folder)
    (step,) = task.recipe.steps
    assert unpacked(folder, step) == {
        "/workspace/a.txt": (0o644, 0, "a"),
        "/workspace/link": (0o755, 0, "a.txt"),
        "/workspace/sub": (0o755, 0, ""),
        "/workspace/sub/b.sh": (0o755, 0, "b"),
    }


def test_setup_runs_in_the_workspace_and_is_no_part_of_it(folder):
    (folder / "environment/setup.sh").write_text("touch made")
    task = load_task(folder)
    files, script, run = task.recipe.steps
    assert "/workspace/setup.sh" not in unpacked(folder, files)
    assert list(unpacked(folder, script)) == ["/tmp/.task-setup/setup.sh"]
    assert isinstance(run, Run)
    assert run.workdir == "/workspace"


def test_dockerfile_is_honoured(folder):
    (folder / "environment/Dockerfile").write_text(
        "# comment\nFROM debian:trixie\nWORKDIR /app\nWORKDIR src\nCOPY a.txt /etc/x.conf\nCOPY sub/ ./tools/\n"
        'COPY --chmod=600 ["a.txt", "keys/"]\nRUN echo 1 && \\\n    echo 2\nRUN ["touch", "a b"]\nCMD ["bash"]\n'
    )
    recipe = load_task(folder).recipe
    assert (recipe.image, recipe.workdir) == ("debian:trixie", "/app/src")
    assert recipe.steps == (
        Copy(("a.txt",), "/etc/x.conf"),
        Copy(("sub/",), "/app/src/tools/"),
        Copy(("a.txt",), "/app/src/keys/", 0o600),
        Run("echo 1 &&     echo 2", "/app/src"),
        Run("touch 'a b'", "/app/src"),
    )
    assert unpacked(folder, recipe.steps[0]) == {"/etc/x.conf": (0o644, 0, "a")}
    assert unpacked(folder, recipe.steps[1]) == {"/app/src/tools/b.sh": (0o755, 0, "b")}
    assert unpacked(folder, recipe.steps[2]) == {"/app/src/keys/a.txt": (0o600, 0, "a")}


def test_setup_follows_a_dockerfile_that_leaves_it_alone(folder):
    (folder / "environment/setup.sh").write_text("touch made")
    (folder / "environment/Dockerfile").write_text("FROM a\nWORKDIR /app\nCOPY a.txt .\n")
    copy, _, run = load_task(folder).recipe.steps
    assert copy == Copy(("a.txt",), "/app/")
    assert run.workdir == "/app"
    (folder / "environment/Dockerfile").write_text("FROM a\nCOPY setup.sh /\nRUN bash /setup.sh\n")
    assert load_task(folder).recipe.steps == (Copy(("setup.sh",), "/"), Run("bash /setup.sh", "/"))


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("FROM a\nFROM b", ":2: FROM"),
        ("FROM a AS b", "FROM a AS b"),
        ("FROM a\nADD http://x /y", "ADD"),
        ("FROM a\nENV A=1", "ENV"),
        ("FROM a\nUSER bob", "USER"),
        ("FROM a\nENTRYPOINT x", "ENTRYPOINT"),
        ("FROM a\nVOLUME /x", "VOLUME"),
        ("FROM a\nARG V", "ARG"),
        ("FROM a\nCOPY --from=b x y", "--from"),
        ("FROM a\nCOPY missing.txt /x", "missing.txt"),
        ("FROM a\nCOPY ../x /x", "../x"),
        ("FROM a\nCOPY x", "a source and a target"),
        ("FROM a\nRUN --mount=type=cache x", "--mount"),
        ("FROM a\nRUN <<EOF\nx\nEOF", "here-document"),
        ("FROM a\nWORKDIR $HOME", "$HOME"),
        ("FROM a\nFROB x", "FROB"),
        ("FROM a\nRUN x \\", "backslash"),
        ("RUN x", "no FROM"),
    ],
)
def test_what_a_dockerfile_asks_in_vain_is_refused_by_name(folder, line, named):
    (folder / "environment/Dockerfile").write_text(line)
    with pytest.raises(ConfigError, match="environment") as refused:
        load_task(folder)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("version = ", "is not TOML"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec"),
        ("[verifier]\ntimeout_sec = 'soon'", "verifier.timeout_sec"),
        ("[verifier]\ntimout_sec = 1", "verifier.timout_sec"),
        ("[agent]\nuser = 'bob'", "agent.user"),
        ("[environment]\ngpus = 1", "environment.gpus"),
        ("[environment]\nmemory_mb = 'much'", "environment.memory_mb"),
        ("[environment]\nworkdir = 'app'", "environment.workdir"),
        ("[environment.env]\nA = 'b'", "environment.env"),
        ("[environment.healthcheck]\ncommand = 'true'", "environment.healthcheck"),
        ("[[environment.mcp_servers]]\nname = 'x'", "environment.mcp_servers"),
        ("[[steps]]\nname = 'one'", "steps"),
        ("artifacts = ['here']", "artifacts"),
        ("frobnicate = 1", "frobnicate"),
    ],
)
def test_a_bad_task_toml_is_refused_by_field(folder, text, named):
    (folder / "task.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_task(folder)
    assert "task.toml" in str(refused.value)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["task.toml", "instruction.md", "tests/test.sh", "environment"])
def test_a_missing_part_is_named(folder, name):
    path = folder / name
    path.rename(folder.parent / "away")
    with pytest.raises(ConfigError) as refused:
        load_task(folder)
    assert name in str(refused.value)
    assert "is missing" in str(refused.value)


@pytest.mark.parametrize("name", ["instruction.md", "tests/test.sh"])
def test_an_empty_part_is_named(folder, name):
    (folder / name).write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        load_task(folder)


def test_files_that_cannot_be_honoured_are_named(folder):
    (folder / "environment/docker-compose.yaml").write_text("services: {}")
    with pytest.raises(ConfigError, match=r"docker-compose\.yaml"):
        load_task(folder)


def test_folders_without_tasks_and_patterns_without_match_are_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no task"):
        load_tasks(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not a folder"):
        load_tasks(tmp_path / "nowhere")
    (tmp_path / "empty").rmdir()
    with pytest.raises(ConfigError, match=r"no task .* matches 'x\*'"):
        load_tasks(tmp_path, ["x*"])
    assert [task.name for task in load_tasks(tmp_path, ["de*"])] == ["demo"]
    assert [task.name for task in load_tasks(folder)] == ["demo"]


def test_older_spellings_and_empty_forms_are_read(folder):
    (folder / "task.toml").write_text(
        'schema_version = "1.1"\n[task]\nname = "org/demo"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
        "mcp_servers = []\ncpus = 2\n[environment.env]\n[verifier.env]\nA = 'b'\n[solution.env]\n"
    )
    task = load_task(folder)
    assert task.config.environment.memory_mb == 2048
    assert task.config.environment.storage_mb == 512
    assert task.config.verifier.env == {"A": "b"}
    problems = task.unmet(memory_mib=1024, disk_mib=256, cpus=1, images=())
    assert [problem.split(":")[0] for problem in problems] == [
        "environment.memory_mb",
        "environment.storage_mb",
        "environment.cpus",
    ]


def test_an_image_needs_a_base(folder):
    (folder / "environment/Dockerfile").write_text("FROM python:3.11-slim\nCOPY . .\n")
    task = load_task(folder)
    assert task.unmet(memory_mib=1, disk_mib=1, cpus=None, images=("python:3*",)) == []
    (problem,) = task.unmet(memory_mib=1, disk_mib=1, cpus=None, images=("debian*",))
    assert problem.startswith("FROM: no base stands in for 'python:3.11-slim'")


def test_large_folders_are_cut_into_archives_that_fit(tmp_path):
    for number in range(8):
        (tmp_path / f"f{number}").write_bytes(b"x" * 50_000)
    pieces = list(pack([(f"f{n}", tmp_path / f"f{n}") for n in range(8)], limit=200_000))
    assert len(pieces) > 1
    assert all(len(piece) <= 200_000 for piece in pieces)
    names = []
    for piece in pieces:
        with tarfile.open(fileobj=io.BytesIO(piece)) as archive:
            names += archive.getnames()
    assert sorted(names) == [f"f{n}" for n in range(8)]
    with pytest.raises(ConfigError, match="too much for one file"):
        list(pack([("f0", tmp_path / "f0")], limit=60_000))


def test_a_fifo_is_refused(folder):
    import os

    os.mkfifo(folder / "environment/pipe")
    (step,) = load_task(folder).recipe.steps
    with pytest.raises(ConfigError, match="pipe: is neither"):
        unpacked(folder, step)
