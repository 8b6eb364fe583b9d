"""The settings files of the two services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos.api.accounts.keys import read_keys
from atropos.api.accounts.secrets import SecretSettings, read_secrets
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


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.yaml", b"token: [secret-1, [secret-2\nb: x\n"),
        ("a.json", b'{"token": "secret-1" "secret-2"}'),
        ("a.toml", b'token = "secret-1" secret-2'),
        ("a.yaml", b"token: secret-1\xff"),
        ("a.toml", b'token = "secret-1\xff"'),
    ],
)
def test_a_wrong_line_is_not_shown(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^--config: .*{name}: .+") as caught:
        read_file(tmp_path / name)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", '{"a": {"b": 1}, "c": {"b": 1, "b": 2}}'), ("a.yaml", "b: 1\nb: 2\n"), ("a.toml", "b = 1\nb = 2\n")],
)
def test_a_name_stands_once(tmp_path: Path, name: str, text: str) -> None:
    """Of two keys of one name, no reader takes the last alone."""
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=f"^--config: .*{name}: "):
        read_file(tmp_path / name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (None, "alice: input should be a table of settings"),
        ({"slots": "many"}, "alice.slots: input should be a valid integer"),
        ({"sha256": 5}, "alice.sha256: input should be a list"),
        ({"limits": 7}, "alice.limits: input should be a table of settings"),
        ({"secrets": {"git": "x"}}, "alice.secrets.git: input should be a table of settings"),
        ({"secrets": {"git": {"hosts": "x", "file": "x"}}}, "alice.secrets.git.hosts: input should be a list"),
    ],
)
def test_a_wrong_key_is_named_with_the_cure(tmp_path: Path, settings: object, said: str) -> None:
    (tmp_path / "keys.json").write_text(json.dumps({"alice": settings}))
    with pytest.raises(ConfigError, match=rf"^keys_file: \S+keys.json: {said}"):
        read_keys(tmp_path / "keys.json")


def test_a_wrong_secret_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("b")
    secrets = {"git": SecretSettings(hosts=("x.example",), file=str(tmp_path / "short"), username="a")}
    with pytest.raises(ConfigError, match=r"^alice\.secrets\.git: value: at least 8 characters"):
        read_secrets(secrets, "alice")


@pytest.mark.parametrize("proxy", ["proxy.example.org", "10.0.0.5/8", "*"])
def test_proxies_are_networks(proxy: str) -> None:
    with pytest.raises(ConfigError, match=r"^executor server settings: trusted_proxies\.0: "):
        parse_settings(ExecutorServerSettings, {"token": "x", "trusted_proxies": [proxy]}, "executor server")
