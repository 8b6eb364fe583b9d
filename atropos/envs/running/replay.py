"""The page a `process` run leaves: every trajectory's messages, calls and score. Everything in it is escaped."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jinja2

MAX_TRAJECTORIES = 1000
"""Shown on one page; the JSONL has all of them."""
MAX_MESSAGE_CHARS = 20_000
PHASES = ("acquire", "setup", "model", "tools", "verify", "reset")
"""Whose seconds are told, from a twentieth on."""
KINDS = frozenset({"user", "assistant", "tool"})
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
HIDDEN = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Characters that turn the direction of what follows, scores included."""
RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)

_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2rem auto;padding:0 1rem;color:#1c2430;background:#fff}
h1{font-size:1.4rem}table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:left;border-bottom:1px solid #dde2ea}
details{border:1px solid #dde2ea;border-radius:6px;margin:.5rem 0}summary{padding:.5rem .8rem;cursor:pointer}
details details{margin:.5rem .8rem}details.m{border-radius:0;border-width:0 0 0 4px}details.m summary{padding:.2rem 0}.m{margin:.4rem .8rem;border-left:4px solid #c3cad6;padding:.2rem .8rem;background:#f7f8fa}
pre.call{border:1px solid #bcd5c5;border-radius:4px;padding:.3rem .5rem}pre.result{color:#3c4656}
.m.user{border-color:#8fa3c8}.m.assistant{border-color:#3a7d55;background:#f1f8f3}.m.tool{border-color:#b9892f}
.m b{font-size:.75rem;text-transform:uppercase;color:#667}pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.2rem 0;font-size:.85rem}
.s{display:inline-block;min-width:3.2rem;font-weight:600}.good{color:#2a7d46}.bad{color:#b3372f}.mid{color:#9a6b12}.n{color:#667}
@media(prefers-color-scheme:dark){body{background:#14181e;color:#dfe5ee}.m{background:#1b212a}.m.assistant{background:#17251c}pre.call{border-color:#2f4a39}pre.result{color:#b6c0ce}
details,td,th{border-color:#2c3440}}
</style></head><body>
<h1>{{ title }}</h1>
<p class="n">{{ groups }} groups, {{ trajectories }} trajectories, mean score {{ "%.3f"|format(mean) }}
{%- if shown < trajectories %}; the first {{ shown }} are shown{% endif %}.</p>
"""
_GROUP = """\
<details><summary><span class="s {{ colour }}">{{ "%.2f"|format(mean) }}</span> {{ name }}
<span class="n">{% for r in rollouts[:16] %}<span class="{{ r.colour }}">{{ "%.2f"|format(r.score) }}</span> {% endfor %}
{%- if rollouts|length > 16 %}and {{ rollouts|length - 16 }} more{% endif %}</span></summary>
{% for r in rollouts %}<details><summary><span class="s {{ r.colour }}">{{ "%.2f"|format(r.score) }}</span>
{{ r.id }} <span class="n">{{ r.facts }}</span></summary>
{% for m in r.messages %}{% if m.folded %}<details class="m"><summary><b>{{ m.role }}</b></summary>
{%- else %}<div class="m {{ m.kind }}"><b>{{ m.role }}</b>{% endif %}
{%- for part in m.parts %}<pre class="{{ part.kind }}">{{ part.text }}</pre>{% endfor %}
{%- if m.folded %}</details>{% else %}</div>{% endif %}
{% endfor %}{% if r.info %}<div class="m"><b>verification</b><pre>{{ r.info }}</pre></div>{% endif %}</details>
{% endfor %}</details>
"""
_env = jinja2.Environment(autoescape=True, trim_blocks=False)
_page, _group = _env.from_string(_PAGE), _env.from_string(_GROUP)


def write_page(jsonl: Path, html: Path | None = None, *, title: str = "") -> Path:
    """Render the groups of a JSONL file; a damaged last line (a killed run) is left out.

    Args:
        jsonl: as `process` writes it.
        html: None: beside it, with the ending .html.
        title: None: the file's name.

    Returns:
        The page's path.
    """
    html = html or jsonl.with_suffix(".html")
    groups = trajectories = 0
    total = 0.0
    for group in read_groups(jsonl):
        groups += 1
        scores = group.get("scores") or []
        trajectories += len(scores)
        total += sum(scores)
    shown = 0
    temporary = html.with_name(html.name + ".part")
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as out:
        out.write(
            _page.render(
                title=title or jsonl.stem,
                groups=groups,
                trajectories=trajectories,
                mean=total / trajectories if trajectories else 0.0,
                shown=min(trajectories, MAX_TRAJECTORIES),
            )
        )
        for group in read_groups(jsonl):
            if shown >= MAX_TRAJECTORIES:
                break
            rollouts = list(_rollouts(group))[: MAX_TRAJECTORIES - shown]
            shown += len(rollouts)
            mean = sum(r["score"] for r in rollouts) / len(rollouts) if rollouts else 0.0
            name = (group.get("atropos") or {}).get("item") or "group"
            out.write(_group.render(name=_visible(str(name)), rollouts=rollouts, mean=mean, colour=_colour(mean)))
        out.write("</body></html>\n")
    temporary.replace(html)
    return html


def read_groups(jsonl: Path) -> Iterator[dict[str, Any]]:
    """The groups of a file; lists of groups are flattened, lines that aren't JSON left out."""
    with jsonl.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                value = json.loads(line)
            except json.JSONDecodeError:
                continue
            for group in value if isinstance(value, list) else [value]:
                if isinstance(group, dict):
                    yield group


def _rollouts(group: dict[str, Any]) -> Iterator[dict[str, Any]]:
    summaries = (group.get("atropos") or {}).get("trajectories") or []
    conversations = group.get("messages") or []
    for index, score in enumerate(group.get("scores") or []):
        summary = summaries[index] if index < len(summaries) else {}
        messages = conversations[index] if index < len(conversations) else []
        facts = [f"{summary[key]} {key}" for key in ("steps", "calls") if key in summary]
        facts += [f"{summary['seconds']:.1f} s"] if "seconds" in summary else []
        facts += [summary["stop_reason"]] if summary.get("stop_reason", "final") != "final" else []
        facts += [f"attempt {summary['attempts']}"] if summary.get("attempts", 1) > 1 else []
        phases = summary.get("phases") or {}
        facts += [", ".join(f"{name} {phases[name]:.1f}" for name in PHASES if phases.get(name, 0) >= 0.05)]
        info = summary.get("info")
        yield {
            "id": _visible(str(summary.get("trajectory_id") or f"trajectory {index}")),
            "score": float(score),
            "colour": _colour(float(score)),
            "facts": " · ".join(fact for fact in facts if fact),
            "messages": list(_messages(messages)),
            "info": _visible(json.dumps(info, indent=1, ensure_ascii=False, default=str)) if info else "",
        }


def _messages(messages: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Each message as parts: its text, and calls and results taken out of their JSON so that lines are lines."""
    for message in messages:
        role = str(message.get("role", ""))
        content = message.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False, default=str)
        thought = message.get("reasoning_content")
        parts = [("result", str(thought))] if thought else []
        parts += [("result", _result(text))] if role == "tool" else [*_parts(role, text)]
        parts += [("call", _openai_call(call)) for call in message.get("tool_calls") or ()]
        shown = [{"kind": kind, "text": _visible(_short(text))} for kind, text in parts if text.strip()]
        yield {
            "role": _visible(role),
            "kind": role if role in KINDS else "",
            "folded": role == "system",
            "parts": shown,
        }


def _parts(role: str, text: str) -> Iterator[tuple[str, str]]:
    pattern = {"assistant": CALL, "user": RESULT, "tool": RESULT}.get(role)
    at = 0
    for found in pattern.finditer(text) if pattern else ():
        readable = _call(found[1]) if role == "assistant" else _result(found[1])
        yield "text", text[at : found.start()]
        yield ("call" if role == "assistant" else "result"), readable
        at = found.end()
    yield "text", text[at:]


def _call(block: str) -> str:
    """`name`, then each argument; a text of several lines as these lines."""
    value = _object(block)
    if value is None or not isinstance(value.get("arguments"), dict):
        return block.strip()
    arguments = [f"{key}: {_plain(item)}" for key, item in value["arguments"].items()]
    return "\n".join([str(value.get("name")), *arguments])


def _openai_call(call: Any) -> str:
    """As `_call`; arguments that are no object, and calls that are none, as they are."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return json.dumps(call, indent=1, ensure_ascii=False, default=str)
    arguments = _object(function["arguments"])
    if arguments is None:
        return f"{function.get('name')}\n{function['arguments']}"
    return "\n".join([str(function.get("name")), *(f"{key}: {_plain(item)}" for key, item in arguments.items())])


def _result(block: str) -> str:
    """The output as the program wrote it, then what else there is to say."""
    value = _object(block)
    if value is None:
        return block.strip()
    rest = {key: item for key, item in value.items() if key not in {"output", "success"}}
    facts = "  ".join(f"{key}: {_plain(item)}" for key, item in rest.items())
    return "\n".join(
        part for part in (str(value.get("output", "")).rstrip("\n"), f"[{facts}]" if facts else "") if part
    )


def _object(block: str) -> dict[str, Any] | None:
    try:
        value = json.loads(block)
    except (json.JSONDecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value, ensure_ascii=False, default=str)
    return f"\n{value}" if "\n" in value.rstrip("\n") else value


def _short(text: str) -> str:
    text = text.strip("\n")
    if len(text) <= MAX_MESSAGE_CHARS:
        return text
    half = MAX_MESSAGE_CHARS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _visible(text: str) -> str:
    """Control characters as symbols, and those that turn the direction of text as escapes: a page shows what was there."""
    shown = "".join(char if char >= " " or char in "\n\t" else chr(0x2400 + ord(char)) for char in text)
    return HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", shown)


def _colour(score: float) -> str:
    return "good" if score >= 0.999 else "bad" if score <= 0.001 else "mid"
