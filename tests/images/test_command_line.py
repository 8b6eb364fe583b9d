"""`atropos image prepare` and `atropos exec --image`, as a user types them."""

import json
import os
import subprocess
import sys

import pytest

from atropos.errors import ConfigError
from atropos.slots import SlotPoolConfig
from tests import privileges
from tests.images.test_leases import busybox_image
from tests.settings import shows

pytestmark = privileges.owners


def atropos(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "atropos.cli", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_an_image_is_prepared_once(tmp_path, images):
    image_id = busybox_image(tmp_path / "layout")
    images.push(tmp_path / "layout", "busy:1")
    name, store = f"{images.host}/busy:1", str(tmp_path / "store")
    done = atropos("image", "prepare", name, "--store", store, "--insecure-registry", images.host)
    assert (done.returncode, done.stdout.split()[:2]) == (0, [name, image_id]), done.stderr
    assert f"{name}: ready" in done.stderr
    again = atropos("image", "prepare", name, "--store", store, "--json")  # nothing is asked of the registry
    assert (again.returncode, "pulling" in again.stderr) == (0, False), again.stderr
    [told] = json.loads(again.stdout)
    assert (told["image"], told["lease_as"], told["bytes"] > 0) == (name, image_id, True)
    ran = atropos("exec", "cat text; pwd", "--image", f"oci:{tmp_path}/layout:image")
    assert (ran.returncode, ran.stdout) == (0, "hello/srv/app\n"), ran.stderr


@shows("image_store")
def test_a_mirror_stands_in_for_a_registry(tmp_path, images):
    image_id = busybox_image(tmp_path / "layout")
    images.push(tmp_path / "layout", "library/mirrored:1")
    mirror = ["--mirror", f"docker.io={images.host}", "--insecure-registry", images.host]
    done = atropos("image", "prepare", "mirrored:1", "--store", str(tmp_path / "store"), *mirror)
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["mirrored:1", image_id]), done.stderr
    task = tmp_path / "task"
    (task / "tests").mkdir(parents=True)
    (task / "task.toml").write_text('[environment]\ndocker_image = "mirrored:1"\n')
    (task / "instruction.md").write_text("Do it.")
    (task / "tests/test.sh").write_text("#!/bin/sh\necho 0 > /logs/verifier/reward.txt\n")
    checked = atropos(
        "tasks", "check", str(task), "--agent", "nop", "--json", "--store", str(tmp_path / "other"), *mirror
    )
    [finding] = json.loads(checked.stdout)
    assert (finding["image"], finding["attempts"]["nop"]["reward"]) == ("mirrored:1", 0), checked
    refused = atropos("image", "prepare", "x", "--mirror", "docker.io=http://mirror:5000")
    assert (refused.returncode, "mirrors.docker.io: write the host alone" in refused.stderr) == (2, True), refused


def test_an_image_without_a_shell_is_named(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    ran = atropos("exec", "true", "--image", str(tmp_path / "Dockerfile"))
    assert (ran.returncode, "neither /bin/bash nor /bin/sh exists in this slot" in ran.stderr) == (1, True), ran.stderr


def test_a_dockerfile_is_built_and_used(tmp_path):
    (tmp_path / "Dockerfile").write_text("FROM debian\nENV WHO=me\nWORKDIR /srv\nRUN echo made > it\n")
    store = str(tmp_path / "store")
    done = atropos("image", "prepare", str(tmp_path / "Dockerfile"), "--store", store)
    assert done.returncode == 0, done.stderr
    assert "building step 2/2" in done.stderr
    assert done.stdout.split()[1].startswith("atropos-build:")
    ran = atropos("exec", "cat it; echo $WHO", "--image", str(tmp_path / "Dockerfile"))
    assert (ran.returncode, ran.stdout) == (0, "made\nme\n"), ran.stderr
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN echo no; exit 3\n")
    failed = atropos("image", "prepare", str(tmp_path / "Dockerfile"), "--store", store)
    assert (failed.returncode, "step 1/1" in failed.stderr, "Traceback" in failed.stderr) == (1, True, False)


def test_a_terminal_bench_task_is_built(tmp_path):
    folder = tmp_path / "python"
    folder.mkdir()
    (folder / "task.yaml").write_text("instruction: Do it.\nparser_name: pytest\n")
    (folder / "docker-compose.yaml").write_text("services: {client: {build: .}}\n")
    (folder / "Dockerfile").write_text("FROM debian\nWORKDIR /srv\n")
    (folder / "run-tests.sh").write_text("pytest\n")
    done = atropos("image", "prepare", str(folder), "--store", str(tmp_path / "store"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1].startswith("atropos-build:")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["image", "prepare", "x", "--backend", "docker"], "--store"),
        (["image", "prepare", "oci-archive:/no/such.tar"], "/no/such.tar"),
        (["exec", "true", "--image", "Not An Image"], "Not An Image"),
    ],
)
def test_mistakes_are_named_in_a_line(arguments, said):
    done = atropos(*arguments)
    assert done.returncode not in {0, 1}
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_paths_start_at_the_commands_folder(tmp_path, monkeypatch):
    """A server works in /."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY Dockerfile /\n")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.chdir(tmp_path)
    done = atropos("image", "prepare", "Dockerfile", "--store", "mine")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mine" / "layers").is_dir()
    refused = atropos("exec", "true", "--base", "nothing")
    assert (refused.returncode, f"base: {tmp_path}/nothing is not a folder" in refused.stderr) == (2, True), refused
    store = [{"image_store": {field: "mine"}} for field in ("folder", "auth_file")]
    for settings in (*store, {"base": "mine"}, {"bases": {"x": "mine"}}):
        with pytest.raises(ConfigError, match=r"(image_store\.(folder|auth_file)|base|bases\.x): write the whole path"):
            SlotPoolConfig(**settings)
