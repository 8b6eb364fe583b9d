"""A sandbox server under requests that nobody would send: HTTP, WebSocket frames and raw bytes, by its own token.

It may refuse what it likes with a 4xx, and never answers 5xx (but 501 to a transfer coding that it doesn't know, as RFC
9112 says), logs a traceback, ends, or gives a slot that doesn't work. ATROPOS_FAULTS multiplies the examples (1 in CI),
each of some requests.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import itertools
import json
import socket
import struct
from collections import Counter
from typing import get_args
from urllib.parse import quote, urlencode

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from atropos import wire
from tests.repeats import TIMES
from tests.unit.server.fakes import TOKEN
from tests.unit.server.test_serve import Process, running

ANSWER_S = 1.0
"""A wait that a request asked for may be longer: then its connection is closed."""
READY_S = 60.0
"""What must be answered may take longer on a busy machine: a lease, its end, an open stream."""
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}
PATHS = {"write_file": "a/b", "search": ".", "untar": "t", "tar": "/tmp", "write_stream": "w"}
"""Of operations whose path is not /etc/passwd."""
FIELDS: dict[str, object] = {
    "command": "echo hi; cat", "stdin": "aGk=", "env": {"A": "b"}, "timeout_s": 1, "workdir": "/tmp",
    "data": "aGk=", "mode": 420, "append": False, "offset": 1, "max_bytes": 100_000, "stream": "stream-1",
    "pattern": "h.", "max_matches": 5, "hosts": ["localhost"],
    "id": "{call}", "pty": True, "rows": 9, "wait_s": 0.05, "until": "quiet", "eof": True, "signal": "KILL",
}  # fmt: skip
"""Values by the names of operations' fields."""


def example(operation: type[wire.SlotOperation]) -> dict[str, object]:
    """An operation as a client sends it; one with a new field that must be there fails here, until it has a value."""
    name = operation.model_fields["op"].default
    values = {"op": name, "path": PATHS.get(name, "/etc/passwd"), **FIELDS}
    chosen = [each for each, field in operation.model_fields.items() if each in values or field.is_required()]
    return {each: values[each] for each in chosen}


OPERATIONS = tuple(map(example, get_args(get_args(wire.Operation)[0])))
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 0, 2**31, 2**63, 2**64, 10**400])
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["/", "..", "/proc/self/mem", "/dev/zero", "\0", "\ud800", "a" * 5000, "🦊", "="])
)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3))  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn, examples: tuple[dict[str, object], ...]) -> dict[str, object]:
    """An example with up to two of its fields replaced, removed or added."""
    body = dict(draw(st.sampled_from(examples)))
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*body, "more"]))
        if draw(st.booleans()):
            body[name] = draw(JSON)
        else:
            body.pop(name, None)
    return body


IDS = st.sampled_from(["{lease}", "{lease}", "{lease}", "none", "x" * 300, "..", "%00", "é"])
NUMBERS = st.sampled_from(["0", "1", "-1", "x", "", "9" * 30, "1e3", "٣"])
EPOCH = st.just({}) | st.fixed_dictionaries({"epoch": NUMBERS})
BODIES = {
    "leases": ({"lease_id": "{lease}", "client_id": "fuzz", "ttl_s": 9, "limits": {"pids": 99}, "network": False},),
    "snapshot": ({"snapshot_id": "{lease}", "epoch": None},),
    "view": ({"folders": ["/workspace"], "epoch": None},),
    "image": ({"key": "0" * 64},),
}
RAW = st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode())


def body_of(name: str) -> st.SearchStrategy[bytes]:
    return mutated(BODIES[name]).map(lambda body: json.dumps(body).encode()) | RAW


CALLS = mutated(tuple({"call_id": "{call}", "epoch": None, "operation": each} for each in OPERATIONS)) | st.builds(
    lambda operation: {"operation": operation}, mutated(OPERATIONS)
)
ROUTES = st.one_of(
    st.tuples(st.just("POST"), st.just("leases"), EPOCH, body_of("leases")),
    st.tuples(
        st.just("POST"), IDS.map("leases/{}/calls".format), EPOCH, CALLS.map(lambda body: json.dumps(body).encode())
    ),
    st.tuples(st.just("POST"), IDS.map("leases/{}/snapshot".format), EPOCH, body_of("snapshot")),
    st.tuples(st.just("POST"), IDS.map("leases/{}/view".format), EPOCH, body_of("view")),
    st.tuples(st.just("POST"), IDS.map("leases/{}/renew".format), EPOCH, RAW),
    st.tuples(st.just("DELETE"), IDS.map("leases/{}".format), EPOCH, st.just(b"")),
    st.tuples(
        st.sampled_from(["PUT", "GET"]),
        IDS.map("leases/{}/streams/stream-1".format),
        st.fixed_dictionaries({"offset": NUMBERS, "last": NUMBERS}),
        RAW,
    ),
    st.tuples(st.sampled_from(["GET", "DELETE"]), IDS.map("snapshots/{}".format), EPOCH, st.just(b"")),
    st.tuples(
        st.sampled_from(["GET", "PUT"]),
        IDS.map("snapshots/{}/archive".format),
        st.fixed_dictionaries({"layers": NUMBERS, "zstd": NUMBERS, "base": st.text(max_size=5)}),
        RAW,
    ),
    st.tuples(st.just("POST"), IDS.map("snapshots/{}/image".format), EPOCH, body_of("image")),
    st.tuples(
        st.sampled_from(["GET", "PUT"]),
        IDS.map("images/{}/layer".format),
        st.fixed_dictionaries({"parent": NUMBERS, "bytes": NUMBERS}),
        RAW,
    ),
    st.tuples(
        st.just("PUT"), st.just("images/archive"), st.fixed_dictionaries({"source": st.just("oci-archive:x")}), RAW
    ),
    st.tuples(
        st.sampled_from(["GET", "PUT", "PATCH", "HEAD", "OPTIONS", "X"]),
        st.sampled_from(["status", "capabilities", "health", "images", "stream", "nothing", "leases"]),
        EPOCH,
        RAW,
    ),
)
HEADERS = st.dictionaries(
    st.sampled_from(["Content-Type", "Content-Encoding", "Expect", "Range", "Connection", "Upgrade", "Accept"]),
    st.sampled_from(["application/zstd", "gzip", "identity", "100-continue", "bytes=0-1", "close", "websocket", "*/*"]),
    max_size=2,
)
HELLO = {"kind": "hello", "client_id": "fuzz", "connection": 0}
MESSAGES = mutated(
    (
        HELLO,
        {"kind": "cancel", "call_id": "{call}"},
        {"kind": "ack", "call_ids": ["{call}"]},
        {"kind": "heartbeat", "seq": 1},
        *({"kind": "call", "call_id": "{call}", "lease_id": "{lease}", "epoch": 1, "operation": each} for each in OPERATIONS),
    )
)  # fmt: skip
FRAMES = st.tuples(
    st.sampled_from([0x81, 0x81, 0x81, 0x81, 0x82, 0x01, 0x80, 0x88, 0x89, 0x83, 0xC1, 0xFF]),
    st.lists(MESSAGES, max_size=3).map(lambda sent: json.dumps(sent).encode()) | RAW,
)
LINES = st.lists(
    st.sampled_from(
        [
            *("GET /v1/status HTTP/1.1", "POST /v1/leases HTTP/1.1", "POST /v1/leases HTTP/1.0", "GET http://a/b HTTP/1.1"),
            *("X", "GET /\xff HTTP/1.1", "GET / HTTP/9.9", "PRI * HTTP/2.0", f"GET /{'a' * 9000} HTTP/1.1", "CONNECT a:1 HTTP/1.1"),
            *("Host: a", f"Authorization: Bearer {TOKEN}", "Content-Length: 5", "Content-Length: -1", "Content-Length: 7"),
            *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", " folded", "NoColon", ": empty", "Expect: 100-continue"),
            *("", "", "0", "5", "{}", "ffffffffffffffffff", "\0", "Upgrade: websocket", "Connection: upgrade"),
        ]
    ),
    max_size=12,
)  # fmt: skip


class Fuzz:
    """Requests to one server; `statuses` counts what it answered."""

    def __init__(self, server: Process) -> None:
        self.port = server.port
        self.statuses: Counter[object] = Counter()
        self._numbers = itertools.count()
        self.names: dict[str, str] = {}

    def lease(self) -> None:
        """A fresh lease, whose name stands for `{lease}` from now on."""
        self.names = {"{lease}": f"fuzz-lease-{next(self._numbers)}", "{call}": f"call-{next(self._numbers)}"}
        body = json.dumps({"lease_id": "{lease}", "client_id": "fuzz"}).encode()
        assert self.request("POST", "leases", {}, body, answer_s=READY_S) == 200

    def release(self) -> None:
        self.request("DELETE", "leases/{lease}", {}, b"", answer_s=READY_S)

    def filled(self, data: bytes) -> bytes:
        for name, value in self.names.items():
            data = data.replace(name.encode(), value.encode())
        return data

    def request(
        self,
        method: str,
        path: str,
        query: dict[str, str],
        body: bytes,
        headers: dict[str, str] | None = None,
        *,
        answer_s: float = ANSWER_S,
    ):
        path = quote(self.filled(path.encode()), safe="/%")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=answer_s)
        try:
            connection.request(
                method, f"/v1/{path}?{urlencode(query)}", self.filled(body), {**AUTHORIZED, **(headers or {})}
            )
            answer = connection.getresponse()
            text = b"" if answer.status == 101 else answer.read(4096)
        except TimeoutError:  # it waits for what was asked for
            self.statuses["waits"] += 1
            return None
        except (ConnectionError, http.client.HTTPException):
            self.statuses["closed"] += 1
            return None
        finally:
            connection.close()
        self.statuses[answer.status] += 1
        assert answer.status < 500, (answer.status, text)
        return answer.status

    def frames(self, frames: list[tuple[int, bytes]]) -> None:
        with socket.create_connection(("127.0.0.1", self.port), timeout=READY_S) as connection:
            key = base64.b64encode(b"0123456789abcdef").decode()
            head = f"GET /v1/stream HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {TOKEN}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {key}\r\n\r\n"
            connection.sendall(head.encode())
            assert b" 101 " in connection.recv(4096)
            connection.settimeout(0.05)
            with contextlib.suppress(ConnectionError):
                for first, template in frames:
                    payload = self.filled(template)
                    size = bytes([0x80 | len(payload)]) if len(payload) < 126 else b"\xfe" + struct.pack(">H", len(payload) & 0xFFFF)  # fmt: skip
                    connection.sendall(bytes([first]) + size + b"\0\0\0\0" + payload)
                with contextlib.suppress(TimeoutError):
                    while connection.recv(65536):
                        pass
        self.statuses["streams"] += 1

    def raw(self, data: bytes) -> None:
        answer = b""
        with (
            contextlib.suppress(ConnectionError, TimeoutError),
            socket.create_connection(("127.0.0.1", self.port), timeout=0.05) as connection,
        ):
            connection.sendall(data)
            answer = connection.recv(4096)
        self.statuses["raw", answer[9:12]] += 1
        unknown_coding = b"Transfer-Encoding" in data and answer.startswith(b"HTTP/1.1 501 ")
        assert unknown_coding or not answer.startswith(b"HTTP/1.1 5"), answer


def fuzzed(fuzz: Fuzz, examples: int) -> None:
    """All kinds of requests, so many of each."""
    some = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=TIMES == 1,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.explicit, Phase.generate),
    )

    @some
    @given(st.lists(st.tuples(ROUTES, HEADERS), min_size=1, max_size=5))
    def requests(steps):
        fuzz.lease()
        for (method, path, query, body), headers in steps:
            fuzz.request(method, path, query, body, headers)
        fuzz.release()

    @some
    @given(st.booleans(), st.lists(FRAMES, min_size=1, max_size=5))
    def streams(greets, frames):
        fuzz.lease()
        hello = [(0x81, json.dumps([HELLO]).encode())] if greets else []
        fuzz.frames([*hello, *frames])
        fuzz.release()

    @some
    @given(LINES.map(lambda lines: "\r\n".join(lines).encode("latin-1")) | st.binary(max_size=300))
    def bytes_alone(data):
        fuzz.raw(data)

    for each in (requests, streams, bytes_alone):
        each()


@pytest.mark.timeout(240 * TIMES)
async def test_no_request_gets_a_5xx(tmp_path):
    images = {"image_store": {"folder": str(tmp_path)}}
    async with running(slots=8, **images) as server:
        fuzz = Fuzz(server)
        await asyncio.to_thread(fuzzed, fuzz, 50 * TIMES)
        print(sum(fuzz.statuses.values()), dict(fuzz.statuses))
        assert server.process.returncode is None
        await asyncio.to_thread(fuzz.lease)
        fuzz.names["{call}"] = "the-last"
        last = json.dumps({"operation": OPERATIONS[0]}).encode()
        answer = await asyncio.to_thread(fuzz.request, "POST", "leases/{lease}/calls", {}, last, answer_s=READY_S)
        assert answer == 200
        server.process.terminate()
        _, log = await server.ended()
    assert "Traceback" not in log, log[-4000:]
