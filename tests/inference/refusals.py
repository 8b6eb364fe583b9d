"""What servers other than vLLM are asked and refuse, with their answers in `refusals.json`: real ones are compared with
it, and a stand-in
gives them in CI. vLLM's are in `vllm.json`."""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from pathlib import Path

from tests.inference import dialogs
from tests.inference.servers import CACHE, MODEL

LONG = [{"role": "user", "content": "Look at notes. " * 1500}]
SHORT = [{"role": "system", "content": dialogs.SYSTEM}, {"role": "user", "content": dialogs.task(random.Random(1))}]
CHAT = "/v1/chat/completions"
CASES: dict[str, tuple[str, str, dict[str, object]]] = {
    "llama.cpp, long prompt": ("cpp", CHAT, {"model": MODEL, "messages": LONG}),
    "transformers serve, unreadable call": (
        "serve", CHAT, {"model": str(CACHE / "mistaken"), "messages": SHORT, "tools": dialogs.tools().schemas(), "max_tokens": 500},
    ),
    "atroposlib, long prompt": ("own", "/generate", {"prompt": {"prompt_token_ids": [77] * 5000}, "max_tokens": 3}),
}  # fmt: skip
"""Which fixture's server, the path and the request."""
RECORDED: dict[str, dict[str, object]] = json.loads(Path(__file__).with_name("refusals.json").read_text())


def answer(url: str, body: dict[str, object]) -> dict[str, object]:
    """Status, content type and text of a server's answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as found:
            status, headers, content = found.status, found.headers, found.read()
    except urllib.error.HTTPError as error:
        status, headers, content = error.code, error.headers, error.read()
    return {"status": status, "type": headers.get("Content-Type"), "text": content.decode()}
