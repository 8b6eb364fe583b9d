#!/usr/bin/env bash
# python-nomad 2.1.0 sends its client's namespace with jobs, allocations and deployments, and not with evaluations, searches, scaling
# policies and the stream of events, for which Nomad takes "default": of a job in that namespace Nomad 1.11.3 then lists no evaluation
# and streams no event, and says nothing. Who waits for the events of a sandbox waits for ever.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q python-nomad==2.1.0 requests==2.34.2
cat >ask.py <<'PYTHON'
import http.server
import threading
import nomad

class Asked(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        asked.append(self.path)
        if "event" in self.path:
            streamed.set()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"[]")

    do_POST = do_GET

    def log_message(self, *_):
        pass

asked, streamed = [], threading.Event()
server = http.server.HTTPServer(("127.0.0.1", 0), Asked)
threading.Thread(target=server.serve_forever, daemon=True).start()
cluster = nomad.Nomad(host="127.0.0.1", port=server.server_port, namespace="agents")
cluster.jobs.get_jobs()
cluster.allocations.get_allocations()
cluster.deployments.get_deployments()
cluster.evaluations.get_evaluations()
cluster.search.search("box", "jobs")
cluster.scaling.get_scaling_policies()
events, ended, _ = cluster.event.stream.get_stream()
events.start()
streamed.wait()
ended.set()
events.join()
print("\n".join(dict.fromkeys(asked)))
PYTHON
found=$(venv/bin/python ask.py)
wanted="/v1/jobs?namespace=agents
/v1/allocations?namespace=agents
/v1/deployments?prefix=&namespace=agents
/v1/evaluations
/v1/search
/v1/scaling/policies?job=&type=
/v1/event/stream?index=0"
echo "python-nomad 2.1.0, asked in the namespace \"agents\":"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
