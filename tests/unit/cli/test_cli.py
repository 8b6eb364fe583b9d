"""The command line's words and exit codes, as a shell sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from atropos.cli import pool as pool_commands
from atropos.cli.app import command_line
from atropos.cli.doctor import engines
from atropos.errors import BackendUnavailable, ConfigError
from atropos.slots.backends.container import Container
from atropos.slots.backends.survey import Survey
from tests.privileges import without_gaps
from tests.processes import adopt_orphans, kept_port, running
from tests.unit.command import ended
from tests.unit.pool.fake_nomad import FakeNomad
from tests.waiting import until


def atropos(
    *arguments: str, env: dict[str, str] | None = None, stdin: bytes = b""
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "atropos.cli", *arguments],
        input=stdin,
        capture_output=True,
        timeout=120,
        env={**os.environ, **(env or {})},
        check=False,
    )


@pytest.mark.slow("starts Python anew")
def test_help_without_atroposlib(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    assert "doctor" in ended(monkeypatch, capfd, "--help").out
    assert ended(monkeypatch, capfd, "--version").out.startswith("atropos ")
    loaded = subprocess.run(
        [sys.executable, "-c", "import atropos.cli, sys; print('atroposlib' in sys.modules, 'torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert loaded.stdout.split() == ["False", "False"]


def test_every_command_has_help() -> None:
    app = command_line()
    words: list[list[str]] = [[]]
    for group in words:
        shown = CliRunner().invoke(app, [*group, "--help"])
        assert shown.exit_code == 0, (group, shown.exception)
        found = typer.main.get_command(app)
        for word in group:
            found = getattr(found, "commands", {})[word]
        words += [[*group, name] for name in getattr(found, "commands", {})]
    assert ["tasks", "check"] in words


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["exec"], "Missing argument"),
        (["nonsense"], "No such command"),
        (["exec", "true", "--timeout", "0"], "--timeout"),
        (["exec", "true", "--upload", "/no/such/file"], "/no/such/file"),
        (["exec", "true", "--backend", "cloud"], "backend"),
        (["exec", "true", "--memory-mib", "1"], "memory_mib"),
        (["tasks", "check", "examples/tasks/top-words", "--memory-mib", "0"], "--memory-mib"),
        (["tasks", "check", "examples/tasks/top-words", "--html", "/no/such/page.html"], "--html: /no/such"),
    ],
)
def test_wrong_usage_is_code_2(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    done = ended(monkeypatch, capfd, *arguments)
    assert done.code == 2
    assert said in done.err


def test_unencodable_characters_are_escaped(tmp_path: Path) -> None:
    lines = tmp_path / "out.jsonl"
    lines.write_text(
        json.dumps({"scores": [1], "messages": [[{"role": "user", "content": "café \x1b[2J 日本"}]]}) + "\n"
    )
    done = atropos("trajectories", "grep", str(lines), "caf", env={"PYTHONIOENCODING": "latin-1"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert "café \\u241b[2J \\u65e5\\u672c\n".encode("latin-1") in done.stdout


@pytest.mark.slow("starts servers")
@pytest.mark.parametrize("arguments", [["--help"], ["trajectories", "export", "--format", "sft"], ["doctor"]])
def test_a_full_disk_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    lines = tmp_path / "out.jsonl"
    lines.write_text(json.dumps({"scores": [1], "messages": [[{"role": "user", "content": "hi"}]]}) + "\n")
    given = [*arguments, *[str(lines)] * (arguments[0] == "trajectories")]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "atropos.cli", *given],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=120,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"atropos: No space left on device\n")


@pytest.mark.slow("starts servers")
def test_exec_passes_bytes_on() -> None:
    done = atropos("exec", r"cat; printf 'to-stderr\xfd' >&2; exit 7", stdin=b"from stdin\n\xff\x00\xfe")
    assert (done.returncode, done.stdout) == (7, b"from stdin\n\xff\x00\xfe")
    assert without_gaps(done.stderr.decode("latin-1")) == "to-stderr\xfd"


@pytest.mark.slow("starts servers")
def test_exec_names_what_it_can_not_upload(tmp_path: Path) -> None:
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 100 << 20)
    done = atropos("exec", "true", "--memory-mib", "64", "--upload", str(tmp_path))
    said = f"atropos: --upload {tmp_path}: No space left on device: /workspace\n"
    assert (done.returncode, without_gaps(done.stderr.decode())) == (2, said)


@pytest.mark.slow("starts servers")
@pytest.mark.skipif(os.geteuid() != 0, reason="root's slots lack nothing that an ordinary user's do")
def test_missing_limits_on_request() -> None:
    somebody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    said: list[str] = []
    for asked in ([], ["--memory-mib", "64"]):
        command = [*somebody, sys.executable, "-m", "atropos.cli", "exec", "true", *asked]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, cwd="/")
        said.append(done.stderr)
    assert said[0] == ""
    assert "memory_limit: " in said[1]


@pytest.mark.slow("starts servers")
def test_exec_without_stdout() -> None:
    command = 'exec "$0" -m atropos.cli exec "echo hi; exit 3" >&-'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, timeout=120, check=False)
    assert (done.returncode, without_gaps(done.stderr.decode())) == (3, "")


@pytest.mark.slow("starts servers")
def test_exec_runs_without_a_standard_input() -> None:
    command = 'exec "$0" -m atropos.cli exec "cat; echo hi" <&-'
    done = subprocess.run(["bash", "-c", command, sys.executable], capture_output=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, b"hi\n"), done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user's server keeps its user, who may enter it")
def test_a_closed_tmpdir_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    done = atropos("exec", "true", env={"TMPDIR": str(tmp_path)})
    assert done.returncode == 3
    assert b"set TMPDIR to a folder that every user may enter, as /tmp" in done.stderr


@pytest.mark.slow("starts servers")
def test_exec_refuses_too_large() -> None:
    done = atropos("exec", "true", "--memory-mib", "99999999")
    assert done.returncode == 2
    assert re.fullmatch(rb"atropos: limits.memory_mib: 99999999 is more than this machine has .*\n", done.stderr)


@pytest.mark.slow("starts servers")
def test_exec_says_it_timed_out() -> None:
    done = atropos("exec", "sleep 60", "--timeout", "0.3")
    assert done.returncode == 124
    assert without_gaps(done.stderr.decode()) == "atropos: timed out after 0.3 s\n"


@pytest.mark.slow("starts servers")
def test_exec_says_that_output_is_missing() -> None:
    done = atropos("exec", "head -c 2000000 /dev/zero; echo end")
    assert (done.returncode, done.stdout[-4:]) == (0, b"end\n")
    assert b"bytes are missing in the middle" in done.stderr
    assert b"stopped" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_gives_back_all(number: signal.Signals) -> None:
    """A CI job's end or `timeout` sends SIGTERM; with an engine, what is left then would be its containers."""
    adopt_orphans()
    mark = str(1_000_000 + secrets.randbelow(1_000_000))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "atropos.cli", "exec", f"sleep {mark}"),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        await until(lambda: running(f"sleep {mark}", process.pid), "the command at work in its slot")
        process.send_signal(number)
        while number is signal.SIGTERM and process.returncode is None:  # impatient ones break nothing off
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)  # `send_signal` may reap it, unknown to asyncio, which then says 255
            await asyncio.sleep(0.01)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        assert process.returncode in {128 + number, -number}  # the latter in Python's last moments
        assert b"Traceback" not in errors, errors.decode()
        assert not running(mark)
        assert not list(Path(tempfile.gettempdir()).glob(f"atropos-{process.pid}-*"))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


INTERRUPTED = """
import signal, sys, weakref

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "pydantic":
            sys.meta_path.remove(self)
            gone = set()
            _ = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))
            del gone

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.slow("starts Python anew")
@pytest.mark.parametrize(("line", "word"), [("atropos do", b"doctor"), ("atropos exec --mem", b"--memory-mib")])
def test_shell_completion(line: str, word: bytes) -> None:
    number = str(len(line.split()) - 1)
    program = [str(Path(sys.executable).with_name("atropos"))]
    env = {**os.environ, "_ATROPOS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": number}
    assert subprocess.run(program, env=env, capture_output=True, timeout=120, check=False).stdout.split() == [word]


@pytest.mark.slow("starts Python anew")
def test_ctrl_c_while_it_loads_is_not_lost(tmp_path: Path) -> None:
    """As in a callback of the import system's, whose exceptions Python only prints."""
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    done = atropos("doctor", env={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"})
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.slow("starts Python anew")
async def test_early_ctrl_c_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "g.jsonl").write_text(json.dumps({"scores": [1], "messages": [[]]}) + "\n")
    process = await asyncio.create_subprocess_exec(  # one that does not end by itself if this process is late
        *(sys.executable, "-m", "atropos.cli", "dashboard", str(tmp_path / "g.jsonl"), "--port", "0"),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    maps = Path(f"/proc/{process.pid}/maps")
    await until(lambda: "pydantic_core" in maps.read_text(), "pydantic, in the middle of what it loads")
    process.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(process.communicate(), 30)
    # of an interrupt within `exec`, as dataclasses use it, `python -m` dies by the signal itself: to a shell that is
    # 130
    assert process.returncode in {130, -signal.SIGINT}
    assert errors == b""


@pytest.mark.slow("starts servers")
@pytest.mark.parametrize("command", [["exec", "true"], ["mcp"]])
async def test_slot_is_a_job_of_its_own(command: list[str]) -> None:
    """A job that envs share, or that was run by hand, is not taken away at the command's end."""
    async with FakeNomad() as nomad:
        await nomad.register(1)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atropos.cli", *command, "--backend", "nomad"),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, "NOMAD_ADDR": nomad.url},
        )
        await asyncio.wait_for(process.communicate(), 60)
        asked = {name for name in nomad.asked if name.startswith("atropos-")}
        assert len(asked) == 1
        assert min(asked).startswith(f"atropos-{command[0]}-")


@pytest.mark.slow("starts servers")
async def test_images_are_prepared_in_nomad_s_job() -> None:
    async def prepare(nomad: FakeNomad) -> tuple[int | None, str]:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "atropos.cli", "image", "prepare", "x:1", "--backend", "nomad"),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "NOMAD_ADDR": nomad.url},
        )
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, errors.decode()

    async with FakeNomad() as nomad:
        code, said = await prepare(nomad)
        assert (code, "no container of atropos-sandbox-agent-env answers" in said) == (2, True), said
        assert nomad.job is None
        await nomad.register(2)
        code, said = await prepare(nomad)
        assert (code, "no attribute 'store'" in said) == (70, True), "the job's servers were asked, which keep none"
        assert nomad.count == 2


@pytest.mark.slow("starts servers")
def test_doctor_names_every_fix() -> None:
    done = atropos("doctor", "--json")
    report = json.loads(done.stdout)
    assert done.returncode in {0, 1}, done
    assert report["ok"] is True
    names = {item["name"] for item in report["findings"]}
    assert {"python", "bwrap", "docker", "nomad", "egress"} <= names
    assert len(names) >= 12
    assert all(item["ok"] != bool(item["fix"]) for item in report["findings"])


@pytest.mark.slow("starts servers")
def test_doctor_misses_bwrap(tmp_path: object) -> None:
    done = atropos("doctor", "--json", env={"PATH": str(tmp_path)})
    assert done.returncode == 3
    bwrap = next(item for item in json.loads(done.stdout)["findings"] if item["name"] == "bwrap")
    assert not bwrap["ok"]
    assert "bubblewrap" in bwrap["fix"]


class AnEngine(BaseHTTPRequestHandler):
    """A rootless Podman without limits."""

    def do_GET(self) -> None:
        about = {"Version": "5.8.6", "ApiVersion": "1.41", "Components": [{"Name": "Podman Engine"}]}
        info = {"SecurityOptions": ["name=rootless"], "MemoryLimit": False, "PidsLimit": True}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(info if self.path.endswith("/info") else about).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.slow("starts servers")
def test_doctor_names_engine_gaps(monkeypatch) -> None:
    monkeypatch.setattr("atropos.cli.doctor.ANSWER_S", 60)
    with ThreadingHTTPServer(("127.0.0.1", 0), AnEngine) as server, kept_port() as other:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        found = engines()[0]
        server.shutdown()
        assert found.ok
        assert found.detail.startswith(
            f"Podman 5.8.6, rootless at tcp://127.0.0.1:{server.server_port}; no limit of a "
        )
        assert "memory" in found.detail
        assert "processes" not in found.detail
        monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{other}")
        assert not engines()[0].ok


@pytest.mark.slow("starts servers")
def test_doctor_finds_tls_nomad(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("atropos.cli.doctor.ANSWER_S", 60)
    certificate, key = tmp_path / "c.pem", tmp_path / "k.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=nomad -addext"
    made = [*command.split(), "subjectAltName=DNS:server.global.nomad", "-out", certificate, "-keyout", key]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(certificate)
    context.verify_mode = ssl.CERT_REQUIRED

    class Agent(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/status/leader" else 404)
            self.end_headers()

    with HTTPServer(("127.0.0.1", 0), Agent) as agent:
        agent.socket = context.wrap_socket(agent.socket, server_side=True)
        threading.Thread(target=agent.serve_forever, daemon=True).start()
        for name, value in (("CACERT", certificate), ("CLIENT_CERT", certificate), ("CLIENT_KEY", key)):
            monkeypatch.setenv(f"NOMAD_{name}", str(value))
        monkeypatch.setenv("NOMAD_TLS_SERVER_NAME", "server.global.nomad")
        monkeypatch.setenv("NOMAD_ADDR", f"https://127.0.0.1:{agent.server_port}/")
        assert engines()[1].ok, engines()[1]
        agent.shutdown()
    monkeypatch.setenv("NOMAD_ADDR", "127.0.0.1:4646")
    assert "must look like http://host:4646" in engines()[1].detail


def test_no_proxy_password_is_shown(monkeypatch, capfd) -> None:
    monkeypatch.setenv("NOMAD_ADDR", "http://someone:s3cret@127.0.0.1:9")
    said = [ended(monkeypatch, capfd, "pool", "status").err, str(engines())]
    assert all("http://127.0.0.1:9" in text for text in said)
    assert not [text for text in said if "s3cret" in text]


@pytest.mark.parametrize(
    ("containers", "said"),
    [
        ([Container(id="c", index=0, url=None, token="", state="starting")], "mine is purged\n"),
        ([], "mine had no container; what else there was of it is purged\n"),
    ],
)
def test_purge_says_what_there_was(monkeypatch, containers: list[Container], said: str) -> None:
    done: list[str] = []

    async def listed() -> tuple[list[Container], str]:
        done.append("looked")
        return containers, ""

    async def end(container: Container) -> None:
        done.append(f"ended {container.id}")

    async def purge() -> None:
        done.append("purged")

    async def close() -> None:
        done.append("closed")

    async def survey(backend: str, job_id: str, *, address: str | None) -> Survey:
        assert (backend, job_id, address) == ("docker", "mine", None)
        return Survey(listed, end, purge, close)

    monkeypatch.setattr(pool_commands, "open_survey", survey)
    command = ["purge", "--backend", "docker", "--job-id", "mine"]
    result = CliRunner().invoke(pool_commands.pool_app, command)
    assert (result.exit_code, result.output) == (0, said)
    assert done == ["looked", "purged", "closed"]
    told = json.loads(CliRunner().invoke(pool_commands.pool_app, [*command, "--json"]).stdout)
    assert told == {"job_id": "mine", "purged": True, "containers": len(containers), "in_use": []}


def test_engines_words_are_shown(monkeypatch) -> None:
    async def listed() -> tuple[list[Container], str]:
        return [], "Nomad places no more containers: volume [/data] [b]is missing"

    async def nothing(*_: object) -> None: ...

    async def survey(backend: str, job_id: str, *, address: str | None) -> Survey:
        return Survey(listed, nothing, nothing, nothing)

    monkeypatch.setattr(pool_commands, "open_survey", survey)
    result = CliRunner().invoke(pool_commands.pool_app, ["status", "--job-id", "mine[/x]"])
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "mine[/x]: 0 containers" in said
    assert "volume [/data] [b]is missing" in said


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_watch_outlasts_an_outage(monkeypatch, arguments: list[str]) -> None:
    looks = iter(["", "away", "", "end"])

    async def listed() -> tuple[list[Container], str]:
        match next(looks):
            case "away":
                raise BackendUnavailable("Nomad does not answer")
            case "end":
                raise KeyboardInterrupt
            case trouble:
                return [Container(id="c4", index=4, url=None, token="", state="starting")], trouble

    async def nothing(*_: object) -> None: ...

    async def survey(backend: str, job_id: str, *, address: str | None) -> Survey:
        return Survey(listed, nothing, nothing, nothing)

    monkeypatch.setattr(pool_commands, "open_survey", survey)
    result = CliRunner().invoke(pool_commands.pool_app, ["watch", "--interval", "0.1", *arguments])
    assert result.output.count("c4") == 3, "without a terminal each look is printed"
    assert result.output.count("starting") == 3
    assert "no answer" not in result.output
    assert "Nomad does not answer" in result.output


def test_unknown_drains_none(monkeypatch) -> None:
    ended: list[int] = []

    async def listed() -> tuple[list[Container], str]:
        return [Container(id=f"c{n}", index=n, url=None, token="", state="starting") for n in (0, 2)], ""

    async def end(container: Container) -> None:
        ended.append(container.index)

    async def nothing() -> None: ...

    async def survey(backend: str, job_id: str, *, address: str | None) -> Survey:
        return Survey(listed, end, nothing, nothing)

    monkeypatch.setattr(pool_commands, "open_survey", survey)
    result = CliRunner().invoke(pool_commands.pool_app, ["drain", "0", "7", "--job-id", "mine"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "mine has no container 7; it has: 0, 2"
    assert not ended
    result = CliRunner().invoke(pool_commands.pool_app, ["drain", "0", "--job-id", "mine", "--json"])
    assert (json.loads(result.stdout), ended) == ({"job_id": "mine", "drained": [0]}, [0])
