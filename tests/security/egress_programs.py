"""Attacks through the egress proxy, each run in a slot. What they may not reach counts every connection that it gets."""

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
            print("BREACH:", address)
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
