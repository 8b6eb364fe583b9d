"""The executor's side of a ToolServer."""
