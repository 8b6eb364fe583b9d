#!/usr/bin/env bash
# podman-py 5.8.0: `exec_run()` leaves in a command's output the eight bytes that Podman puts in front of each piece to tell stdout from
# stderr, where docker-py, whose interface it is, takes them off. `demux=True` and `stream=True` do. A grader that compares what a
# command printed finds it wrong, with an exit code of 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q podman==5.8.0 requests==2.34.2
cat >ask.py <<'PYTHON'
import http.server
import threading
from podman import PodmanClient

ANSWERS = {  # as Podman 5.4.2 gives them
    "/containers/box/json": b'{"Id": "c", "Name": "box"}',
    "/containers/box/exec": b'{"Id": "e"}',
    "/exec/e/start": b"\x01\0\0\0\0\0\0\x05hello\x02\0\0\0\0\0\0\x05world",
    "/exec/e/json": b'{"ExitCode": 0}',
}

class Podman(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(ANSWERS[self.path.partition("?")[0].partition("/libpod")[2]])

    do_POST = do_GET

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Podman)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = PodmanClient(base_url=f"tcp://127.0.0.1:{server.server_port}")
box = client.containers.get("box")
print(box.exec_run(["greet"]))
print(box.exec_run(["greet"], demux=True))
print(list(box.exec_run(["greet"], stream=True)[1]))
PYTHON
found=$(venv/bin/python ask.py)
wanted="(0, b'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x05hello\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x05world')
(0, (b'hello', b'world'))
[b'hello', b'world']"
echo "podman-py 5.8.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
