"""An MCP server of the protocol of 2025 over HTTP: a session lasts as long as the process."""

from __future__ import annotations

import sys
import uuid
from typing import Any

from aiohttp import web

SESSIONS: set[str] = set()
NOTHING = {"type": "object", "properties": {}}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    match asked["method"]:
        case "initialize":
            info = {"name": "sessions", "version": "1"}
            return {
                "result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info},
            }
        case "tools/list":
            return {"result": {"tools": [{"name": "add", "description": "Add.", "inputSchema": NOTHING}]}}
        case "tools/call" if code := asked["params"]["arguments"].get("code"):
            return {"error": {"code": code, "message": "no such thing"}}
        case "tools/call":
            return {"result": {"content": [{"type": "text", "text": "added"}]}}
    return {"error": {"code": -32601, "message": "no such method"}}


async def post(request: web.Request) -> web.Response:
    asked = await request.json()
    headers: dict[str, str] = {}
    if asked["method"] == "initialize":
        headers["mcp-session-id"] = uuid.uuid4().hex
        SESSIONS.add(headers["mcp-session-id"])
    elif request.headers.get("mcp-session-id") not in SESSIONS:
        error = {"code": -32001, "message": "Session not found"}  # as the TypeScript SDK's
        return web.json_response({"jsonrpc": "2.0", "id": None, "error": error}, status=404)
    if asked["method"] == "tools/call" and asked["params"]["arguments"].get("gateway"):
        return web.Response(status=504, text="Gateway Time-out")
    if "id" not in asked:
        return web.Response(status=202)
    return web.json_response({"jsonrpc": "2.0", "id": asked["id"], **answer(asked)}, headers=headers)


app = web.Application()
app.router.add_post("/mcp", post)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
