"""The external tools that a ToolServer usually offers, as they are before it was asked for its list."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

from atropos.errors import ConfigError
from atropos.tools.arguments import Arguments
from atropos.tools.base import Tool, ToolScope
from atropos.tools.models import ToolSchema

Ref = Annotated[str, Field(description="the element's reference in the latest snapshot, such as 'e12'")]


class WebSearchArguments(Arguments):
    """Arguments of `web_search`."""

    query: Annotated[str, StringConstraints(strip_whitespace=True)] = Field(
        min_length=1, max_length=2000, description="what to search for"
    )
    limit: int = Field(default=5, ge=1, le=20, description="most results")


class WebExtractArguments(Arguments):
    """Arguments of `web_extract`."""

    urls: list[str] = Field(min_length=1, max_length=5, description="addresses of pages or PDF files")


class NavigateArguments(Arguments):
    """Arguments of `browser_navigate`."""

    url: str = Field(min_length=1, max_length=8000, description="address to open")


class SnapshotArguments(Arguments):
    """Arguments of `browser_snapshot`."""

    full: bool = Field(default=False, description="the whole page; else what matters for acting on it")


class ClickArguments(Arguments):
    """Arguments of `browser_click`."""

    ref: Ref


class TypeArguments(Arguments):
    """Arguments of `browser_type`."""

    ref: Ref
    text: str = Field(max_length=100_000, description="replaces what the field holds")
    submit: bool = Field(default=False, description="press Enter afterwards")


class NoArguments(Arguments):
    """No arguments."""


class ExternalTool(Tool):
    """A tool that runs on a ToolServer. The server checks the arguments again and is the authority on the schema."""

    sandboxed = False

    def __init__(
        self,
        name: str,
        description: str,
        toolset: str,
        *,
        arguments: type[BaseModel] = NoArguments,
        parameters: dict[str, object] | None = None,
        read_only: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        self.name, self.description, self.toolsets = name, description, (toolset,)
        self.arguments, self.read_only, self.timeout_s = arguments, read_only, timeout_s
        if parameters is not None:
            self.schema = ToolSchema(name=name, description=description, parameters=parameters)

    async def run(self, arguments: object, scope: ToolScope) -> object:
        """Raise `ConfigError`: only a ToolServer can run it."""
        del arguments, scope
        raise ConfigError(f"tool {self.name!r} runs on a ToolServer: set tool_server_url to its URL or 'inprocess'")


def external_tools() -> list[Tool]:
    """The web and browser tools."""
    return [
        ExternalTool(
            "web_search",
            "Search the web. Answers titles, addresses and descriptions of the best results.",
            "web",
            arguments=WebSearchArguments,
            read_only=True,
        ),
        ExternalTool(
            "web_extract",
            "Read web pages or PDF files as text.",
            "web",
            arguments=WebExtractArguments,
            read_only=True,
        ),
        ExternalTool("browser_navigate", "Open an address in the browser.", "browser", arguments=NavigateArguments),
        ExternalTool(
            "browser_snapshot",
            "See the page as a tree of elements, with the references that the other browser tools take.",
            "browser",
            arguments=SnapshotArguments,
            read_only=True,
        ),
        ExternalTool("browser_click", "Click an element of the page.", "browser", arguments=ClickArguments),
        ExternalTool("browser_type", "Type into a field of the page.", "browser", arguments=TypeArguments),
        ExternalTool("browser_back", "Go back to the page before.", "browser"),
        ExternalTool("browser_screenshot", "Take a picture of the page.", "browser", read_only=True),
    ]
