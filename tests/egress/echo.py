"""Hosts that send back what they are asked, in many ways, on port 8081 and by TLS on port 8443. Run as a program.

    python -m tests.egress.echo AUTHORITY SEEN

Writes the authority that signed for them to a file, and a line for each request to another: the host that it was for, and what credentials it had.
"""

from __future__ import annotations

import base64
import gzip
import http.server
import json
import socket
import socketserver
import ssl
import sys
import threading
from pathlib import Path
from urllib.parse import quote

from atropos.net.authority import Authority
from atropos.net.secrets import host_rule

HOSTS = ("files.example.org", "other.example.net")
OTHER = "http://other.example.net:8081/redirected"


class Echo(http.server.BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def do_POST(self) -> None:
        self.do_GET()

    def do_TRACE(self) -> None:
        self.do_GET()

    def answer(self, body: bytes, *, status: int = 200, reason: str | None = None, **headers: str) -> None:
        self.send_response(status, reason)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        asked = self.requestline.encode() + b"\n" + bytes(self.headers) + self.rfile.read(length)
        given = [str(self.headers.get(name)) for name in ("Host", "Authorization", "X-Api-Key")]
        with self.server.seen.open("a") as seen:
            seen.write(" | ".join([self.path, *given]) + "\n")
        match self.path.split("?")[0].lstrip("/"):
            case "headers":
                self.answer(b"", Location=given[1], X_Back=given[1], **{f"X-{given[1].split()[-1].strip('=')}": "name"})
            case "status":
                self.answer(b"", status=418, reason=f"{given[1]} is a teapot")
            case "gzip":
                self.answer(gzip.compress(asked), Content_Encoding="gzip")
            case "base64":
                self.answer(
                    base64.b64encode(asked) + b" " + base64.b64encode(b"x" + asked) + base64.b64encode(b"xx" + asked)
                )
            case "escaped":
                self.answer(
                    f"{quote(given[1])} {json.dumps(given[1])} {given[1].encode().hex()} {given[1].upper()}".encode()
                )
            case "range":
                start, end = (self.headers.get("Range") or "bytes=0-9999").removeprefix("bytes=").split("-")
                self.answer(asked[int(start) : int(end) + 1])
            case "bytes":
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                for each in asked:
                    self.wfile.write(b"1;x=y\r\n%c\r\n" % each)
                self.wfile.write(b"0\r\nTrailer: " + given[1].encode() + b"\r\n\r\n")
            case "events":  # all of an event, and then nothing for long
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"7\r\nevent\n\n\r\n")
                self.connection.recv(1)
            case "no-http":
                self.wfile.write(asked)
                self.close_connection = True
            case "redirect":
                self.answer(b"", status=302, Location=OTHER)
            case _:
                self.answer(asked)


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads, address_family, request_queue_size = True, socket.AF_INET6, 200

    def __init__(self, port: int, seen: Path, authority: Authority | None) -> None:
        super().__init__(("", port), Echo)
        self.seen = seen
        if authority is not None:

            def chosen(connection: ssl.SSLSocket, name: str | None, _: object) -> None:
                connection.context = authority.context(name or HOSTS[0])

            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.sni_callback = chosen
            self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)


def serve(authority: Path, seen: Path, ports: tuple[int, int] = (8081, 8443)) -> list[Server]:
    """Start both; the port 0 is any."""
    signer = Authority.make([host_rule(host, tls=True) for host in HOSTS])
    authority.write_text(signer.certificate)
    servers = [Server(port, seen, each) for port, each in zip(ports, (None, signer), strict=True)]
    for server in servers:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return servers


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.read()
