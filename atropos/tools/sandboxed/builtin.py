"""The sandboxed tools that come with atropos."""

from __future__ import annotations

from atropos.tools.base import Tool
from atropos.tools.sandboxed.files import ReadFileTool, WriteFileTool
from atropos.tools.sandboxed.patch import PatchTool
from atropos.tools.sandboxed.process import ProcessTool
from atropos.tools.sandboxed.search import SearchTool
from atropos.tools.sandboxed.sessions import SessionTool
from atropos.tools.sandboxed.terminal import TerminalTool


def sandbox_tools() -> list[Tool]:
    """One of each, in the order in which a model sees them."""
    return [TerminalTool(), ProcessTool(), ReadFileTool(), WriteFileTool(), PatchTool(), SearchTool(), SessionTool()]
