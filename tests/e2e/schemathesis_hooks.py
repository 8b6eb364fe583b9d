"""What schemathesis can't know: names of tools and arguments that they take, so that not every call is of an unknown one."""

from __future__ import annotations

import random
from typing import Any

import schemathesis

_CALLS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("echo", {"text": "é"}),
    ("explode", {}),
    ("flood", {"megabytes": 1}),
    ("nap", {"seconds": 0.01}),
    ("terminal", {"command": "echo hi"}),
    ("terminal", {"command": "sleep 600", "timeout": 0.05}),
    ("process", {"action": "list"}),
    ("read_file", {"path": "/etc/hostname"}),
    ("write_file", {"path": "a", "content": "b"}),
    ("patch", {"path": "a", "old": "b", "new": "c"}),
    ("search_files", {"pattern": "b"}),
)


def _known(call: Any) -> Any:
    """Of a well-formed call, often one of a tool that exists, with the drawn arguments or right ones."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return call
    generator = random.Random(repr(call))  # the same body for the same draw, or nothing could be shrunk
    if generator.random() < 0.3:
        return call
    name, arguments = generator.choice(_CALLS)
    return {**call, "name": name, **({"arguments": arguments} if generator.random() < 0.6 else {})}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if isinstance(body, dict) and isinstance(body.get("calls"), list):
        return {**body, "calls": [_known(one) for one in body["calls"]]}
    return _known(body)
