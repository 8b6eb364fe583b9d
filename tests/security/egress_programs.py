"""Attacks through the egress proxy, each run in a slot. What they may not reach counts every connection that it gets.

Those of `ATTACKS` that ask for a host run once more without the proxy, by the names and addresses alone
(`PRELUDE_DIRECT`).
"""

PRELUDE = r'''
import os, socket, struct, sys, threading, time
patience = 3
def proxy():
    s = socket.socket()
    s.settimeout(patience)
    s.connect(("127.0.0.1", 3128))
    return s
def say(data, more=b"", head=False):
    """The whole answer to raw bytes, or its head; what came until then when it hangs up or hangs."""
    answer = b""
    with proxy() as s:
        try:
            s.sendall(data if isinstance(data, bytes) else data.encode("utf-8", "surrogateescape"))
            if more:
                s.sendall(more)
            while len(answer) < 65536 and not (head and b"\r\n\r\n" in answer):
                piece = s.recv(65536)
                if not piece:
                    break
                answer += piece
        except OSError:
            pass
    return answer.decode("latin-1")
def get(url, host="x", extra=""):
    return say(f"GET {url} HTTP/1.1\r\nHost: {host}\r\n{extra}\r\n")
def connect(target):
    return say(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n", head=True)
'''

PRELUDE_DIRECT = (
    PRELUDE
    + r"""
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
import random
def talk(host, port, data):
    answer = b""
    try:
        with socket.create_connection((host, port), timeout=patience) as s:
            s.sendall(data.encode("utf-8", "surrogateescape"))
            while len(answer) < 65536 and (piece := s.recv(65536)):
                answer += piece
    except (OSError, ValueError):
        pass
    return answer.decode("latin-1")
def get(url, host="x", extra=""):
    try:
        parts = urlsplit(url)
        name, port = parts.hostname or "", parts.port or 80
    except ValueError:
        return ""
    return talk(name, port, f"GET {parts.path or '/'} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{extra}\r\n")
def connect(target):
    host, _, port = target.rpartition(":")
    answer = talk(host.strip("[]"), port, "GET /direct HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    return answer.replace("200 ", "")  # an origin's, not the proxy's
def question(name, kind=1, ident=7, flags=0x100):
    labels = b"".join(bytes([len(each)]) + each for each in name.encode("latin-1").split(b".") if each)
    return struct.pack(">HHHHHH", ident, flags, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)
def resolve(name, kind=1, server="198.18.0.1"):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.settimeout(patience)
        s.sendto(question(name, kind), (server, 53))
        try:
            return s.recv(4096)
        except OSError:
            return b""
"""
)

SPELLINGS = r"""
def spellings(address):
    parts = [int(part) for part in address.split(".")]
    number = int.from_bytes(bytes(parts), "big")
    high, low = number >> 16, number & 0xFFFF
    two = f"{high:x}:{low:x}"
    yield from (address, f"{number}", f"{number:#x}", f"{number:#o}", f"0{number:o}", f"{parts[0]}.{number & 0xFFFFFF}",
                f"{parts[0]}.{parts[1]}.{low}", ".".join(f"{part:#x}" for part in parts), ".".join(f"0{part:o}" for part in parts),
                ".".join(f"{part:03d}" for part in parts), f"{address}.", f"{address}..", f" {address}", f"{address}%00.example.org",
                f"{address}%20", "".join(f"%{ord(c):02x}" for c in address), address.replace(".", "。"), address.replace("1", "１"),
                address.replace(".", "%2e"), f"{address}/", f"{address}\\@files.example.org", f"files.example.org@{address}",
                f"files.example.org:80@{address}", f"{address}#@files.example.org", f"{address}?@files.example.org",
                f"{address}#.example.org", f"files.example.org#@{address}", f"user:pass@{address}", f"{address}\t", f"{address};files.example.org")
    for six in (f"::ffff:{address}", f"::ffff:{two}", f"0:0:0:0:0:ffff:{two}", f"::{address}", f"::{two}", f"64:ff9b::{two}",
                f"64:ff9b:1::{two}", f"2002:{two}::", f"2002:{two}::1", f"::ffff:0:{two}", f"::ffff:{address}%1", f"::ffff:{two}%lo",
                f"2001:0:{two}::1", f"fe80::5efe:{two}", f"::ffff:{address}."):
        yield f"[{six}]"
        yield six
"""

ATTACKS = {
    "every_spelling_of_what_is_not_public": SPELLINGS
    + r"""
for address in ("169.254.169.254", "10.9.8.7", "127.0.0.1", "93.184.215.1", "0.0.0.0"):
    for spelling in spellings(address):
        get(f"http://{spelling}/")
for address in ("169.254.169.254", "93.184.215.1"):
    for spelling in spellings(address):
        connect(f"{spelling}:80")
for six in ("::1", "::", "fe80::1", "fd00:ec2::254", "2606:4700:10::1", "2606:4700:10::1%1", "2606:4700:10::1%lo", "2606:4700:10::1%25near",
            "fd00:ec2::254%1", "ff02::1", "0000:0000::0001", "::1%lo", "fec0::1"):
    get(f"http://[{six}]/")
    connect(f"[{six}]:80")
    connect(f"{six}:80")
""",
    "names_of_what_is_not_public": r"""
for name in ("localhost", "LOCALHOST", "localhost.", "loop.example.org", "LOOP.example.org.", "loop.example.org..", "here.example.org",
             "private.example.org", "metadata.example.org", "metadata.example.org.", "ip6-localhost", "localhost.localdomain",
             "*.example.org", "private.example.org\x00.files.example.org", "private.example.org%00", "six.example.org", "mapped.example.org",
             "denied-under-another-name.example.org"):
    get(f"http://{name}/", host="files.example.org")
    connect(f"{name}:80")
""",
    "tricks_with_ports": r"""
for port in ("22", "0", "65616", "+80", "-80", " 80", "80 ", "0x50", "080", "８０", "80:80", "", "1e2", "4646", "3128", "8787", "80#443", "80/443"):
    answer = connect(f"127.0.0.1:{port}") + connect(f"files.example.org:{port}")
    if port != "080" and "200 " in answer.split("\r\n", 1)[0]:
        print("BREACH: port", repr(port), answer[:80])
    get(f"http://127.0.0.1:{port}/")
    get(f"http://169.254.169.254:{port}/")
""",
    "a_host_header_that_says_something_else": r"""
patience = 60  # what the origin says is looked at
for host in ("private.example.org", "169.254.169.254", "files.example.org:81", "x\r\n y"):
    answer = get("http://files.example.org/host", host=host)
    if "hello from " in answer and "hello from files.example.org to" not in answer:
        print("BREACH: the origin was told", answer[-80:])
answer = get("http://files.example.org/host", extra="Connection: Host, Content-Length\r\nX-Forwarded-Host: private.example.org\r\n")
if "hello from files.example.org to" not in answer:
    print("BREACH: no host", answer[-120:])
for target in ("/", "*", "files.example.org", "//169.254.169.254/", "http:///", "http:/169.254.169.254/", "https://169.254.169.254/",
               "ftp://169.254.169.254/", "gopher://169.254.169.254/", "file:///etc/passwd", "ws://169.254.169.254/", "unix:/run/x"):
    get(target, host="169.254.169.254")
""",
    "smuggled_requests": r"""
inner = "GET http://10.9.8.7/smuggled HTTP/1.1\r\nHost: x\r\n\r\n"
chunk = f"{len(inner):x}\r\n{inner}\r\n0\r\n\r\n"
for head, body in (
    ("Content-Length: 6\r\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n" + inner),
    ("Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", chunk + inner),
    ("Transfer-Encoding: xchunked\r\n", "0\r\n\r\n" + inner), ("Transfer-Encoding : chunked\r\n", "0\r\n\r\n" + inner),
    ("Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n", "0\r\n\r\n" + inner),
    ("Transfer-Encoding:\x0bchunked\r\n", "0\r\n\r\n" + inner), ("Content-Length: 0\r\nContent-Length: 90\r\n", inner),
    ("Content-Length: +0\r\n", inner), ("Content-Length: 0\r\n", inner), ("Content-Length: 0x10\r\n", inner),
    ("Transfer-Encoding: chunked\r\n", "0;" + "x" * 200 + "\r\n\r\n" + inner), ("Transfer-Encoding: chunked\r\n", "0\r\nA: b\r\n\r\n" + inner),
    ("Transfer-Encoding: chunked\r\n", "0\n\n" + inner), ("X: y\r\n GET http://10.9.8.7/smuggled HTTP/1.1\r\n", inner),
    ("X: y\nTransfer-Encoding: chunked\r\n", "0\r\n\r\n" + inner), ("Expect: 100-continue\r\nContent-Length: 2\r\n", "ab" + inner),
    ("Upgrade: websocket\r\nConnection: Upgrade\r\n", inner), ("Connection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n", chunk + inner),
):
    say(f"POST http://files.example.org/outer HTTP/1.1\r\nHost: x\r\n{head}\r\n{body}")
say("GET http://files.example.org/a%0d%0aHost:%20evil HTTP/1.1\r\nHost: x\r\n\r\n")
say("GET http://files.example.org/a b HTTP/1.1\r\nHost: x\r\n\r\n")
say("GET http://files.example.org/\x01 HTTP/1.1\r\nHost: x\r\n\r\n")
say("GET http://files.example.org/a HTTP/1.1\r\nHost: x\r\n\r\n" + inner * 50)
say("CONNECT files.example.org:80 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nGET /tunnelled HTTP/1.1\r\nHost: files.example.org\r\nConnection: close\r\n\r\n")
""",
    "heads_without_end": r"""
say(b"GET http://files.example.org/ HTTP/1.1\r\n", b"A: b\r\n" * 400000)
say(b"GET http://files.example.org/" + b"a" * 3000000 + b" HTTP/1.1\r\n\r\n")
say(b"A" * 3000000)
say(b"\r\n" * 1000000)
say(bytes(range(256)) * 1000)
say(b"POST http://files.example.org/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"f" * 3000000)
say(b"POST http://files.example.org/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 3000000)
say(b"POST http://files.example.org/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n" * 400000)
get("http://files.example.org/endless-head")
get("http://files.example.org/endless-chunk-line")
""",
    "names_that_answer_differently_every_time": r"""
for number in range(24):
    get(f"http://rebind{number % 4}.example.org/rebound")
    connect(f"rebind{number % 4}.example.org:80")
""",
    "around_the_proxy": r"""
for family, address in ((socket.AF_INET, ("93.184.215.14", 80)), (socket.AF_INET, ("169.254.169.254", 80)), (socket.AF_INET6, ("2606:4700:10::2", 80)),
                        (socket.AF_INET, ("93.184.215.1", 80))):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        s = socket.socket(family, kind)
        s.settimeout(1)
        try:
            s.connect(address)
            s.send(b"GET /around HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            # what is public may be reached, by the rules; nothing else than TCP ever is
            if s.recv(100) and not (kind == socket.SOCK_STREAM and address[0] in ("93.184.215.14", "2606:4700:10::2")):
                print("BREACH:", kind, address)
        except OSError:
            pass
for kind in (socket.SOCK_RAW, socket.SOCK_PACKET if hasattr(socket, "SOCK_PACKET") else 10):
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET):
        try:
            socket.socket(family, kind, 1)
            print("BREACH: raw socket", family)
        except OSError:
            pass
for name, value in (("IP_TRANSPARENT", 19), ("IP_FREEBIND", 15)):
    s = socket.socket()
    try:
        s.setsockopt(socket.SOL_IP, value, 1)
        s.bind(("93.184.215.1", 999))
        s.settimeout(1)
        s.connect(("93.184.215.14", 80))
        s.send(b"GET /bound HTTP/1.1\r\nHost: x\r\n\r\n")
        if s.recv(100):
            print("BREACH:", name)
    except OSError:
        pass
import fcntl
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for request in (0x8916, 0x891C, 0x890B, 0x8914):
    try:
        fcntl.ioctl(s, request, struct.pack("16sH14s", b"lo", 2, b"\0\0\x01\x02\x03\x04"))
        print("BREACH: ioctl", hex(request))
    except OSError:
        pass
n = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
n.send(struct.pack("IHHII", 32, 16, 0x605, 1, 0) + struct.pack("BxHiII", 0, 0, 0, 0, 0))
answer = n.recv(4096)
if struct.unpack("i", answer[16:20])[0] == 0:
    print("BREACH: a network device was made")
""",
    "the_proxys_own_place": r"""
for address in ("127.0.0.1", "0.0.0.0"):
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        s.bind((address, 3128))
        s.listen()
        print("BREACH: bound", address)
    except OSError:
        pass
for target in ("127.0.0.1:3128", "localhost:3128", "[::1]:3128"):
    connect(target)
    get(f"http://{target}/")
""",
}

DIRECT = (
    "every_spelling_of_what_is_not_public",
    "names_of_what_is_not_public",
    "tricks_with_ports",
    "names_that_answer_differently_every_time",
    "around_the_proxy",
)
"""Those of `ATTACKS` that are tried without the proxy, too."""

DIRECT_ATTACKS = {
    **{name: ATTACKS[name] for name in DIRECT},
    "messages_that_are_no_questions": r"""
good = question("files.example.org")
odd = [b"", b"\0", good[:11], good[:-1], good[:20], good + b"x" * 3000, b"\xff" * 512, bytes(512), good[:12] + b"\xc0\x0c" + good[-4:],
       good[:12] + b"\x3f" * 400, good[:2] + b"\x81\x80" + good[4:], good[:4] + b"\xff\xff" + good[6:], good[:2] + b"\x28\0" + good[4:],
       question("." * 300), question("a" * 63 + "." + "b" * 63), question("a." * 120), question("\xff\0.example.org"),
       question("files.example.org", kind=255), question("files.example.org", kind=0), good[:-2] + b"\0\3"]
def by_tcp(data):
    with socket.create_connection(("198.18.0.1", 53), timeout=patience) as s:
        try:
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            while s.recv(4096):
                pass
        except OSError:
            pass
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for data in odd + [random.randbytes(size) for size in range(200)]:
    s.sendto(data, ("198.18.0.1", 53))
    by_tcp(len(data).to_bytes(2, "big") + data)
for data in (b"\xff\xff" + b"x" * 70000, b"\0", b"\0\0" * 1000, b"\0\x05abc"):
    by_tcp(data)
if len(resolve("files.example.org")) < 40:
    print("BREACH: the resolver answers no more")
""",
    "names_as_many_as_there_can_be": r"""
seen = set()
def ask(number):
    answer = resolve(f"files{number}.example.org")
    return answer[3:4]
with ThreadPoolExecutor(32) as some:
    codes = list(some.map(ask, range(2000)))
if len(resolve("files.example.org")) < 40:
    print("BREACH: the resolver answers no more", codes[:9])
""",
    "addresses_that_stand_for_nothing": r"""
for number in range(1, 300):
    get(f"http://198.18.{random.randrange(256)}.{random.randrange(256)}/")
    get(f"http://198.19.{random.randrange(256)}.{random.randrange(256)}/")
for address in ("198.18.0.0", "198.18.0.1", "198.18.0.2", "198.18.0.3", "[fd61:7472:6f70:6f73::c612:1]", "[fd61:7472:6f70:6f73::7f00:1]",
                "[fd61:7472:6f70:6f73::a9fe:a9fe]", "[::ffff:198.18.0.1]", "[64:ff9b::198.18.0.1]"):
    get(f"http://{address}/")
    connect(f"{address}:443")
""",
    "a_name_s_address_leads_to_its_name_alone": r"""
address = socket.gethostbyname("files.example.org")
for port in (22, 53, 81, 443, 3128, 4646, 8080, 8787):
    try:
        with socket.create_connection((address, port), timeout=patience) as s:
            if port not in (53, 443):
                print("BREACH: port", port)
    except OSError:
        pass
patience = 60
if "hello from private.example.org to /host" not in get(f"http://{address}/host", host="private.example.org"):
    print("BREACH: the origin of the name isn't reached")
""",
}

HOGS = {
    "heads_that_never_end": r"""
kept = []
for _ in range(400):
    try:
        s = proxy()
        s.send(b"GET http://files.example.org/ HTTP/1.1\r\nX: ")
        kept.append(s)
    except OSError:
        break
print("busy", flush=True)
while True:
    time.sleep(0.2)
    for s in kept:
        try:
            s.send(b"y")
        except OSError:
            pass
""",
    "names_that_no_server_answers": r"""
def ask(number):
    while True:
        get(f"http://tarpit{number}.example.org/")
for number in range(40):
    threading.Thread(target=ask, args=(number,), daemon=True).start()
time.sleep(1.5)
print("busy", flush=True)
time.sleep(1000)
""",
    "connections_without_end": r"""
def churn():
    while True:
        try:
            with proxy() as s:
                s.send(b"GET http://10.9.8.7/ HTTP/1.1\r\nHost: x\r\n\r\n")
        except OSError:
            time.sleep(0.01)
for _ in range(8):
    threading.Thread(target=churn, daemon=True).start()
time.sleep(0.5)
print("busy", flush=True)
time.sleep(1000)
""",
    "questions_without_end": r"""
asked = struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + b"\5files\7example\3org\0" + struct.pack(">HH", 1, 1)
def flood():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    while True:
        try:
            s.sendto(asked, ("198.18.0.1", 53))
        except OSError:
            time.sleep(0.01)
for _ in range(4):
    threading.Thread(target=flood, daemon=True).start()
print("busy", flush=True)
time.sleep(1000)
""",
    "connections_past_the_proxy_without_end": r"""
def churn():
    while True:
        try:
            socket.create_connection(("10.9.8.7", 80), timeout=5).close()
        except OSError:
            time.sleep(0.01)
for _ in range(8):
    threading.Thread(target=churn, daemon=True).start()
time.sleep(0.5)
print("busy", flush=True)
time.sleep(1000)
""",
    "answers_that_are_never_read": r"""
kept = []
for _ in range(60):
    s = proxy()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    s.send(b"GET http://files.example.org/big HTTP/1.1\r\nHost: x\r\n\r\n")
    kept.append(s)
print("busy", flush=True)
time.sleep(1000)
""",
}
