"""Replays: what a terminal gets, and when."""

from __future__ import annotations

import json

import pytest

from atropos.dashboard import replay
from atropos.dashboard.replay import asciicast, events
from atropos.dashboard.store import entry_of


def read(messages, turns=None, name="t"):
    return entry_of({"trajectory_id": name, "score": 1.0, "messages": messages, "turns": turns}, item="i")


def called(*commands, text=""):
    calls = [json.dumps({"name": "terminal", "arguments": {"command": command}}) for command in commands]
    return {"role": "assistant", "content": text + "".join(f"<tool_call>{call}</tool_call>" for call in calls)}


def answered(*outputs, exit_code=0):
    results = [json.dumps({"success": True, "output": output, "exit_code": exit_code}) for output in outputs]
    return {"role": "user", "content": "".join(f"<tool_response>{result}</tool_response>" for result in results)}


def test_a_replay_keeps_the_times():
    turns = [
        {"model_s": 2.0, "tools_s": 1.0, "calls_s": [0.25, 0.5]},
        {"model_s": 3.0, "tools_s": 0.0, "calls_s": []},
    ]
    _, details = read([called("ls", "pwd"), answered("a\nb\n", "/w"), {"role": "assistant", "content": "fin"}], turns)
    found = events(details)
    assert [at for at, _ in found] == [2.0, 2.25, 2.25, 2.75, 6.0]
    assert "$ ls" in found[0][1]
    assert found[1][1].startswith("a\r\nb\r\n")
    assert "$ pwd" in found[2][1]
    assert "# fin" in found[4][1]


def test_failed_results_are_red():
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": '{"success": false, "error": "of b"}'},
        {"role": "tool", "tool_call_id": "a", "content": '{"success": true, "output": "of a"}'},
    ]
    texts = [text for _, text in events(read(messages)[1])]
    assert ["of a" in texts[1], "of b" in texts[3]] == [True, True]
    assert texts[3].startswith("\x1b[31m")


@pytest.mark.parametrize("turns", [None, 7, [], [7], [{"model_s": "x", "calls_s": [None]}], [{"model_s": -1}]])
def test_odd_times_are_a_second_each(turns):
    found = events(read([called("ls"), answered("a")], turns)[1])
    assert [at for at, _ in found] == [1.0, 2.0]


def test_asciinema_files_are_harmless():
    evil = "\x1b]52;c;ZXZpbA==\x07\x1b[2J\x1b[31mred\x1b[0m \x9b31m\x1bP1\x1b\\\u202e 1%\r\x1b[K2%"
    entry, details = read([called(evil), answered(evil)], name=f"t{evil}")
    header, *lines = [json.loads(line) for line in asciicast(entry, details).splitlines()]
    assert (header["version"], header["width"], header["height"]) == (2, 100, 30)
    assert all(code == "o" for _, code, _ in lines)
    text = header["title"] + "".join(data for _, _, data in lines)
    assert "\x1b[31mred" in text
    assert "1%\r\x1b[K2%" in text
    left = text.replace("\x1b[31m", "").replace("\x1b[0m", "").replace("\x1b[1m", "").replace("\x1b[K", "")
    assert not set(left) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_a_replay_is_bounded(monkeypatch):
    monkeypatch.setattr(replay, "MAX_CHARS", 100_000)
    _, details = read([called("ls"), answered("x" * 50_000)] * 50)
    found = events(details)
    assert sum(len(text) for _, text in found) < 130_000
    assert "characters left out" in found[1][1]
    assert "the rest is left out" in found[-1][1]
