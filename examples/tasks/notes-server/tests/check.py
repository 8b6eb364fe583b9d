import contextlib
import http.client
import json
import secrets
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from verify import PATIENCE_S, copy_of, main, same, started, wait_for


def ask(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S / 2)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.getheader("Content-Type") or ""
    finally:
        connection.close()


@contextlib.contextmanager
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with copy_of() as work, started([sys.executable, "server.py", port], cwd=work) as process:

        def up():
            if process.poll() is not None:
                raise AssertionError("the server ended")
            return ask(port, "GET", "/health")[:2] == (200, "ok")

        wait_for(up)
        yield port


def keeps_notes():
    texts = [secrets.token_hex(4), "gr\u00fc\u00dfe \u2603", "", '"quoted"\n']
    with server() as port:
        same(json.loads(ask(port, "GET", "/notes")[1]), [])
        for number, text in enumerate(texts, 1):
            status, body, kind = ask(port, "POST", "/notes", json.dumps({"text": text}))
            same((status, json.loads(body)), (201, {"id": number, "text": text}))
            same(kind.split(";")[0], "application/json")
        same(ask(port, "DELETE", "/notes/4")[0], 204)
        same(ask(port, "DELETE", "/notes/4")[0], 404)
        same(ask(port, "DELETE", "/notes/2")[0], 204)
        same(json.loads(ask(port, "POST", "/notes", '{"text": "x"}')[1])["id"], 5)
        same([n["id"] for n in json.loads(ask(port, "GET", "/notes")[1])], [1, 3, 5])
        same(json.loads(ask(port, "GET", "/notes/1")[1]), {"id": 1, "text": texts[0]})


def refuses_nonsense():
    with server() as port:
        for body in ("nonsense", "[1]", '{"text": 5}', "{}", '"text"'):
            same(ask(port, "POST", "/notes", body)[0], 400, body)
        for path in ("/", "/notes/7", "/notes/abc", "/other", "/notes/1/2"):
            same(ask(port, "GET", path)[0], 404, path)
        same(json.loads(ask(port, "GET", "/notes")[1]), [])


def an_idle_client_blocks_nobody():
    with server() as port, contextlib.ExitStack() as idle:
        for _ in range(3):
            idle.enter_context(socket.create_connection(("127.0.0.1", port)))
        same(ask(port, "GET", "/health")[:2], (200, "ok"))


main(keeps_notes, refuses_nonsense, an_idle_client_blocks_nobody)
