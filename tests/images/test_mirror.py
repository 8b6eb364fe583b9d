"""A set of tasks taken along: its images and wheels in a folder that a plain web server serves."""

import asyncio
import contextlib
import functools
import http.server
import os
import re
import subprocess
import threading
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atropos.cli.tasks import tasks_app
from atropos.config import ImageStoreSettings
from atropos.images.reference import ImageSource
from atropos.images.store import ImageStore
from atropos.tasks.folder import load_task
from atropos.tasks.mirror import pip
from atropos.tasks.needs import SetNeeds, needs
from tests import privileges
from tests.images.making import as_index, entry, layer, layout
from tests.images.test_task_images import make

TERMINAL_BENCH = """#!/bin/bash
# apt-get install nothing
apt-get update && apt-get install -y curl libgl1
curl -LsSf https://astral.sh/uv/0.7.13/install.sh | sh
source $HOME/.local/bin/env
if [ "$PWD" = "/" ]; then echo "no: pip install this"; fi
uvx \\
  -p 3.13 \\
  -w pytest==8.4.1 -w pytest-json-ctrf==0.3.5 \\
  pytest --ctrf /logs/verifier/ctrf.json /tests/test_outputs.py -rA
"""


def task(tmp_path: Path, script: str, dockerfile: str = "FROM debian:13\n") -> Path:
    made = make(tmp_path, dockerfile).path
    (made / "tests").mkdir(exist_ok=True)
    (made / "tests/test.sh").write_text(script)
    return made


@pytest.mark.parametrize(
    "script, found",
    [
        (
            TERMINAL_BENCH,
            SetNeeds(
                wheels=(("3.13", ("pytest-json-ctrf==0.3.5", "pytest==8.4.1")),),
                uv=("0.7.13",),
                debian=("curl", "libgl1"),
            ),
        ),
        ("curl -sSL https://astral.sh/uv/install.sh | sh", SetNeeds(uv=("",))),
        ("python3 -m pip install -q --user 'numpy>=2' pandas -r more.txt\n", SetNeeds(wheels=(("", ("numpy>=2", "pandas")),))),
        ("cd /tests; uv add pytest==8 requests[socks]; uv run pytest .", SetNeeds(wheels=(("", ("pytest==8", "requests[socks]")),))),
        ("uv run --with polars,attrs==25 check.py", SetNeeds(wheels=(("", ("attrs==25", "polars")),))),
        ("uv pip install --python 3.12 $EXTRA ruff", SetNeeds(wheels=(("3.12", ("ruff",)),))),
        ("sudo pip3 install --index-url https://x.example/simple a b", SetNeeds(wheels=(("", ("a", "b")),), addresses=("https://x.example/simple",))),
        ("wget -q https://a.example/data.tgz -O /tmp/x # https://not.this\n", SetNeeds(addresses=("https://a.example/data.tgz", "https://not.this"))),
        ("apt-get install -y -t sid g++ libc6:i386 libstdc++6=14.2.0 vim/sid ./x.deb $MORE", SetNeeds(debian=("g++", "libc6:i386", "libstdc++6=14.2.0", "vim/sid"))),
        ("pytest /tests; echo 'pip install x", SetNeeds()),
    ],
)  # fmt: skip
def test_scripts_say_what_tests_fetch(tmp_path, script, found):
    wanted = needs([load_task(task(tmp_path / "task", script))])
    assert wanted.images == ("docker.io/library/debian:13",)
    assert SetNeeds(("docker.io/library/debian:13",), found.wheels, found.uv, found.debian, found.addresses) == wanted


def test_images_count_and_stages_do_not(tmp_path):
    text = "FROM ghcr.io/a/b:1 AS made\nRUN true\nFROM made AS more\nRUN true\nFROM scratch AS none\nFROM python:3.13\nCOPY --from=more /x /x\n"
    text += "COPY --from=alpine /y /y\nRUN --mount=from=none,target=/m true\n"
    wanted = needs([load_task(task(tmp_path / "task", "true", text))])
    assert wanted.images == ("docker.io/library/alpine:latest", "docker.io/library/python:3.13", "ghcr.io/a/b:1")


def test_builds_fetch_as_tests_do(tmp_path):
    text = (
        "FROM debian:13 AS made\nRUN apt-get update && \\\n    apt-get install -y r-base \\\n    && rm -rf /var/lib/apt/lists/*\n"
        'FROM made\nARG DATA=https://a.example/data.tgz\nADD $DATA /data.tgz\nRUN ["pip", "install", "-q", "wheel"]\n'
        "COPY more.txt /app/\nRUN <<EOF\npip install --requirement=/app/more.txt pytest\ncurl -O https://b.example/x\nEOF\n"
    )
    files = {
        "environment/more.txt": "# what it needs\nnumpy >= 2 ; python_version > '3'\n-e .\nruff==1 # x\n\n",
        "tests/own.txt": "attrs\n",
        "tests/test.sh": "pip install -r /tests/own.txt\n",
    }
    assert needs([make(tmp_path / "task", text, files=files)]) == SetNeeds(
        images=("docker.io/library/debian:13",),
        wheels=(("", ("attrs",)), ("", ("numpy>=2", "pytest", "ruff==1")), ("", ("wheel",))),
        debian=("r-base",),
        addresses=("https://a.example/data.tgz", "https://b.example/x"),
    )


@contextlib.contextmanager
def served(folder: Path):
    """A plain web server of files; its host."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def wheel(folder: Path, name: str, *needed: str, tag: str = "py3-none-any") -> None:
    info = f"{name}-1.0.dist-info"
    requires = "".join(f"Requires-Dist: {each}\n" for each in needed)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-1.0-{tag}.whl", "w") as file:
        file.writestr(f"{name}.py", f"NAME = '{name}'\n")
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}")
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")


@privileges.owners
def test_a_mirror_replaces_registry_and_index(tmp_path, images, monkeypatch):
    at = tmp_path / "layout"
    image_id = layout(at, layer(entry("x", "x")), layer(entry("y", "y")))
    platforms = [(tmp_path / "layout", "amd64"), (tmp_path / "layout", "arm64")]
    index = tmp_path / "index"
    layout(index, layer(entry("x", "x")))
    as_index(index, *platforms)
    images.push(index, "set/base:1", "--all")
    wheel(tmp_path / "wheels", "first", "second")
    wheel(tmp_path / "wheels", "second")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    folder, name = tmp_path / "mirror", f"{images.host}/set/base:1"
    made = task(tmp_path / "set/one", "uvx first\npip install missing==9\n", f"FROM {name}\n")
    arguments = ["mirror", str(made.parent), str(folder), "--insecure-registry", images.host]
    result = CliRunner().invoke(tasks_app, arguments)
    assert result.exit_code == 1  # one wheel is nowhere
    (failed,) = [line for line in result.stderr.splitlines() if "ERROR" in line]
    assert failed.startswith("wheels of missing==9: ")
    assert f"image\t{name}" in result.stdout
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    with served(folder) as host:
        root = tmp_path / "store"
        root.mkdir()
        settings = ImageStoreSettings(mirrors={images.host: f"{host}/{images.host}"}, insecure_registries=(host,))
        store = ImageStore(settings, str(root), 65_536)
        got = asyncio.run(store.prepare(ImageSource.parse(name), lambda *_: None))
        assert got.id == image_id
        target = tmp_path / "installed"
        index_url = f"http://{host}/simple"
        subprocess.run([*pip(), "install", "-q", "--index-url", index_url, "--target", target, "first"], check=True)
        assert {path.name for path in target.glob("*.py")} == {"first.py", "second.py"}


def test_wheels_fit_the_images_python(tmp_path, monkeypatch):
    for version in ("310", "312"):
        wheel(tmp_path / "wheels", "native", tag=f"cp{version}-cp{version}-manylinux_2_17_{os.uname().machine}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    made = make(tmp_path / "task", files={"tests/test.sh": "pip install native\n"})
    for _ in range(2):  # what is there already is found again
        result = CliRunner().invoke(tasks_app, ["mirror", str(made.path), str(tmp_path / "mirror"), "--python", "3.12"])
        assert result.exit_code == 0, result.stderr
    assert re.findall('href="(.*?)"', (tmp_path / "mirror/simple/index.html").read_text()) == ["native/"]
    (got,) = (tmp_path / "mirror/simple/native").glob("*.whl")
    assert "cp312" in got.name


def test_a_list_fetches_nothing(tmp_path):
    made = task(tmp_path / "task", TERMINAL_BENCH)
    result = CliRunner().invoke(tasks_app, ["mirror", str(made), str(tmp_path / "mirror"), "--list"])
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "image\tdocker.io/library/debian:13",
        "wheels\tpytest-json-ctrf==0.3.5 pytest==8.4.1 (Python 3.13)",
        "uv\t0.7.13",
        "debian\tcurl",
        "debian\tlibgl1",
    ]
    assert not (tmp_path / "mirror").exists()
