"""HTTP services: ToolServer and executor API."""
