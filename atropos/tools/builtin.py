"""The sandboxed tools that come with atropos."""

from __future__ import annotations

from atropos.tools.base import Tool
from atropos.tools.files import ReadFileTool, WriteFileTool
from atropos.tools.patch import PatchTool
from atropos.tools.process import ProcessTool
from atropos.tools.search import SearchTool
from atropos.tools.sessions import SessionTool
from atropos.tools.terminal import TerminalTool


def sandbox_tools() -> list[Tool]:
    """One of each, in the order in which a model is told of them."""
    return [TerminalTool(), ProcessTool(), ReadFileTool(), WriteFileTool(), PatchTool(), SearchTool(), SessionTool()]
