"""The sandbox container's entry point, before there is a server: what is wrong with its settings is its last words."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = Path(__file__).resolve().parents[3] / "docker/sandbox/entry.py"


@pytest.mark.parametrize(
    ("config", "token", "said"),
    [
        (b"[1]", b"secret", "ATROPOS_CONFIG is neither a JSON object nor the path of one: the file holds a list"),
        (b"{", b"secret", "ATROPOS_CONFIG is neither a JSON object nor the path of one: Expecting"),
        (b"{}", b"\xff\xfe\x00", "ATROPOS_TOKEN_FILE 'token' cannot be read: 'utf-8' codec"),
        (b"{}", b" \n", "ATROPOS_TOKEN_FILE 'token' is empty"),
        (b"{}", None, "ATROPOS_TOKEN_FILE 'token' cannot be read: No such file"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, config: bytes, token: bytes | None, said: str) -> None:
    (tmp_path / "config").write_bytes(config)
    if token is not None:
        (tmp_path / "token").write_bytes(token)
    done = subprocess.run(
        [sys.executable, "-S", "-I", str(ENTRY)],
        env=os.environ | {"ATROPOS_CONFIG": "config", "ATROPOS_TOKEN_FILE": "token"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"atropos-sandbox: {said}")
