"""The page: readable, whole where the file is damaged, and nothing in it is live."""

from __future__ import annotations

import html.parser
import json
import time

import pytest

from atropos.dashboard import render
from atropos.dashboard.conversation import conversation
from atropos.dashboard.render import write_page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'><b>&amp;\x1b[31m</details>"


def group(*contents: str, score: float = 0.5):
    return {
        "scores": [score] * len(contents),
        "messages": [[{"role": EVIL, "content": text}, {"role": "assistant", "content": text}] for text in contents],
        "atropos": {
            "item": EVIL,
            "trajectories": [{"trajectory_id": EVIL, "steps": 2, "info": {"k": EVIL}}] * len(contents),
        },
    }


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)


def page_of(tmp_path, lines: list[str]) -> str:
    path = tmp_path / "g.jsonl"
    path.write_text("\n".join(lines))
    return write_page(path).read_text()


def test_everything_is_escaped(tmp_path):
    page = page_of(tmp_path, [json.dumps(group(EVIL))])
    groups, _, player = page.partition("<script>")
    assert f"script-src 'sha256-{render.digest(player.removesuffix('</script></body></html>' + chr(10)))}'" in groups
    tags = Tags()
    tags.feed(groups)
    assert not tags.seen & {"script", "img"}
    assert "<script" not in groups + player
    assert "&lt;script&gt;alert(1)" in page
    assert "\x1b" not in page
    assert "\u241b[31m" in page


def test_damaged_last_line_ends_alone(tmp_path):
    page = page_of(tmp_path, [json.dumps(group("first")), json.dumps(group("second"))[:50]])
    assert "first" in page
    assert "1 group, 1 trajectory" in page


def test_odd_groups_are_shown(tmp_path):
    odd = [{"scores": [1.0], "messages": None}, [group("x"), None], {"scores": []}, 7]
    page = page_of(tmp_path, [json.dumps(one) for one in odd])
    assert "3 groups, 2 trajectories" in page


def test_the_page_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "PAGE_TRAJECTORIES", 3)
    rest = [json.dumps(group("rest", score=1.0))] * 4
    page = page_of(tmp_path, [json.dumps(group("y" * 50_000, "z")) for _ in range(2)] + rest)
    assert "2 groups, 3 trajectories, mean score 0.500; these are the first of the file" in page
    assert "rest" not in page
    assert "characters left out" in page
    assert len(page) < 200_000
    whole = page_of(tmp_path, [json.dumps(group("x", "y", "z"))])
    assert "1 group, 3 trajectories, mean score 0.500. Each" in whole


def test_a_failed_page_leaves_the_last_one(tmp_path):
    (tmp_path / "g.jsonl").write_text(json.dumps(group("x")) + "\n")
    (tmp_path / "g.html").write_text("the last one")
    (tmp_path / "g.html.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_page(tmp_path / "g.jsonl")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["g.html", "g.jsonl"]
    assert (tmp_path / "g.html").read_text() == "the last one"


def test_surrogates_do_not_break_it(tmp_path):
    page_of(tmp_path, [json.dumps(group("\ud800 lone"))])


def test_calls_are_shown_as_lines(tmp_path):
    call = '<tool_call>\n{"name": "terminal", "arguments": {"command": "cd x\\nls -la"}}\n</tool_call>'
    result = '<tool_response>\n{"success": true, "output": "a\\nb\\n", "exit_code": 0}\n</tool_response>'
    messages = [{"role": "assistant", "content": "I look.\n" + call}, {"role": "user", "content": result}]
    page = page_of(tmp_path, [json.dumps({"scores": [1.0], "messages": [messages]})])
    assert "I look." in page
    assert "command: \ncd x\nls -la" in page
    assert "a\nb\n[exit_code: 0]" in page
    assert "tool_call" not in page


def test_malformed_calls_are_shown(tmp_path):
    messages = [
        {"role": "assistant", "content": "<tool_call>{broken</tool_call>", "tool_calls": [{"function": {"name": "f"}}]},
        {"role": "tool", "content": '["odd"]'},
        {"role": "user", "content": "<tool_response>[1]</tool_response>"},
        {"role": "user", "content": ["part"]},
    ]
    page = page_of(tmp_path, [json.dumps({"scores": [1.0], "messages": [messages]})])
    assert "{broken" in page
    assert "&#34;name&#34;: &#34;f&#34;" in page
    assert "odd" in page


def test_text_around_calls_stays():
    content = "</tool_call>a<tool_call>{x<tool_call></tool_call>b<tool_call>{y</tool_call></tool_call><tool_call>c"
    (message,) = conversation([{"role": "assistant", "content": content}])
    assert [(part.kind, part.text) for part in message.parts] == [
        ("text", "</tool_call>a"),
        ("call", "{x<tool_call>"),
        ("text", "b"),
        ("call", "{y"),
        ("text", "</tool_call><tool_call>c"),
    ]


def test_a_call_in_thinking_takes_no_result():
    def call(command):
        return f'<tool_call>{{"name": "terminal", "arguments": {{"command": "{command}"}}}}</tool_call>'

    content = f"<think>Or {call('rm')}?</think>I look.{call('ls')}<think>and {call('never ended')}"
    (message,) = conversation([{"role": "assistant", "content": content}])
    assert [part.kind for part in message.parts] == ["thought", "text", "call", "thought"]
    assert message.parts[0].text == f"Or {call('rm')}?"
    assert message.parts[2].arguments == {"command": "ls"}
    (asked,) = conversation([{"role": "user", "content": "<think>hm</think>"}])
    assert [part.kind for part in asked.parts] == ["text"]


@pytest.mark.parametrize(
    ("role", "tag"),
    [("assistant", "think"), ("assistant", "tool_call"), ("user", "tool_response"), ("tool", "tool_response")],
)
def test_unended_calls_take_linear_time(role, tag):
    def seconds(count):
        started = time.process_time()
        conversation([{"role": role, "content": f"<{tag}>" * count}])
        return time.process_time() - started

    seconds(100)
    small, large = seconds(1_000), seconds(8_000)
    assert large < max(small, 0.01) * 30  # quadratic work would take 64 times as long


def test_bidirectional_text_turns_no_score(tmp_path):
    page = page_of(tmp_path, [json.dumps(group("a\u202eb\u2066c")).replace("31m", "31m\\u202e")])
    assert "\u202e" not in page
    assert "\u2066" not in page
    assert "a\\u202eb\\u2066c" in page


def test_openai_messages_are_readable(tmp_path):
    call = {"id": "c", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "a\\nb"}'}}
    messages = [
        {"role": "assistant", "content": "", "reasoning_content": "first I think", "tool_calls": [call]},
        {"role": "tool", "content": '{"success": true, "output": "1\\n2\\n", "exit_code": 0}'},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[list"}}, 7]},
    ]
    facts = {"trajectory_id": "t", "phases": {"model": 1.25, "tools": 0.5, "reset": 0.001}}
    shown = {"scores": [1.0], "messages": [messages], "atropos": {"trajectories": [facts]}}
    page = page_of(tmp_path, [json.dumps(shown)])
    assert "first I think" in page
    assert "terminal</b>\ncommand: \na\nb" in page
    assert "1\n2\n[exit_code: 0]" in page
    assert "f</b>\n[list" in page
    assert "null" not in page.partition("<body")[2]
    assert "model 1.2, tools 0.5</span>" in page
