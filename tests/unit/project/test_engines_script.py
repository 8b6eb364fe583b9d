"""scripts/engines.py, without an engine."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import alive

ROOT = Path(__file__).resolve().parents[3]
SOON = "import sys; sys.path.insert(0, 'scripts'); import engines; engines.GRACE_S = 0.2; sys.exit(engines.main())"


def test_processes_end_with_their_command(tmp_path: Path) -> None:
    """As the workers of pytest do, and Nomad agents of the cluster's tests: in sessions of their own."""
    with subprocess.Popen(
        [sys.executable, "-c", SOON, "local", "sh", "-c", "setsid sleep 1000 >&- 2>&- & echo $!; exec sleep 1000"],
        cwd=ROOT,
        env=os.environ | {"ATROPOS_ENGINES_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as engines:
        assert engines.stdout is not None
        left = int(engines.stdout.readline())
        while (
            Path(f"/proc/{left}/cmdline").read_bytes()[:6] != b"sleep\0"
        ):  # until it has executed setsid, and that this
            time.sleep(0.01)
        engines.send_signal(signal.SIGTERM)
        _, said = engines.communicate(timeout=60)
    assert engines.returncode == 128 + signal.SIGTERM
    assert not alive([left]), said
    assert list(tmp_path.iterdir()) == []


APT_GET = """#!/bin/bash
for package in "$@"; do
  echo "$package" >> {bin}/../installed
  for program in $(sed -n "s/^$package: //p" {bin}/../packages); do
    printf '#!/bin/bash\\nexit 1\\n' > {bin}/$program && chmod +x {bin}/$program
  done
done
"""
DPKG = """#!/bin/bash
grep -qx "$2" {bin}/../installed
"""
DEBIAN_12 = "docker.io: dockerd docker\niptables: iptables\niproute2: ip\ndebootstrap: debootstrap\n"
DEBIAN_13 = DEBIAN_12.replace("dockerd docker", "dockerd") + "docker-cli: docker\n"
THERE = "bash bwrap cat cc dirname flock git grep id ldconfig mktemp rm sed unshare as ld chmod".split()  # noqa: SIM905


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str, str], subprocess.CompletedProcess[str]]:
    """Runs Python on a machine without an engine, where apt-get installs the programs that packages are said to hold."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in THERE:
        found = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert found, name
        (folder / name).symlink_to(found)
    for name, script in {"apt-get": APT_GET, "dpkg": DPKG, "uv": "#!/bin/bash\n"}.items():
        (folder / name).write_text(script.format(bin=folder))
        (folder / name).chmod(0o755)
    (tmp_path / "installed").touch()
    (tmp_path / "engines").mkdir()

    def run(packages: str, program: str, *argv: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "packages").write_text(packages)
        env = {"PATH": str(folder), "HOME": str(tmp_path), "ATROPOS_ENGINES_DIR": str(tmp_path / "engines")}
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'scripts'); import engines; {program}", *argv]
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.mark.skipif(os.geteuid() != 0, reason="packages are installed by root")
@pytest.mark.parametrize("packages", [DEBIAN_12, DEBIAN_13], ids=["Debian 12", "Debian 13"])
def test_docker_client_installed(machine, tmp_path: Path, packages: str) -> None:
    done = machine(packages, "engines.Engines().install()")
    assert done.returncode == 0, done.stderr
    assert {"docker", "dockerd", "ip", "iptables"} <= {path.name for path in (tmp_path / "bin").iterdir()}
    assert ("docker-cli" in (tmp_path / "installed").read_text()) is (packages == DEBIAN_13)


@pytest.mark.skipif(os.geteuid() != 0, reason="an engine is started by root")
@pytest.mark.parametrize(
    ("packages", "named"),
    [
        (DEBIAN_13.replace("docker-cli: docker", ""), "not on PATH, though the packages .*: docker$"),
        (DEBIAN_12, "dockerd ended with 1: docker ended with 1"),
    ],
    ids=["no client", "no engine"],
)
def test_a_missing_engine_is_named(machine, tmp_path, packages, named) -> None:
    done = machine(packages, "sys.exit(engines.main())", "docker", "sh", "-c", "echo ran")
    assert (done.returncode, done.stdout.endswith("ran\n")) == (1, False)
    assert re.search(f"LEFT OUT docker: {named}", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "engines").iterdir()) == []
