"""A small internet of two network namespaces, and a pool of slots in one of them. Run as root, as a program.

    unshare --net --mount python -m tests.egress.world SCENARIO

Here: 198.51.100.1 (documentation range) is turned public by nothing; so the far host bears addresses that *are* public
by their number, on a cable that leads nowhere else. Names come from a hosts file that only this namespace sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from atropos.errors import ConfigError, NotSupported
from atropos.slots import Slot, SlotPool, SlotPoolConfig
from atropos.slots.containers.share import BASE
from atropos.tasks import workspace
from atropos.tasks.folder import load_task
from tests.files import write_files

FAR = "93.184.215.14"
HERE = "93.184.215.1"
PRIVATE = "10.9.8.7"
METADATA = "169.254.169.254"
HOSTS = f"""127.0.0.1 localhost
{FAR} files.example.org other.example.net deep.sub.example.org
{PRIVATE} private.example.org
{METADATA} metadata.example.org
127.0.0.1 loop.example.org
{HERE} here.example.org
{PRIVATE} mixed.example.org
{FAR} mixed.example.org
"""

SERVER = r"""
import http.server, socket, socketserver, sys, threading
seen, go = [], threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def setup(self):
        seen.append("connection at " + self.request.getsockname()[0])
        super().setup()
    def log_message(self, *args):
        seen.append(repr(self.requestline) + " of " + str(self.headers.get("Host")) + " at " + self.request.getsockname()[0])
    def endless(self, head, piece):
        try:
            self.wfile.write(head)
            for _ in range(2000): self.wfile.write(piece)
        except OSError: pass
        self.close_connection = True
    def do_GET(self):
        if self.path == "/seen":
            body = "\n".join(seen).encode(); seen.clear()
            self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
            return
        if self.path == "/endless-head":
            self.endless(b"HTTP/1.1 200 OK\r\n", b"A: b\r\n" * 1000); return
        if self.path == "/endless-chunk-line":
            self.endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"f" * 4000); return
        if self.path == "/redirect":
            self.send_response(302); self.send_header("Location", "http://private.example.org/"); self.send_header("Content-Length", "0"); self.end_headers(); return
        if self.path.startswith("/big"):
            self.send_response(200); self.send_header("Content-Length", str(8 << 20)); self.end_headers()
            try:
                for _ in range(128): self.wfile.write(b"x" * (1 << 16))
            except OSError: pass
            return
        if self.path == "/hang":
            self.send_response(200); self.send_header("Content-Length", "10"); self.end_headers(); self.wfile.write(b"abc"); self.wfile.flush()
            if go.wait(60): self.wfile.write(b"defghij")
            return
        if self.path == "/go": go.set()
        body = ("hello from %s to %s%s" % (self.headers.get("Host"), self.path, self.headers.get("X-Secret", ""))).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def do_POST(self):
        length = self.headers.get("Content-Length")
        if length is not None:
            body = self.rfile.read(int(length))
        else:
            body = b""
            while True:
                size = int(self.rfile.readline(), 16)
                body += self.rfile.read(size); self.rfile.readline()
                if not size: break
        answer = b"got %d" % len(body)
        self.send_response(200); self.send_header("Content-Length", str(len(answer))); self.end_headers(); self.wfile.write(answer)
class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True; allow_reuse_address = True; address_family = socket.AF_INET6; request_queue_size = 200
class Greeter(socketserver.StreamRequestHandler):
    def handle(self):
        self.wfile.write(b"220 welcome\n")
        self.wfile.write(b"you said " + self.rfile.readline())
class Greeting(socketserver.ThreadingTCPServer):
    daemon_threads = True; allow_reuse_address = True
threading.Thread(target=Greeting(("", 2525), Greeter).serve_forever, daemon=True).start()
for port in (80, 443, 8080):
    threading.Thread(target=Server(("", port), Handler).serve_forever, daemon=True).start()
print("ready", flush=True)
sys.stdin.read()
"""


GET = "curl -sS -m 30 "
DIRECT = "unset HTTP_PROXY HTTPS_PROXY http_proxy https_proxy; "
"""Before a command that is to find hosts by their names and addresses alone."""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def internet():
    """The far host and its cable, gone with this process; yields that host's pid."""
    with tempfile.NamedTemporaryFile("w", suffix=".hosts") as hosts:
        hosts.write(HOSTS)
        hosts.flush()
        os.chmod(hosts.name, 0o644)
        subprocess.run(["mount", "--bind", hosts.name, "/etc/hosts"], check=True)
        far = subprocess.Popen(
            ["unshare", "--net", sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert far.stdout is not None
            assert far.stdout.readline() == b"ready\n"
            ip("link", "set", "lo", "up")
            ip("link", "add", "near", "type", "veth", "peer", "name", "far")
            ip("link", "set", "far", "netns", str(far.pid))
            ip("addr", "add", f"{HERE}/24", "dev", "near")
            ip("addr", "add", "10.9.8.1/24", "dev", "near")
            ip("addr", "add", "169.254.169.1/24", "dev", "near")
            ip("link", "set", "near", "up")
            for words in (
                ["link", "set", "lo", "up"],
                *(["addr", "add", f"{address}/24", "dev", "far"] for address in (FAR, PRIVATE, METADATA)),
                ["link", "set", "far", "up"],
            ):
                subprocess.run(["nsenter", "--net", "--target", str(far.pid), "ip", *words], check=True)
            yield far.pid
        finally:
            far.kill()
            far.wait()


@contextlib.asynccontextmanager
async def slots(**settings) -> AsyncIterator[SlotPool]:
    config = {"backend": "local", "slots_per_container": 3, "max_containers": 1, "allow_network": True, "warm": 1}
    async with SlotPool(SlotPoolConfig.model_validate({**config, **settings})) as pool:
        yield pool


async def run(pool: SlotPool, commands: dict[str, str], before: str = "") -> dict[str, list]:
    """Each command in one slot: exit code and output."""
    found = {}
    async with pool.lease("t") as slot:
        for name, command in commands.items():
            result = await slot.exec(before + command, timeout_s=60)
            found[name] = [result.exit_code, result.output]
    return found


async def both_ways(pool: SlotPool, commands: dict[str, str]) -> dict[str, list]:
    """Each by the proxy, and once more without, under its name and `_direct`."""
    direct = await run(pool, commands, DIRECT)
    return await run(pool, commands) | {f"{name}_direct": outcome for name, outcome in direct.items()}


async def direct() -> dict:
    return await public(DIRECT)


async def public(before: str = "") -> dict:
    async with slots() as pool:
        found = await run(
            pool,
            {
                "http": GET + "http://files.example.org/path?q=1",
                "literal": GET + f"http://{FAR}/x",
                "connect": GET + "-p http://files.example.org:443/tunnel",
                "post": "head -c 3000000 /dev/zero | " + GET + "--data-binary @- http://files.example.org/",
                "chunked": "head -c 300000 /dev/zero | "
                + GET
                + "-H 'Transfer-Encoding: chunked' --data-binary @- http://files.example.org/",
                "big": GET + "http://files.example.org/big | wc -c",
                "python": "python3 -c \"import urllib.request as r; print(r.urlopen('http://files.example.org/py').read().decode())\"",
                "git": "GIT_CURL_VERBOSE=1 git ls-remote http://files.example.org/repo 2>&1 | grep -c '200 OK'",
                "hop": GET + "-H 'Connection: X-Secret' -H 'X-Secret: yes' http://files.example.org/",
                "private": GET + "http://private.example.org/",
                "private_literal": GET + f"http://{PRIVATE}/",
                "private_connect": f"curl -sS -v -m 10 -p http://{PRIVATE}:443/ 2>&1 | grep -i refused",
                "metadata": GET + f"http://{METADATA}/latest/",
                "metadata_name": GET + "http://metadata.example.org/",
                "decimal": GET + "--proxy-header 'x: y' http://2852039166/",
                "octal": GET + "http://0251.0376.0251.0376/",
                "mapped": GET + f"-g 'http://[::ffff:{METADATA}]/'",
                "nat64": GET + "-g 'http://[64:ff9b::a9fe:a9fe]/'",
                "loopback": GET + "http://loop.example.org/",
                "zero": GET + "http://0.0.0.0/",
                "here": GET + "http://here.example.org/",
                "mixed": GET + "http://mixed.example.org/",
                "redirect": GET + "-L http://files.example.org/redirect",
                "port": GET + "http://files.example.org:8080/",
                "unknown": GET + "http://nowhere.example.org/",
                "around": f"curl -sS --noproxy '*' -m 3 http://{PRIVATE}/",
                "odd_scheme": "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'GET ftp://files.example.org/ HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3; head -1 <&3",
                # with one write, which bash's printf isn't: the proxy hangs up once it has answered the first
                "smuggle": "python3 -c \"import socket; s = socket.create_connection(('127.0.0.1', 3128)); "
                "s.sendall(b'GET http://files.example.org/one HTTP/1.1\\r\\nHost: private.example.org\\r\\n\\r\\n'"
                f"b'GET http://{PRIVATE}/two HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n'); print(s.makefile().read())\"",
                "long_head": "exec 3<>/dev/tcp/127.0.0.1/3128; (printf 'GET http://files.example.org/ HTTP/1.1\\r\\nA: '; "
                "head -c 200000 /dev/zero | tr '\\0' a) >&3 2>/dev/null; timeout 10 head -1 <&3",
                "still": GET + "http://files.example.org/still",
            },
            before,
        )
        return found | {"used": [pool.share.usage(0)[BASE].egress_bytes, ""]}


async def listed() -> dict:
    shut = {"metadata": GET + "http://metadata.example.org/", "loop": GET + "http://loop.example.org/"}
    names = ["files.example.org", "*.sub.example.org", "other.example.net:8080", "private.example.org"]
    async with slots(egress_allow=names) as pool:
        found = await both_ways(
            pool,
            {
                "allowed": GET + "http://files.example.org/a",
                "suffix": GET + "http://deep.sub.example.org/b",
                "port": GET + "http://other.example.net:8080/c",
                "other_port": GET + "http://other.example.net/c",
                "other": GET + f"http://{FAR}/",
                "host_header": GET + "-H 'Host: files.example.org' http://other.example.net/",
                "mirror": GET + "http://private.example.org/",
                **shut,
            },
        )
    async with slots(egress_allow=["10.9.8.0/24", METADATA]) as pool:
        found |= await both_ways(
            pool,
            {
                "mirror_net": GET + "http://private.example.org/",
                "metadata_literal_net": GET + f"http://{METADATA}/",
                **{f"{name}_net": command for name, command in shut.items()},
            },
        )
    async with slots(egress_deny=["files.example.org", "93.184.215.0/25"]) as pool:
        return found | await both_ways(
            pool,
            {"denied": GET + "http://files.example.org/", "denied_net": GET + "http://other.example.net/"},
        )


async def bounds_direct() -> dict:
    return await bounds(DIRECT)


async def bounds(before: str = "") -> dict:
    async with slots(egress_mib=20, egress_connections=4) as pool:
        async with pool.lease("greedy") as greedy, pool.lease("spender") as spender, pool.lease("other") as other:
            many = await greedy.exec(
                before + "for i in 1 2 3 4; do curl -sSN http://files.example.org/hang > $i & done; "
                "for i in 1 2 3 4; do until [ -s $i ]; do sleep 0.02; done; done; "
                f"{GET} http://files.example.org/fifth; kill $(jobs -p); wait",
                timeout_s=60,
            )
            spent = await spender.exec(
                f"{before}for i in 1 2 3 4; do {GET} http://files.example.org/big | wc -c; done; "
                f"{GET} http://files.example.org/after",
                timeout_s=60,
            )
            neighbour = await other.exec(GET + "http://files.example.org/neighbour")
        async with pool.lease("next") as fresh:
            again = await fresh.exec(GET + "http://files.example.org/again")
    return {
        name: [result.exit_code, result.output]
        for name, result in {"many": many, "spent": spent, "neighbour": neighbour, "again": again}.items()
    }


async def ends() -> dict:
    """The proxy dies and comes back; a fork has a network of its own; without one there is only loopback."""
    found: dict = {}
    async with slots() as pool, pool.lease("a") as slot:
        found["before"] = (await slot.exec(GET + "http://files.example.org/1")).output
        found["before_direct"] = (await slot.exec(DIRECT + GET + "http://files.example.org/1")).output
        mine = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_our_proxy(pid)]
        status = Path(f"/proc/{mine[0]}/status").read_text()
        found["capabilities"] = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff")]
        found["proxies"] = len(mine)
        os.kill(mine[0], 9)
        for _ in range(100):
            result = await slot.exec(GET + "http://files.example.org/2")
            if result.exit_code == 0:
                break
            await asyncio.sleep(0.1)
        found["after"] = result.output
        found["after_direct"] = (await slot.exec(DIRECT + GET + "http://files.example.org/2")).output
        snapshot = await slot.snapshot()
        async with pool.lease("fork", snapshot=snapshot) as fork:
            found["fork"] = (await fork.exec(GET + "http://files.example.org/fork")).output
        found["original"] = (await slot.exec(GET + "http://files.example.org/orig")).output
        async with pool.lease("off", network=False) as off:
            result = await off.exec(
                "env | grep -ic _proxy; curl -sS -m 3 http://127.0.0.1:3128; ls /sys/class/net; getent hosts files.example.org; "
                f"curl -m 3 -sS http://{FAR}"
            )
            found["off"] = [result.exit_code, result.output]
    return found


async def phases() -> dict:
    """What one lease reaches, changed again and again within what the pool allows."""
    found: dict = {}

    async def look(slot: Slot, name: str) -> None:
        hosts = {
            "files": "files.example.org",
            "other": "other.example.net",
            "deep": "deep.sub.example.org",
            "private": "private.example.org",
        }
        for key, host in hosts.items():
            found[f"{name}_{key}"] = (await slot.exec(GET + f"http://{host}/")).output
            found[f"{name}_{key}_direct"] = (await slot.exec(DIRECT + GET + f"http://{host}/")).output

    allow = ["files.example.org", "*.sub.example.org", "other.example.net", "private.example.org"]
    async with slots(egress_allow=allow, slots_per_container=2) as pool:
        async with pool.lease("a") as slot, pool.lease("neighbour") as neighbour:
            await look(slot, "all")
            await slot.set_network([])
            await look(slot, "none")
            found["none_neighbour"] = (await neighbour.exec(GET + "http://files.example.org/")).output
            await slot.set_network(["files.example.org", "*.sub.example.org", "elsewhere.example.net"])
            await look(slot, "some")
            await slot.set_network(["10.0.0.0/8", "93.184.0.0/16:8080"])
            await look(slot, "network")
            await slot.set_network(["public"])
            await look(slot, "public")
            found["public_elsewhere"] = (await slot.exec(GET + f"http://{FAR}/")).output
            await slot.set_network(None)
            await look(slot, "again")
            hang = await slot.start("curl -sSN -m 20 http://files.example.org/hang")
            beside = await neighbour.start("curl -sSN -m 50 http://files.example.org/hang")
            assert (await hang.read(wait_s=15), await beside.read(wait_s=15)) == (b"abc", b"abc")
            await slot.set_network([])
            found["cut"] = await hang.wait()
            await neighbour.exec(GET + "http://files.example.org/go")
            found["beside"] = await beside.wait()
            for pid in [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_our_proxy(pid)]:
                os.kill(pid, 9)
            await slot.set_network(["files.example.org"])  # while there is no proxy
            await look(slot, "restarted")
            snapshot = await slot.snapshot()
            await look(slot, "frozen")
            for bad in (["not a host"], [f"host{number}.example.org" for number in range(257)]):
                with contextlib.suppress(ConfigError):
                    await slot.set_network(bad)
                    found["bad"] = "was taken"
            await slot.set_network([])
        for number in range(3):
            async with pool.lease(f"next{number}") as slot:
                await look(slot, f"next{number}")
        async with pool.lease("fork", snapshot=snapshot) as fork:
            await look(fork, "fork")
        async with pool.lease("off", network=False) as off:
            await off.set_network([])
            await off.set_network(None)
            with contextlib.suppress(NotSupported):
                await off.set_network(["files.example.org"])
                found["off"] = "was taken"
    return found


async def task_phases() -> dict:
    """A task whose agent is offline and whose tests reach one host; the pool reaches more."""
    get = GET + "http://{}/"
    with tempfile.TemporaryDirectory() as folder:
        write_files(
            Path(folder, "task"),
            {
                "task.toml": "schema_version = '1.4'\n[agent]\nnetwork_mode = 'no-network'\n[verifier]\n"
                "network_mode = 'allowlist'\nallowed_hosts = ['files.example.org']\n",
                "instruction.md": "Do nothing.",
                "environment/notes": "x",
                "tests/test.sh": f"#!/bin/bash\n{get.format('files.example.org')} | grep -q hello && "
                f"! {get.format('other.example.net')} | grep -q hello && echo 1 > /logs/verifier/reward.txt\n",
            },
        )
        task = load_task(Path(folder, "task"))
        async with slots() as pool, pool.lease("a") as slot:
            await workspace.enter(slot, task)
            agent = (await slot.exec(get.format("files.example.org"))).output
            verdict = await workspace.verify(slot, task)
            await workspace.enter(slot, task)
            again = (await slot.exec(get.format("files.example.org"))).output
    return {"agent": agent, "reward": verdict.reward, "again": again}


ASK = r"""
import socket, struct, sys
def question(name, kind):
    labels = b"".join(bytes([len(each)]) + each.encode() for each in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)
def said(answer):
    code, count, size = answer[3] & 15, answer[7], len(answer)
    return [code, socket.inet_ntop(2 if size - answer.rindex(b"\xc0\x0c") == 16 else 10, answer[answer.rindex(b"\xc0\x0c") + 12:]) if count else ""]
def ask(name, kind=1, server="198.18.0.1", tcp=False):
    with socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM) as s:
        s.settimeout(20)
        s.connect((server, 53))
        data = question(name, kind)
        s.sendall(len(data).to_bytes(2, "big") + data if tcp else data)
        return said(s.recv(4096)[2 * tcp:])
"""
MANY = r"""
import asyncio
async def one(number):
    reader, writer = await asyncio.open_connection("files.example.org", 80)
    writer.write(b"GET /%d HTTP/1.1\r\nHost: many\r\nConnection: close\r\n\r\n" % number)
    answer = await reader.read()
    writer.close()
    return answer.endswith(b"hello from many to /%d" % number)
async def all_of_them():
    print(sum(await asyncio.gather(*map(one, range(200)))))
asyncio.run(all_of_them())
"""
PROGRAMS = {
    "urllib": """python3 -c "import urllib.request as r; print(r.urlopen('http://files.example.org/').read().decode())" """,
    "sockets": "exec 3<>/dev/tcp/files.example.org/80; printf 'GET / HTTP/1.1\\r\\nHost: files.example.org\\r\\nConnection: close\\r\\n\\r\\n' >&3; tail -1 <&3",
    "node": "node -e \"require('http').get('http://files.example.org/', r => r.pipe(process.stdout))\"",
    "node fetch": "node -e \"fetch('http://files.example.org/').then(r => r.text()).then(console.log)\"",
    "node resolver": "node -e \"require('dns').resolve4('files.example.org', (e, a) => console.log(e || 'hello from files.example.org to /'))\"",
    "java": """cat > Get.java <<'END'
import java.net.*; import java.net.http.*;
class Get { public static void main(String[] a) throws Exception {
  System.out.println(HttpClient.newHttpClient().send(HttpRequest.newBuilder(URI.create("http://files.example.org/")).build(), HttpResponse.BodyHandlers.ofString()).body()); } }
END
java Get.java""",
}
"""Programs without any variable; a value of its own for each that this machine has."""


async def names() -> dict:
    """Names and plain connections, without a proxy."""
    found: dict = {}
    allow = ["public", "files.example.org:2525"]
    async with slots(egress_allow=allow, egress_connections=256, slots_per_container=1) as pool:
        async with pool.lease("a") as slot:

            async def python(code: str) -> object:
                result = await slot.exec(
                    "python3 -I -", stdin=f"{ASK}\nimport json\nprint(json.dumps({code}))", timeout_s=120
                )
                return json.loads(result.output) if result.exit_code == 0 else result.output

            for key, code in {
                "both": "[ask('files.example.org'), ask('files.example.org', 28)]",
                "again": "ask('FILES.example.org')",
                "tcp": "ask('files.example.org', tcp=True)",
                "other_servers": "[ask('files.example.org', server=s) for s in ('8.8.8.8', '10.0.0.1', '2606:4700:10::1')]",
                "refused": "[ask(n)[0] for n in ('private.example.org', 'metadata.example.org', 'loop.example.org', 'here.example.org', 'nowhere.example.org')]",
                "other_kinds": "[ask('files.example.org', kind) for kind in (15, 16, 33, 65, 255)]",
            }.items():
                found[key] = await python(code)
            commands = {
                "search": "echo 'nameserver 8.8.8.8\nsearch example.com example.org' > /etc/resolv.conf; getent ahostsv4 files | head -1",
                "first": "exec 3<>/dev/tcp/files.example.org/2525; head -1 <&3; echo ho >&3; head -1 <&3",
                "six": GET + "-6 http://files.example.org/six",
                "own_port": "python3 -c \"import socket; [socket.create_server(('', port)) for port in (53, 80, 443)]; print('ok')\"",
                "udp": "exec 3<>/dev/udp/93.184.215.14/443; echo x >&3; read -t 20 <&3",
                "many": f"python3 - <<'END'\n{MANY}END",
                **{
                    name: command
                    for name, command in PROGRAMS.items()
                    if shutil.which(command.splitlines()[-1].split()[0]) or name == "sockets"
                },
            }
            for name, command in commands.items():
                result = await slot.exec(DIRECT + command, timeout_s=120)
                found[name] = [result.exit_code, result.output.strip()]
            connection = await slot.start(DIRECT + GET + "-N http://files.example.org/hang")
            assert await connection.read(wait_s=15) == b"abc"
            address = found["both"][0][1]
            result = await slot.exec(GET + f"http://{address}/x; " + GET + f"-p http://{address}:80/x")
            found["proxied"] = [result.exit_code, result.output]
        async with pool.lease("next") as slot:
            result = await slot.exec(DIRECT + GET + f"-H 'Host: files.example.org' http://{address}/")
            found["next"] = [result.exit_code, result.output]
            tcp = "grep -vc local_address /proc/net/tcp; grep -c . /proc/net/udp"
            found["next_sockets"] = (await slot.exec(tcp)).output
    return found


def is_our_proxy(pid: int) -> bool:
    with contextlib.suppress(OSError):
        ours = os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net")
        return ours and b"atropos.sandbox.programs.egress_proxy\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


if __name__ == "__main__":
    with internet():
        print(json.dumps(asyncio.run(globals()[sys.argv[1]]())))
