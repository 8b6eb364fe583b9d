"""`E2B_DOMAIN`: hosts of the API and of sandboxes' servers, behind a TLS proxy with a wildcard certificate."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import aiohttp
import httpx
import pytest
from e2b import Sandbox

from atropos.api.e2b.ports import HostRoutes, SandboxHosts, SandboxServer, UpgradeRelay
from tests.adapters.peers import ROOT
from tests.adapters.test_e2b import TOKEN, Server, serving

DOMAIN = "sandboxes.test"


@contextlib.contextmanager
def serving_hosts(folder: Path) -> Iterator[Server]:
    """A server that gives sandboxes hosts below `DOMAIN`."""
    settings = folder / "settings.toml"
    settings.write_text(f'acquire_s = 60\ne2b_domain = "{DOMAIN}"')
    with serving("--slots-per-container", "4", "--config", str(settings)) as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving_hosts(tmp_path_factory.mktemp("server")) as running:
        yield running


HTTP_SERVER = """
import http.server, socketserver, hashlib, base64, struct
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.headers.get("Upgrade"):
            return self.websocket()
        size = int(self.headers.get("Content-Length") or 0)
        said = f"{self.command} {self.path} {self.headers['Host']} {self.headers.get('X-Own', '')} ".encode()
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline(), 16):
                said += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            said += self.rfile.read(size)
        self.send_response(302 if self.path == "/moved" else 200)
        self.send_header("X-Mine", "yes")
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)
    do_POST = do_PUT = do_DELETE = do_GET
    def websocket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key.encode()).digest()).decode())
        self.end_headers()
        while True:  # frames of up to 125 bytes come back
            head = self.rfile.read(2)
            if len(head) < 2 or head[0] & 15 == 8:
                break
            mask = self.rfile.read(4)
            data = bytes(each ^ mask[at % 4] for at, each in enumerate(self.rfile.read(head[1] & 127)))
            self.wfile.write(bytes([head[0], len(data)]) + data)
        self.close_connection = True
    def log_message(self, *_):
        pass
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""

SLOW_SERVER = """
import http.server, threading
go = threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        said = str(self.client_address).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.flush()
        if self.path == "/held":
            go.wait()
        elif self.path == "/go":
            go.set()
        self.wfile.write(said)
    def log_message(self, *_):
        pass
class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 200
Server(("127.0.0.1", 8001), Handler).serve_forever()
"""


@pytest.fixture
def sandbox(server: Server) -> Iterator[Sandbox]:
    made = Sandbox.create(timeout=120, **server.options)
    start_server(made)
    yield made
    made.kill()


def start_server(sandbox: Sandbox) -> None:
    sandbox.files.write("/tmp/server.py", HTTP_SERVER)
    sandbox.commands.run("python3 /tmp/server.py", background=True, timeout=0)
    listens = "import socket; socket.create_connection(('127.0.0.1', 8000))"
    sandbox.commands.run(f'until python3 -c "{listens}" 2>/dev/null; do sleep 0.1; done')


def asked(server: Server, host: str, path: str = "/", method: str = "GET", **options: object) -> httpx.Response:
    headers = {"Host": host, **options.pop("headers", {})}  # type: ignore[dict-item]
    return httpx.request(method, f"{server.url}{path}", headers=headers, timeout=30, **options)  # type: ignore[arg-type]


def test_each_port_has_a_host(server: Server, sandbox: Sandbox):
    host = sandbox.get_host(8000)
    assert host == f"8000-{sandbox.sandbox_id}.{DOMAIN}"
    answer = asked(server, host, "/a%20b?c=d%26", headers={"X-Own": "mine"})
    assert (answer.status_code, answer.headers["x-mine"]) == (200, "yes")
    assert answer.text == f"GET /a%20b?c=d%26 {host} mine "
    plain = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)  # httpx would resolve the path
    plain.request("GET", "/a/../%7e?c=..", headers={"Host": host})
    assert plain.getresponse().read().startswith(b"GET /a/../%7e?c=.. ")
    plain.close()
    big = os.urandom(3_000_000)
    assert asked(server, host, "/", "POST", content=big).content.endswith(big)
    assert asked(server, host, "/", "PUT", content=iter([b"one", b"two"])).text.endswith("onetwo")
    assert asked(server, host, "/moved").headers["location"] == "/elsewhere"
    missing = asked(server, f"9-{sandbox.sandbox_id}.{DOMAIN}")
    assert (missing.status_code, missing.json()["port"]) == (502, 9)
    assert asked(server, f"8000-nobody.{DOMAIN}").status_code == 401, "which is what all get who send no token"
    headers = {"X-API-Key": TOKEN}
    assert asked(server, f"8000-nobody.{DOMAIN}", headers=headers).json()["message"] == "The sandbox was not found"


async def test_many_answers_at_once(server: Server, sandbox: Sandbox):
    """More than an HTTP client has connections by itself; each has its own, which leads to this sandbox alone."""
    sandbox.files.write("/tmp/slow.py", SLOW_SERVER)
    sandbox.commands.run("python3 /tmp/slow.py", background=True, timeout=0)
    headers = {"Host": sandbox.get_host(8001)}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server.url, connector=connector, headers=headers) as session, asyncio.timeout(120):
        while (await session.get("/")).status == 502:  # noqa: ASYNC110 (it starts)
            await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(session.get("/held") for _ in range(110)))
        assert (await session.get("/go")).status == 200
        peers = await asyncio.gather(*(answer.text() for answer in answers))
    assert len(set(peers)) == 110


class Hosts(SandboxHosts):
    """Every request leads to one port."""

    def __init__(self, port: int) -> None:
        super().__init__(DOMAIN, lambda: ())
        self.port = port

    async def port_of(self, server: SandboxServer, given: bytes) -> int:
        return self.port


async def routed(hosts: SandboxHosts, target: bytes, headers: list[tuple[bytes, bytes]], messages: list[object]) -> int:
    """The status of a request's answer, or 0."""
    incoming, sent = asyncio.Queue[object](), list[dict[str, int]]()
    for each in messages:
        incoming.put_nowait(each)

    async def send(message: dict[str, int]) -> None:
        sent.append(message)

    path, _, query = target.partition(b"?")
    scope = {"type": "http", "method": "POST", "path": "/", "raw_path": path, "query_string": query}
    scope["headers"] = [(b"host", f"8000-i1.{DOMAIN}".encode()), *headers]
    await HostRoutes(mock.Mock(), hosts, "")(scope, incoming.get, send)  # type: ignore[arg-type]
    return sent[0]["status"] if sent else 0


@pytest.mark.parametrize("target", [b"@192.0.2.1/x", b"http://192.0.2.1/x", b".192.0.2.1/x", b"*", b""])
async def test_targets_without_path_lead_nowhere(target: bytes):
    """h11 lets it through; httptools doesn't."""
    with mock.patch.object(SandboxHosts, "http", None):  # not asked
        assert await routed(Hosts(9), target, [], []) == 400


@pytest.mark.parametrize(
    "target",
    [
        b"/a/../b",
        b"/../../etc",
        b"/./a/.",
        b"/%2e%2e/%2E%2e/%7euser/%41%2f",
        b"//192.0.2.1/a//b",
        b"/a@192.0.2.1:80/;b=c,d/",
        b'/\\192.0.2.1/|<>^`{}"',
        b"/%/%zz/%e9",
        b"/a?b=../c&d=%7e+%20&e=/?#",
    ],
)
async def test_paths_and_headers_arrive_as_sent(target: bytes):
    received = asyncio.get_running_loop().create_future()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.set_result(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        hosts = Hosts(listening.sockets[0].getsockname()[1])
        async with asyncio.timeout(30):
            assert await routed(hosts, target, [(b"x-own", "é ☃ a=b".encode())], []) == 204
            request, *headers = (await received).split(b"\r\n")
        assert request == b"POST %s HTTP/1.1" % target
        assert "x-own: é ☃ a=b".encode() in headers
        await hosts.aclose()


@pytest.mark.parametrize("body", [None, b"sent"])
async def test_gone_clients_are_not_waited_for(body: bytes | None):
    left = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()
        left.set()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as silence:
        hosts = Hosts(silence.sockets[0].getsockname()[1])
        headers = [] if body is None else [(b"content-length", b"4")]
        messages = [{"type": "http.request", "body": body or b""}, {"type": "http.disconnect"}]
        async with asyncio.timeout(30):
            await routed(hosts, b"/", headers, messages)
            await left.wait()
        await hosts.aclose()


async def test_a_websocket_goes_through(server: Server, sandbox: Sandbox):
    headers = {"Host": sandbox.get_host(8000)}
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(f"{server.url}/ws", headers=headers) as first:
            async with session.ws_connect(f"{server.url}/ws", headers=headers) as second:
                for number in range(20):
                    await first.send_str(f"a{number}")
                    await second.send_bytes(b"b%d" % number)
                    assert (await first.receive_str(), await second.receive_bytes()) == (f"a{number}", b"b%d" % number)
            sandbox.kill()
            async with asyncio.timeout(30):
                assert (await first.receive()).type in {aiohttp.WSMsgType.CLOSED, aiohttp.WSMsgType.CLOSE}
        for host in (f"8000-nobody.{DOMAIN}", f"49983-{sandbox.sandbox_id}.{DOMAIN}", f"api.{DOMAIN}", "127.0.0.1"):
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await session.ws_connect(f"{server.url}/ws", headers={"Host": host, "X-API-Key": TOKEN})


UPGRADE = f"GET / HTTP/1.1\r\nHost: 8000-i1.{DOMAIN}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n".encode()
OTHERS = f"GET / HTTP/1.1\r\nHost: api.{DOMAIN}\r\nX-API-Key: {TOKEN}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (b"HTTP/1.1 403 No\r\nContent-Length: 3\r\nConnection: keep-alive\r\n\r\nnot", 403),
        (b"HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nnot\r\n0\r\n\r\n", 200),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nnotHTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nmine", 200),
        (b"SSH-2.0\r\n\r\n", 502),
    ],
)
async def test_refused_upgrades_end_the_connection(answer: bytes, status: int):
    """A proxy in front may send another key's request on a connection that goes on."""
    read = asyncio.get_running_loop().create_future()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        read.set_result(await reader.read())
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as sandbox, asyncio.timeout(30):
        relay = partial(UpgradeRelay, Hosts(sandbox.sockets[0].getsockname()[1]))
        async with await asyncio.get_running_loop().create_server(relay, "127.0.0.1", 0) as listening:
            reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
            writer.write(UPGRADE + OTHERS)
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 %d " % status)
            assert b"connection: close" in head.lower()
            assert status == 502 or (b"not" in body, b"mine" in body) == (True, False)
            assert await read == b"", "what was for another"
            writer.close()


def test_private_traffic_needs_a_token(server: Server):
    sandbox = Sandbox.create(timeout=60, network={"allow_public_traffic": False}, **server.options)
    start_server(sandbox)
    assert sandbox.traffic_access_token
    host = sandbox.get_host(8000)
    assert asked(server, host).status_code == 403
    right = {"e2b-traffic-access-token": sandbox.traffic_access_token}
    assert asked(server, host, headers=right).status_code == 200
    assert asked(server, host, headers={"e2b-traffic-access-token": "x"}).status_code == 403
    sandbox.kill()


def test_daemon_and_api_need_the_key(server: Server, sandbox: Sandbox):
    for host in (f"49983-{sandbox.sandbox_id}.{DOMAIN}", f"api.{DOMAIN}", f"sandbox.{DOMAIN}"):
        assert asked(server, host, "/sandboxes").status_code == 401
    key = {"X-API-Key": TOKEN}
    assert asked(server, f"api.{DOMAIN}", "/v2/sandboxes", headers=key).json()[0]["sandboxID"] == sandbox.sandbox_id
    other = {"X-Access-Token": TOKEN, "E2b-Sandbox-Id": "another"}
    found = asked(
        server, f"49983-{sandbox.sandbox_id}.{DOMAIN}", "/files", headers=other, params={"path": "/tmp/server.py"}
    )
    assert found.text == HTTP_SERVER, "the host decides which sandbox it is"


@contextlib.contextmanager
def tls_in_front(server: Server, folder: Path) -> Iterator[tuple[str, Path]]:
    """A proxy that takes every name for the server, by TLS; its address, and the certificate that signs."""
    authority = folder / "ca.pem"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    signed = ["-CA", authority, "-CAkey", folder / "ca.key", "-subj", f"/CN={DOMAIN}"]
    leaf = ["-addext", f"subjectAltName=DNS:*.{DOMAIN}", "-addext", "basicConstraints=CA:FALSE"]
    signs = ["-subj", "/CN=Tests", "-addext", "keyUsage=critical,keyCertSign"]  # which Python 3.13 asks for
    for made, further in (("ca", signs), ("leaf", [*signed, *leaf])):
        files = ["-keyout", folder / f"{made}.key", "-out", folder / f"{made}.pem"]
        subprocess.run([*new, *further, *files], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "leaf.pem", folder / "leaf.key")
    listening = socket.create_server(("127.0.0.1", 0))
    port = int(server.url.rpartition(":")[2])

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65_536):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def serve(client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")  # CONNECT name:443
            secured = context.wrap_socket(client, server_side=True)
            behind = socket.create_connection(("127.0.0.1", port))
            threading.Thread(target=copy, args=(secured, behind), daemon=True).start()
            copy(behind, secured)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", authority
    finally:
        listening.close()


@pytest.mark.parametrize(
    "python", [ROOT / ".peers/e2b-2.7.0/bin/python", Path(sys.executable)], ids=["oldest", "newest"]
)
def test_the_sdk_needs_the_domain_alone(server: Server, tmp_path: Path, python: Path):
    if not python.exists():
        pytest.skip("no e2b 2.7.0: scripts/peers.sh installs it")
    program = """
    import sys
    from e2b import Sandbox
    with Sandbox.create(timeout=60, proxy=sys.argv[1]) as sandbox:
        sandbox.files.write("a", "written")
        print(sandbox.commands.run("cat a").stdout, sandbox.get_host(3000).replace(sandbox.sandbox_id, "ID"))
    """
    with tls_in_front(server, tmp_path) as (proxy, certificate):
        done = subprocess.run(
            [python, "-c", textwrap.dedent(program), proxy],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "E2B_DOMAIN": DOMAIN, "E2B_API_KEY": TOKEN, "SSL_CERT_FILE": str(certificate)},
        )
    assert done.stdout.split() == ["written", f"3000-ID.{DOMAIN}"], done.stderr[-2000:]
