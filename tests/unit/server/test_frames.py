"""What comes over a wire is read or refused, whatever it is: both ends of the stream, and a runner's end of its socket.

ATROPOS_EXAMPLES says how many drawn frames each (100 in CI; thousands by hand).
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import socket
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos import wire
from atropos.resources import Resources
from atropos.sandbox.host.runner_link import RunnerLink
from atropos.sandbox.server.calls.lanes import MAX_CONCURRENT
from atropos.slots.slot.uploads import PIECE_BYTES
from tests.waiting import until

EXAMPLES = settings(
    max_examples=int(os.environ.get("ATROPOS_EXAMPLES", "100")),
)
CALL = wire.Call(call_id="c", lease_id="lease-1", epoch=1, operation=wire.Exec(command="é", stdin=b"\x00"))
CLIENT = [
    wire.Hello(client_id="a", holds=("x",)),
    CALL,
    wire.Cancel(call_id="c"),
    wire.Ack(call_ids=("c", "d")),
    wire.Heartbeat(seq=3),
]
SERVER = [
    wire.Welcome(boot_id="b", heartbeat_s=1),
    wire.Reply(call_id="c", result=wire.CommandResult(exit_code=0, output=b"\xff", duration_s=0.1)),
    wire.Reply(call_id="c", result=wire.OpError(error="io", message="no")),
    wire.Fault(call_id="c", code="slot_lost", message="gone"),
    wire.LeaseEnded(lease_id="lease-1", epoch=1, code="x", message="y"),
    wire.Draining(),
    wire.Capacity(room=Resources(memory_mib=2)),
]
PIECES = [
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b"9" * 5000, b"1" + b"0" * 400, b"null", b"true", b"[]", b"{}", b'""'),
    *(b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b'"\\ud800"', b"\x00", b"\\", b'"', b"{", b"}", b"[", b"]", b",", b":"),
    *(b"[" * 3000, b'{"a":' * 3000, b'"kind":"call"', b'"operation":{"op":"exec"}', b'"op":"tar"', b"\xef\xbb\xbf"),
]


def frame(messages: list[Any]) -> bytes:
    return b"[" + b",".join(one.model_dump_json().encode() for one in messages) + b"]"


@st.composite
def spoilt(draw: st.DrawFn, whole: list[bytes]) -> bytes:
    """A frame with pieces cut out, put in, doubled, or put in the place of others."""
    data = draw(st.sampled_from(whole))
    for _ in range(draw(st.integers(0, 4))):
        at, end = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        match draw(st.integers(0, 3)):
            case 0:
                data = data[:at] + data[end:]
            case 1:
                data = data[:at] + draw(st.sampled_from(PIECES) | st.binary(max_size=8)) + data[at:]
            case 2:
                data = data[:end] + data[at:]
            case _:
                data = data[:at] + draw(st.sampled_from(PIECES)) + data[end:]
    return data


WHOLE = [frame(CLIENT), frame(SERVER), *(frame([one]) for one in (*CLIENT, *SERVER))]


@EXAMPLES
@given(data=spoilt(WHOLE))
def test_no_frame_breaks_an_end(data: bytes):
    for kind in (wire.CLIENT_FRAME, wire.SERVER_FRAME):
        try:
            for message in kind.validate_json(data):
                assert kind.validate_json(b"[" + message.model_dump_json().encode() + b"]")
        except ValidationError as error:
            assert error.errors(include_url=False, include_input=False)


@pytest.mark.parametrize(
    "operation",
    [
        wire.Exec(command="x", timeout_s=math.inf),
        wire.ProcRead(id="p", wait_s=math.inf),
        wire.ProcRead(id="p", until="quiet", quiet_s=math.inf),
    ],
)
def test_endless_calls_are_read_as_written(operation: wire.Operation):
    call = wire.Call(call_id="c", lease_id="lease-1", epoch=1, operation=operation)
    assert wire.CLIENT_FRAME.validate_json(frame([call])) == [call]


@pytest.mark.parametrize(
    "piece",
    [b"0,", b"[],", b'{"kind":"nonsense"},', b'{"kind":"call"},', b'"x",', b"[", b'{"kind":', b'{"a":0},', b"9", b'"'],
)
def test_cost_is_linear(piece: bytes):
    """One wrong message refuses a frame: a frame of millions of them must not become millions of complaints."""

    def seconds(size: int) -> float:
        data = b"[" + (piece * (size // len(piece))).rstrip(b",") + b"]"
        started = time.process_time()
        with pytest.raises(ValidationError) as refused:
            wire.CLIENT_FRAME.validate_json(data)
        assert refused.value.error_count() <= 10
        return time.process_time() - started

    seconds(10_000)
    small, large = seconds(200_000), seconds(1_600_000)
    assert large < max(small, 0.05) * 30  # eight times the text


# ------------------------------------------------------------------------------------------------------------- runners


def answer(fields: Any, *blobs: tuple[str, bytes], number: Any = 1, **more: object) -> bytes:
    """A frame as a runner sends it."""
    sizes = [[name, len(blob)] for name, blob in blobs]
    header = json.dumps({"id": number, "r": fields, "b": sizes, **more}).encode()
    body = len(header).to_bytes(4, "little") + header + b"".join(blob for _, blob in blobs)
    return len(body).to_bytes(4, "little") + body


ENDED = {"kind": "exec_result", "exit_code": 0, "duration_s": 0.1}
DONE = answer(ENDED, ("output", b"ok"))
ANSWERS = [
    DONE,
    answer({"kind": "op_error", "error": "io", "message": "x"}),
    answer({"kind": "file_result", "size": 2, "mode": 420}, ("data", b"ab")),
    answer({"kind": "exec_result", "exit_code": 0, "duration_s": 0.1}, ("output", b"x" * 100_000)),
    answer({"kind": "exec_result"}, ("output", b"a"), ("stdout", b"b"), ("stderr", b"c")),
    *(
        answer({"kind": "exec_result", "exit_code": 0, "duration_s": 0}, number=one)
        for one in (0, 2, -1, None, "1", [1])
    ),
    *(answer(fields) for fields in ([], None, 3, "x", {"kind": []}, {"kind": "ready"})),
]


@EXAMPLES
@example(data=answer(ENDED | {"duration_s": math.inf}, ("output", b"ok")), pieces=1, seed=0)
@given(data=spoilt(ANSWERS), pieces=st.integers(1, 4), seed=st.integers(0, 99))
def test_bad_bytes_break_one(data: bytes, pieces: int, seed: int):
    """The call is answered by a result of its kind, or the channel is given up with a reason; nothing else happens."""
    asyncio.run(_told(data, pieces, random.Random(seed)))


async def _told(data: bytes, pieces: int, rng: random.Random) -> None:
    loop = asyncio.get_running_loop()
    complaints: list[Any] = []
    loop.set_exception_handler(lambda _, context: complaints.append(context))
    ours, theirs = socket.socketpair()
    broken: list[str] = []

    def on_broken(reason: str) -> None:
        broken.append(reason)
        channel.close(ConnectionError(reason))

    channel = RunnerLink(ours, output_bytes=1000, on_broken=on_broken)
    channel.ready.set_result(None)
    told: asyncio.Future[Any] = loop.create_future()
    channel.call("exec", {"command": "x"}, told.set_result, answer="exec_result")
    theirs.setblocking(False)
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(pieces - 1))
    for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        try:
            await loop.sock_sendall(theirs, data[begin:end])
        except OSError:
            break
        await asyncio.sleep(0)
    theirs.shutdown(socket.SHUT_WR)
    async with asyncio.timeout(10):
        result = await told
    if isinstance(result, Exception):
        assert broken
    else:
        assert result.kind in {"exec_result", "op_error"}
        reply = wire.Reply(call_id="c", result=result)
        assert wire.SERVER_FRAME.validate_json(frame([reply])) == [reply]  # its client can read it
    channel.close(ConnectionError("over"))
    theirs.close()
    await asyncio.sleep(0)
    assert complaints == []


async def test_a_busy_slot_is_not_empty():
    """An answer that says so may have been sent before the other command reached the runner."""
    ours, theirs = socket.socketpair()
    channel = RunnerLink(ours, output_bytes=1000, on_broken=pytest.fail)
    channel.ready.set_result(None)
    seen: list[bool] = []
    for number in (1, 2):
        channel.call("exec", {"command": "x"}, lambda _: seen.append(channel.alone), answer="exec_result")
        theirs.sendall(answer(ENDED, ("output", b"ok"), number=number, alone=True))
    await until(lambda: len(seen) == 2)
    assert seen == [False, True]
    channel.close(ConnectionError("over"))
    theirs.close()


def test_late_runner_is_sent_all():
    """As many concurrent commands as run at once, each with the longest input that one call carries."""
    asyncio.run(_all_sent(MAX_CONCURRENT, bytes(PIECE_BYTES)))


async def _all_sent(commands: int, stdin: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = RunnerLink(ours, output_bytes=1000, on_broken=pytest.fail)
    for _ in range(commands):
        channel.call("exec", {"command": "x", "stdin": stdin}, lambda _: None, answer="exec_result")
    channel.close(ConnectionError("over"))
    theirs.close()
    await asyncio.sleep(0)
