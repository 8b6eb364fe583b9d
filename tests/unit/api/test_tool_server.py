"""The ToolServer's promises, over ASGI with its real lifespan."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import tracemalloc
from urllib.parse import quote

import httpx
import pytest

from atropos.api.settings import Bounds
from atropos.errors import ConfigError
from atropos.tools.tool_server.messages import ExecuteAnswer, ToolList
from tests.waiting import until

from .conftest import ONE_AT_A_TIME, Jar, Workbench, call, served


async def test_execute_answers_the_tools_result(bench: Workbench):
    async with served(bench) as client:
        answer = await client.post("/execute", json=call("note", text="a"))
        parsed = ExecuteAnswer.model_validate_json(answer.content)
        assert (answer.status_code, parsed.result.success, parsed.result.output) == (200, True, "noted a")
        assert parsed.call_id == "c1"


async def test_tools_have_openai_schemas(bench: Workbench):
    async with served(bench) as client:
        listed = ToolList.model_validate_json((await client.get("/tools")).content)
        note = next(tool for tool in listed.tools if tool.name == "note")
        assert note.schema_["function"]["parameters"]["required"] == ["text"]
        assert note.toolset == "test"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer wrong", "Basic right-token", "right-token", "Bearer right-token2", "bearer é"],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/execute"), ("POST", "/batch"), ("GET", "/tools"), ("GET", "/stats")]
)
async def test_nothing_runs_without_the_token(bench: Workbench, header: str | None, method: str, path: str):
    async with served(bench) as client:
        del client.headers["Authorization"]
        headers = {} if header is None else {"Authorization": header.encode("latin-1")}
        body = call("note", text="a") if path == "/execute" else {"calls": [call("note", text="a")]}
        answer = await client.request(method, path, headers=headers, json=body)
        assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
        assert (await client.get("/health")).status_code == 200
        assert bench.ran == []


async def test_calls_sent_again_run_once(bench: Workbench):
    async with served(bench) as client:
        first = (await client.post("/execute", json=call("note", text="a"))).json()
        again = (await client.post("/execute", json=call("note", text="a"))).json()
        assert first == again
        assert bench.ran == ["a"]


async def test_resend_attaches_to_its_call(bench: Workbench):
    async with served(bench) as client:
        lost = asyncio.create_task(client.post("/execute", json=call("hang", text="a")))
        await bench.started.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        again = asyncio.create_task(client.post("/execute", json=call("hang", text="a")))
        await asyncio.sleep(0.05)
        bench.hold.set()
        assert (await again).json()["result"]["output"] == "held a"
        assert bench.ran == ["a"]
        assert bench.most == 1


async def test_a_restart_makes_outcomes_unknown(bench: Workbench):
    async with served(bench) as client:
        answer = await client.post("/execute", json={**call("note", text="a"), "boot_id": "of-another-life"})
        assert (answer.status_code, answer.json()["code"]) == (409, "outcome_unknown")
        assert bench.ran == []


@pytest.mark.parametrize("how", ["unknown", "afterwards", "grouped", "stray"])
async def test_unknown_outcomes_are_not_rerun(bench: Workbench, how: str):
    async with served(bench) as client:
        for boot_id in (None, client.host.boot_id):
            answer = await client.post("/execute", json={**call("fail", how=how), "boot_id": boot_id})
            assert (answer.status_code, answer.json()["code"]) == (409, "outcome_unknown")
            assert ("cancelled" if how == "stray" else "lost") in answer.json()["message"]
        assert bench.ran == [how]


async def test_unknown_outcomes_keep_no_arguments(bench: Workbench):
    async with served(bench) as client:
        tracemalloc.start()
        try:
            for number in range(10):
                body = call("fail", call_id=str(number), how="unknown", text=str(number) * 1_000_000)
                assert (await client.post("/execute", json=body)).status_code == 409
            del body
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 3_000_000
        finally:
            tracemalloc.stop()


async def test_reads_may_be_repeated(bench: Workbench):
    async with served(bench) as client:
        for _ in range(2):
            answer = await client.post("/execute", json=call("look"))
            assert (answer.status_code, answer.json()["code"]) == (503, "sandbox_error")
        assert bench.ran == ["look", "look"]


async def test_a_call_id_of_another_call_is_refused(bench: Workbench):
    async with served(bench) as client:
        await client.post("/execute", json=call("note", text="a"))
        answer = await client.post("/execute", json=call("note", text="b"))
        assert (answer.status_code, answer.json()["code"]) == (409, "call_id_reused")
        other = await client.post("/execute", json=call("note", trajectory="t2", text="b"))
        assert other.status_code == 200


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [
        ("tool", 200, "write it differently"),
        ("bug", 200, "a bug"),
        ("exit", 200, "it exited with 2"),
        ("infrastructure", 503, "the provider is down"),
    ],
)
async def test_only_a_tool_s_failure_is_a_result(bench: Workbench, how: str, status: int, said: str):
    async with served(bench) as client:
        answer = await client.post("/execute", json=call("fail", how=how))
        assert answer.status_code == status
        body = answer.json()
        assert said in (body["message"] if status == 503 else body["result"]["error"])
        if status == 503:
            assert body["code"] == "tool_server_unavailable"
            assert int(answer.headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (call("note"), "'text' is missing"),
        (call("note", text=3), "'text' is wrong"),
        (call("note", text="a", more=1), "'more' is not an argument"),
        (call("notes", text="a"), "there is no tool 'notes'"),
    ],
)
async def test_bad_arguments_are_explained(bench: Workbench, body: dict, said: str):
    async with served(bench) as client:
        answer = await client.post("/execute", json=body)
        assert answer.status_code == 200
        assert answer.json()["result"]["success"] is False
        assert said in answer.json()["result"]["error"]
        assert bench.ran == []


async def test_a_hanging_tool_delays_nobody_else(bench: Workbench):
    async with served(bench) as client:
        held = [asyncio.create_task(client.post("/execute", json=call("hang", f"h{i}"))) for i in range(20)]
        await bench.started.wait()
        for number in range(50):
            answer = await asyncio.wait_for(
                client.post("/execute", json=call("note", f"n{number}", text=str(number))), timeout=20
            )
            assert answer.status_code == 200
        assert not any(task.done() for task in held)
        bench.hold.set()
        assert {(await task).status_code for task in held} == {200}


async def test_a_batch_answers_as_calls_finish(bench: Workbench):
    calls = [call("hang", "slow", "s1", text="s1"), call("note", "slow", "s2", text="s2")]
    calls += [call("note", f"q{i}", text=str(i)) for i in range(5)]
    async with served(bench) as client:

        async def letting_go() -> None:
            await until(lambda: len(bench.ran) >= 5)
            bench.hold.set()

        _, answer = await asyncio.gather(letting_go(), client.post("/batch", json={"calls": calls}))
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["call_id"] for line in lines[-2:]] == ["s1", "s2"]
        assert all(line["kind"] == "result" for line in lines)
        assert bench.ran[-2:] == ["s1", "s2"]


async def test_a_batch_explains_refusals(bench: Workbench):
    calls = [call("note", text="a"), call("fail", "t2", how="infrastructure"), call("note", "t3", text=1)]
    async with served(bench) as client:
        answer = await client.post("/batch", json={"calls": calls})
        lines = {(line["kind"], line.get("status")) for line in map(json.loads, answer.text.splitlines())}
        assert lines == {("result", None), ("refusal", 503)}


async def test_a_full_queue_is_429_with_retry_after(bench: Workbench):
    async with served(bench, tool_overrides={"hang": ONE_AT_A_TIME}) as client:
        first = [asyncio.create_task(client.post("/execute", json=call("hang", f"t{i}"))) for i in range(2)]
        await until(lambda: client.host.stats()["running"] == 2)
        answer = await client.post("/execute", json=call("hang", "t9"))
        assert (answer.status_code, answer.json()["code"]) == (429, "busy")
        assert int(answer.headers["Retry-After"]) >= 1
        bench.hold.set()
        assert {(await task).status_code for task in first} == {200}
        assert bench.most == 1
        assert (await client.post("/execute", json=call("hang", "t9"))).status_code == 200


async def test_bounds_need_a_tool(bench: Workbench):
    with pytest.raises(ConfigError, match="tool_overrides: there is no tool 'web_serach'"):
        async with served(bench, tool_overrides={"web_serach": ONE_AT_A_TIME}):
            pass
    async with served(bench, tool_overrides={"web_search": ONE_AT_A_TIME}) as client:  # no provider is configured here
        assert (await client.get("/health")).status_code == 200


async def test_a_rate_is_kept_per_tool(bench: Workbench):
    bounds = Bounds(rate_per_s=0.001, burst=3)
    async with served(bench, tool_overrides={"note": bounds}) as client:
        answers = [await client.post("/execute", json=call("note", f"t{i}", text="a")) for i in range(5)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
        assert int(answers[-1].headers["Retry-After"]) > 100
        assert (await client.post("/execute", json=call("keep", "other", item="a"))).status_code == 200


async def test_one_trajectory_leaves_places(bench: Workbench):
    async with served(bench, trajectory_bounds=ONE_AT_A_TIME) as client:
        mine = [asyncio.create_task(client.post("/execute", json=call("hang", "t", f"c{i}"))) for i in range(2)]
        await until(lambda: client.host.stats()["running"] == 2)
        assert (await client.post("/execute", json=call("hang", "t", "c9"))).status_code == 429
        assert (await client.post("/execute", json=call("note", "other", text="a"))).status_code == 200
        bench.hold.set()
        await asyncio.gather(*mine)


async def test_waiting_takes_no_place_of_the_tool(bench: Workbench):
    async with served(bench, tool_overrides={"hang": Bounds(concurrency=2, queue=0)}) as client:
        mine = [asyncio.create_task(client.post("/execute", json=call("hang", "a", f"c{i}"))) for i in range(4)]
        await until(lambda: client.host.stats()["running"] == 4)
        other = asyncio.create_task(client.post("/execute", json=call("hang", "b")))
        await until(lambda: bench.running == 2)
        assert (await client.post("/execute", json=call("hang", "c"))).status_code == 429
        await client.delete("/trajectories/a")  # its calls give back the place that they have, and none more
        third = asyncio.create_task(client.post("/execute", json=call("hang", "c")))
        await until(lambda: bench.running == 2)
        bench.hold.set()
        assert [(await task).status_code for task in (other, third)] == [200, 200]
        assert {(await task).status_code for task in mine} == {409}
        assert bench.most == 2


async def test_timeout_frees_the_place(bench: Workbench):
    async with served(bench, tool_overrides={"hang": Bounds(concurrency=1)}) as client:
        for number in range(2):
            answer = await client.post("/execute", json={**call("hang", f"t{number}"), "timeout_s": 0.05})
            assert answer.json()["result"]["timed_out"] is True
        assert bench.running == 0


async def test_stop_is_no_time_of_a_tool(bench: Workbench):
    async with served(bench) as client:
        asked = asyncio.create_task(client.post("/execute", json={**call("hang"), "timeout_s": 3}))
        await bench.started.wait()
        asyncio.get_running_loop().call_later(1, bench.hold.set)  # what it waits for comes meanwhile
        time.sleep(3.5)  # noqa: ASYNC251 (the process is stopped, or a tool blocks the event loop)
        assert (await asked).json()["result"]["output"] == "held "


async def test_a_tool_s_timeout_error_is_its_own(bench: Workbench):
    async with served(bench) as client:
        result = (await client.post("/execute", json=call("fail", how="late"))).json()["result"]
        assert (result["timed_out"], result["error"]) == (True, "fail timed out: the shop did not answer")


async def test_callers_shorten_no_tool_s_timeout(bench: Workbench):
    async with served(bench, max_timeout_s=0.05) as client:
        assert (await client.post("/execute", json=call("slow"))).json()["result"]["output"] == "done"
        asked = await client.post("/execute", json={**call("slow", call_id="c2"), "timeout_s": 0.05})
        assert asked.json()["result"]["error"] == "slow took longer than 0.05 s"
    bench.hold.clear()
    async with served(bench, timeout_s=0.1, max_timeout_s=0.05) as client:
        asked = await client.post("/execute", json={**call("hang"), "timeout_s": 3000})
        assert asked.json()["result"]["error"] == "hang took longer than 0.1 s"


async def test_a_huge_answer_is_cut_and_says_so(bench: Workbench):
    async with served(bench, result_bytes=2000, data_bytes=3000) as client:
        answer = await client.post("/execute", json=call("big", size=5_000_000))
        result = answer.json()["result"]
        assert len(answer.content) < 6000
        assert result["truncated"] is True
        assert result["dropped_bytes"] > 4_900_000
        assert result["data"] is None


async def test_a_huge_request_is_refused(bench: Workbench):
    async with served(bench) as client:
        answer = await client.post("/execute", content=b'{"x": "' + b"a" * 9_000_000 + b'"}')
        assert answer.status_code == 413

        async def endless():
            for _ in range(100):
                yield b"x" * 100_000

        assert (await client.post("/execute", content=endless())).status_code == 413


async def test_state_ends_with_its_trajectory(bench: Workbench):
    async with served(bench) as client:
        await client.post("/execute", json=call("keep", "t1", "c1", item="a"))
        mine = await client.post("/execute", json=call("keep", "t1", "c2", item="b"))
        other = await client.post("/execute", json=call("keep", "t2", "c1", item="c"))
        assert (mine.json()["result"]["output"], other.json()["result"]["output"]) == ("a,b", "c")
        assert (await client.delete("/trajectories/t1")).json() == {"ended": True}
        assert [jar.closed for jar in bench.jars] == [True, False]
        assert (await client.delete("/trajectories/t1")).json() == {"ended": False}
    assert bench.jars[1].closed


@pytest.mark.parametrize("failure", [RuntimeError("a bug of its own"), SystemExit(1)])
async def test_unclosable_ends_no_server(bench: Workbench, failure: BaseException):
    async def close() -> None:
        raise failure

    async with served(bench) as client:
        await client.post("/execute", json=call("keep", item="a"))
        bench.jars[0].aclose = close
        assert (await client.delete("/trajectories/t1")).json() == {"ended": True}
        assert (await client.post("/execute", json=call("note", text="a"))).status_code == 200


async def test_a_namesake_gets_no_old_answers(bench: Workbench):
    async with served(bench) as client:
        for item in ("a", "b"):
            answer = await client.post("/execute", json=call("keep", item=item))
            assert answer.json()["result"]["output"] == item
            await client.delete("/trajectories/t1")
        assert client.host.stats()["journal"] == 0


async def test_late_calls_begin_nothing(bench: Workbench):
    """A call that was given up on its way, and reaches the server when its trajectory has ended, is told so."""
    async with served(bench) as client:
        first = {**call("keep", "t", "c1", item="a"), "life": "one"}
        assert (await client.post("/execute", json=first)).status_code == 200
        assert (await client.delete("/trajectories/t?life=one")).json() == {"ended": True}
        for late in (first, {**call("keep", "t", "c2", item="b"), "life": "one"}):
            answer = await client.post("/execute", json=late)
            assert (answer.status_code, answer.json()["code"]) == (410, "trajectory_ended")
            batch = await client.post("/batch", json={"calls": [late]})
            assert json.loads(batch.text)["status"] == 410
        assert client.host.stats()["trajectories"] == 0
        other = await client.post("/execute", json={**call("keep", "t", "c1", item="c"), "life": "two"})
        assert other.json()["result"]["output"] == "c", "the next trajectory of that name is another one"
        assert (await client.delete("/trajectories/t?life=one")).json() == {"ended": False}
        assert [jar.closed for jar in bench.jars] == [True, False]
        unnamed = await client.post("/execute", json=call("keep", "t", "c1", item="d"))
        assert unnamed.json()["result"]["output"] == "d"


async def test_ended_trajectories_are_bounded(bench: Workbench):
    async with served(bench, journal_calls=10) as client:
        for number in range(100):
            await client.delete(f"/trajectories/t{number}?life=x")
        late = [{**call("keep", f"t{number}", item="a"), "life": "x"} for number in range(100)]
        answers = [(await client.post("/execute", json=one)).status_code for one in late]
        assert answers == [200] * 90 + [410] * 10, "the trajectories that ended last are known"


async def test_finished_calls_are_bounded(bench: Workbench):
    async with served(bench, journal_bytes=100_000) as client:
        for number in range(20):
            await client.post("/execute", json=call("big", call_id=f"c{number}", size=10_000))
        assert 2 <= client.host.stats()["journal"] <= 10
        for number, status in ((19, 200), (0, 409)):
            resent = {**call("big", call_id=f"c{number}", size=10_000), "boot_id": client.host.boot_id}
            assert (await client.post("/execute", json=resent)).status_code == status


async def test_idle_state_ends_after_its_ttl(bench: Workbench):
    async with served(bench, trajectory_ttl_s=0.1) as client:
        await client.post("/execute", json=call("keep", item="a"))
        await until(lambda: bench.jars[0].closed)
        assert client.host.stats()["trajectories"] == 0


async def test_a_new_life_starts_its_own_clock(bench: Workbench):
    closing, closed = asyncio.Event(), asyncio.Event()

    class Slow(Jar):
        async def aclose(self) -> None:
            if self is bench.jars[0]:
                closing.set()
                await closed.wait()

    bench.jar = Slow
    async with served(bench, trajectory_ttl_s=0.1) as client:
        await client.post("/execute", json=call("keep", "slow", item="a"))
        await client.post("/execute", json=call("keep", "t", "c1", item="b"))
        await closing.wait()  # until both are idle, and the first one is being closed
        await client.delete("/trajectories/t")
        running = asyncio.create_task(client.post("/execute", json=call("hang", "t", "c2", text="c")))
        await bench.started.wait()
        closed.set()
        await asyncio.sleep(0.1)
        bench.hold.set()
        assert (await running).json().get("result", {}).get("output") == "held c"


async def test_an_end_cancels_its_calls(bench: Workbench):
    async with served(bench) as client:
        running = asyncio.create_task(client.post("/execute", json=call("hang", "a/b c")))
        await bench.started.wait()
        assert (await client.delete("/trajectories/a%2Fb%20c")).json() == {"ended": True}
        answer = await running
        assert (answer.status_code, answer.json()["code"]) == (409, "trajectory_ended")
        assert bench.running == 0


@pytest.mark.parametrize("name", ["a\nb", "\n\n", "a/../b", "%", "?life=x", "é😀", " "])
async def test_a_trajectory_of_any_name_is_ended(bench: Workbench, name: str):
    async with served(bench) as client:
        await client.post("/execute", json=call("keep", name, item="a"))
        assert (await client.delete(f"/trajectories/{quote(name, safe='')}")).json() == {"ended": True}
        assert client.host.stats()["trajectories"] == 0


@pytest.mark.parametrize("timeout_s", [True, "1", float("nan"), 0, -1, 1e9, [], {}])
async def test_a_timeout_is_a_number(bench: Workbench, timeout_s: object):
    async with served(bench) as client:
        content = json.dumps({**call("note", text="a"), "timeout_s": timeout_s})
        answer = await client.post("/execute", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422
        assert (await client.post("/execute", json={**call("note", text="a"), "timeout_s": 5})).status_code == 200


async def test_draining_finishes_running_calls(bench: Workbench):
    async with served(bench) as client:
        running = asyncio.create_task(client.post("/execute", json=call("hang")))
        await bench.started.wait()
        drain = asyncio.create_task(client.host.drain(20))
        await asyncio.sleep(0)
        refused = await client.post("/execute", json=call("note", "t2", text="a"))
        assert (refused.status_code, refused.json()["code"]) == (503, "draining")
        assert (await client.get("/health")).json()["status"] == "draining"
        bench.hold.set()
        await drain
        assert (await running).status_code == 200


@pytest.mark.slow("large input")
async def test_the_journal_stays_bounded(bench: Workbench):
    async with served(bench, max_trajectories=50, journal_calls=100) as client:
        for number in range(600):
            answer = await client.post("/execute", json=call("note", f"t{number}", text="a"))
            assert answer.status_code == 200
        stats = client.host.stats()
        assert stats["trajectories"] <= 50
        assert stats["journal"] <= 100
        resend = await client.post("/execute", json={**call("note", "t0", text="a"), "boot_id": client.host.boot_id})
        assert resend.json()["code"] == "outcome_unknown", "a forgotten call was run again"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"calls": []}', b'{"trajectory_id": ""}', b"\xff\xfe", b'{"x": "\\ud800"}']
)
@pytest.mark.parametrize("path", ["/execute", "/batch"])
async def test_nonsense_is_422_with_one_line(bench: Workbench, path: str, content: bytes):
    async with served(bench) as client:
        answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 422, answer.text
        assert "\n" not in answer.json()["message"]


async def test_a_body_must_be_json(bench: Workbench):
    async with served(bench) as client:
        answer = await client.post("/execute", data={"name": "note"})
        assert answer.status_code == 422
        assert "send it with Content-Type: application/json" in answer.json()["message"]


@pytest.mark.slow("large input")
@pytest.mark.parametrize("what", ["calls", "empty", "fields", "arguments"])
async def test_a_million_mistakes_are_one_error(bench: Workbench, what: str):
    many = json.dumps({f"k{i}": 0 for i in range(100_000)})
    content = {
        "calls": '{"calls": [' + "0," * 500_000 + "0]}",
        "empty": '{"calls": [' + "{}," * 500_000 + "{}]}",
        "fields": '{"calls": [' + many + "]}",
        "arguments": '{"calls": [{"trajectory_id": "t", "call_id": "c", "name": "note", "arguments": ' + many + "}]}",
    }[what]
    async with served(bench) as client:
        answer = await client.post("/batch", content=content, headers={"Content-Type": "application/json"})
        assert len(answer.content) < 2000
        assert answer.status_code == (200 if what == "arguments" else 422)
        assert what != "arguments" or "too many" in answer.json()["result"]["error"]
        assert bench.ran == []


async def test_surrogate_does_no_harm(bench: Workbench):
    async with served(bench) as client:
        body = json.dumps(call("note", text="\ud800"))
        answer = await client.post("/execute", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code in {200, 422}


@pytest.mark.parametrize("path", ["/execute", "/batch"])
async def test_half_a_surrogate_is_replaced(bench: Workbench, path: str):
    async with served(bench) as client:
        for body in (call("halves"), call("fail", call_id="c2", how="half")):
            answer = await client.post(path, json=body if path == "/execute" else {"calls": [body]})
            assert answer.status_code == 200
            result = ExecuteAnswer.model_validate_json(answer.content).result
            if result.success:
                assert (result.output, result.data) == ("? hello", {"pages": ["?"], "?": 1})
            else:
                assert result.error == "half of a pair: ?"


async def test_unknown_paths_are_problems(bench: Workbench):
    async with served(bench) as client:
        assert (await client.get("/nothing")).json()["code"] == "not_found"
        assert (await client.get("/execute")).json()["code"] == "method_not_allowed"


async def test_the_interface_is_described(bench: Workbench):
    async with served(bench) as client:
        document = (await client.get("/openapi.json")).json()
        assert {"/execute", "/batch", "/tools", "/health"} <= set(document["paths"])
        assert isinstance(client, httpx.AsyncClient)
