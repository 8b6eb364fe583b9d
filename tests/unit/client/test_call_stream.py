"""What a stream writes, without a connection: each call once, in order, and none that nobody waits for any more."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import pytest

from atropos.errors import BackendUnavailable, OutcomeUnknown, SandboxError, SlotLost
from atropos.net import web_socket
from atropos.slots.client import call_stream
from atropos.slots.client.call_stream import CallStream, FrameLimit, StreamEvents
from atropos.wire import CLIENT_FRAME, Call, Cancel, CommandResult, Exec, Reply
from tests.waiting import SLOWNESS


class Stream(CallStream):
    """A stream that is never opened."""

    def __init__(self, *, max_calls: int = 200) -> None:
        self.told: list[object] = []
        events = StreamEvents(self.told.append, self.told.append, self.told.append, tuple, lambda: 5.0)
        super().__init__(None, "ws://x", "tester", events, frames=FrameLimit(max_calls), reconnect_s=60 * SLOWNESS)
        self.asked: dict[str, asyncio.Task] = {}

    async def ask(self, *call_ids):
        for call_id in call_ids:
            call = Call(call_id=call_id, lease_id="lease-1", epoch=1, operation=Exec(command="true"))
            self.asked[call_id] = asyncio.create_task(self.call(call))
        await asyncio.sleep(0)

    async def close(self, reason):
        await super().close(reason)
        await asyncio.gather(*self.asked.values(), return_exceptions=True)

    async def give_up(self, call_id):
        self.asked[call_id].cancel()
        await asyncio.wait([self.asked[call_id]])

    def written(self):
        """What its next frame holds."""
        frame = self._next_frame()
        return [] if frame is None else [shown(message) for message in CLIENT_FRAME.validate_json(frame)]


def shown(message):
    if isinstance(message, Call):
        return f"call {message.call_id}{' again' * message.resent}"
    return f"cancel {message.call_id}" if isinstance(message, Cancel) else f"ack {' '.join(message.call_ids)}"


def answer(call_id, output=b""):
    return Reply(call_id=call_id, result=CommandResult(exit_code=0, output=output, duration_s=0))


async def test_an_unsent_call_that_is_given_up_never_leaves():
    stream = Stream()
    await stream.ask("a", "b", "c")
    await stream.give_up("b")
    assert stream.written() == ["call a", "call c"]
    await stream.give_up("a")
    assert stream.written() == ["cancel a"]
    assert stream.written() == []
    await stream.close("the end")


async def test_a_frame_has_a_bound():
    stream = Stream(max_calls=2)
    await stream.ask("a", "b", "c")
    assert [stream.written(), stream.written()] == [["call a", "call b"], ["call c"]]
    await stream.close("the end")


async def test_a_new_connection_gets_what_is_unanswered(monkeypatch):
    """Cancelled calls first: one that is unknown there must not begin."""
    monkeypatch.setattr(call_stream, "MAX_CANCELS", 2)
    stream = Stream()
    await stream.ask(*"abcdef")
    stream.written()
    for call_id in "abc":
        await stream.give_up(call_id)
    stream._handle([answer("d")])
    assert stream.asked["d"] in (await asyncio.wait([stream.asked["d"]]))[0]
    await stream.ask("g")
    stream._resend()
    # the oldest cancellation is forgotten: they have a bound
    assert stream.written() == ["cancel b", "cancel c", "call e again", "call f again", "call g", "ack d"]
    stream._handle([answer("b")])
    stream._resend()
    assert stream.written()[:3] == ["cancel c", "call e again", "call f again"]
    await stream.close("the end")


async def test_what_waits_has_a_bound(monkeypatch):
    monkeypatch.setattr(call_stream, "MAX_PENDING", 2)
    stream = Stream()
    await stream.ask("a", "b", "c")
    with pytest.raises(SandboxError, match="2 calls wait"):
        await stream.asked["c"]
    await stream.close("the end")


@pytest.mark.parametrize(("room", "sent"), [(2, True), (1, False)])
async def test_a_call_fits_into_a_frame(monkeypatch, room, sent):
    """With its brackets."""
    call = Call(call_id="a", lease_id="lease-1", epoch=1, operation=Exec(command="true"))
    monkeypatch.setattr(call_stream, "MAX_FRAME_BYTES", len(call.model_dump_json()) + room)
    stream = Stream()
    await stream.ask("a")
    assert stream.asked["a"].done() != sent
    assert stream.written() == ["call a"] * sent
    await stream.close("the end")


async def test_what_never_left_did_not_run():
    stream = Stream(max_calls=1)
    await stream.ask("sent", "unsent")
    stream.written()
    await stream.close("the end")
    await stream.ask("late")
    for call_id, kind in (("sent", OutcomeUnknown), ("unsent", SlotLost), ("late", SlotLost)):
        with pytest.raises(kind, match="the end") as caught:
            await stream.asked[call_id]
        assert caught.type is kind


async def test_an_idle_connection_sends_at_once(monkeypatch):
    sent = []
    monkeypatch.setattr(web_socket, "send_now", lambda _, frame: sent.append(frame))
    stream = Stream()
    stream._socket = object()
    await stream.ask("a", "b")
    assert len(sent) == 1
    assert stream.written() == ["call b"]  # while a call is under way, the writer takes all that came
    await stream.close("the end")


async def test_an_answer_that_nobody_awaits_is_acknowledged():
    stream = Stream()
    await stream.ask("a")
    stream.written()
    await stream.give_up("a")
    assert stream.written() == ["cancel a"]
    stream._handle([answer("a")])
    assert stream.written() == ["ack a"]
    await stream.close("the end")


async def test_a_call_goes_on_for_who_still_waits():
    stream = Stream()
    await stream.ask("a")
    first = stream.asked["a"]
    await stream.ask("a")
    first.cancel()
    await asyncio.wait([first])
    assert stream.written() == ["call a"]
    stream._handle([answer("a")])
    assert (await stream.asked["a"]).exit_code == 0
    await stream.close("the end")


async def test_a_large_answer_is_acknowledged_at_once():
    """The server keeps it until then."""
    for output, written in ((b"", []), (bytes(call_stream.LARGE_FRAME), ["ack a"])):
        stream = Stream()
        await stream.ask("a")
        stream.written()
        frame = f"[{answer('a', output).model_dump_json()}]"
        kinds = {aiohttp.WSMsgType.TEXT: frame, aiohttp.WSMsgType.CLOSED: None}
        messages = [aiohttp.WSMessage(kind, data, None) for kind, data in kinds.items()]

        class Socket:
            close_code = 1000

            async def receive(self, messages=messages):
                return messages.pop(0)

        assert (await stream._read(Socket())).startswith("closed by the server")
        assert stream.written() == written
        await stream.close("the end")


async def test_a_silent_connection_is_dead():
    stream = Stream()
    stream._heartbeat_s, stream._heard_at = 0.05, time.monotonic()
    reason = await asyncio.wait_for(stream._beat(), 20 * SLOWNESS)
    assert reason.startswith("nothing came for")
    assert time.monotonic() - stream._heard_at > 3 * 0.05
    await stream.close("the end")


@pytest.mark.parametrize(
    ("draining", "cause", "tries"),
    [(False, ConnectionRefusedError(), 3), (True, ConnectionRefusedError(), 1), (True, TimeoutError(), 3)],
)
async def test_only_a_server_that_was_to_end_has_ended(monkeypatch, draining, cause, tries):
    """Another one that refuses a connection may be back in a moment."""
    tried = []

    async def connect():
        tried.append(1)
        if len(tried) < 3:
            raise BackendUnavailable("no") from cause

    stream = Stream()
    stream.draining = draining
    monkeypatch.setattr(stream, "_connect", connect)
    await stream._reconnect("it broke")
    assert len(tried) == tries
    assert stream.told == (["no (it broke)"] if tries == 1 else [])
    await stream.close("the end")
