"""docker/sandbox/build.sh on a machine that has a Docker engine and little else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
DOCKER = """#!/bin/bash
case "$1 $2" in
  version*) echo amd64;;
  "image inspect")
    case "$*" in *Size*) echo 1000000;; *sandbox-base*) cat "$MACHINE/base" 2>/dev/null;; *) exit 1;; esac;;
  load*) echo "$LOADED" > "$MACHINE/base";;
  build*) [[ "$*" != *base.Dockerfile* ]] || { echo amd64 > "$MACHINE/base"; echo >> "$MACHINE/bases"; };;
  pull*) exit 1;;
  save*) : > "$3";;
  import*) cat >/dev/null;;
esac
"""
APT = """#!/bin/bash
echo "$*" >> "$MACHINE/apt.log"
[ "$1" = install ] || exit 0
printf '#!/bin/bash\\necho "$*" >> "$MACHINE/debootstrap.log"; mkdir -p "$3/etc/dpkg/dpkg.cfg.d"\\n' > "$MACHINE/bin/debootstrap"
chmod +x "$MACHINE/bin/debootstrap"
"""
TOOLS = [
    "as",
    "awk",
    "bash",
    "bwrap",
    "cat",
    "cc",
    "chmod",
    "cp",
    "cut",
    "dirname",
    "find",
    "flock",
    "git",
    "grep",
    "id",
    "ld",
    "ldconfig",
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "sha256sum",
    "sort",
    "tail",
    "tar",
    "timeout",
    "unshare",
]


def machine(folder: Path, **programs: str) -> dict[str, str]:
    """An environment whose PATH has common tools and these scripts, and nothing else."""
    (folder / "bin").mkdir()
    for tool in TOOLS:
        (folder / "bin" / tool).symlink_to(
            next(p for d in ("/usr/bin", "/usr/sbin", "/bin", "/sbin") if (p := Path(d, tool)).exists())
        )
    for name, script in programs.items():
        (folder / "bin" / name.replace("_", "-")).write_text(script)
        (folder / "bin" / name.replace("_", "-")).chmod(0o755)
    return {
        "PATH": str(folder / "bin"),
        "MACHINE": str(folder),
        "ATROPOS_CACHE": str(folder / "cache"),
        "HOME": str(folder),
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed as root alone")
def test_debootstrap_is_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        ["/bin/bash", "docker/sandbox/build.sh"],
        cwd=ROOT,
        env=machine(tmp_path, docker=DOCKER, apt_get=APT),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "debootstrap" in (tmp_path / "apt.log").read_text()
    assert "minbase trixie" in (tmp_path / "debootstrap.log").read_text()
    assert "is built" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed as root alone")
def test_podman_builds_alone(tmp_path: Path) -> None:
    podman = DOCKER.replace("echo amd64", '[[ "$*" == *OsArch* ]] && echo linux/amd64', 1)
    podman = podman.replace("case", '[ "$1 $2 $3" = "--remote --url unix:///podman.sock" ] || exit 1\nshift 3\ncase', 1)
    done = subprocess.run(
        ["/bin/bash", "docker/sandbox/build.sh"],
        cwd=ROOT,
        env=machine(tmp_path, podman=podman, apt_get=APT) | {"DOCKER_HOST": "unix:///podman.sock"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "docker" not in (tmp_path / "apt.log").read_text()
    assert "is built" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed as root alone")
@pytest.mark.parametrize(("loaded", "bases"), [("amd64", 1), ("arm64", 2)])
def test_another_machines_base_is_not_used(tmp_path: Path, loaded: str, bases: int) -> None:
    env = machine(tmp_path, docker=DOCKER, apt_get=APT) | {"LOADED": loaded}
    for _ in range(2):  # the second finds what the first has kept
        (tmp_path / "base").unlink(missing_ok=True)
        subprocess.run(["/bin/bash", "docker/sandbox/build.sh"], cwd=ROOT, env=env, capture_output=True, check=True)
    assert (tmp_path / "bases").read_text().count("\n") == bases


def test_image_has_every_program() -> None:
    base = (ROOT / "docker/sandbox/base.Dockerfile").read_text()
    packages = base.split("--no-install-recommends")[-1].split(";")[0].split()
    assert {"bubblewrap", "python3-isal", "zstd"} <= set(packages)


def test_image_has_every_module(tmp_path: Path) -> None:
    script = (ROOT / "docker/sandbox/build.sh").read_text()
    listed = re.search(r"sources < <\(find (.*) -name", script)
    assert listed is not None
    for name in listed[1].split():
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    server = "import atropos.sandbox.server.serve, atropos.sandbox.server.http.routes, atropos.sandbox.host.slot_host"
    done = subprocess.run(
        [sys.executable, "-c", server],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
