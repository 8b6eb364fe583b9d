"""Packages that build on E2B's SDK, as their users have them, against `atropos executor-server`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from e2b import Template

from tests.adapters.peers import E2B_CLIENTS, HOSTS, needs, run
from tests.adapters.test_e2b import TOKEN, Server
from tests.adapters.test_e2b_hosts import DOMAIN, serving_hosts, tls_in_front

pytestmark = needs("pytest", E2B_CLIENTS)
INTERPRETER = """
import contextlib, http.server, io, json
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(204)
        self.end_headers()
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(asked["code"], {})
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"type": "stdout", "text": out.getvalue(), "timestamp": 0}).encode() + b"\\n")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("0.0.0.0", 49999), Handler).serve_forever()
"""
"""E2B's own has Jupyter's kernels behind the same requests."""
PROGRAM = """
import sys
from e2b_code_interpreter import Sandbox
with Sandbox.create(timeout=60, proxy=sys.argv[1]) as sandbox:
    print(sandbox.run_code("print(6 * 7)").logs.stdout)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_hosts(tmp_path_factory.mktemp("server")) as running:
        yield running


def test_they_reach_slots(server: Server, tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
    shutil.copy(HOSTS / "e2b_clients_contract.py", tmp_path / "test_contract.py")
    urls = dict.fromkeys(("E2B_API_URL", "E2B_SANDBOX_URL"), f"{server.url}/e2b")
    flags = ("-q", "-W", "ignore", "-p", "no:cacheprovider")
    output = run("python", "-m", "pytest", *flags, folder=tmp_path, where=E2B_CLIENTS, E2B_API_KEY=TOKEN, **urls)
    assert re.search(r"^6 passed in", output, re.MULTILINE), output


def test_a_template_brings_an_interpreter(server: Server, tmp_path: Path):
    (tmp_path / "interpreter.py").write_text(INTERPRETER)
    template = Template(file_context_path=str(tmp_path)).from_template("base").copy("interpreter.py", "/srv/")
    ready = "python3 -c \"import urllib.request as r; r.urlopen('http://127.0.0.1:49999/health')\""
    options = {"api_url": f"{server.url}/e2b", "api_key": TOKEN}
    started = template.set_start_cmd("python3 /srv/interpreter.py", ready)
    assert Template.build(started, "code-interpreter-v1", **options).name == "code-interpreter-v1"
    try:
        with tls_in_front(server, tmp_path) as (proxy, certificate):
            domain = {"E2B_DOMAIN": DOMAIN, "E2B_API_KEY": TOKEN, "SSL_CERT_FILE": str(certificate)}
            assert "42" in run("python", "-c", PROGRAM, proxy, folder=tmp_path, where=E2B_CLIENTS, **domain)
    finally:
        headers = {"X-API-Key": TOKEN}
        httpx.delete(f"{server.url}/e2b/templates/code-interpreter-v1", headers=headers).raise_for_status()
