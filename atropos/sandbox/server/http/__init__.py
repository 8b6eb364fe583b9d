"""What clients of the server reach: HTTP routes, the WebSocket, status and metrics."""
