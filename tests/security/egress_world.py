"""A pool of slots beside hosts that must never be reached and count who reaches them. Run as root, as a program.

unshare --net --mount python -m tests.security.egress_world
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import tempfile
import threading
import urllib.request
from collections import Counter
from pathlib import Path

from tests.egress.world import FAR, GET, HERE, METADATA, PRIVATE, internet, ip, is_our_proxy, slots
from tests.security.egress_programs import ATTACKS, DIRECT_ATTACKS, HOGS, PRELUDE, PRELUDE_DIRECT

HERE6, FAR6, UNIQUE6 = "2606:4700:10::1", "2606:4700:10::2", "fd00:ec2::254"
TRAPS = [("0.0.0.0", 80), ("::", 80), ("127.0.0.1", 4646), ("127.0.0.1", 443), ("127.0.0.1", 22)]
DENIED = "93.184.215.15"


class Traps:
    """Listens on this namespace's own addresses; whoever connects is counted."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()
        for address, port in TRAPS:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = socket.socket(family)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address, port))
            listener.listen(100)
            threading.Thread(target=self._serve, args=(listener,), daemon=True).start()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            host, port = connection.getsockname()[:2]
            self.reached[f"{host}:{port}"] += 1
            connection.close()


class Names(threading.Thread):
    """A name server: `rebindN` is another host each time, `tarpitN` never answers."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.sock.bind(("127.0.0.1", 53))
        self.asked: Counter[str] = Counter()

    def run(self) -> None:
        while True:
            data, sender = self.sock.recvfrom(4096)
            name, at = "", 12
            while data[at]:
                name += data[at + 1 : at + 1 + data[at]].decode("latin-1").lower() + "."
                at += 1 + data[at]
            question, kind = data[12 : at + 5], struct.unpack(">H", data[at + 1 : at + 3])[0]
            if name.startswith("tarpit"):
                continue
            answers = b""
            if kind == 1 and name.startswith("rebind"):
                self.asked[name] += 1
                address = (FAR, METADATA, PRIVATE, "127.0.0.1")[(self.asked[name] - 1) % (2 + int(name[6]) % 3)]
                answers = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton(address)
            flags = 0x8180 if answers or name.startswith("rebind") else 0x8183
            self.sock.sendto(
                data[:2] + struct.pack(">HHHHH", flags, 1, bool(answers), 0, 0) + question + answers, sender
            )


def seen() -> list[str]:
    """What the far host was asked since the last time, each with the address that it was reached at."""
    with urllib.request.urlopen(f"http://{FAR}:8080/seen", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return [line for line in lines if " /seen " not in line]


def forbidden(lines: list[str]) -> list[str]:
    allowed = {FAR, f"::ffff:{FAR}", FAR6}
    return [line for line in lines if line.rpartition(" at ")[2].removeprefix("::ffff:") not in allowed]


def proxy_size() -> dict[str, int]:
    (pid,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if is_our_proxy(pid)]
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "pid": pid,
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "mib": int(status.partition("VmRSS:")[2].split()[0]) // 1024,
        "threads": int(status.partition("Threads:")[2].split()[0]),
    }


async def attacks(traps: Traps) -> dict:
    found: dict = {"attacks": {}, "direct": {}, "hogs": {}}
    async with slots(egress_deny=["denied.example.org"], slots_per_container=3) as pool:
        fetch = GET + "http://files.example.org/"
        async with pool.lease("attacker") as slot:
            await slot.exec(fetch)
            seen()
            found["before"] = proxy_size()
            for way, prelude, bodies in (("attacks", PRELUDE, ATTACKS), ("direct", PRELUDE_DIRECT, DIRECT_ATTACKS)):
                for name, body in bodies.items():
                    traps.reached.clear()
                    result = await slot.exec("python3 -I -", stdin=prelude + body + "\nprint('HELD')\n", timeout_s=200)
                    lines = await asyncio.to_thread(seen)
                    reached = sorted(traps.reached) + forbidden(lines)
                    found[way][name] = {"output": result.output, "reached": reached, "asked": lines}
        for name, body in HOGS.items():
            async with pool.lease("hog") as hog, pool.lease("neighbour") as neighbour:
                await hog.exec(f"cat > hog.py <<'END'\n{PRELUDE}{body}\nEND\n(python3 -I hog.py > log 2>&1 &)")
                await hog.exec("for i in $(seq 500); do grep -q busy log && break; sleep 0.02; done")
                answers = [(await neighbour.exec(fetch + "neighbour")).output for _ in range(5)]
                await hog.quiesce()
                for _ in range(60):
                    afterwards = (await hog.exec(fetch + "afterwards")).output
                    if "egress" not in afterwards:
                        break
                    await asyncio.sleep(0.25)
            found["hogs"][name] = {"neighbour": answers, "afterwards": afterwards}
        for _ in range(40):
            found["after"] = proxy_size()
            if found["after"]["descriptors"] <= found["before"]["descriptors"]:
                break
            await asyncio.sleep(0.25)
    return found


@contextlib.contextmanager
def names_and_addresses(far: int):
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf, tempfile.NamedTemporaryFile("w") as switch:
        conf.write("nameserver 127.0.0.1\noptions timeout:3 attempts:2\n")
        switch.write("hosts: files dns\n")
        for file, target in ((conf, "/etc/resolv.conf"), (switch, "/etc/nsswitch.conf")):
            file.flush()
            os.chmod(file.name, 0o644)
            subprocess.run(["mount", "--bind", file.name, os.path.realpath(target)], check=True)
        with open("/etc/hosts", "a") as hosts:
            hosts.write(f"{HERE6} here.example.org\n{UNIQUE6} six.example.org\n::ffff:{METADATA} mapped.example.org\n")
            hosts.write(f"{DENIED} denied.example.org denied-under-another-name.example.org\n")
        ip("addr", "add", f"{HERE6}/64", "dev", "near", "nodad")
        ip("addr", "add", "fd00:ec2::1/64", "dev", "near", "nodad")
        for address in (f"{FAR6}/64", f"{UNIQUE6}/64", f"{DENIED}/24"):
            words = ["ip", "addr", "add", address, "dev", "far", *(["nodad"] if ":" in address else [])]
            subprocess.run(["nsenter", "--net", "--target", str(far), *words], check=True)
        yield


def control(traps: Traps) -> list[str]:
    """The same counters, tripped from here."""
    seen()
    traps.reached.clear()
    for address, port in ((PRIVATE, 80), (METADATA, 80), (HERE, 80), ("127.0.0.1", 80), ("127.0.0.1", 4646)):
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://{address}:{port}/control", timeout=5)
    return sorted(traps.reached) + [
        f"{line.rpartition(' at ')[2].removeprefix('::ffff:')}:80" for line in forbidden(seen())
    ]


if __name__ == "__main__":
    with internet() as host, names_and_addresses(host):
        Names().start()
        trapped = Traps()
        outcome = asyncio.run(attacks(trapped))
        outcome["control"] = control(trapped)
        print(json.dumps(outcome))
