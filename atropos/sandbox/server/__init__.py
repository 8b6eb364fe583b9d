"""The sandbox server: leases, calls and snapshots over HTTP and WebSocket."""
