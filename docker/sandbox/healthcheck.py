"""The container's HEALTHCHECK: does the server answer, and does it call itself well?"""

from __future__ import annotations

import json
import os
import socket
import sys


def main() -> int:
    """0 when the server says `ok` or `draining`, else 1 with the reason."""
    port = int(os.environ.get("ATROPOS_PORT") or 8787)
    host = os.environ.get("ATROPOS_HOST") or "127.0.0.1"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    try:
        with socket.create_connection((host, port), timeout=4) as connection:
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


if __name__ == "__main__":
    sys.exit(main())
