"""How tools are described to the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from atropos.tools import Tool, ToolCall
from atropos.tools.models import ToolSchema
from atropos.tools.parsers import Parser

Tools = Iterable[Tool | ToolSchema | Mapping[str, object]]
"""The forms in which an agent takes its tools; a registry is one."""

DEFAULT_SYSTEM = (
    "You are an agent at work in a Linux sandbox of your own. Use the tools to do the task, look at their results, "
    "and go on until it is done. Then answer in plain text without a tool call."
)
TOOLS_SECTION = """
# Tools

You may call one or more functions. Their signatures stand within <tools></tools>:
<tools>
{schemas}
</tools>

For each call write the function's name and its arguments in exactly this form:
{example}"""
EXAMPLE = ToolCall(name="function_name", arguments={"argument_name": "value"})


def schemas_of(tools: Tools | None) -> list[dict[str, object]]:
    """OpenAI schemas of tools, or of schemas in either form."""
    return [_schema(tool) for tool in tools or ()]


def _schema(tool: Tool | ToolSchema | Mapping[str, object]) -> dict[str, object]:
    if isinstance(tool, Mapping):
        return dict(tool)
    return (tool.schema if isinstance(tool, Tool) else tool).to_openai()


def system_text(prompt: str | None, schemas: Sequence[Mapping[str, object]], parser: Parser) -> str:
    """The system message: the prompt, then the tools, with a call as the parser reads it."""
    text = DEFAULT_SYSTEM if prompt is None else prompt
    if not schemas:
        return text
    described = "\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas)
    return text + "\n" + TOOLS_SECTION.format(schemas=described, example=parser.render_turn("", [EXAMPLE]))
