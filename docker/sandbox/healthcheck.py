"""The container's HEALTHCHECK: does the server answer, and does it call itself well?"""

from __future__ import annotations

import json
import os
import socket
import ssl
import sys


def main() -> int:
    """0 when the server says `ok` or `draining`, else 1 with the reason."""
    port = int(os.environ.get("ATROPOS_PORT") or 8787)
    host = os.environ.get("ATROPOS_HOST") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with _connected(host, port) as connection:
            connection.sendall(b"GET /v1/health HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = b""
            while chunk := connection.recv(4096):
                answer += chunk
        status = json.loads(answer.partition(b"\r\n\r\n")[2])["status"]
    except (OSError, ValueError, KeyError) as error:
        print(f"no answer on {host}:{port}: {error}")
        return 1
    print(status)
    return 0 if status in {"ok", "draining"} else 1


def _connected(host: str, port: int) -> socket.socket:
    connection = socket.create_connection((host, port), timeout=4)
    path = os.environ.get("ATROPOS_TLS_FILE")
    if path is None or not os.path.exists(path) or os.path.getsize(path) < 2:  # an empty one has a line's end
        return connection
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # it is this container's own
    return context.wrap_socket(connection)


if __name__ == "__main__":
    sys.exit(main())
