"""Templates of the `e2b` package: built, tagged and started by `atropos executor-server`."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import e2b
import httpx
import pytest
from e2b import AsyncTemplate, Sandbox, Template

from tests.adapters.peers import ROOT
from tests.adapters.test_e2b import TOKEN, Server, serving

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
OLDEST = ROOT / ".peers/e2b-2.7.0/bin/python"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("--slots-per-container", "4") as running:
        yield running


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("hello\n")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/run.sh").write_text("echo ran\n")
    (tmp_path / "d/python").symlink_to("/usr/bin/python3")
    return tmp_path


def api(server: Server) -> dict[str, str]:
    return {"api_url": f"{server.url}/e2b", "api_key": TOKEN}


def link_seen(server: Server, address: str | None = None, host: str = "127.0.0.1") -> str:
    """An upload link that a proxy with an address gets, which says that its client came by TLS."""
    headers = {"X-API-Key": TOKEN, "X-Forwarded-Proto": "https", "Host": "api.example.test"}
    port = server.url.rpartition(":")[2]
    transport = httpx.HTTPTransport(local_address=address)
    with httpx.Client(base_url=f"http://{host}:{port}/e2b", headers=headers, transport=transport) as client:
        made = client.post("/v3/templates", json={"name": uuid.uuid4().hex}).raise_for_status().json()
        return str(client.get(f"/templates/{made['templateID']}/files/{'0' * 16}").raise_for_status().json()["url"])


def printed(server: Server, template: str, command: str) -> str:
    with Sandbox.create(template, timeout=60, **server.options) as sandbox:
        return sandbox.commands.run(command).stdout


def test_a_templates_instructions_hold(server: Server, files: Path):
    fresh = uuid.uuid4().hex  # images of earlier runs are still there
    template = (
        Template(file_context_path=str(files))
        .from_template("base")
        .copy("a.txt", "/srv/")
        .copy("d", "data", mode=0o755)
        .set_envs({"WORD": "one", "MORE": "${WORD}-two", "FRESH": fresh})
        .run_cmd("echo $MORE > built; id -un >> built; pwd >> built")
        .set_workdir("/work")
        .run_cmd("touch here; chown nobody here")
        .run_cmd("echo own > here", user="nobody")
        .set_user("nobody")
    )
    logs: list[str] = []
    built = Template.build(
        template, "mine:v1", tags=["stable"], on_build_logs=lambda e: logs.append(e.message), **api(server)
    )
    assert (built.name, built.tags) == ("mine:v1", ["v1", "stable"])
    assert "[4/8] RUN echo $MORE > built; id -un >> built; pwd >> built" in logs
    told = printed(server, "mine:stable", "cat /home/user/built; id -un; pwd; cat here; echo $WORD")
    assert told.split() == ["one-two", "root", "/home/user", "nobody", "/work", "own"], told
    listed = printed(
        server, built.template_id + ":v1", "cat /srv/a.txt; sh /home/user/data/run.sh; readlink /home/user/data/python"
    )
    assert listed.split() == ["hello", "ran", "/usr/bin/python3"]
    assert {each.tag for each in Template.get_tags("mine", **api(server))} == {"v1", "stable"}


def test_upload_links_by_tls(server: Server, tmp_path: Path):
    assert link_seen(server).startswith("https://api.example.test/e2b/uploads/")
    settings = tmp_path / "settings.toml"
    settings.write_text('trusted_proxies = ["127.0.7.0/24", "::1"]')
    with serving("--host", "::", "--config", str(settings)) as other:
        assert link_seen(other, "127.0.7.3").startswith("https://")  # which is ::ffff:127.0.7.3 to the server
        assert link_seen(other, "::1", "[::1]").startswith("https://")
        assert link_seen(other, "127.0.8.3").startswith("http://api.example.test/")


def test_templates_build_on_others(server: Server):
    options = api(server)
    Template.build(Template().from_image("base").run_cmd("date +%N > /stamp").set_workdir("/opt"), "first", **options)
    stamp = printed(server, "first", "cat /stamp; pwd")
    Template.build(Template().from_template("first").run_cmd("cp /stamp copied"), "second", **options)
    assert printed(server, "second", "cat copied; pwd") == stamp
    Template.build(Template().from_image("base").run_cmd("date +%N > /stamp").set_workdir("/opt"), "third", **options)
    assert printed(server, "third", "cat /stamp; pwd") == stamp, "the same instructions are carried out once"
    again = Template().from_image("base").skip_cache().run_cmd("date +%N > /stamp").set_workdir("/opt")
    Template.build(again, "third", skip_cache=True, **options)
    assert printed(server, "third", "cat /stamp; pwd") != stamp


def test_tags_move_and_names_are_found(server: Server):
    options = api(server)
    assert not Template.exists("tagged", **options)
    with pytest.raises(e2b.TemplateException):
        Template.get_tags("tagged", **options)
    Template.build(Template().from_image("base").run_cmd("echo 1 > /n"), "tagged:one", **options)
    Template.build(Template().from_image("base").run_cmd("echo 2 > /n"), "tagged:two", **options)
    assert Template.exists("tagged", **options)
    Template.assign_tags("tagged:one", ["default", "three"], **options)
    assert [printed(server, name, "cat /n") for name in ("tagged", "tagged:two", "tagged:three")] == [
        "1\n",
        "2\n",
        "1\n",
    ]
    Template.remove_tags("tagged", "two", **options)
    with pytest.raises(e2b.SandboxException, match="404: tag 'two' does not exist for template 'tagged'"):
        Sandbox.create("tagged:two", **server.options)
    assert httpx.delete(f"{server.url}/e2b/templates/tagged", headers={"X-API-Key": TOKEN}).status_code == 204
    assert not Template.exists("tagged", **options)


def test_a_start_command_runs_when_ready(server: Server):
    serve = "cd /tmp && echo $WHO > who && sleep 1 && exec python3 -m http.server 8000 --bind 127.0.0.1"
    ready = "python3 -c \"import urllib.request as r; r.urlopen('http://127.0.0.1:8000/who')\""
    template = Template().from_image("base").set_envs({"WHO": "me"}).set_start_cmd(serve, ready)
    Template.build(template, "serving", **api(server))
    asked = "python3 -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/who').read())\""
    sandbox = Sandbox.create("serving", timeout=60, **server.options)
    assert sandbox.commands.run(asked).stdout == "b'me\\n'\n"
    sandbox.pause()
    resumed = Sandbox.connect(sandbox.sandbox_id, **server.options)
    assert resumed.commands.run(asked).stdout == "b'me\\n'\n", "and again after a pause, which ends programs"
    resumed.kill()
    Template.build(Template().from_image("base").set_start_cmd("sleep infinity", "sleep 20"), "waiting", **api(server))
    assert printed(server, "waiting", "pgrep sleep || echo none") == "none\n", "what only waits isn't started"


def test_a_failed_step_is_named(server: Server):
    template = Template().from_image("base").run_cmd("true").run_cmd("echo oops >&2; exit 3").run_cmd("true")
    with pytest.raises(e2b.BuildException, match=r"(?s)oops >&2; exit 3'` ended with 3: oops"):
        Template.build(template, "broken", **api(server))
    with pytest.raises(e2b.SandboxException, match=r"tag 'default' does not exist .*: its build is broken"):
        Sandbox.create("broken", **server.options)
    for wrong, said in (
        (Template().from_image("dir:/"), "an image of a registry"),
        (Template().from_template("nobody-s"), "neither a template of this key nor a base"),
        (Template().from_image("base").set_user("noone").run_cmd("true"), "noone"),
    ):
        with pytest.raises(e2b.BuildException, match=said):
            Template.build(wrong, "broken", **api(server))
    with pytest.raises(e2b.BuildException, match="no name of a template of one's own"):
        Template.build(Template().from_image("base"), "base", **api(server))
    with pytest.raises(e2b.BuildException, match=r"limits\.memory_mib"):
        Template.build(Template().from_image("base"), "broken", memory_mb=10_000_000, **api(server))


def test_a_templates_memory_holds(server: Server):
    Template.build(Template().from_image("base"), "larger", memory_mb=2048, cpu_count=1, **api(server))
    with Sandbox.create("larger", timeout=60, **server.options) as sandbox:
        assert sandbox.get_info().memory_mb == 2048


async def test_many_builds_at_once_share_a_name(server: Server, files: Path):
    def template(number: int):
        return (
            AsyncTemplate(file_context_path=str(files)).from_image("base").copy("a.txt", f"/{number}").run_cmd("true")
        )

    built = await asyncio.gather(
        *(AsyncTemplate.build(template(number), f"shared:n{number}", **api(server)) for number in range(4))
    )
    assert len({each.template_id for each in built}) == 1
    assert [printed(server, f"shared:n{number}", f"cat /{number}") for number in range(4)] == ["hello\n"] * 4


def test_the_oldest_sdk_builds_as_well(server: Server, files: Path):
    if not OLDEST.exists():
        pytest.skip("no e2b 2.7.0: scripts/peers.sh installs it")
    (files / "Dockerfile").write_text("FROM base\nWORKDIR /app\nENV WORD=two\nCOPY d /app/\nRUN sh run.sh > out\n")
    program = """
    from e2b import Sandbox, Template
    Template.build(Template(file_context_path=".").from_dockerfile("Dockerfile"), alias="old")
    with Sandbox.create("old", timeout=60) as sandbox:
        print(sandbox.commands.run("cat /app/out; pwd").stdout)
    """
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), f"{server.url}/e2b")
    for python in (OLDEST, sys.executable):
        done = subprocess.run(
            [python, "-W", "ignore", "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            check=False,
            cwd=files,
            env={**os.environ, **urls, "E2B_API_KEY": TOKEN},
        )
        assert done.stdout.split() == ["ran", "/home/user" if python == OLDEST else "/app"], done.stderr
