"""`atropos tool-server` and `executor-server` with wrong settings: one clear line, exit code not 0, nothing left
running."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.unit.command import ended

OWN = ("--tool", "tests.e2e.own_tools:TOOLS")


def said_by(
    command: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    done = ended(monkeypatch, capfd, command, *arguments)
    assert done.code != 0
    return done.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tool", "no.such:thing"), "can't be imported"),
        (("--tool", "os:getcwd"), "expected a Tool"),
        (("--tool", "nonsense"), "module:attribute"),
        ((*OWN, "--only", "web_search"), "no search provider"),
        ((*OWN, "--only", "nothing"), "no external tool or toolset 'nothing'"),
        (("--config", "/no/such/file.toml"), "--config"),
        (("--allow-host", "http://x"), "allow_hosts"),
        (("--host", "192.0.2.1"), "can't listen on 192.0.2.1"),
        (("--port", "99999"), "--port"),
        (("--token-file", "/no/such/token"), "--token-file"),
    ],
)
def test_tool_server_errors_are_a_line(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ATROPOS_TOOL_SERVER_TOKEN", "x")
    for name in ("SEARXNG_URL", "BRAVE_API_KEY", "TAVILY_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    given = arguments if "--port" in arguments else ("--port", "0", *arguments)
    assert said in said_by("tool-server", given, monkeypatch, capfd)


@pytest.mark.parametrize("command", ["tool-server", "executor-server"])
def test_without_a_token_nothing_listens(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("ATROPOS_TOOL_SERVER_TOKEN", raising=False)
    monkeypatch.delenv("ATROPOS_EXECUTOR_TOKEN", raising=False)
    assert "token: missing" in said_by(command, ("--port", "0"), monkeypatch, capfd)


def test_a_binary_token_file_is_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    (tmp_path / "token").write_bytes(b"\xff\xfe")
    said = said_by("tool-server", ("--port", "0", "--token-file", str(tmp_path / "token")), monkeypatch, capfd)
    assert "not UTF-8" in said


def test_a_port_in_use_is_one_clear_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setenv("ATROPOS_TOOL_SERVER_TOKEN", "x")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"can't listen on 127.0.0.1:{port}" in said_by("tool-server", ("--port", str(port)), monkeypatch, capfd)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("surprise = 1", "surprise: no such setting"),
        ("port = 'x'", "port"),
        ("not toml", "--config"),
        ('[[mcp]]\nname = "a"', "command or url"),
        ('[search]\nprovider = "brave"', "brave needs a key"),
        ("[tool_bounds]\nconcurrency = 0", "concurrency"),
    ],
)
def test_a_bad_settings_file_names_the_field(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ATROPOS_TOOL_SERVER_TOKEN", "x")
    file = tmp_path / "settings.toml"
    file.write_text(text)
    assert said in said_by("tool-server", ("--config", str(file)), monkeypatch, capfd)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--toolset", "nonsense"), "unknown toolset 'nonsense'"),
        (("--slots-per-container", "0"), "slots_per_container"),
        (("--toolset", "web"), "tool_server_url"),
        (
            ("--backend", "nonsense"),
            "pool: backend: input should be 'local', 'docker', 'ssh', 'modal', 'singularity' or 'nomad'",
        ),
        (("--tool-server-url", "ftp://x"), "neither an http(s) URL nor 'inprocess'"),
    ],
)
def test_executor_server_errors_are_a_line(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ATROPOS_EXECUTOR_TOKEN", "x")
    assert said in said_by("executor-server", ("--port", "0", *arguments), monkeypatch, capfd)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--backend", "nonsense"),
            "backend: input should be 'local', 'docker', 'ssh', 'modal', 'singularity' or 'nomad'",
        ),
        (("--toolset", "nonsense"), "unknown toolset 'nonsense'"),
        (("--toolset", "web"), "runs on a ToolServer"),
        (("surplus",), "surplus"),
    ],
)
def test_mcp_server_errors_are_a_line(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    assert said in said_by("mcp", arguments, monkeypatch, capfd)


@pytest.mark.parametrize("command", ["tool-server", "executor-server", "mcp"])
def test_help_names_every_option(command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    done = ended(monkeypatch, capfd, command, "--help")
    assert done.code == 0
    assert ("--network" if command == "mcp" else "--token-file") in done.out
