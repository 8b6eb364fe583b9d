"""The settings files of the two services."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos.api.executor.models import ExecutorServerSettings
from atropos.api.settings import parse_settings, read_file
from atropos.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", '[pool]\nbackend = "docker"\n'),
        ("a.json", '{\n\t"pool": {"backend": "docker"}}'),
        ("a.yaml", "pool:\n  backend: docker\n"),
        ("a.yml", "pool: {backend: docker}\n"),
    ],
)
def test_a_file_is_read_by_its_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_file(tmp_path / name) == {"pool": {"backend": "docker"}}


@pytest.mark.parametrize("name", ["a.toml", "a.json", "a.yaml"])
@pytest.mark.parametrize("text", ["{[", "- 1\n"])
def test_a_file_that_is_none_is_one_line(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^--config: .*{name}: .+") as caught:
        read_file(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("proxy", ["proxy.example.org", "10.0.0.5/8", "*"])
def test_proxies_are_networks(proxy: str) -> None:
    with pytest.raises(ConfigError, match=r"^executor server settings: trusted_proxies\.0: "):
        parse_settings(ExecutorServerSettings, {"token": "x", "trusted_proxies": [proxy]}, "executor server")
