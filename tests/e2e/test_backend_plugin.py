"""The settings of a backend from another package, as docs/backends.md has them: in pools, envs and their command lines."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENTRY_POINTS = """
[atropos.backends]
processes = examples.backends.processes:ProcessBackend
misnamed = builtins:repr
lacking = builtins:repr

[atropos.backend_settings]
processes = examples.backends.settings:ProcessSettings
misnamed = misnamed:Settings
lacking = nowhere:Settings
"""
MISNAMED = """
from atropos.slots.plugins import BackendSettings

class Settings(BackendSettings):
    colour: str = "red"
"""
USED = """
import asyncio, sys
from atropos.slots import SlotPool, SlotPoolConfig
from atropos.envs import AgentEnvConfig

async def main():
    config = AgentEnvConfig(tool_pool_mode="processes", processes_python=sys.argv[1]).pool_config()
    assert config == SlotPoolConfig(backend="processes", processes_python=sys.argv[1], **config.model_dump(
        exclude={"backend", "processes_python"}, exclude_unset=True))
    async with SlotPool(config.model_copy(update={"slots_per_container": 1, "max_containers": 1})) as pool:
        async with pool.lease("t") as slot:
            print((await slot.exec("echo in a slot")).output)

asyncio.run(main())
"""


@pytest.fixture
def python(tmp_path):
    """Runs Python where packages with these entry points are installed."""

    info = tmp_path / "atropos_plugins-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: atropos-plugins\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "misnamed.py").write_text(MISNAMED)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), os.getcwd()])
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def test_pool_and_env_have_it(python, tmp_path):
    link = tmp_path / "python-of-the-setting"
    link.write_text(f'#!/bin/sh\ntouch {tmp_path}/used\nexec {sys.executable} "$@"\n')
    link.chmod(0o755)
    ran = python("-c", USED, str(link))
    assert (ran.returncode, ran.stdout) == (0, "in a slot\n\n"), ran.stderr
    assert (tmp_path / "used").exists()
    ran = python("-c", USED, "/no/python")
    assert "ConfigError: processes_python: there is no program '/no/python'" in ran.stderr


def test_setting_is_in_help(python):
    shown = python("-m", "atropos.envs.humaneval_env", "process", "--help").stdout
    assert "env (ProcessSettings)" in shown
    assert "--env.processes_python TEXT" in shown or "--env.processes_python STR" in shown
    assert "the Python that runs the servers" in shown
    wrong = python(
        "-m", "atropos.envs.humaneval_env", "process", "--env.tool_pool_mode", "processes", "--env.processes_pyton", "x"
    )
    assert "--env.processes_python" in wrong.stderr


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("misnamed", "have a field 'colour': its name must begin with 'misnamed_'"),
        ("lacking", "can't be loaded: No module named 'nowhere'"),
    ],
)
def test_bad_settings_are_refused(python, backend, why):
    ran = python("-c", f"from atropos.slots import SlotPoolConfig as C; C(); C(backend={backend!r})")
    assert f"ConfigError: backend: the settings of backend {backend!r}" in ran.stderr
    assert why in ran.stderr


def test_operators_ask_the_backend(python):
    ran = python("-m", "atropos.cli", "pool", "status", "--backend", "processes")
    assert (ran.returncode, "known to their pool's own process alone" in ran.stderr) == (2, True)
    ran = python("-m", "atropos.cli", "top", "--once", "--backend", "k8s")
    assert (ran.returncode, "--backend 'k8s': input should be 'lacking'" in ran.stderr) == (2, True)
