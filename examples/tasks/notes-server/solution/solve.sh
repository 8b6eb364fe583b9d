#!/bin/bash
set -e
cd /workspace
cat > server.py <<'PY'
import itertools
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

notes, ids, lock = {}, itertools.count(1), threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self, status, body=b"", kind="application/json"):
        if not isinstance(body, bytes):
            body = json.dumps(body, ensure_ascii=False).encode()
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status != 204:
            self.wfile.write(body)

    def note_id(self):
        head, _, tail = self.path.rpartition("/")
        return int(tail) if head == "/notes" and tail.isascii() and tail.isdigit() else None

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, b"ok", "text/plain")
        with lock:
            if self.path == "/notes":
                return self.answer(200, list(notes.values()))
            note = notes.get(self.note_id())
        return self.answer(200, note) if note else self.answer(404, {"error": "not found"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/notes":
            return self.answer(404, {"error": "not found"})
        try:
            text = json.loads(body)["text"]
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            return self.answer(400, {"error": "a JSON object with a text is needed"})
        with lock:
            note = {"id": next(ids), "text": text}
            notes[note["id"]] = note
        return self.answer(201, note)

    def do_DELETE(self):
        with lock:
            gone = notes.pop(self.note_id(), None)
        return self.answer(204) if gone else self.answer(404, {"error": "not found"})

    def log_message(self, *arguments):
        pass


ThreadingHTTPServer.daemon_threads = True
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
PY
python3 -m py_compile server.py
