"""Groups as `process` writes them, hostile ones among them."""

from __future__ import annotations

import json

EVIL = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\"'></details></pre>"
    "{{ 7*191 }}{% raw %}${7*191}<svg onload=alert(1)><a href=\"javascript:document.title='owned'\">x</a>"
    "\x1b]0;owned\x07\x1b[31mred\x9b31m\u202egnp.exe"
)


def trajectory(name: str, score: float, *, output: str = "ok", exit_code: int = 0, **more):
    call = {"name": "terminal", "arguments": {"command": f"cat {name}.txt"}}
    result = {"success": True, "output": output, "exit_code": exit_code}
    messages = [
        {"role": "system", "content": "You have tools."},
        {"role": "user", "content": "Write the answer to answer.txt."},
        {"role": "assistant", "content": f"I look.\n<tool_call>{json.dumps(call)}</tool_call>"},
        {"role": "user", "content": f"<tool_response>{json.dumps(result)}</tool_response>"},
        {"role": "assistant", "content": f"done: {output}"},
    ]
    phases = {"acquire": 0.2, "setup": 0.1, "model": 2.5, "tools": 0.7, "verify": 0.3, "reset": 0.05}
    summary = {"trajectory_id": name, "steps": 2, "calls": 1, "seconds": 3.85, "attempts": 1, "stop_reason": "final"}
    return messages, score, {**summary, "phases": phases, "info": {"expected": "ok", "found": output}, **more}


def group(item: str, *rows) -> dict:
    return {
        "tokens": [[1, 2]] * len(rows),
        "scores": [row[1] for row in rows],
        "messages": [row[0] for row in rows],
        "atropos": {"item": item, "trajectories": [row[2] for row in rows]},
    }


def ordinary() -> list[dict]:
    return [
        group(
            f"square-{at}",
            trajectory(f"square-{at}-0", 1.0, output=f"{at * at}"),
            trajectory(f"square-{at}-1", 0.0, output="No such file", exit_code=1),
            trajectory(f"square-{at}-2", 0.5, output="nearly", stop_reason="max_steps"),
        )
        for at in range(20)
    ]


def sampled() -> dict:
    """Two turns of the model, as `scored_group` has them, with the group's other fields."""
    turn = {"tokens": 2, "model_s": 1.5, "tools_s": 0.5, "calls_s": [0.5]}
    turns = [{**turn, "started_at": f"2026-11-28T10:00:0{second}.500+00:00"} for second in (0, 2)]
    return {
        **group("sampled", trajectory("t", 1.0, model="some/model", turns=turns, changes={"files": []})),
        "tokens": [[1, 2, 3, 7, 8, 4, 9]],
        "masks": [[-100, -100, -100, 7, 8, -100, 9]],
        "inference_logprobs": [[1.0, 1.0, 1.0, -0.5, -0.25, 1.0, -0.125]],
        "generation_params": {"temperature": 0.7, "logprobs": "policy"},
        "overrides": [{"stop_reason": "final", "weight_versions": [[3, 7, "5"]]}],
    }


def hostile() -> dict:
    return group(EVIL, trajectory(EVIL, 0.5, output=EVIL, stop_reason=EVIL, info={EVIL: EVIL}))
