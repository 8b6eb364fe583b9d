"""`atropos trajectories`: what it writes, chooses and prints."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from atropos.cli.app import command_line
from atropos.errors import ConfigError
from tests.unit.dashboard.support import group, hostile, ordinary, sampled, trajectory


def run(tmp_path, command, *arguments, groups=None):
    path = tmp_path / "g.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in (groups or ordinary())))
    return CliRunner().invoke(command_line(), ["trajectories", command, str(path), *arguments])


def test_atif_has_numbered_steps(tmp_path):
    done = run(tmp_path, "export", "--to", str(tmp_path / "atif"), "--item", "square-3", "--least", "1")
    assert done.exit_code == 0, done.output
    [file] = (tmp_path / "atif").iterdir()
    value = json.loads(file.read_text())
    assert value["schema_version"] == "ATIF-v1.8"
    assert [step["step_id"] for step in value["steps"]] == [1, 2, 3, 4]
    assert [step["source"] for step in value["steps"]] == ["system", "user", "agent", "agent"]
    step = value["steps"][2]
    [call] = step["tool_calls"]
    assert call["function_name"] == "terminal"
    assert call["arguments"] == {"command": "cat square-3-0.txt"}
    [result] = step["observation"]["results"]
    assert result["source_call_id"] == call["tool_call_id"]
    assert result["content"].startswith("9\n")
    assert value["extra"]["score"] == 1.0


def test_replays_are_written_for_asciinema(tmp_path):
    done = run(tmp_path, "export", "--format", "cast", "--to", str(tmp_path / "casts"), "--item", "square-3")
    assert done.exit_code == 0, done.output
    assert {file.suffix for file in (tmp_path / "casts").iterdir()} == {".cast"}
    header, *lines = map(json.loads, (tmp_path / "casts/000001-square-3-0.cast").read_text().splitlines())
    assert header["version"] == 2
    assert "$ cat square-3-0.txt" in "".join(text for _, _, text in lines)


def test_atif_keeps_openai_s_ids(tmp_path):
    calls = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    messages = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "b", "content": '{"success": true, "output": "of b"}'},
        {"role": "tool", "tool_call_id": "a", "content": '{"success": true, "output": "of a"}'},
    ]
    one = group("i", (messages, 1.0, {"trajectory_id": "../../t"}))
    run(tmp_path, "export", "--to", str(tmp_path / "atif"), groups=[one])
    [file] = (tmp_path / "atif").iterdir()
    step = json.loads(file.read_text())["steps"][1]
    assert step["reasoning_content"] == "hm"
    assert [(r["source_call_id"], r["content"]) for r in step["observation"]["results"]] == [
        ("b", "of b"),
        ("a", "of a"),
    ]


def test_atif_errors_stay_apart(tmp_path):
    def tagged(tag, *values):
        return "".join(f"<{tag}>{value if isinstance(value, str) else json.dumps(value)}</{tag}>" for value in values)

    calls = [{"name": "f", "arguments": {"n": n}} for n in (1, 2)]
    results = [{"success": False, "error": "not valid JSON"}, *({"success": True, "output": f"of {n}"} for n in (1, 2))]
    messages = [
        {"role": "assistant", "content": tagged("tool_call", '{"name": "f", "arg', *calls)},
        {"role": "user", "content": tagged("tool_response", *results)},
    ]
    one = group("i", (messages, 1.0, {"trajectory_id": "t"}))
    run(tmp_path, "export", "--to", str(tmp_path / "atif"), groups=[one])
    [file] = (tmp_path / "atif").iterdir()
    [step] = json.loads(file.read_text())["steps"]
    ids = [call["tool_call_id"] for call in step["tool_calls"]]
    found = [(result.get("source_call_id"), result["content"]) for result in step["observation"]["results"]]
    assert found == [(None, "[error: not valid JSON]"), (ids[0], "of 1"), (ids[1], "of 2")]


def exported(tmp_path, one):
    """An ATIF document, and its steps of the model."""
    run(tmp_path, "export", "--to", str(tmp_path / "atif"), groups=[one])
    [file] = (tmp_path / "atif").iterdir()
    value = json.loads(file.read_text())
    return value, [step for step in value["steps"] if step["source"] == "agent"]


def test_atif_has_what_was_sampled(tmp_path):
    value, (first, last) = exported(tmp_path, sampled())
    assert first["timestamp"] == "2026-11-28T10:00:00.500+00:00"
    assert first["metrics"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "completion_token_ids": [7, 8],
        "logprobs": [-0.5, -0.25],
        "extra": {"model_s": 1.5, "tools_s": 0.5, "calls_s": [0.5]},
    }
    assert (last["metrics"]["completion_token_ids"], last["metrics"]["prompt_tokens"]) == ([9], 6)
    assert value["agent"]["model_name"] == "some/model"
    assert value["final_metrics"] == {"total_steps": 4, "total_prompt_tokens": 9, "total_completion_tokens": 3}
    assert value["extra"]["token_ids"] == [1, 2, 3, 7, 8, 4, 9]
    told = {"temperature": 0.7, "logprobs": "policy", "stop_reason": "final", "weight_versions": [[3, 7, "5"]]}
    assert value["extra"]["trainer"] == told


def test_atif_of_hidden_labels(tmp_path):
    hidden = {"masks": [[-100] * 7], "inference_logprobs": [[1.0] * 7]}
    value, (first, _) = exported(tmp_path, sampled() | hidden)
    assert (first["metrics"]["completion_tokens"], "logprobs" in first["metrics"]) == (2, False)
    assert first["timestamp"]
    assert len(value["extra"]["token_ids"]) == 7


def test_atif_no_placeholder_ids(tmp_path):
    value, (first, _) = exported(tmp_path, sampled() | {"generation_params": {"logprobs": "placeholder"}})
    assert first["metrics"] == {"extra": {"model_s": 1.5, "tools_s": 0.5, "calls_s": [0.5]}}
    assert "token_ids" not in value["extra"]


def test_sft_lines_are_the_chosen(tmp_path):
    done = run(tmp_path, "export", "--format", "sft", "--least", "1", "--item", "square-1")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == 11  # square-1 and square-10 to square-19
    assert all(set(line) == {"messages"} for line in lines)
    assert lines[0]["messages"] == trajectory("square-1-0", 1.0, output="1")[0]
    assert run(tmp_path, "export", "--format", "sft", "--item", "none").exit_code == 1


def test_stats_count_what_is_there(tmp_path):
    found = json.loads(run(tmp_path, "stats", "--json").stdout)
    assert found["trajectories"] == 60
    assert found["mean_score"] == 0.5
    assert found["pass_at"] == {"1": 0.3333, "2": 0.6667}
    assert found["by_item"]["square-3"] == {
        "trajectories": 3,
        "passed": 1,
        "mean_score": 0.5,
        "pass_at": {"1": 0.3333, "2": 0.6667},
    }
    assert json.loads(run(tmp_path, "stats", "--json", "--passing", "0.5").stdout)["pass_at"] == {"1": 0.6667, "2": 1.0}
    assert "square-3  1 of 3  mean 0.5  pass@1 0.3333  pass@2 0.6667" in run(tmp_path, "stats", "--by-item").stdout
    assert found["failed_calls"] == 20
    assert found["endings"] == {"final": 40, "max_steps": 20}
    assert found["calls_by_tool"] == {"terminal": 60}
    assert "trajectories      60" in run(tmp_path, "stats").stdout


def test_grep_prints_inertly(tmp_path):
    done = run(tmp_path, "grep", "no such", "-i", "--most", "0", "--item", "square-3")
    assert done.stdout.splitlines()[0] == "square-3-1 (0.00) 4 user: No such file"
    told = run(tmp_path, "grep", "no such", "-i", "--most", "0", "--item", "square-3", "--json").stdout.splitlines()
    assert json.loads(told[0]) == {
        "trajectory_id": "square-3-1",
        "score": 0.0,
        "where": "4 user",
        "line": "No such file",
    }
    assert run(tmp_path, "grep", "absent").exit_code == 1
    assert run(tmp_path, "grep", "(").exit_code == 2
    shown = run(tmp_path, "grep", "script", groups=[hostile()]).stdout
    assert shown
    assert not set(shown) & set("\x1b\x07\x9b\u202e")
    assert "\x1b" not in run(tmp_path, "stats", groups=[hostile()]).stdout


def test_lone_surrogate_is_escaped(tmp_path):
    one = group("i\ud800", trajectory("t", 1.0, output="half \ud83d here"))
    assert "half \\ud83d here" in run(tmp_path, "grep", "half", groups=[one]).stdout
    two = group("i", trajectory("t", 1.0, stop_reason="odd\udc00"))
    assert "odd\\udc00 1" in run(tmp_path, "stats", groups=[two]).stdout


@pytest.mark.parametrize(("form", "to"), [("sft", "missing/x"), ("atif", "g.jsonl"), ("cast", "g.jsonl/x")])
def test_unwritable_place_is_named(tmp_path, form, to):
    done = run(tmp_path, "export", "--format", form, "--to", str(tmp_path / to))
    assert isinstance(done.exception, ConfigError)
    assert str(done.exception).startswith(f"--to {tmp_path / to}: ")


@pytest.mark.parametrize("command", [["stats", "--json"], ["export", "--format", "sft"], ["grep", "."]])
def test_broken_lines_are_reported(tmp_path, command):
    one, two = (json.dumps(group(name, trajectory(name, 1.0))) for name in ("first", "second"))
    path = tmp_path / "g.jsonl"
    path.write_text(f"{one}\n[1]\n{two[:100]}")  # the writer was killed in the middle of its last line
    name, *options = command
    pattern = [options.pop()] if name == "grep" else []
    done = CliRunner().invoke(command_line(), ["trajectories", name, str(path), *pattern, *options])
    assert done.exit_code == 0
    assert "2 lines left out, as no whole group, the first is line 2" in done.stderr
    assert "left out" not in done.stdout
    path.write_text(f"{one}\n{two}")  # whole, though its last line has no end
    assert CliRunner().invoke(command_line(), ["trajectories", "stats", str(path)]).stderr == ""


def test_export_spares_its_source(tmp_path):
    for to in (tmp_path / "g.jsonl", tmp_path / "link.jsonl"):
        if to.name == "link.jsonl":
            to.symlink_to("g.jsonl")
        done = run(tmp_path, "export", "--format", "sft", "--to", str(to))
        assert str(done.exception) == f"--to {to}: this is the file that is read"
        assert len(to.read_text().splitlines()) == 20


def test_late_pipe_is_refused(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = CliRunner().invoke(command_line(), ["trajectories", "stats", str(pipe)])
    assert done.exit_code == 2
    assert "is a pipe" in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize("command", [["dashboard"], ["trajectories", "stats"]])
def test_no_groups_is_refused(tmp_path, command):
    file = tmp_path / "notes.md"
    file.write_text("# No JSON\n")
    done = CliRunner().invoke(command_line(), [*command, str(file)])
    assert done.exit_code == 2
    assert "holds no groups" in " ".join(done.output.replace("│", " ").split())
