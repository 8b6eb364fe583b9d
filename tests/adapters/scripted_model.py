"""A chat model over HTTP that follows a script: each task's text is its first command, then it submits what that wrote and ends.

`python -m tests.adapters.scripted_model TOOL` is one in a process of its own, whose commands are calls of that tool; it prints its URL.
"""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat answer"


class Model(BaseHTTPRequestHandler):
    asked: Callable[[str], None] = staticmethod(lambda _: None)
    """Called with a task's text before its first answer."""
    tool = "bash"

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        messages: list[dict[str, Any]] = json.loads(self.rfile.read(length))["messages"]
        command = SUBMIT
        if messages[-1]["role"] == "user":
            text = str(messages[-1]["content"])  # or a list of parts
            found = re.search(r"RUN<(.*?)>RUN", text)
            assert found, messages
            command = found[1]
            self.asked(text)
        call = {"name": self.tool, "arguments": json.dumps({"command": command})}
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": f"call_{len(messages)}", "type": "function", "function": call}],
        }
        if SUBMIT in str(messages[-2:-1]):
            message = {"role": "assistant", "content": "done"}
        reply = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [
                {"index": 0, "finish_reason": "tool_calls" if "tool_calls" in message else "stop", "message": message}
            ],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        }
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def scripted_model(asked: Callable[[str], None] = Model.asked) -> Iterator[str]:
    """Its base URL."""
    handler = type("Asked", (Model,), {"asked": staticmethod(asked)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    Model.tool = sys.argv[1]
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as own:
        print(f"http://127.0.0.1:{own.server_port}/v1", flush=True)
        own.serve_forever()
