"""A task folder is either understood in full or refused in one line that names the place and the cure."""

import io
import itertools
import os
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atropos.config import SandboxSettings
from atropos.errors import ConfigError
from atropos.resources import Resources
from atropos.tasks.builder.archive import LargeFile, changed_mode, pack, unpack_steps
from atropos.tasks.fit import Note, Room, TaskFit, fit, largest_on_disk
from atropos.tasks.folder import load_task, read_folders, read_tasks
from atropos.tasks.format import tars
from atropos.tasks.format.context import Context, walk
from atropos.tasks.format.recipe import CACHES, PATH, BuildInputs, Copy, Download, Folder, Mount, Run, StepSettings
from atropos.tasks.verifier.exposure import exposure
from atropos.tasks.verifier.mode import Choice, choose
from atropos.tasks.verifier.reward import Verdict, combined
from atropos.tasks.verifier.texts import TaskTexts, makes_links, read_texts, renames_across, venvs_of_tests
from atropos.tasks.verifier.venvs import venvs_made
from atropos.wire import HealthConfig, LeaseLimits
from tests.files import write_files
from tests.needs import needs
from tests.settings import shows

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "tasks"


@pytest.fixture
def folder(tmp_path):
    root = write_files(
        tmp_path / "demo",
        {
            "task.toml": 'version = "1.0"\n',
            "instruction.md": "Do it.\n",
            "environment/a.txt": "a",
            "environment/sub/b.sh": "b",
            "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        },
    )
    (root / "environment/sub/b.sh").chmod(0o775)
    return root


def unpacked(folder, step):
    found = {}
    where, pieces = unpack_steps(Context.of(folder / "environment", None), step)
    for data in pieces:
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                content = archive.extractfile(member).read().decode() if member.isfile() else member.linkname
                found[where.rstrip("/") + "/" + member.name] = (member.mode, member.uid, content)
    return found


def test_every_example_task_is_complete():
    tasks = read_tasks(EXAMPLES).tasks
    assert len(tasks) >= 15
    helpers = {(task.path / "tests/verify.py").read_text() for task in tasks}
    assert len(helpers) == 1, "the copies of tests/verify.py differ"
    categories = {task.config.metadata["category"] for task in tasks}
    assert len(categories) >= 10
    for task in tasks:
        assert task.solution is not None, task.name
        found = fit(task, Room(Resources(memory_mib=1024, disk_mib=512)), images=())
        assert (found.refused, found.clamped, task.warnings) == ((), (), ())
    assert len({task.instruction for task in tasks}) == len(tasks)


def test_files_keep_their_modes(folder):
    (folder / "environment/link").symlink_to("a.txt")
    (folder / "environment/open").write_text("o")
    (folder / "environment/open").chmod(0o666)
    task = load_task(folder)
    start, step = task.recipe.steps
    assert start == Folder("/workspace")
    assert unpacked(folder, step) == {
        "/workspace/a.txt": (0o644, 0, "a"),
        "/workspace/link": (0o755, 0, "a.txt"),
        "/workspace/open": (0o666, 0, "o"),
        "/workspace/sub": (0o755, 0, ""),
        "/workspace/sub/b.sh": (0o755, 0, "b"),
    }, "no umask lets others write, and some let the group"


def test_litter_is_left_out(folder):
    every = load_task(folder).recipe.steps[-1]
    wanted = unpacked(folder, every)
    write_files(
        folder / "environment",
        dict.fromkeys((".DS_Store", "__pycache__/a.pyc", "sub/.DS_Store", "sub/__pycache__/b.pyc"), ""),
    )
    every = load_task(folder).recipe.steps[-1]
    assert unpacked(folder, every) == wanted
    starred, below = recipe_of(folder, "FROM debian\nCOPY * /x/\nCOPY sub/* /y/\n").steps
    assert sorted(unpacked(folder, starred)) == ["/x/Dockerfile", "/x/a.txt", "/x/b.sh"]
    assert sorted(unpacked(folder, below)) == ["/y/b.sh"]


def test_setup_is_not_in_the_workspace(folder):
    (folder / "environment/setup.sh").write_text("touch made")
    task = load_task(folder)
    _, files, script, run = task.recipe.steps
    assert "/workspace/setup.sh" not in unpacked(folder, files)
    assert list(unpacked(folder, script)) == ["/tmp/.task-setup/setup.sh"]
    assert isinstance(run, Run)
    assert run.settings.workdir == "/workspace"


def test_dockerfile_is_honoured(folder):
    (folder / "environment/Dockerfile").write_text(
        "# comment\nFROM debian:trixie\nWORKDIR /app\nWORKDIR src\nCOPY a.txt /etc/x.conf\nCOPY sub/ ./tools/\n"
        'COPY --chmod=600 ["a.txt", "keys/"]\nRUN echo 1 && \\\n    echo 2\nRUN ["touch", "a b"]\nCMD ["bash"]\n'
    )
    recipe = load_task(folder).recipe
    assert (recipe.image, recipe.workdir) == ("debian:trixie", "/app/src")
    there = StepSettings("/app/src")
    assert recipe.steps == (
        Folder("/app"),
        Folder("/app/src"),
        Copy(("a.txt",), "/etc/x.conf"),
        Copy(("sub/",), "/app/src/tools/"),
        Copy(("a.txt",), "/app/src/keys/", 0o600),
        Run(("/bin/sh", "-c", "echo 1 &&     echo 2"), there),
        Run(("touch", "a b"), there),
    )
    assert unpacked(folder, recipe.steps[2]) == {"/etc/x.conf": (0o644, 0, "a")}
    assert unpacked(folder, recipe.steps[3]) == {"/app/src/tools/b.sh": (0o755, 0, "b")}
    assert unpacked(folder, recipe.steps[4]) == {"/app/src/keys/a.txt": (0o600, 0, "a")}


def test_setup_follows_the_dockerfile(folder):
    (folder / "environment/setup.sh").write_text("touch made")
    (folder / "environment/Dockerfile").write_text("FROM a\nWORKDIR /app\nCOPY a.txt .\n")
    _, copy, _, run = load_task(folder).recipe.steps
    assert copy == Copy(("a.txt",), "/app/")
    assert run.settings.workdir == "/app"
    (folder / "environment/Dockerfile").write_text("FROM a\nCOPY setup.sh /\nRUN bash /setup.sh\n")
    assert load_task(folder).recipe.steps == (Copy(("setup.sh",), "/"), Run(("/bin/sh", "-c", "bash /setup.sh")))


def recipe_of(folder, text):
    (folder / "environment/Dockerfile").write_text(text)
    return load_task(folder).recipe


def test_variables_are_replaced(folder):
    recipe = recipe_of(
        folder,
        "ARG BASE=debian\nARG VERSION=12\nFROM ${BASE}:${VERSION}\nARG VERSION\nARG NAME=x PLACE=/srv\n"
        "ENV HOME_OF=$PLACE/${NAME:-none} PATH=/opt/bin:$PATH\nENV OLD style here\nENV NAME=won\n"
        "WORKDIR $HOME_OF\nCOPY ${MISSING:-a}.txt '$literal'/\nRUN echo $NAME\n",
    )
    assert recipe.image == "debian:12"
    env = {"HOME_OF": "/srv/x", "PATH": f"/opt/bin:{PATH}", "OLD": "style here", "NAME": "won"}
    assert recipe.settings == StepSettings("/srv/x", env)
    start, copy, run = recipe.steps
    assert start == Folder("/srv/x")
    assert copy == Copy(("a.txt",), "/srv/x/$literal/")
    assert run == Run(
        ("/bin/sh", "-c", "echo $NAME"), StepSettings("/srv/x", {"VERSION": "12", "PLACE": "/srv", **env})
    )


def test_the_later_of_arg_and_env_holds(folder):
    recipe = recipe_of(
        folder, "FROM debian\nENV A=1 B=1\nARG A=2\nENV B=$A\nRUN one\nENV A=3\nRUN two\nARG A\nRUN three\n"
    )
    assert [run.settings.env for run in recipe.steps] == [{"A": "2", "B": "2"}, *2 * [{"A": "3", "B": "2"}]]
    assert recipe.settings.env == {"A": "3", "B": "2"}, "an ARG is no part of the image"


def test_a_download_s_name_is_unescaped(folder):
    recipe = recipe_of(folder, "FROM debian\nADD https://example.com/torch-2%2Bcpu.whl?x=%2F /tmp/\n")
    assert [step.target for step in recipe.steps] == ["/tmp/torch-2+cpu.whl"]


@pytest.mark.parametrize(
    ("platforms", "architecture"),
    [
        (("linux/amd64", "linux/x86_64", "AMD64", "linux/amd64/v3", "linux", "$BUILDPLATFORM"), "amd64"),
        (("linux/arm64", "Linux/aarch64", "arm64", "linux/arm64/v8", "linux", "$TARGETPLATFORM"), "arm64"),
    ],
)
def test_from_names_what_slots_are(folder, platforms, architecture):
    other = {"amd64": "arm64", "arm64": "amd64"}[architecture]
    for platform in platforms:
        (folder / "environment/Dockerfile").write_text(f"FROM --platform={platform} debian\n")
        assert load_task(folder, architecture=architecture).recipe.image == "debian"
        if platform not in {"linux", "$BUILDPLATFORM", "$TARGETPLATFORM"}:
            with pytest.raises(ConfigError, match=f"--platform={platform}: slots are linux/{other}; .* architecture"):
                load_task(folder, architecture=other)
    for platform in (f"windows/{architecture}", "linux/riscv64", f"linux/{architecture}/v9"):
        (folder / "environment/Dockerfile").write_text(f"FROM --platform={platform} debian\n")
        with pytest.raises(ConfigError, match=f"slots are linux/{architecture}"):
            load_task(folder, architecture=architecture)


def test_other_machines_stages_are_refused_where_needed(folder):
    dockerfile = folder / "environment/Dockerfile"
    both = "FROM --platform=linux/amd64 a AS for-amd64\nFROM --platform=linux/arm64 b AS for-arm64\n"
    dockerfile.write_text(f"{both}FROM --platform=linux/riscv64 for-$TARGETARCH\n")
    found = [load_task(folder, architecture=each).recipe.image for each in ("amd64", "arm64")]
    assert found == ["a", "b"]
    for last in (
        "FROM for-arm64",
        "FROM a\nCOPY --from=for-arm64 /x /x",
        "FROM a\nRUN --mount=from=for-arm64,target=/x id",
    ):
        dockerfile.write_text(f"{both}{last}\n")
        with pytest.raises(ConfigError, match=":2: FROM --platform=linux/arm64: slots are linux/amd64"):
            load_task(folder, architecture="amd64")


def test_dockerfiles_are_read_for_slots(folder):
    (folder / "environment/Dockerfile").write_text(
        "FROM --platform=$BUILDPLATFORM debian\nARG TARGETARCH TARGETPLATFORM TARGETVARIANT BUILDARCH\n"
        "ENV GOT=$TARGETARCH,$TARGETPLATFORM,$TARGETVARIANT,$BUILDARCH\n"
    )
    task = load_task(folder, architecture="arm64")
    assert task.recipe.settings.env["GOT"] == "arm64,linux/arm64,,arm64"
    assert task.on(BuildInputs(architecture="amd64")).recipe.settings.env["GOT"] == "amd64,linux/amd64,,amd64"


def test_slashes_count_once(folder):
    text = "FROM debian\nENV ROOT=/\nWORKDIR $ROOT/app\nCOPY a.txt $ROOT/x/\nRUN --mount=type=cache,target=//c id\n"
    text += "ADD https://example.org/y //z//\n"
    recipe = recipe_of(folder, text)
    made, copied, ran, added, _ = recipe.steps
    assert (recipe.workdir, made.path, copied.target, added.target) == ("/app", "/app", "/x/", "/z/y")
    assert [mount.target for mount in ran.mounts] == ["/c"]


def test_a_build_has_no_secrets(folder):
    text = "FROM debian\nRUN --mount=type=secret,id=a,env=A --mount=type=ssh,required=false --mount=type=cache,target=/c id\n"
    assert recipe_of(folder, text).steps[0].mounts == (Mount("/c", cache="/c"),)


def test_later_entrypoint_drops_the_cmd(folder):
    text = 'FROM debian AS one\nCMD ["a"]\nFROM one\nENTRYPOINT ["b"]\n'
    assert recipe_of(folder, text).settings.cmd == ()
    assert recipe_of(folder, f'{text}CMD ["c"]\nENTRYPOINT ["d"]\n').settings.cmd == ("c",)


def test_an_entrypoint_is_known(folder):
    text = "FROM debian AS one\nENTRYPOINT start $X\nRUN id\nFROM one AS two\nFROM one\nENTRYPOINT []\n"
    assert recipe_of(folder, text).settings.entrypoint == ()
    assert recipe_of(folder, text.rpartition("FROM")[0]).settings.entrypoint == ("/bin/sh", "-c", "start $X")


def test_users_and_shells_hold_on(folder):
    recipe = recipe_of(
        folder,
        'FROM debian\nSHELL ["/bin/bash", "-eo", "pipefail", "-c"]\nRUN a | b\nUSER dev:staff\nWORKDIR /home/dev/app\n'
        'RUN id\nUSER root\nRUN id\nEXPOSE 80 443/tcp\nLABEL a=1 "b c"=2\nVOLUME /data\nSTOPSIGNAL INT\n'
        'HEALTHCHECK --interval=5s CMD curl -f localhost\nENTRYPOINT ["/go", "on"]\nCMD run it\nUSER dev\n',
    )
    piped, start, as_dev, as_root, data = recipe.steps
    bash = ("/bin/bash", "-eo", "pipefail", "-c")
    assert piped.command == (*bash, "a | b")
    assert start == Folder("/home/dev/app", "dev:staff")
    assert as_dev.settings == StepSettings("/home/dev/app", {}, "dev:staff", shell=bash)
    assert as_root.settings.user is None
    assert data == Folder("/data")
    assert recipe.settings.user == "dev"
    assert recipe.settings.healthcheck == HealthConfig(test=("CMD-SHELL", "curl -f localhost"), interval_s=5)


def test_a_health_check_is_the_last_one_s(folder):
    text = 'FROM debian AS one\nHEALTHCHECK CMD one $X\nFROM one\nHEALTHCHECK --timeout=1m0.5s --retries=2 --start-period=0 cmd ["a b", "-c"]\n'
    assert recipe_of(folder, text).settings.healthcheck == HealthConfig(
        test=("CMD", "a b", "-c"), timeout_s=60.5, retries=2
    )
    assert recipe_of(folder, text.rpartition("HEALTH")[0]).settings.healthcheck == HealthConfig(
        test=("CMD-SHELL", "one $X")
    )
    assert recipe_of(folder, f"{text}HEALTHCHECK NONE\n").settings.healthcheck == HealthConfig(test=("NONE",))


def test_here_documents_are_read(folder):
    recipe = recipe_of(
        folder,
        "FROM debian\nENV WHO=me\nRUN <<EOF\necho one\necho two\nEOF\nRUN python3 - <<'PY'\nprint(1)\nPY\n"
        "COPY <<conf <<-'raw' /etc/my/\nuser=$WHO\nconf\n\tkept=$WHO\nraw\n",
    )
    script, piped, copy = recipe.steps
    assert script.command == ("/bin/sh", "-c", "echo one\necho two\n")
    assert piped.command == ("/bin/sh", "-c", "python3 - <<'PY'\nprint(1)\nPY")
    assert unpacked(folder, copy) == {
        "/etc/my/conf": (0o644, 0, "user=me\n"),
        "/etc/my/raw": (0o644, 0, "kept=$WHO\n"),
    }


def test_unused_stages_are_dropped(folder):
    recipe = recipe_of(
        folder,
        "FROM debian AS base\nENV A=1\nRUN base\nFROM base AS build\nRUN build\nFROM debian AS unused\nRUN unused\n"
        "FROM base\nCOPY --from=build --chown=1000 /out/* /opt/\nCOPY --from=1 /x /y\n",
    )
    (build,) = recipe.stages
    assert (build.index, [step.command[-1] for step in build.steps]) == (1, ["base", "build"])
    base, first, second = recipe.steps
    assert base.command == ("/bin/sh", "-c", "base")
    assert (recipe.settings.env, recipe.image) == ({"A": "1"}, "debian")
    assert first == Copy(("out/*",), "/opt/", stage=1, owner="1000")
    assert second == Copy(("x",), "/y", stage=1)


def test_ignored_files_are_left_out(folder):
    write_files(folder / "environment", dict.fromkeys(("b.log", "keep.log", "sub/c.log", "secret/key"), "x"))
    (folder / "environment/.dockerignore").write_text(
        "\ufeffsecret\n# no logs\n**/*.log\n!keep.log\nDockerfile\n.dockerignore\n"
    )
    recipe = recipe_of(
        folder,
        "FROM debian\nCOPY . /all/\nCOPY --exclude=b.* sub /some/\nCOPY *.txt *.log /found/\n"
        "COPY --exclude=sub/b.* sub /kept/\nCOPY --exclude=keep.* [ak]* /named/\n",
    )
    every, some, found, kept, named = recipe.steps
    assert sorted(unpacked(folder, every)) == ["/all/a.txt", "/all/keep.log", "/all/sub", "/all/sub/b.sh"]
    assert unpacked(folder, some) == {}
    assert sorted(unpacked(folder, kept)) == ["/kept/b.sh"], "a pattern speaks of the names in the source"
    assert sorted(unpacked(folder, named)) == ["/named/a.txt"]
    assert sorted(unpacked(folder, found)) == ["/found/a.txt", "/found/keep.log"]
    for source in ("b.log", "--exclude=*.txt a.txt"):
        with pytest.raises(ConfigError, match=r"is left out by \.dockerignore or --exclude"):
            recipe_of(folder, f"FROM debian\nCOPY {source} /\n")


def test_here_documents_are_expanded(folder):
    """By buildkit 0.25.2's own tests and lexer: backslashes go, quotes stay; a quoted one stays as it is."""
    raw = 'a\\$X b\\\\c d\\`e f\\n g\\"q $X \'$X\' "${X}"'
    recipe = recipe_of(folder, f"FROM debian\nARG X=val\nCOPY <<E /filled\n{raw}\nE\nCOPY <<'E' /raw\n{raw}\nE\n")
    filled, as_it_is = (step.files[0][1] for step in recipe.steps)
    assert filled == 'a$X b\\c d`e fn g"q val \'val\' "val"\n'
    assert as_it_is == f"{raw}\n"


def test_indented_here_documents(folder):
    recipe = recipe_of(folder, "FROM debian\nRUN <<-E\n\t#!/bin/cat\n\techo\nE\nRUN <<-E\n#!/bin/cat\n\tx\nE\n")
    shells, program = (step.command for step in recipe.steps)
    assert shells == ("/bin/sh", "-c", "#!/bin/cat\necho\n")
    assert program == ("/.heredocs/E",)


def test_parents_start_at_the_pivot(folder):
    write_files(folder / "environment", dict.fromkeys(("x/y/deep/f.txt", "x/y/g.txt", "z/y/g.txt"), "x"))
    recipe = recipe_of(
        folder,
        "FROM debian\nCOPY --parents x/y/g.txt a.txt /some\nCOPY --parents ./x/./y/deep /pivot/\nCOPY --parents */y/g.txt /wild/\n"
        "COPY --parents */./y/g.txt /cut/\nCOPY --parents **/f.txt z/** /far/\nCOPY --parents --exclude=deep x /all\nCOPY --parents=false x/y/g.txt /plain\n",
    )
    found = [sorted(unpacked(folder, step)) for step in recipe.steps]
    assert found[0] == ["/some/a.txt", "/some/x", "/some/x/y", "/some/x/y/g.txt"]
    assert found[1] == ["/pivot/y", "/pivot/y/deep", "/pivot/y/deep/f.txt"]
    assert found[2] == ["/wild/x", "/wild/x/y", "/wild/x/y/g.txt", "/wild/z", "/wild/z/y", "/wild/z/y/g.txt"]
    assert found[3] == ["/cut/y", "/cut/y/g.txt"]
    assert [name for name in found[4] if name.endswith(".txt")] == ["/far/x/y/deep/f.txt", "/far/z/y/g.txt"]
    assert "/all/x/y/g.txt" in found[5]
    assert found[6] == ["/plain"]


def test_own_ignore_files_come_first(folder):
    environment = folder / "environment"
    for name, ignored in (("", "nothing"), ("Dockerfile", "sub"), ("Other", "a.txt")):
        (environment / f"{name}.dockerignore").write_text(f"{ignored}\n*ockerfile\nOther\n*.dockerignore\n")
    for name, found in (
        ("Dockerfile", {"a.txt"}),
        ("Other", {"sub", "sub/b.sh"}),
        ("Third", {"a.txt", "sub", "sub/b.sh", "Third"}),
    ):
        (environment / name).write_text("FROM debian\nCOPY . /all\n")
        task = load_task(environment / name)
        assert {path for path, _ in task.build_context.below(environment, ())} == found
        (environment / name).unlink()


def test_a_source_may_climb_in_its_context(folder):
    recipe = recipe_of(folder, "FROM a AS b\nFROM a\nCOPY ./sub/../a.txt /x/../a/\nCOPY --from=b /opt/../etc/x /\n")
    assert [step.sources for step in recipe.steps] == [("a.txt",), ("etc/x",)]


@pytest.mark.parametrize("source", ["./a.txt", ".//a.txt", "././a.txt", ".//a*", "sub/..//a.txt", "a.txt/."])
def test_sources_may_have_idle_parts(folder, source):
    [step] = recipe_of(folder, f"FROM a\nARG DIR=\nCOPY {source} ./${{DIR}}/a.txt /x/\n").steps
    assert sorted(unpacked(folder, step)) == ["/x/a.txt"]


def test_copied_links_stay_in_the_context(folder):
    environment = folder / "environment"
    (environment / "below").mkdir(exist_ok=True)
    (environment / "below/in.txt").write_text("in")
    for name, target in (
        ("file-link", "a.txt"),
        ("folder-link", "below"),
        ("out", "/etc/passwd"),
        ("nothing", "absent"),
    ):
        (environment / name).symlink_to(target)
    one, several = recipe_of(folder, "FROM debian\nCOPY file-link /to\nCOPY folder-link /there/\n").steps
    text = (environment / "a.txt").read_text()
    assert unpacked(folder, one) == {"/to": (0o644, 0, text)}, "the file, and no link"
    assert sorted(unpacked(folder, several)) == ["/there/in.txt"]
    for name in ("out", "nothing"):
        with pytest.raises(ConfigError, match=f"{name}: a link to .*, which is not in the build context"):
            recipe_of(folder, f"FROM debian\nCOPY {name} /to\n")


@pytest.mark.parametrize("source", ["way/key", "w*/key", "way/below", "round"])
def test_no_link_leads_out_of_the_context(folder, tmp_path, source):
    (tmp_path / "secret/below").mkdir(parents=True)
    for name in ("key", "below/key"):
        (tmp_path / "secret" / name).write_text("of the host")
    (folder / "environment/way").symlink_to(tmp_path / "secret")
    (folder / "environment/round").symlink_to("round")
    with pytest.raises(ConfigError, match="which is not in the build context"):
        recipe_of(folder, f"FROM debian\nCOPY {source} /to\n")
    with pytest.raises(ConfigError, match="which is not in the build context"):  # nor one that was made since
        unpacked(folder, Copy((source,), "/to"))


def test_added_archives_are_unpacked(folder):
    with tarfile.open(folder / "environment/x.tar.gz", "w:gz") as archive:
        archive.add(folder / "environment/a.txt", "a.txt")
    unpack, plain = recipe_of(folder, "FROM debian\nADD x.tar.gz a.txt /opt/it/\n").steps
    assert (unpack.sources, unpack.target, unpack.unpack) == (("x.tar.gz",), "/opt/it/", True)
    assert plain == Copy(("a.txt",), "/opt/it/")
    (left,) = recipe_of(folder, "FROM debian\nADD --exclude=*.gz [ax]* /opt/it/\n").steps
    assert left.sources == ("a.txt",)
    packed = (folder / "environment/x.tar.gz").read_bytes()
    (folder / "environment/disk.img").write_bytes(bytes(2048) + b"a file system")
    (folder / "environment/torn.tar.gz").write_bytes(packed[: len(packed) // 2])
    (as_they_are,) = recipe_of(folder, "FROM debian\nADD disk.img torn.tar.gz /opt/it/\n").steps
    assert (as_they_are.sources, as_they_are.unpack) == (("disk.img", "torn.tar.gz"), False)


@needs("zstd")
def test_zstd_is_known_by_content(folder, monkeypatch):
    environment = folder / "environment"
    with tarfile.open(environment / "plain", "w") as archive:
        archive.add(environment / "a.txt", "a.txt")
    for name, of in (("one", "plain"), ("no-tar.tar.zst", "a.txt")):
        subprocess.run(["zstd", "-q", environment / of, "-o", environment / name], check=True)
    (environment / "torn").write_bytes((environment / "one").read_bytes()[:-8])
    text = "FROM debian\nADD one no-tar.tar.zst torn /opt/it/\n"
    unpack, plain = recipe_of(folder, text).steps
    assert (unpack.sources, plain.sources) == (("one",), ("no-tar.tar.zst", "torn"))
    with tarfile.open(fileobj=tars.opened(environment / "one")) as archive:
        assert archive.getnames() == ["a.txt"]
    with pytest.raises(tarfile.ReadError, match="cut off or damaged"):
        tars.opened(environment / "torn")
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(ConfigError, match="ADD one: is packed with zstd, a program that is missing here"):
        recipe_of(folder, text)


def test_onbuild_may_hold_here_documents(folder):
    text = (
        "FROM debian AS one\nONBUILD RUN <<EOF\necho a\nEOF\nonbuild COPY <<'A' <<-B /x/\n$Y\nA\n\tb\n\tB\n"
        "COPY <<D /d\nONBUILD RUN <<EOF\nD\nFROM one\n"
    )
    written, script, copied = recipe_of(folder, text).steps
    assert unpacked(folder, written) == {"/d": (0o644, 0, "ONBUILD RUN <<EOF\n")}
    assert script.command == ("/bin/sh", "-c", "echo a\n")
    assert unpacked(folder, copied) == {"/x/A": (0o644, 0, "$Y\n"), "/x/B": (0o644, 0, "b\n")}


def test_a_dockerfile_may_stand_below(folder):
    environment = folder / "environment"
    (environment / "docker").mkdir()
    (environment / "docker-compose.yaml").write_text("services: {main: {build: {dockerfile: docker/Dockerfile}}}")
    (environment / "docker/Dockerfile").write_text("FROM debian\nADD x.tar /opt/\nADD *.txt /opt/it/\n")
    with tarfile.open(environment / "x.tar", "w") as archive:
        archive.add(environment / "a.txt", "a.txt")
    unpack, plain = load_task(folder).recipe.steps
    assert (unpack.sources, unpack.unpack) == (("x.tar",), True)
    assert plain == Copy(("a.txt",), "/opt/it/")


def test_patterns_match_leading_dots(folder):
    (folder / "environment/.hidden").write_text("")
    every, rest = recipe_of(folder, "FROM debian\nCOPY * /all/\nADD [^.Da]* /rest/\n").steps
    assert {"/all/.hidden", "/all/a.txt"} < set(unpacked(folder, every))
    assert (rest.sources, sorted(unpacked(folder, rest))) == (("sub",), ["/rest/b.sh"])


def test_a_pattern_may_match_nothing(folder):
    (folder / "environment/sub/deep").mkdir()
    (folder / "environment/sub/deep/c.txt").write_text("")
    some, below, none = recipe_of(
        folder, "FROM debian\nCOPY a.txt lock* /x/\nCOPY sub/** /y/\nADD l** /z/\nCOPY l** /z/"
    ).steps
    assert sorted(unpacked(folder, some)) == ["/x/a.txt"]
    assert sorted(unpacked(folder, below)) == ["/y/b.sh", "/y/c.txt"], "with Docker, a folder's content"
    assert unpacked(folder, none) == {}


def test_mounts_are_there_for_one_command(folder):
    steps = recipe_of(
        folder,
        "FROM debian\nWORKDIR /app\n"
        "RUN --mount=type=cache,target=/root/.cache --mount=type=bind,source=a.txt,target=in.txt cat in.txt\n",
    ).steps
    cache, bound = steps[1].mounts
    assert (cache, bound) == (
        Mount("/root/.cache", cache="/root/.cache"),
        Mount("/app/in.txt", Copy(("a.txt",), "/app/in.txt")),
    )
    assert steps[2].command == ("rm", "-rf", CACHES)


def test_one_command_may_be_offline(folder):
    steps = recipe_of(folder, "FROM debian\nRUN --network=none a\nRUN --network=default b\nRUN c\n").steps
    assert [step.offline for step in steps] == [True, False, False]


def test_an_address_may_be_unpacked(folder):
    text = "FROM debian\nWORKDIR /w\nADD --unpack https://example.org/x.tar y/\nADD --unpack=false https://example.org/x.tar y/\n"
    _, unpacks, plain = recipe_of(folder, text).steps
    assert (unpacks.target, unpacks.unpack, plain.target, plain.unpack) == ("/w/y/", True, "/w/y/x.tar", False)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("FROM a b", ":1: FROM a b"),
        ("FROM --platform=linux/riscv64 a", "--platform=linux/riscv64"),
        ("FROM a\nADD git@host:x.git /y", ":2: ADD of a repository"),
        ("FROM a\nADD https://host/x.git#main /y", ":2: ADD of a repository"),
        ("FROM a\nADD --checksum=sha256:0 x /y", "--checksum"),
        ("FROM a\nENV A", "ENV must have two arguments"),
        ("FROM a\nUSER", "USER needs exactly one value"),
        ("FROM a\nSHELL bash -c", "SHELL needs the JSON form"),
        ("FROM a\nONBUILD FROM x", "ONBUILD FROM x: is no instruction"),
        ("FROM a\nONBUILD FETCH x", "ONBUILD FETCH x"),
        ("FROM a\nONBUILD", "ONBUILD"),
        ("FROM a\nRUN --mount=type=tmpfs,target=/ x", "name a folder below /"),
        ("FROM a\nRUN --mount=type=cache,target=/c,uid=me x", "mode, uid and gid are numbers"),
        ("ENV A=1\nFROM a", "before the first FROM"),
        ("FROM a\nCOPY --from=1 x y", "--from=1"),
        ("FROM a AS b\nFROM a\nCOPY --parents --from=b **/x y", "--parents of a stage takes no **"),
        ("FROM a\nCOPY --parents=maybe x y", "--parents=maybe: write true or false"),
        ("FROM a\nCOPY --frob x y", "--frob"),
        ("FROM a\nCOPY --chmod=u+k a.txt y", "--chmod=u+k"),
        ("FROM a\nCOPY missing.txt /x", "missing.txt"),
        ("FROM a\nCOPY ../x /x", "../x"),
        ("FROM a\nCOPY /sub/../../x /x", "../x"),
        ("FROM a\nCOPY x", "a source and a target"),
        ("FROM a\nCOPY --exclude=[ sub /x", ":2: COPY --exclude: "),
        ("FROM a\nCOPY <<E /x\n${A:?none}\nE", ":2: COPY ${A:?none}"),
        ("FROM a\nADD http://[x/y /z", ":2: ADD http://[x/y: "),
        ("FROM a\nRUN --mount=type=bind,source=../x,target=/x x", ":2: RUN ../x leads out"),
        ("FROM a\nRUN --mount=type=secret,id=x,required x", "--mount=type=secret"),
        ("FROM a\nRUN --mount=type=ssh,required=true x", "--mount=type=ssh"),
        ("FROM a\nRUN --mount=type=tempfs,target=/t x", "--mount=type=tempfs"),
        ("FROM a\nRUN --network=host x", "--network=host can't be honoured"),
        ("FROM a\nFROM a\nCOPY --from=0 <<E x /y/\nE", "--from takes no here-document"),
        ("FROM a\nSTOPSIGNAL", "STOPSIGNAL"),
        ("FROM a\nHEALTHCHECK curl localhost", ":2: HEALTHCHECK needs CMD and a command, or NONE"),
        ("FROM a\nHEALTHCHECK NONE x", ":2: HEALTHCHECK needs CMD"),
        ("FROM a\nHEALTHCHECK", ":2: HEALTHCHECK"),
        ("FROM a\nHEALTHCHECK --interval=soon CMD x", "HEALTHCHECK --interval: 'soon' is no time"),
        ("FROM a\nHEALTHCHECK --retries=-1 CMD x", "HEALTHCHECK --retries: '-1' is no number"),
        ("FROM a\nEXPOSE ${A", "${A"),
        ("FROM a\nLABEL a=${A", "${A"),
        ("FROM a\nLABEL a", "LABEL"),
        ("FROM a\nMAINTAINER", "MAINTAINER"),
        ("FROM a\nRUN --security=insecure x", "--security"),
        ("FROM a\nRUN <<EOF\nx", "unterminated heredoc"),
        ("FROM a\nWORKDIR ${A", "${A"),
        ("FROM a\nFROB x", "FROB"),
        ("FROM a\nRUN", "RUN needs a command"),
        ("FROM a\nRUN []", "RUN needs a command"),
        ("RUN x", "before the first FROM"),
        ("# nothing", "no FROM"),
    ],
)
def test_vain_instructions_are_refused(folder, line, named):
    (folder / "environment/Dockerfile").write_text(line)
    with pytest.raises(ConfigError, match="environment") as refused:
        load_task(folder)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("version = ", "is not TOML"),
        (f"x = {'[' * 3000}", "is not TOML"),
        (f"x = {'1' * 5000}", "is not TOML"),
        ("[verifier]\ntimeout_sec = -1", "verifier.timeout_sec"),
        ("[verifier]\ntimeout_sec = 'soon'", "verifier.timeout_sec"),
        ("[verifier]\nkeep_processes = 'some'", "verifier.keep_processes"),
        ("[verifier]\nenvironment_mode = 'shared'\n[verifier.environment]\ncpus = 1", "verifier: "),
        ("[verifier.environment]\nos = 'windows'", "verifier.environment.os"),
        ("[verifier.environment.env]\nA = '${A_SECRET}'", "verifier.environment.env.A: ${A_SECRET}"),
        ("[verifier.env]\nA = '${A_SECRET}'", "verifier.env.A: ${A_SECRET}"),
        ("[[verifier.collect]]\ncommand = 'x'\nservice = 'db'", "verifier.collect.0.service"),
        (
            "[[steps]]\nname = 'one'\n[[steps.verifier.collect]]\ncommand = 'x'\nservice = 'db'",
            "steps.0.verifier.collect.0.service: 'db'",
        ),
        ("[[steps]]\nname = 'one'\n[[steps.artifacts]]\nsource = '/x'\nservice = 'db'", "steps.0.artifacts.0.service"),
        ("[environment]\nos = 'windows'", "environment.os"),
        ("[environment]\nnetwork_mode = 'some'", "environment.network_mode"),
        ("[environment]\nallowed_hosts = ['a.b']", "environment: allowed_hosts needs network_mode"),
        ("[agent]\nallowed_hosts = ['a.b']", "agent: allowed_hosts needs network_mode"),
        ("[verifier]\nnetwork_mode = 'no-network'\nallowed_hosts = ['a.b']", "verifier: allowed_hosts needs"),
        ("[[steps]]\nname = 'a'\n[steps.verifier]\nallowed_hosts = ['a.b']", "steps.0.verifier: allowed_hosts needs"),
        ("[environment]\nmemory_mb = 'much'", "environment.memory_mb"),
        ("[environment]\nworkdir = 'app'", "environment.workdir"),
        ("[environment.tpu]\ntype = 'v5'", "environment.tpu"),
        ("[[steps]]\nname = 'a/b'", "steps.0.name"),
        ("[[steps]]\nname = '..'", "steps.0.name"),
        ("[[steps]]\nname = 'One'\n[[steps]]\nname = 'one'", "steps: 'one' names two steps"),
        ("agent = [1]", "agent: Input should be a valid dictionary (it is [1])"),
        ("artifacts = ['here']", "artifacts"),
    ],
)
def test_bad_task_tomls_name_the_field(folder, text, named):
    (folder / "task.toml").write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_task(folder)
    assert "task.toml" in str(refused.value)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("toml", "pool", "limits", "said"),
    [
        ("gpus = 1", {}, None, "environment.gpus: 1 wanted, a container has 0; set gpus"),
        ("gpu_types = ['H100']", {}, None, "environment.gpus: 1 wanted"),
        ("gpus = 0\ngpu_types = ['H100']", {}, None, ""),
        ("gpus = 2", {"gpus": 2}, LeaseLimits(gpus=2), ""),
        ("gpus = 2", {"gpus": 2, "slots_per_gpu": 4}, None, "a lease one, since slots_per_gpu"),
        (
            "gpus = 1\ngpu_types = ['H100']",
            {"gpus": 2},
            None,
            "environment.gpu_types: H100 wanted, they are not said to be any",
        ),
        (
            "gpus = 1\ngpu_types = ['H100']",
            {"gpus": 2, "gpu_type": "A100"},
            None,
            "H100 wanted, they are A100; set gpu_type",
        ),
        (
            "gpu_types = ['h100', 'A100']",
            {"gpus": 1, "gpu_type": "H100"},
            LeaseLimits(gpus=1, gpu_types=("h100", "A100")),
            "",
        ),
    ],
)
def test_gpus_reach_the_lease(folder, toml, pool, limits, said):
    (folder / "task.toml").write_text(f"[environment]\n{toml}\n")
    settings = SandboxSettings(**pool)
    room = Room(Resources(memory_mib=1024, disk_mib=512), gpu_refusal=settings.gpu_refusal)
    found = fit(load_task(folder), room, images=())
    assert bool(found.refused) == bool(said)
    assert said in "".join(found.refused)
    assert said or found.limits == limits


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


TEXTS = ["task.toml", "instruction.md", "tests/test.sh"]


@pytest.mark.parametrize("name", TEXTS)
def test_no_waiting_for_odd_parts(folder, name):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match=f"{name}: is not a file"):
        load_task(folder)


@pytest.mark.parametrize("name", [*TEXTS, "environment/Dockerfile", "environment/docker-compose.yaml"])
def test_special_files_are_not_read(folder, name):
    with (folder / name).open("ab") as file:
        file.truncate(5 << 30)
    with pytest.raises(ConfigError, match=f"{name}: has 5,368,709,120 bytes; at most 67,108,864 are read$"):
        load_task(folder)


def test_windows_text_is_read(folder):
    (folder / "task.toml").write_bytes(
        b'\xef\xbb\xbfversion = "1.0"\r\n[environment]\r\nos = "Linux"\r\nmemory = "1.5G"\r\n'
    )
    (folder / "environment/Dockerfile").write_bytes(
        b"\xef\xbb\xbfFROM debian\r\nENV A=1 \\\r\n  B=2\r\nWORKDIR /app\r\n"
    )
    (folder / "instruction.md").write_bytes(b"\xef\xbb\xbfDo\r\nit.\r\n")
    task = load_task(folder)
    assert (task.instruction, task.config.environment.memory_mb) == ("Do\nit.", 1536)
    assert task.agent_settings == StepSettings("/app", {"A": "1", "B": "2"})
    (folder / "tests/test.sh").write_bytes(b"#!/bin/bash\r\ntrue\r\n")
    with pytest.raises(ConfigError, match=r"tests/test\.sh: has CRLF line ends"):
        load_task(folder)


def test_no_continued_conversations(folder):
    (folder / "trajectory.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"trajectory\.json: no agent is given an earlier conversation"):
        load_task(folder)
    (folder / "task.toml").write_text("[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'")
    for name in ("one", "two"):
        (folder / "steps" / name).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text("Do.")
        (folder / "steps" / name / "trajectory.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"steps/one/trajectory\.json"):
        load_task(folder)


def test_canaries_are_left_out(folder):
    (folder / "instruction.md").write_text("<!-- harbor-canary GUID 1 -->\n# CANARY 2\n\n# Title\nNo canary.\n")
    assert load_task(folder).instruction == "# Title\nNo canary."
    prompt = "Ship build #4 to the canary first.\n\n## The canary\nIt is ours."
    for marks, text in (("", prompt), ("# canary GUID\n\n", f"# Canary releases\n\n{prompt}")):
        (folder / "instruction.md").write_text(marks + text)
        assert load_task(folder).instruction == text, "only the head has marks"


def test_images_need_no_environment(folder):
    shutil.rmtree(folder / "environment")
    (folder / "tests/test.sh").unlink()
    text = "[environment]\ndocker_image = 'a:1'\n[verifier.environment]\ndocker_image = 'judge:1'\n"
    (folder / "task.toml").write_text(text)
    task = load_task(folder)
    assert (task.image, task.verifier.image, task.verifier.bundled) == ("a:1", "judge:1", True)
    assert task.on(BuildInputs({"a:1": StepSettings("/srv")}), prebuilt=True).recipe.workdir == "/srv"


@pytest.mark.parametrize("table", ["environment", "verifier.environment"])
def test_unbuilt_dockerfiles_do_not_count(folder, table):
    place = folder / ("environment" if table == "environment" else "tests")
    (place / "Dockerfile").write_text("FROM debian\nRUN --network=host true\n")
    (folder / "task.toml").write_text(f"[{table}]\ncpus = 1\n")
    with pytest.raises(ConfigError, match=r"Dockerfile:2: .*--network"):
        load_task(folder)
    (folder / "task.toml").write_text(f"[{table}]\ndocker_image = 'a:1'\n")
    task, room = load_task(folder), Room(Resources(memory_mib=1024, disk_mib=512))
    machine = task if table == "environment" else task.verifier
    assert machine.recipe.image == "a:1"
    assert fit(task, room, images=()).refused == ()
    (refused,) = fit(task, room, images=("a:*",)).refused
    assert "Dockerfile:2: " in refused and "or pull a:1, which `task_images`" in refused


def test_a_task_is_named_as_its_folder(folder, tmp_path):
    (tmp_path / "linked").symlink_to(folder)
    assert [task.name for task in read_tasks(tmp_path).tasks] == ["demo", "linked"]
    with pytest.raises(ConfigError, match="have the same name; rename one"):
        read_folders([folder, tmp_path / "other/demo"])
    assert [task.name for task in read_folders([folder, Path(str(folder))]).tasks] == ["demo"], "named twice"


@pytest.mark.parametrize("part", ["instruction.md", "environment", "tests", "solution", "steps", "steps/one/workdir"])
def test_links_out_of_the_task_are_refused(folder, tmp_path, part):
    outside, link = tmp_path / "outside", folder / part
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        link.rename(outside)
    else:
        (outside / "one/workdir").mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{part}.*: leads to {outside}.*, outside the task's folder"):
        load_task(folder)
    link.unlink()
    outside.rename(folder / "elsewhere")
    link.symlink_to(folder / "elsewhere")
    assert load_task(folder).name == "demo", "a link inside it"


def test_unsupported_files_are_named(folder):
    compose = folder / "environment/docker-compose.yaml"
    for text, named in (
        ("services: {}", "has no services"),
        ("services: {main: {privileged: true}}", r"services\.main\.privileged"),
        ("services: {main: {volumes: ['/var/run/docker.sock:/x']}}", "volumes"),
        ("services: {main: {network_mode: host}}", "network_mode"),
        ("services: {main: [a]}", r"services\.main: Input should be a valid dictionary"),
        ("services: {main: {build: 5}}", r"services\.main: build: "),
        ("services: {main: {build: {context: ., args: [A]}}}", r"services\.main\.build\.args\.A: takes the value"),
        ("services: {main: {volumes: 5}}", r"services\.main: volumes: "),
        ('services: {main: {command: "echo \'x"}}', r"services\.main\.command: .*No closing quotation"),
        ("services: {main: {mem_limit: lots}}", r"services\.main\.mem_limit: 'lots' is no size"),
        ("services: {main: {environment: ['K=${KEY}']}}", r"environment\.K: \$\{KEY\} is not given to tasks"),
        ("services: {main: {environment: ['K=${KEY:-${OTHER:-x}}']}}", r"environment\.K: .* or a plain default"),
        ("services: [", "can't be read"),
        (f"services: {{}} # {'x' * (4 << 20)}", "can't be read: it is longer than 4,194,304 characters"),
        (f"services: {'[' * 1000}", "can't be read"),
    ):
        compose.write_text(text)
        with pytest.raises(ConfigError, match=rf"docker-compose\.yaml.*{named}") as refused:
            load_task(folder)
        assert "\n" not in str(refused.value)


def test_an_unread_folder_is_not_empty(folder):
    assert dict(walk(folder / "tests"))
    free = os.dup(0)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            dict(walk(folder / "tests"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert not dict(walk(folder / "nothing"))


@shows("tasks_path", "task_names")
def test_empty_matches_are_named(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="holds no task"):
        read_tasks(tmp_path / "empty")
    with pytest.raises(ConfigError, match="is not a folder"):
        read_tasks(tmp_path / "nowhere")
    (tmp_path / "empty").rmdir()
    with pytest.raises(ConfigError, match=r"no task .* matches 'x\*'"):
        read_tasks(tmp_path, ["x*"])
    assert [task.name for task in read_tasks(tmp_path, ["de*"]).tasks] == ["demo"]
    assert [task.name for task in read_tasks(folder).tasks] == ["demo"]


def test_unreadable_folders_are_no_tasks(folder):
    """As lost+found is, at the top of a disk of tasks."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as name:
        shutil.copytree(folder, f"{name}/demo")
        Path(name, "lost+found").mkdir(mode=0)
        Path(name).chmod(0o755)
        if root:
            os.seteuid(65534)
        try:
            assert [task.name for task in read_tasks(name).tasks] == ["demo"]
        finally:
            if root:
                os.seteuid(0)


def test_older_spellings_are_read(folder):
    (folder / "task.toml").write_text(
        'schema_version = "1.1"\n[task]\nname = "org/demo"\n[environment]\nmemory = "2G"\nstorage = "512M"\n'
        "mcp_servers = []\ndocker_image = ''\nworkdir = ''\ncpus = 2\n[environment.env]\n[verifier.env]\nA = 'b'\n[solution.env]\n"
    )
    task = load_task(folder)
    assert (task.config.environment.memory_mb, task.config.environment.docker_image) == (2048, None)
    assert task.config.environment.storage_mb == 512
    assert task.config.verifier.env == {"A": "b"}
    found = fit(task, Room(Resources(memory_mib=1024, disk_mib=256, cpus=1)), images=(), policy="refuse")
    assert [problem.split(":")[0] for problem in found.refused] == ["environment.memory_mb"]
    found = fit(task, Room(Resources(memory_mib=1024, disk_mib=256, cpus=1), volume="disk"), images=(), policy="refuse")
    assert [problem.split(":")[0] for problem in found.refused] == ["environment.memory_mb", "environment.storage_mb"]
    found = fit(task, Room(Resources(memory_mib=1024, disk_mib=256, cpus=1), most_mib=4096), images=(), policy="refuse")
    # the files of a volume in memory are memory, too
    assert (found.refused, found.limits) == ((), LeaseLimits(memory_mib=2560, disk_mib=512, cpu_quota=2))


def test_patterns_choose_the_base(folder):
    (folder / "environment/Dockerfile").write_text("FROM python:3.11-slim\nCOPY . .\n")
    task = load_task(folder)
    room = Room(Resources(memory_mib=1, disk_mib=1))
    [note] = fit(task, room, images=("python:3*",)).notes
    assert note == Note("FROM: the slots' base stands in for python:3.11-slim", "images")
    assert fit(task, room, images=("debian*",)).notes == ()


def test_image_settings_come_first(folder):
    (folder / "environment/Dockerfile").write_text(
        "FROM app:1\nENV PATH=/own:$PATH\nWORKDIR sub\nCOPY --from=tools:2 /bin/x /x\nCOPY --from=tools:2 /y /y\n"
        "ADD --checksum=sha256:"
        + "0" * 64
        + " https://host/dir/name.txt?x=1 /etc/\nCOPY --chmod=u=rwX,go=rX a.txt /b\n"
    )
    recipe = load_task(folder).on(BuildInputs({"app:1": StepSettings("/srv", {"PATH": "/usr/bin"}, "app")})).recipe
    assert recipe.settings == StepSettings("/srv/sub", {"PATH": "/own:/usr/bin"}, "app")
    folder_step, one, two, add, copy = recipe.steps
    assert folder_step == Folder("/srv/sub", "app")
    assert (one.stage, two.stage, [stage.image for stage in recipe.stages]) == (-1, -1, ["tools:2"])
    assert add == Download("https://host/dir/name.txt?x=1", "/etc/name.txt", "sha256:" + "0" * 64)
    assert unpacked(folder, copy) == {"/b": (0o644, 0, "a")}


@pytest.mark.parametrize(
    ("mode", "words", "folder", "changed"),
    [
        (0o644, "u+x", False, 0o744),
        (0o644, "+x", False, 0o755),
        (0o600, "u=rwX,go=rX", True, 0o755),
        (0o600, "u=rwX,go=rX", False, 0o644),
        (0o777, "o-rwx,g-w", False, 0o750),
        (0o755, "u+s,g+s", False, 0o6755),
        (0o755, "+t", True, 0o1755),
        (0o764, "u=g,go=u-x", False, 0o666),
        (0o640, "o=g,u-g", False, 0o244),
        (0o644, 0o4711, False, 0o4711),
    ],
)
def test_symbolic_modes_are_those_of_chmod(mode, words, folder, changed, tmp_path):
    assert oct(changed_mode(mode, words, folder=folder)) == oct(changed)
    if isinstance(words, str):
        path = tmp_path / "it"
        path.mkdir() if folder else path.touch()
        path.chmod(mode)
        subprocess.run(["chmod", words, path], check=True)
        assert oct(path.stat().st_mode & 0o7777) == oct(changed)


def test_large_folders_are_split(tmp_path):
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
    (tmp_path / "f0").chmod(0o777)
    large, text = pack([("f0", tmp_path / "f0"), ("text", b"x")], limit=60_000)
    assert large == LargeFile("f0", tmp_path / "f0", 0o777)
    with tarfile.open(fileobj=io.BytesIO(text)) as archive:
        assert archive.getnames() == ["text"]


@pytest.mark.parametrize("where", ["environment", "tests", "solution", "steps/one/workdir"])
def test_fifos_are_refused_at_load(folder, where):
    (folder / "steps/one").mkdir(parents=True)
    (folder / "steps/one/instruction.md").write_text("Do.")
    (folder / "task.toml").write_text('[[steps]]\nname = "one"\n')
    (folder / where).mkdir(parents=True, exist_ok=True)
    (folder / "solution/solve.sh").parent.mkdir(exist_ok=True)
    (folder / "solution/solve.sh").write_text("true")
    os.mkfifo(folder / where / "pipe")
    with pytest.raises(ConfigError, match="pipe: is neither"):
        load_task(folder)


def test_earlier_stages_are_checked(folder):
    with pytest.raises(ConfigError, match="absent: is missing, and a COPY needs it"):
        recipe_of(folder, "FROM debian AS one\nCOPY absent /x\nFROM debian\nCOPY --from=one /x /x\n")


def test_missing_files_matter_when_built(folder):
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'own:1'\n")
    (folder / "environment/Dockerfile").write_text("FROM debian\nCOPY absent /x\n")
    task = load_task(folder)
    assert (task.image, task.recipe.dockerfile) == ("own:1", None)
    assert "absent: is missing" in task.unbuildable
    room = Room(Resources(memory_mib=1024, disk_mib=256))
    assert fit(task, room, images=()).refused == ()
    assert "absent: is missing" in fit(task, room, images=("own*",)).refused[0], "the base would be built on"


# --------------------------------------------------------------------------------------------------------------- sizes


def sized(folder, version, **sizes):
    lines = "\n".join(f"{name} = {value}" for name, value in sizes.items())
    (folder / "task.toml").write_text(f'schema_version = "{version}"\n[environment]\n{lines}\n')
    return load_task(folder)


def test_memory_files_need_room(folder):
    task = sized(folder, "1.4", memory_mb=512, storage_mb=2048)
    (problem,) = fit(task, Room(Resources(memory_mib=2048, disk_mib=2048), volume="memory")).refused
    assert "2048 of files in memory beside 512 for programs wanted, slots have at most 2048 for both" in problem
    assert "slot_memory_mib or slots_per_container for 2560" in problem
    assert fit(task, Room(Resources(memory_mib=2560, disk_mib=2048))) == TaskFit()
    assert fit(task, Room(Resources(memory_mib=512, disk_mib=2048), volume="disk")) == TaskFit()
    room = Room(Resources(memory_mib=1024, disk_mib=512), most_mib=4096)
    assert fit(task, room) == TaskFit(limits=LeaseLimits(memory_mib=2560, disk_mib=2048))


@pytest.mark.parametrize(
    ("storage", "memory", "limits"),
    [
        (20_480, 4096, LeaseLimits(memory_mib=4096, disk_mib=20_480)),
        (20_480, 512, LeaseLimits(disk_mib=20_480)),
        (2048, 3072, LeaseLimits(memory_mib=3072, disk_mib=3073)),  # more files than memory are on disk
        (2048, 2048, LeaseLimits(memory_mib=4096, disk_mib=2048)),  # fits
    ],
)
def test_large_files_are_on_disk(folder, storage, memory, limits):
    task = sized(folder, "1.4", memory_mb=memory, storage_mb=storage)
    room = Room(Resources(memory_mib=1024, disk_mib=512), most_mib=4096)
    found = fit(task, room)
    assert found == TaskFit(limits=limits)
    assert largest_on_disk([found.sized(task)], room) == (None if memory == 2048 else limits.disk_mib)
    (problem,) = fit(sized(folder, "1.4", storage_mb=8192), replace(room, largest_disk_mib=4096)).refused
    assert "leases have 4096 on disk; raise largest_disk_mib to 8192" in problem


@pytest.mark.parametrize(
    ("version", "sizes", "limits", "clamped", "refused"),
    [
        ("1.1", {"memory_mb": 2048, "storage_mb": 10_240}, LeaseLimits(memory_mib=2048, disk_mib=2048), 1, 0),
        ("1.1", {"memory_mb": 4096, "storage_mb": 10_240}, LeaseLimits(memory_mib=4096, disk_mib=4096), 1, 0),
        ("1.1", {"memory_mb": 8192, "storage_mb": 10_240}, None, 1, 1),
        ("1.4", {"memory_mb": 4096, "storage_mb": 512}, None, 0, 1),
        ("1.4", {"memory_mb": 512, "storage_mb": 512, "cpus": 1}, None, 0, 0),
        ("1.4", {"memory_mb": 512, "storage_mb": 1024}, LeaseLimits(memory_mib=1536, disk_mib=1024), 0, 0),
        ("1.4", {"cpus": 4}, LeaseLimits(cpu_quota=4), 0, 0),
    ],
)
def test_leases_grow_to_a_whole_container(folder, version, sizes, limits, clamped, refused):
    found = fit(
        sized(folder, version, **sizes), Room(Resources(memory_mib=1024, disk_mib=512), volume="memory", most_mib=4096)
    )
    assert (len(found.clamped), len(found.refused)) == (clamped, refused)
    if not refused:
        assert found.limits == limits


def test_clamp_lowers_everything(folder):
    task = sized(folder, "1.4", memory_mb=8192, storage_mb=8192)
    found = fit(task, Room(Resources(memory_mib=1024, disk_mib=512), volume="memory", most_mib=4096), policy="clamp")
    assert (found.refused, len(found.clamped), found.limits) == ((), 2, LeaseLimits(memory_mib=4096, disk_mib=4096))


@pytest.mark.parametrize(
    ("version", "policy", "refused", "clamped"),
    [("1.1", "old", 0, 2), ("1.4", "old", 2, 0), ("1.1", "refuse", 2, 0), ("1.4", "clamp", 0, 2)],
)
def test_default_sizes_of_old_are_lowered(folder, version, policy, refused, clamped):
    task = sized(folder, version, memory_mb=2048, storage_mb=10_240)
    found = fit(task, Room(Resources(memory_mib=1024, disk_mib=512), volume="memory"), policy=policy)
    assert (len(found.refused), len(found.clamped)) == (refused, clamped)
    assert sorted(found.sized(task).lowered) == (["disk", "memory"] if clamped else [])
    chosen = sized(folder, "1.1", memory_mb=4096)
    assert len(fit(chosen, Room(Resources(memory_mib=1024, disk_mib=512)), policy="old").refused) == 1


@pytest.mark.parametrize(
    ("text", "agent", "verifier", "offline"),
    [
        ("", None, None, False),
        ("[environment]\nnetwork_mode = 'no-network'", (), (), True),
        ("[environment]\nallow_internet = false\n[verifier]\nnetwork_mode = 'public'", (), None, False),
        ("[agent]\nnetwork_mode = 'no-network'", (), None, False),
        ("[environment]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['*.a.b']", ("*.a.b",), ("*.a.b",), False),
        (
            "[environment]\nnetwork_mode = 'no-network'\n[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['10.0.0.0/8']",
            ("10.0.0.0/8",),
            (),
            False,
        ),
    ],
)
def test_each_phase_has_its_network(folder, text, agent, verifier, offline):
    (folder / "task.toml").write_text(text)
    task = load_task(folder)
    assert (task.agent_hosts, task.verifier_hosts, task.offline) == (agent, verifier, offline)


def test_unreachable_hosts_are_noted(folder):
    room = Room(Resources(memory_mib=1024, disk_mib=512), egress=("pypi.org", "*.debian.org"))
    (folder / "task.toml").write_text(
        "[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['pypi.org', 'a.b', '*.debian.org', '10.0.0.0/8']\n"
        "[verifier]\nnetwork_mode = 'allowlist'\nallowed_hosts = ['not a host']\n"
    )
    found = fit(load_task(folder), room)
    assert [note.text.split(":")[1].split()[0] for note in found.notes] == ["a.b", "10.0.0.0/8"]
    assert len(found.refused) == 1
    assert found.refused[0].startswith("verifier.allowed_hosts: 'not a host'")
    many = ", ".join(f"'a{number}.debian.org'" for number in range(257))
    (folder / "task.toml").write_text(f"[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = [{many}]\n")
    assert [each.split(";")[0] for each in fit(load_task(folder), room).refused] == ["agent.allowed_hosts: 257 hosts"]
    most = many.removesuffix(", 'a256.debian.org'")
    (folder / "task.toml").write_text(f"[agent]\nnetwork_mode = 'allowlist'\nallowed_hosts = [{most}]\n")
    assert fit(load_task(folder), room).refused == ()
    (folder / "task.toml").write_text("[environment]\nnetwork_mode = 'public'\n")
    assert fit(load_task(folder), Room(Resources(memory_mib=1024, disk_mib=512), network=False)).notes == tuple(
        Note(f"{phase}.network_mode: slots have no network", "network") for phase in ("agent", "verifier")
    )


# ---------------------------------------------------------------------------------------------------------------- sets


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("environment/Dockerfile", f"FROM debian\nCOPY {'a' * 300} /x\n"),
        ("environment/Dockerfile", f"FROM debian\nCOPY {'a/' * 3000} /x\n"),
        ("environment/Dockerfile", f"FROM debian\nRUN {'[' * 100_000}\n"),
        ("environment/docker-compose.yaml", f"services: {{main: {{build: {{dockerfile: {'a' * 300}}}}}}}"),
        ("environment/docker-compose.yaml", f"services: {{main: {{image: debian, cpus: '{'9' * 400}'}}}}"),
        ("task.toml", f"[environment]\nmemory = '{'9' * 400}G'\n"),
        ("task.toml", "[environment]\ncpus = inf\n"),
        ("task.toml", '[[steps]]\nname = "a\\u0000b"\n'),
    ],
)
def test_an_impossible_task_is_one_bad_one(folder, tmp_path, name, text):
    shutil.copytree(folder, tmp_path / "other")
    (folder / "environment/Dockerfile").unlink(missing_ok=True)
    (folder / name).write_text(text)
    found = read_tasks(tmp_path)
    assert ([task.name for task in found.tasks], list(found.refused)) == (["other"], ["demo"])
    assert str(folder) in found.refused["demo"]
    assert "\n" not in found.refused["demo"]


@pytest.mark.parametrize("more", ["[*{0}, *{0}]", "{{<<: [*{0}, *{0}]}}"])
def test_aliases_of_aliases_take_no_memory(folder, more):
    anchors = [
        "a: &a {k: v}",
        *(f"{n}: &{n} {more.format(before)}" for before, n in itertools.pairwise("abcdefghijklmnopqrstu")),
    ]
    (folder / "environment/docker-compose.yaml").write_text("\n".join([*anchors, "services: {main: {image: *u}}"]))
    with pytest.raises(ConfigError, match=r"compose.yaml: .* longer than 4194304 characters"):
        load_task(folder)


def test_all_bad_tasks_are_named_at_once(folder, tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "task.toml").write_text("")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/readme.md").write_text("no task")
    found = read_tasks(tmp_path)
    assert [task.name for task in found.tasks] == ["demo"]
    assert sorted(found.refused) == ["one", "two"]
    with pytest.raises(ConfigError, match=r"2 of 3 tasks can't be used:\n  one: .*\n  two: "):
        found.check()


def test_unknown_keys_are_listed(folder):
    (folder / "task.toml").write_text(
        "frobnicate = 1\n[verifier]\ntimout_sec = 1\n[environment]\nmcp_servers = []\n[environment.env]\n"
        "[environment.healthcheck]\n[verifier.environment]\n[metadata]\nanything = 'goes'\n[agent]\n"
    )
    task = load_task(folder)
    assert [text.split()[0] for text in task.warnings] == ["frobnicate", "verifier.timout_sec"]
    assert choose(task) == Choice("separate", "[verifier.environment] is set"), "as in Harbor, an empty one says so too"


@pytest.mark.parametrize(
    ("test", "across"),
    [
        ('python3 -c "import os; os.rename(\\"/app/a\\", \\"/jail/a\\")"', True),
        ("os.link('/app/a', '/tmp/a')", True),
        ("Path('/tmp/a').rename('/app/a')", True),
        ("fs.renameSync('/app/a', '/tmp/a')", True),
        ("cd /; ln /app/a /tmp/a", True),
        ("ln -s /app/a /tmp/a", False),
        ("os.replace('/app/a.new', '/app/a')", False),
        ("os.rename('/tmp/a', '/tmp/b')", False),
        ("mv /app/a /tmp/a", False),
        ("frame.rename(columns={'/app': '/tmp'})", False),
    ],
)
def test_renaming_tests_are_known(folder, test, across):
    (folder / "environment/Dockerfile").write_text("FROM debian:13\nWORKDIR /app\n")
    (folder / "tests/helper.py").write_text(test)
    task = load_task(folder)
    assert renames_across(read_texts(task).tests, [task.recipe.workdir]) == across
    assert choose(task).mode == "view"


def test_own_variables_are_passed_by_name(folder):
    (folder / "task.toml").write_text("[verifier.env]\nKEY = '${KEY}'\nURL = 'http://${HOST:-localhost}:1'\n")
    with pytest.raises(ConfigError, match="KEY} is not given to tasks"):
        load_task(folder)
    task = load_task(folder, variables={"KEY": "k"})
    assert task.verifier_settings.env == {"KEY": "k", "URL": "http://localhost:1"}
    assert load_task(folder, variables={"KEY": "k", "HOST": "h"}).verifier_settings.env["URL"] == "http://h:1"
    assert "'k'" not in repr(task)


@pytest.mark.parametrize(
    ("value", "filled"),
    [
        ("${A:-}${B:-${A}}", "1${A}"),
        ("${A:-x", "${A:-x"),
        ("${A}${A:-x ${A}", "11"),
        ("${A ${A", "${A ${A"),
        ("${B:-\\n} $A ${}", "\n $A ${}"),
    ],
)
def test_a_variable_without_an_end_is_text(folder, value, filled):
    (folder / "task.toml").write_text(f'[verifier.env]\nKEY = "{value}"\n')
    assert load_task(folder, variables={"A": "1"}).verifier_settings.env["KEY"] == filled


def test_one_service_sets_the_start(folder):
    (folder / "environment/Dockerfile").write_text("FROM debian\nENV A=1\nWORKDIR /app\n")
    (folder / "environment/docker-compose.yaml").write_text(
        "services:\n  main:\n    build: {context: .}\n    command: [sh, -c, sleep infinity]\n    working_dir: /srv\n"
        "    network_mode: none\n    environment: [B=2, 'DIR=${T_BENCH_TEST_DIR}', 'C=${MODE:-fast} $$x']\n"
        "    volumes: ['${HOST_VERIFIER_LOGS_PATH}:${ENV_VERIFIER_LOGS_PATH}']\n"
        "    mem_limit: 1.5g\n    deploy: {resources: {limits: {cpus: '2.5', memory: '${MEMORY}'}}}\n"
    )
    task = load_task(folder)
    assert task.agent_settings == StepSettings("/srv", {"A": "1", "B": "2", "C": "fast $x"})
    assert task.offline
    assert (task.config.environment.memory_mb, task.config.environment.cpus) == (1536, 2.5)
    compose = folder / "environment/docker-compose.yaml"
    compose.write_text("services: {main: {build: ., deploy: {resources: [1]}}}")
    assert load_task(folder).config.environment.memory_mb is None
    compose.write_text("services: {main: {build: ., mem_limit: 1g, x-note: [any]}}")
    (folder / "task.toml").write_text("[environment]\nmemory_mb = 700\n")
    assert load_task(folder).config.environment.memory_mb == 700, "task.toml comes first"
    compose.write_text("services: {main: {image: 'app:1', working_dir: /srv}}")
    (folder / "environment/Dockerfile").unlink()
    assert load_task(folder).recipe.workdir == "/srv"
    (folder / "task.toml").write_text("[environment]\nworkdir = '/own'\n")
    assert load_task(folder).recipe.workdir == "/own"


def test_a_compose_file_may_have_defaults(folder):
    (folder / "environment/docker-compose.yaml").write_text(
        "services: {main: {image: '${IMAGE:-app}:${TAG-1}', working_dir: '${DIR:-/srv}', user: '${UID:-1000}:5', "
        "network_mode: '${NET:-none}'}}"
    )
    task = load_task(folder)
    assert (task.image, task.agent_settings, task.offline) == ("app:1", StepSettings("/srv", {}, "1000:5"), True)
    (folder / "environment/docker-compose.yaml").write_text("services: {main: {image: '${MAIN_IMAGE_NAME}'}}")
    assert load_task(folder).image is None, "the harness names it"


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ("build: .", "environment/Dockerfile: is missing"),
        ("build: {dockerfile: docker/Dockerfile}", "environment/docker/Dockerfile: is missing"),
        ("image: app, working_dir: srv", "services.main.working_dir: 'srv' doesn't begin with /"),
        ("image: app, user: '${UID}'", "services.main.user: ${UID} is not given to tasks"),
        ("image: '${REGISTRY}/app'", "services.main.image: ${REGISTRY} is not given to tasks"),
        ("image: app, command: ['" + "${A-" * 5000 + "']", "services.main.command: ${A-"),
    ],
)
def test_vain_compose_keys_are_refused(folder, keys, named):
    (folder / "environment/docker-compose.yaml").write_text(f"services: {{main: {{{keys}}}}}")
    with pytest.raises(ConfigError) as refused:
        load_task(folder)
    assert named in str(refused.value)
    (folder / "environment/docker-compose.yaml").write_text("services: {main: {build: .}}")
    (folder / "task.toml").write_text("[environment]\ndocker_image = 'app'\n")
    assert load_task(folder).image == "app", "with an image, a Dockerfile isn't needed"


@pytest.mark.parametrize(
    ("keys", "entrypoint", "command"),
    [
        ("", ("/start",), ()),
        ("command: [serve, '$${A} ${B:-b}']", ("/start",), ("serve", "${A} b")),
        ("command: sh -c 'a && b'", ("/start",), ("sh", "-c", "a && b")),
        ("entrypoint: [/own, x], command: ''", ("/own", "x"), ()),
        ("entrypoint: [], command: serve", (), ("serve",)),
    ],
)
def test_compose_replaces_the_start(folder, keys, entrypoint, command):
    (folder / "environment/Dockerfile").write_text('FROM debian\nENTRYPOINT ["/start"]\nCMD ["image"]\n')
    (folder / "environment/docker-compose.yaml").write_text(f"services: {{main: {{build: .{keys and ', '}{keys}}}}}")
    settings = load_task(folder).recipe.settings
    assert (settings.entrypoint, settings.command) == (entrypoint, command)


def test_steps_inherit_from_the_task(folder):
    (folder / "task.toml").write_text(
        "multi_step_reward_strategy = 'final'\n[agent]\ntimeout_sec = 5\nuser = 'dev'\n[verifier.env]\nA = '1'\n"
        "[[steps]]\nname = 'one'\n[steps.agent]\ntimeout_sec = 9\n[[steps]]\nname = 'two'\nmin_reward = 0.5\n"
    )
    (folder / "instruction.md").unlink()
    for name in ("one", "two"):
        (folder / "steps" / name).mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text(f"Do {name}.")
    (folder / "steps/two/tests").mkdir()
    (folder / "steps/two/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    one, two = load_task(folder).steps
    assert (one.name, one.instruction) == ("demo/one", "Do one.")
    assert (one.config.agent.timeout_sec, one.config.agent.user, two.config.agent.timeout_sec) == (9, "dev", 5)
    assert one.tests == (folder / "tests",)
    assert two.tests == (folder / "tests", folder / "steps/two/tests")
    assert two.config.verifier.env == {"A": "1"}


@pytest.mark.parametrize(
    ("rewards", "mean"), [([1.0] * 49, 1.0), ([0.0, 1.0], 0.5), ([1e308, 1e308], 1e308), ([-1e308, 1e308], 0.0)]
)
def test_means_of_steps_are_exact(folder, rewards, mean):
    (folder / "steps/one").mkdir(parents=True)
    (folder / "steps/one/instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text("[[steps]]\nname = 'one'\n")
    assert combined(load_task(folder), [Verdict(reward, 0, "", 0.0, {"reward": reward}) for reward in rewards]) == mean


def test_the_final_step_counts_alone(folder):
    (folder / "task.toml").write_text("multi_step_reward_strategy = 'final'\n")
    assert (
        combined(load_task(folder), [Verdict(reward, 0, "", 0.0, {"reward": reward}) for reward in (1.0, 0.25)]) == 0.25
    )


def test_gaps_of_steps_count_as_0(folder):
    (folder / "steps/one").mkdir(parents=True)
    (folder / "steps/one/instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text("[[steps]]\nname = 'one'\n")
    found = [{"style": 1.0, "reward": 0.5}, {"style": 1.0}, {"accuracy": 1.0, "reward": 1.0}]
    verdicts = [Verdict(metrics.get("reward", 1.0), 0, "", 0.0, metrics) for metrics in found]
    assert combined(load_task(folder), verdicts) == 0.5
    assert combined(load_task(folder), [Verdict(1.0, 0, "", 0.0, {"style": 1.0}), Verdict(0.0, None, "", 0.0)]) == 0.5


@pytest.mark.parametrize("table", ["steps.verifier", "steps.verifier.environment"])
def test_steps_need_their_variables(folder, table):
    (folder / "steps/one").mkdir(parents=True)
    (folder / "steps/one/instruction.md").write_text("Do it.")
    (folder / "task.toml").write_text(f"[[steps]]\nname = 'one'\n[{table}.env]\nA = '${{A_SECRET}}'\n")
    named = table.replace("steps.", "steps.one.")
    with pytest.raises(ConfigError, match=rf"task\.toml: {named}\.env\.A: \$\{{A_SECRET\}} is not given"):
        load_task(folder)
    assert load_task(folder, variables={"A_SECRET": "a"}).steps


@pytest.mark.parametrize(
    ("toml", "files", "image", "bundled"),
    [
        ("", {}, None, None),
        ("", {"tests/Dockerfile": "FROM debian"}, None, None),
        ("[verifier]\nenvironment_mode = 'shared'", {"tests/Dockerfile": "FROM debian"}, None, None),
        ("[verifier]\nenvironment_mode = 'separate'", {}, None, None),
        ("[verifier]\nenvironment_mode = 'separate'", {"tests/Dockerfile": "FROM debian"}, "debian", True),
        ("[verifier.environment]\ncpus = 2", {"tests/Dockerfile": "FROM debian"}, "debian", True),
        ("[verifier.environment]\ndocker_image = 'judge:1'", {"tests/Dockerfile": "FROM debian"}, "judge:1", True),
        ("[verifier.environment]\nmemory_mb = 4096", {"environment/Dockerfile": "FROM ubuntu"}, "ubuntu", False),
        (
            "[verifier]\nenvironment_mode = 'separate'",
            {"tests/docker-compose.yaml": "services: {main: {image: 'judge:2'}}"},
            "judge:2",
            True,
        ),
    ],
)
def test_a_separate_verifier_s_machine(folder, toml, files, image, bundled):
    write_files(folder, {"task.toml": toml, **files})
    task = load_task(folder)
    found = None if task.verifier is None else (task.verifier.image, task.verifier.bundled)
    assert found == (None if bundled is None else (image, bundled))
    if bundled:
        assert [one.source for one in task.artifacts] == ["/logs/artifacts"]
        assert task.recipe.image is None
    if "4096" in toml:
        room = Room(Resources(memory_mib=1024, disk_mib=512), most_mib=2048)
        assert (
            fit(task, room)
            .refused[0]
            .startswith("verifier.environment.memory_mb: 4096 wanted, slots have at most 2048")
        )
        sized = fit(task, Room(Resources(memory_mib=1024, disk_mib=512), most_mib=8192)).sized(task)
        assert (sized.limits, sized.verifier.limits) == (None, LeaseLimits(memory_mib=4096))


def test_a_step_s_verifier_comes_first(folder):
    (folder / "task.toml").write_text(
        "[verifier]\nenvironment_mode = 'separate'\ntimeout_sec = 7\n"
        "[[steps]]\nname = 'one'\n[[steps]]\nname = 'two'\n[steps.verifier]\nuser = 'judge'\n"
        "[[steps]]\nname = 'three'\n[steps.verifier]\nenvironment_mode = 'shared'\n"
    )
    (folder / "tests/Dockerfile").write_text("FROM all")
    for name in ("one", "two", "three"):
        (folder / "steps" / name / "tests").mkdir(parents=True)
        (folder / "steps" / name / "instruction.md").write_text("Do.")
    (folder / "steps/two/tests/Dockerfile").write_text("FROM own")
    one, two, three = load_task(folder).steps
    assert (one.verifier.image, two.verifier.image, three.verifier) == ("all", "own", None)
    assert [(choose(step).mode, step.config.verifier.timeout_sec) for step in (one, two, three)] == [
        ("separate", 7),
        ("separate", 7),
        ("shared", 7),
    ]
    assert two.config.verifier.user == "judge"


@pytest.mark.parametrize(
    ("toml", "solution", "mode"),
    [
        ("", "echo 42 > answer; /usr/bin/python3 run.py", "view"),
        ("", "apt-get install -y nginx", "shared"),
        ("", "pip3 install --user numpy", "shared"),
        ("", "echo x >> /etc/hosts", "shared"),
        ("", "cd /root && echo x > answer", "shared"),
        ("", "cp site.conf /etc/", "shared"),
        ("", "echo x > ${HOME}/.profile", "shared"),
        ("", "cd ~; echo x > answer", "shared"),
        ("", "make -j4 && make install", "shared"),
        ("", "service postgresql start && createdb x", "shared"),
        ("", "git config --global user.name x", "shared"),
        ("", "uv tool install ruff", "shared"),
        ("", "go install ./cmd/x", "shared"),
        ("", "make installer; echo the service will restart; git config user.name x", "view"),
        ("", "cat /rooted /app/etc > /data/opt", "view"),
        ("artifacts = ['/var/www']", "echo x > /var/www/index.html", "view"),
        ("[verifier]\nenvironment_mode = 'shared'", "echo 42 > answer", "shared"),
        ("[verifier]\nenvironment_mode = 'view'", "apt-get install -y nginx", "view"),
        ("[verifier]\nenvironment_mode = 'separate'", "echo 42 > answer", "separate"),
    ],
)
def test_tests_run_in_a_view_by_default(folder, toml, solution, mode):
    (folder / "task.toml").write_text(toml)
    (folder / "solution").mkdir(exist_ok=True)
    (folder / "solution" / "solve.sh").write_text(f"#!/bin/bash\n{solution}\n")
    assert choose(load_task(folder)).mode == mode


@pytest.mark.parametrize(
    ("test", "mode"),
    [
        ("s = socket.socket(socket.AF_UNIX)", "shared"),
        ("curl --unix-socket app http://x/", "shared"),
        ("cat /app/run/app.sock", "shared"),
        ("curl localhost; cat x.socket", "view"),
    ],
)
def test_unix_sockets_need_the_agents_slot(folder, test, mode):
    (folder / "tests/helper.py").write_text(test)
    assert choose(load_task(folder)).mode == mode


def test_venvs_of_tests_alone_are_known(folder):
    (folder / "environment/Dockerfile").write_text("FROM debian:13\nWORKDIR /app\n")
    (folder / "instruction.md").write_text("Put numpy into mine.")
    run = ". ./.venv/bin/activate; /venv/bin/python3.11 x; ../v/bin/coverage; $HOME/h/bin/python; mine/bin/python; /usr/bin/awk"
    (folder / "tests/helper.sh").write_text(run)
    assert venvs_of_tests(read_texts(load_task(folder)), "/app") == ["/app/.venv", "/v", "/venv"]


@pytest.mark.parametrize(
    ("workdir", "mode"), [("/", "shared"), ("/etc", "shared"), ("/usr/local", "shared"), ("/opt/x", "view")]
)
def test_no_view_shows_system_folders(folder, workdir, mode):
    (folder / "environment/Dockerfile").write_text(f"FROM debian:13\nWORKDIR {workdir}\n")
    assert choose(load_task(folder)).mode == mode


def test_reading_is_linear(folder):
    (folder / "solution").mkdir()
    (folder / "solution/solve.sh").write_text("apt -" * 15_000)
    (folder / "instruction.md").write_text(f"<!--{'canary' * 50_000}")
    (folder / "task.toml").write_text(f"[verifier.env]\nA = '{'${A:-' * 20_000}'\n")
    started = time.process_time()
    task = load_task(folder)
    assert choose(task).mode == "view"
    assert task.verifier_settings.env["A"] == "${A:-" * 20_000
    assert time.process_time() - started < 2


def test_links_read_nothing_here(folder):
    (folder / "solution").mkdir()
    (folder / "solution/solve.sh").write_text("echo 42 > answer\n")
    (folder / "solution/memory").symlink_to("/proc/self/mem")
    (folder / "solution/hosts").symlink_to("/etc/hosts")
    assert choose(load_task(folder)).mode == "view"


def test_steps_have_no_view(folder):
    (folder / "task.toml").write_text('[verifier]\nenvironment_mode = "view"\n[[steps]]\nname = "one"\n')
    (folder / "steps/one").mkdir(parents=True)
    (folder / "steps/one/instruction.md").write_text("Do.")
    task = load_task(folder)
    assert [choose(each).mode for each in (task, *task.steps)] == ["shared", "shared"]
    assert [choose(task, wanted).mode for wanted in ("view", "separate")] == ["shared", "separate"]


@pytest.mark.parametrize(
    ("test", "found"),
    [
        ("python3 /app/solve.py > /tmp/out", "python3 /app/solve.py"),
        ("cd /app && ./server --port 1", "./server"),
        ("/app/run.sh", "/app/run.sh"),
        ("make test", "make"),
        ("cargo test --release", "cargo test"),
        ("python3 -m pytest /tests/test_it.py", "python3 -m pytest"),
        ("bash solve.sh", "bash solve.sh"),
        (
            "out = subprocess.run(['python3', '/app/solve.py'], check=False)",
            "subprocess.run(['python3', '/app/solve.py",
        ),
        ("sys.path.insert(0, '/app')", "sys.path.insert(0, '/app"),
        ("PYTHONPATH=/app/src pytest /tests/test_it.py", "PYTHONPATH=/app"),
        ("export PYTHONPATH=.:$PYTHONPATH", "PYTHONPATH=."),
        ("space = exec(compile(open('/app/a.py').read(), 'a', 'exec'))", "exec(compile(open"),
        ("export PYTHONPATH=/application", None),
        ("model = pickle.load(open('/app/model.pkl', 'rb'))", "pickle.load"),
        ("run = subprocess.run([\n    './solve'])", "subprocess.run([ './"),
        ("pytest -rA /tests/test_outputs.py", None),
        ("bash /tests/helper.sh", None),
        ("grep -q one /app/answer.txt && echo 1 > /logs/verifier/reward.txt", None),
        ("assert Path('/app/answer.txt').read_text() == 'one'", None),
        ("cmp /app/a /tests/b", None),
    ],
)
def test_agent_programs_of_tests_are_known(folder, test, found):
    (folder / "environment/Dockerfile").write_text("FROM debian:13\nWORKDIR /app\n")
    (folder / "tests/helper.py").write_text(f"# comment\n{test}\n")
    seen = exposure(load_task(folder))
    assert (None if seen is None else str(seen)) == (found and f"tests/helper.py has `{found}`, as root")


def test_whom_the_tests_run_as_is_said(folder):
    (folder / "environment/Dockerfile").write_text("FROM debian:13\nWORKDIR /app\n")
    (folder / "task.toml").write_text("[verifier]\nuser = 'judge'\n")
    (folder / "tests/test.sh").write_text("./server\n")
    assert str(exposure(load_task(folder))) == "tests/test.sh has `./server`, as judge"


@pytest.mark.parametrize(
    ("test", "links"),
    [
        *(("ln -s /etc/hosts new", True), ("cd /app && ln -sfn a /app/b; true", True), ("os.symlink(a, b)", True)),
        *(("python3 -m venv .v && x", True), ("uv run pytest /tests/t.py", True), ("npm ci", True)),
        *(("ln -s /usr/bin/python3 /usr/bin/python", False), ("python3 -m venv /opt/v\n", False), ("ln a b", False)),
        *(("uv pip install --system x", False), ("uv venv\n", True), ("ln -s x '/usr/y'", False)),
    ],
)
def test_links_that_tests_make_are_seen(test, links):
    assert makes_links([test], ["/app"]) == links


@pytest.mark.parametrize("text", ["ln -s %s(", "ln -%s(", "ln -s x'y%s'"], ids=str)
def test_long_words_take_as_long_as_they_are(text):
    assert not makes_links([text % ("s" * (1 << 20))], ["/app"])


@pytest.mark.parametrize(
    ("test", "made"),
    [
        *(("python3 -m venv --without-pip .a && x", ["/app/.a"]), ("if (uv venv -p 3.12 /b) >&2; then x; fi", ["/b"])),
        *(("cd /app && virtualenv c", ["/app/c"]), ("uv venv --python python3.12 own", ["/app/own"])),
        *(("cd /tests; uv venv a", []), ("cd /tests; uv venv /b", ["/b"]), ("uv venv $V", []), ("uv venv a b", [])),
        *(("uv venv\nsource .venv/bin/activate", []), ("uv venv\n./build.sh", []), ("uv venv asked", [])),
        *(("# no virtualenv data", []), ("# see: (uv venv data)", []), ("echo '; uv venv data'", []), ("cat <<E\nuv venv a\n", [])),
        *(("apt-get install -y python3-virtualenv src", []), ("pip install virtualenv pytest", []), ("uv venv .", [])),
        *(("[ -d a ] || uv venv a", []), ("[ -d a ] && uv venv b", []), ("test -d a || (uv venv a)", [])),
        *(("python3 -m venv .venv", []), ("uv venv --cache-dir /data", []), ("uv venv --cache-dir /data x", [])),
    ],
)  # fmt: skip
def test_own_venvs_are_seen(test, made):
    assert list(venvs_made(TaskTexts("Use asked.", (f"#!/bin/bash\n{test}", f"print(1)\n{test}")), "/app")) == made


@pytest.mark.parametrize("part", ["ln -s a", "a", "\n", " ", ";", "; ", "uv venv a;", "-q ", "cd ", "python", "npm -"])
def test_texts_are_read_in_linear_time(part):
    def seconds(count):
        text = f"#!/bin/sh\nln -s {part * (count // len(part))}("
        started = time.process_time()
        makes_links([text], ["/app"])
        renames_across([text], ["/app"])
        venvs_made(TaskTexts("", (text,)), "/app")
        return time.process_time() - started

    seconds(100)
    assert seconds(8000) < 30 * max(seconds(1000), 1e-3)
