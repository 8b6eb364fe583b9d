"""An OTLP/HTTP receiver as a process of its own: `otlp_receiver.py FILE` prints its port and writes each span as a JSON
line."""

from __future__ import annotations

import gzip
import http.server
import json
import sys

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        assert self.path == "/v1/traces", self.path
        request = ExportTraceServiceRequest.FromString(body)
        with open(sys.argv[1], "a") as file:
            for resource in request.resource_spans:
                service = {pair.key: pair.value.string_value for pair in resource.resource.attributes}["service.name"]
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        fields = {
                            pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes
                        }
                        line = {
                            "service": service,
                            "name": span.name,
                            "trace": span.trace_id.hex(),
                            "id": span.span_id.hex(),
                            "parent": span.parent_span_id.hex(),
                            "kind": span.kind,
                            "seconds": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                            "status": span.status.code,
                            "message": span.status.message,
                            "events": [event.name for event in span.events],
                            "attributes": fields,
                        }
                        file.write(json.dumps(line) + "\n")
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.end_headers()
        self.wfile.write(ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_: object) -> None:
        pass


server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
