#!/usr/bin/env bash
# mcp 2.3.0: a tool's argument that may be text or None is read as JSON first. The text `null` comes as None, and text that is a JSON
# object is refused, so a `write` tool with `content: str | None = None` cannot write a package.json. With `content: str` both come
# as they are.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install -q mcp==2.3.0
cat >tools.py <<'PYTHON'
import asyncio
from mcp.server import MCPServer

server = MCPServer("files")

@server.tool()
def optional(content: str | None = None) -> str:
    return repr(content)

@server.tool()
def required(content: str) -> str:
    return repr(content)

async def main():
    for tool in "required", "optional":
        for text in "null", '{"name": "a"}':
            try:
                answer = await server.call_tool(tool, {"content": text})
                print(f"{tool} {text}: {answer.content[0].text}")
            except Exception as error:
                print(f"{tool} {text}: {type(error).__name__}: {str(error).splitlines()[0]}")

asyncio.run(main())
PYTHON
found=$(venv/bin/python tools.py 2>/dev/null)
wanted="required null: 'null'
required {\"name\": \"a\"}: '{\"name\": \"a\"}'
optional null: None
optional {\"name\": \"a\"}: ToolError: Error executing tool optional: 1 validation error for optionalArguments"
echo "mcp 2.3.0:"$'\n'"$found"
[ "$found" = "$wanted" ] || { echo "it was: $wanted" >&2; exit 1; }
